"""Which optimizers can run on pages, and how finely their work may be cut."""

from __future__ import annotations

import enum
import inspect

import torch

from ptm_accel.errors import UnsupportedError


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
    root = cls.__module__.partition(".")[0]
    if root in ("bitsandbytes", "schedulefree", "apollo_torch"):
        raise UnsupportedError(
            f"the optimizer {cls.__name__} of {root} cannot run on pages: it keeps state or parameters of its own "
            f"outside torch.optim's. {_HELP}"
        )
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise UnsupportedError(f"the optimizer {cls.__name__} cannot run on pages: its step needs a closure. {_HELP}")
    return Grain.TENSOR
