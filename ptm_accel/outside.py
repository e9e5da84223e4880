"""For code outside the training loop that wants to see a paged model as an ordinary one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ptm_accel.engine import engine_holding, engine_of
from ptm_accel.model.copying import copy_off_pages


@contextmanager
def gathered(model: nn.Module, *, grads: bool = False, write: bool = False) -> Iterator[nn.Module]:
    """All parameters of a paged model at once, for code that looks at them as in an ordinary model.

    Args:
        model: the model, or a part of it, or what wraps it; one that is not on pages is yielded as it is.
        grads: also show the summed (and clipped) gradients as `p.grad`.
        write: what is changed inside is kept.

    Raises:
        BudgetError: the budget does not hold them all at once.
    """
    engine = engine_of(model) or engine_holding(model.parameters())
    if engine is None:
        yield model
        return
    with engine.gathered(grads=grads, write=write, part=model):
        yield model


def plain_copy(model: nn.Module) -> nn.Module:
    """A deep copy of a model (or of a part of one) in ordinary memory, where `copy.deepcopy` refuses one on pages.

    For averages of the weights (EMA, SWA), reference models, or anything that wants to own its model. The copy is
    beside the budgets, knows nothing of ptm_accel, keeps hooks of the user's, and can be trained as any other model.
    """
    engine = engine_of(model) or engine_holding(model.parameters())
    if engine is None:
        return copy.deepcopy(model)
    hooks = [*engine.residency.hooks, *engine.state_dicts.hooks]
    return copy_off_pages(model, engine.slots, hooks)
