"""Views of a paged model as an ordinary one, for code outside the training loop."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from ptm_accel.engine import Engine, engine_holding, engine_of
from ptm_accel.memory.calls import Call
from ptm_accel.model.assignments import take_in
from ptm_accel.model.copying import copy_off_pages
from ptm_accel.model.slots import ParamSlot
from ptm_accel.sizing import refuse_gathering


@contextmanager
def gathered(model: nn.Module, *, grads: bool = False, write: bool = False) -> Iterator[nn.Module]:
    """Loads all parameters of a model on pages at once, for code that reads them as in an ordinary model.

    Args:
        model: the model, a part of it, or a wrapper of it; one that is not on pages is yielded unchanged.
        grads: True checks that gradients can be read inside, by `p.grad`, which loads one at a time.
        write: True keeps the changes that are made inside.

    Raises:
        BudgetError: the budget does not hold them all at once.
        UnsupportedError: `grads` is set between a backward in which updates have begun and its step.
    """
    engine = engine_of(model) or engine_holding(model.parameters())
    if engine is None:
        yield model
        return
    with engine.pool.calls.during(Call.ACCESS, engine.pool), ExitStack() as stack:
        _gather(engine, stack, model, grads=grads, write=write)
        yield model


def _gather(engine: Engine, stack: ExitStack, part: nn.Module, *, grads: bool, write: bool) -> None:
    # Pins leave little room to work in.
    engine.settle()
    if grads:
        engine.training.look_at_gradients()
    slots = [slot for slot in map(engine.slots.of, part.parameters()) if slot is not None]
    refuse_gathering(engine.memory, dict.fromkeys(slot.value.block for slot in slots))
    saved = engine.residency.forwards.saved.cover()
    if saved is not None:
        # What is computed with parameters meanwhile may have its backward after it.
        stack.enter_context(saved)
    for slot in slots:
        stack.callback(engine.pages.executor.pin(slot.value, write=write).release)
    # What was written before an exception is written, as without pages.
    stack.callback(_hide, [] if grads else slots, slots if write else [])
    for slot in [] if grads else slots:
        slot.show()


def _hide(shown: list[ParamSlot], written: list[ParamSlot]) -> None:
    moved = [slot for slot in shown if slot.hide()]
    take_in(written or moved)


def plain_copy(model: nn.Module) -> nn.Module:
    """Returns a deep copy of a model on pages, or of a part of it, in ordinary memory.

    It replaces `copy.deepcopy`, which is refused for a model on pages: for averages of the weights (EMA, SWA) and
    reference models. The budgets do not count the copy. It keeps the user's hooks, has none of ptm_accel's, and can be
    trained as any other model.
    """
    engine = engine_of(model) or engine_holding(model.parameters())
    if engine is None:
        return copy.deepcopy(model)
    engine.settle()
    hooks = [*engine.residency.hooks, *engine.state_dicts.hooks]
    return copy_off_pages(model, engine.slots, hooks)
