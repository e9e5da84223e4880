"""Which optimizers can run on pages, and how finely their work may be cut."""

from __future__ import annotations

import enum
import inspect
from typing import Any

import torch

from ptm_accel.errors import UnsupportedError
from ptm_accel.model.floor import Appetite


class Grain(enum.Enum):
    """The smallest piece that one update may be cut into without changing a number."""

    ELEMENTS = "elements"
    """Element-wise: any slice that starts at a multiple of 64 elements gives the same bits."""
    TENSOR = "tensor"
    """Uses the whole tensor (row and column statistics, orthogonalisation, norms)."""


ELEMENTWISE = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.Adagrad,
)
"""Optimizers known to be element-wise. A subclass may do more, so only the classes themselves count."""

_REFUSED = {
    "LBFGS": "it needs a closure and couples all tensors in one line search",
    "SparseAdam": "it needs sparse gradients",
    "LOMO": "it updates inside backward through hooks of its own",
    "AdaLomo": "it updates inside backward through hooks of its own",
    "GaLoreAdamW": "layer-wise variants update inside backward through hooks of their own",
    "GaLoreAdafactor": "layer-wise variants update inside backward through hooks of their own",
    "LayerWiseDummyOptimizer": "it updates inside backward through hooks of its own",
}
_WITH_STATE_OF_THEIR_OWN = ("bitsandbytes", "schedulefree", "apollo_torch", "galore_torch", "torchao")
"""Packages whose optimizers hold more than `torch.optim` knows of: quantised state, projections, second parameters."""
_HELP = (
    "Use optim='adamw_torch_fused', 'sgd', 'adagrad', 'adafactor', or any torch.optim optimizer that updates each "
    "tensor by itself."
)


def grain_of(optimizer: torch.optim.Optimizer) -> Grain:
    """How finely the optimizer's update may be cut.

    Raises:
        UnsupportedError: the optimizer cannot run on pages; says why.
    """
    cls = type(optimizer)
    if cls in ELEMENTWISE:
        return Grain.ELEMENTS
    for base in cls.__mro__:
        if base.__name__ in _REFUSED:
            raise UnsupportedError(
                f"the optimizer {cls.__name__} cannot run on pages: {_REFUSED[base.__name__]}. {_HELP}"
            )
    for base in cls.__mro__:
        root = base.__module__.partition(".")[0]
        if root in _WITH_STATE_OF_THEIR_OWN:
            raise UnsupportedError(
                f"the optimizer {cls.__name__} cannot run on pages: {base.__name__} of {root} keeps state or "
                f"parameters of its own outside torch.optim's. {_HELP}"
            )
    if callable(getattr(cls, "train", None)) and callable(getattr(cls, "eval", None)):
        raise UnsupportedError(
            f"the optimizer {cls.__name__} cannot run on pages: its train() and eval() exchange the parameters for "
            f"others of its own, as schedule-free optimizers do. {_HELP}"
        )
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(f"the optimizer {cls.__name__} cannot run on pages: its step needs a closure. {_HELP}")
    return Grain.TENSOR


_STATE_TENSORS = {"Adafactor": 0, "Muon": 1, "Lion": 1, "RMSprop": 1, "ASGD": 1}
"""Full-size state tensors of optimizers that keep another number than two, where that was not found by trying."""


def appetite_of(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]] | None = None, *, state_tensors: int | None = None
) -> Appetite:
    """What the optimizer needs in memory to update a parameter.

    Args:
        optimizer: which one.
        groups: the hyperparameters to go by; those that it has by default.
        state_tensors: full-size tensors of its state, where it was tried (`ptm_accel.optim.rehearsal`).

    Raises:
        UnsupportedError: the optimizer cannot run on pages; says why.
    """
    cls, groups = type(optimizer), optimizer.param_groups if groups is None else groups
    if grain_of(optimizer) is Grain.TENSOR:
        if state_tensors is not None:
            return Appetite(state_tensors, scratch_tensors=3, whole=True)
        state = _STATE_TENSORS.get(cls.__name__, 2)
        state += cls.__name__ == "RMSprop" and any(g["momentum"] for g in groups)
        state += cls.__name__ == "RMSprop" and any(g["centered"] for g in groups)
        state += cls.__name__ == "Adafactor" and any(g.get("beta1") is not None for g in groups)
        return Appetite(state_tensors=state, scratch_tensors=3, whole=True)
    state = 2
    if isinstance(optimizer, torch.optim.SGD):
        state = int(any(g["momentum"] for g in groups))
    elif isinstance(optimizer, torch.optim.Adagrad):
        state = 1
    elif any(g["amsgrad"] for g in groups):
        state = 3
    fused = all(g.get("fused") for g in groups)
    return Appetite(state_tensors=state, scratch_tensors=0 if fused else 3)
