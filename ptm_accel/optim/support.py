"""Optimizers that can run on pages, how finely their work may be cut, and the memory that they need.

An update calls the user's optimizer for the tensors that are in memory. That changes no number of an optimizer that
updates each tensor by itself. Classes known to couple tensors are refused by name.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ptm_accel.errors import UnsupportedError
from ptm_accel.model.floor import OptimizerMemory
from ptm_accel.model.norms import is_narrow
from ptm_accel.model.slot_table import SlotTable

logger = logging.getLogger(__name__)


ELEMENTWISE = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
"""Optimizers known to be element-wise: any slice that starts at a multiple of 64 elements gives the same bits.

Others may use the whole tensor (row and column statistics, orthogonalisation, norms). A subclass may do more, so only
the classes themselves count.
"""

_RATE = "it learns one rate for all from sums over all tensors"
_NORM = "it goes by a norm over all tensors"
_HOOKS = "it updates inside backward through hooks of its own"
_LAYERWISE = "layer-wise variants update inside backward through hooks of their own"
_REFUSED = {
    **dict.fromkeys(("Prodigy", "DAdaptAdam", "DAdaptSGD", "DAdaptAdaGrad", "DAdaptLion", "DAdaptAdan"), _RATE),
    **dict.fromkeys(("DoG", "DoWG", "Mechanic", "MechanicOptimizer"), _RATE),
    **dict.fromkeys(("Lamb", "LAMB", "FusedLAMB", "SAM", "GSAM", "WSAM", "ASAM"), _NORM),
    "LBFGS": "it needs a closure and couples all tensors in one line search",
    "SparseAdam": "it needs sparse gradients",
    **dict.fromkeys(("LOMO", "AdaLomo", "LayerWiseDummyOptimizer"), _HOOKS),
    **dict.fromkeys(("GaLoreAdamW", "GaLoreAdafactor"), _LAYERWISE),
}
_WITH_STATE_OF_THEIR_OWN = ("bitsandbytes", "schedulefree", "apollo_torch", "galore_torch", "torchao")
"""Packages whose optimizers hold more than `torch.optim` knows of: quantised state, projections, second parameters."""
_HELP = (
    "Use optim='adamw_torch_fused', 'sgd', 'adagrad', 'adafactor', or any torch.optim optimizer that updates each "
    "tensor by itself."
)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an update of the optimizer may be cut into slices, in any order.

    Raises:
        UnsupportedError: the optimizer cannot run on pages; says why.
    """
    if type(optimizer) in ELEMENTWISE:
        return True
    if (reason := _refusal(optimizer)) is not None:
        raise UnsupportedError(f"the optimizer {type(optimizer).__name__} cannot run on pages: {reason}")
    return False


def _refusal(optimizer: torch.optim.Optimizer) -> str | None:
    """Says why an optimizer cannot run on pages, and what to use instead; None if it can."""
    cls = type(optimizer)
    for base in cls.__mro__:
        if base.__name__ in _REFUSED:
            return f"{_REFUSED[base.__name__]}. {_HELP}"
        root = base.__module__.partition(".")[0]
        if root in _WITH_STATE_OF_THEIR_OWN:
            return f"{base.__name__} of {root} keeps state or parameters of its own outside torch.optim's. {_HELP}"
    if callable(getattr(cls, "train", None)) and callable(getattr(cls, "eval", None)):
        return (
            "its train() and eval() exchange the parameters for others of its own, as schedule-free optimizers do. "
            f"{_HELP}"
        )
    for name, value in vars(optimizer).items():
        for other in value if isinstance(value, (list, tuple)) else [value]:
            if isinstance(other, torch.optim.Optimizer):
                return (
                    f"it updates through another one (its attribute {name!r}, {type(other).__name__}), which would not "
                    "see what is on pages. Use that one by itself."
                )
    closure = inspect.signature(cls.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        return f"its step needs a closure. {_HELP}"
    return None


_STATE_TENSORS: dict[str, tuple[int, tuple[str, ...]]] = {
    "Adam": (2, ("amsgrad",)),
    "AdamW": (2, ("amsgrad",)),
    "SGD": (0, ("momentum",)),
    "Adagrad": (1, ()),
    "RMSprop": (1, ("momentum", "centered")),
    "Adafactor": (0, ("beta1",)),
    "Muon": (1, ()),
    "Lion": (1, ()),
    "ASGD": (1, ()),
}
"""Full-size state tensors of optimizers, where that was not measured, and options that add one; two of all others."""


def optimizer_memory_of(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]] | None = None, *, state_tensors: int | None = None
) -> OptimizerMemory:
    """Returns the memory that the optimizer needs to update a parameter.

    Args:
        optimizer: which one.
        groups: the hyperparameters to go by; those that it has by default.
        state_tensors: full-size tensors of its state, where that was measured (`measured_state`).

    Raises:
        UnsupportedError: the optimizer cannot run on pages; says why.
    """
    groups = optimizer.param_groups if groups is None else groups
    whole = not is_elementwise(optimizer)
    if state_tensors is None:
        always, options = _STATE_TENSORS.get(type(optimizer).__name__, (2, ()))
        state_tensors = always + sum(any(group.get(option) for group in groups) for option in options)
    fused = not whole and all(group.get("fused") for group in groups)
    return OptimizerMemory(state_tensors, scratch_tensors=0 if fused else 3, whole=whole)


def switches_of(optimizer: torch.optim.Optimizer) -> list[tuple[bool, ...]]:
    """Lists for each group which options that `optimizer_memory_of` depends on are set."""
    switches = []
    # A loop, not a comprehension: a step in plain mode makes no call more than it must.
    for g in optimizer.param_groups:
        found = g.get("fused"), g.get("amsgrad"), g.get("momentum"), g.get("centered"), g.get("beta1")
        switches.append(tuple(map(bool, found)))
    return switches


_KNOWN = ("torch.optim", "transformers.optimization")
"""Modules whose optimizers update each tensor by itself, but for those that are refused by name."""


def measured_state(optimizer: torch.optim.Optimizer, *, masters: bool, device: torch.device) -> int | None:
    """Counts the full-size state tensors of an unknown optimizer, by one step of its class over small tensors.

    Args:
        optimizer: the user's; neither it nor its parameters are changed.
        masters: whether narrower parameters are updated as fp32 masters.
        device: where updates are computed.

    Returns:
        the most of any parameter, in tensors as wide as the parameter; None if the class is known, or cannot be
        measured.
    """
    cls = type(optimizer)
    if cls in ELEMENTWISE or cls.__module__.startswith(_KNOWN):
        return None
    logger.warning(
        "the optimizer %s is not of torch or transformers. On pages its step() is called for some whole tensors at a "
        "time; if it couples tensors, or counts the calls of step() outside of param_groups and state, its numbers "
        "will differ from a plain run's.",
        cls.__name__,
    )
    groups = []
    for group in optimizer.param_groups:
        trained = sorted((param.numel(), at) for at, param in enumerate(group["params"]) if param.requires_grad)
        # The largest of each number of dimensions: a matrix may have less state than a vector.
        largest = {group["params"][at].dim(): at for _, at in trained}
        if largest:
            params: list[Any] = []
            for at in largest.values():
                param = group["params"][at]
                small = _small(param, device, torch.float32 if masters and is_narrow(param.dtype) else param.dtype)
                params.append((group["param_names"][at], small) if "param_names" in group else small)
            options = {key: value for key, value in group.items() if key != "param_names"}
            groups.append({**options, "params": params})
    if not groups:
        return None
    arguments = inspect.signature(cls).parameters
    try:
        with torch.compiler.set_stance("force_eager"), torch.random.fork_rng([device] if device.type == "cuda" else []):
            probe = cls(groups, **{key: value for key, value in optimizer.defaults.items() if key in arguments})
            probe.step()
    except Exception as error:
        logger.warning(
            "the state of the optimizer %s could not be measured on small tensors (%s: %s); two tensors for each "
            "parameter are assumed.",
            cls.__name__,
            type(error).__name__,
            str(error).partition("\n")[0][:200],
        )
        return None
    return max(_full_size(param, probe.state[param]) for group in probe.param_groups for param in group["params"])


def _small(param: nn.Parameter, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """A small parameter with a gradient in the place of another; lengths that are equal, or differ, still do."""
    shorter = {size: min(size, 8 + at) for at, size in enumerate(sorted(set(param.shape)))}
    small = nn.Parameter(torch.ones([shorter[size] for size in param.shape], dtype=dtype, device=device))
    # An optimizer may read attributes of a parameter.
    vars(small).update(vars(param))
    small.grad = torch.ones_like(small)
    return small


def _full_size(param: nn.Parameter, state: dict[str, Any]) -> int:
    full = [v for v in state.values() if isinstance(v, torch.Tensor) and v.dim() and v.shape == param.shape]
    return -(-sum(tensor.dtype.itemsize for tensor in full) // param.dtype.itemsize)


# ---- optimizers that make their state as they are constructed (Adagrad), over parameters that do not fit ------------


class _BlankState(TorchFunctionMode):
    """Gives optimizer constructors constant state without memory: `full_like(param)` becomes an expanded scalar."""

    def __init__(self, slots: SlotTable) -> None:
        super().__init__()
        self._slots = slots

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.zeros_like, torch.ones_like, torch.full_like) and self._slots.of(args[0]) is not None:
            param = args[0]
            fill = float(func is torch.ones_like)
            if func is torch.full_like:
                fill = args[1] if len(args) > 1 else kwargs["fill_value"]
            dtype = kwargs.get("dtype") or param.dtype
            return torch.full((1,) * param.dim(), fill, dtype=dtype, device=param.device).expand(param.shape)
        return func(*args, **kwargs)


def blank_state(slots: SlotTable) -> TorchFunctionMode:
    """Lets optimizers be constructed over paged parameters without allocating full-size state (Adagrad)."""
    return _BlankState(slots)
