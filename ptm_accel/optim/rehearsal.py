"""Whether an optimizer that nobody knows gives the same numbers one tensor at a time as all at once, and what it keeps.

On pages it is called for some tensors at a time, whichever fit, and which those are must change nothing. Nothing in an
optimizer's class says that it sums a norm over all gradients, or counts the calls of its own `step`. So before it is
taken, it makes a few steps over a few small tensors: once as a plain run has it, once cut up as pages need it.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ptm_accel.errors import UnsupportedError
from ptm_accel.optim.arithmetic import bare_step

logger = logging.getLogger(__name__)

_STEPS = 3
"""The first makes the state; what couples tensors through it alone shows in the one after."""
_GROUPS = 4
"""How many parameter groups have tensors in it: enough to see what one group has to do with another."""
_EDGE = 8
"""The longest dimension of a small tensor."""
_LARGEST_OF_ITS_OWN = 4096
"""Elements of the largest tensor that an optimizer may keep outside of its state and is copied for this."""
_KNOWN = ("torch.optim", "transformers.optimization")
"""Modules whose optimizers update each tensor by itself, but for those that are refused by name."""

_Row = tuple[int, torch.Tensor]
"""A small tensor and the number of its group."""


@dataclass
class _Outcome:
    """What some steps have left: values, state by tensor, hyperparameters by group."""

    values: list[torch.Tensor]
    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]

    def full_size(self, at: int) -> int:
        """How many tensors of the shape of one are in its state."""
        shape = self.values[at].shape
        return sum(isinstance(v, torch.Tensor) and v.dim() > 0 and v.shape == shape for v in self.states[at].values())

    def differs_in(self, other: _Outcome) -> str | None:
        """What is not the same in both, in a user's words; None where all is."""
        if not _same(self.values, other.values):
            return "the parameters"
        if not _same(self.states, other.states):
            return "the state"
        if not _same(self.groups, other.groups):
            return "the parameter groups"
        return None


def rehearse(optimizer: torch.optim.Optimizer, *, masters: bool, device: torch.device) -> int | None:
    """Tries an optimizer, and refuses one whose numbers depend on how many tensors are updated in one call.

    What cannot be tried (an optimizer that takes no small tensors) is warned of, and so is one that changes nothing.

    Args:
        optimizer: as it is before its first step here; neither it nor its parameters are touched.
        masters: whether it will see fp32 masters in the place of narrower parameters.
        device: where updates are computed.

    Returns:
        how many tensors of a parameter's shape its state has at the most; None where it was not tried.

    Raises:
        UnsupportedError: it couples tensors, counts its calls, or is made around another optimizer.
    """
    cls = type(optimizer)
    if cls.__module__.startswith(_KNOWN):
        return None
    for name, value in vars(optimizer).items():
        for other in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(other, torch.optim.Optimizer):
                raise UnsupportedError(
                    f"the optimizer {cls.__name__} cannot run on pages: it updates through another one (its attribute "
                    f"{name!r}, {type(other).__name__}), which would not see what is on pages. Use that one by itself."
                )
    rows = _small(optimizer, masters=masters, device=device)
    try:
        whole = _steps(optimizer, rows, apart=False)
        apart = _steps(optimizer, rows, apart=True)
    except Exception as error:
        # It may still do its work on tensors of their true size, where an error of its own ends the step.
        logger.warning(
            "the optimizer %s could not be tried on small tensors (%s: %s). Pages call it for some tensors at a time; "
            "if it couples tensors, or counts the calls of its step, its numbers will differ from a plain run's.",
            cls.__name__,
            type(error).__name__,
            error,
        )
        return None
    what = whole.differs_in(apart)
    if what is not None:
        raise UnsupportedError(
            f"the optimizer {cls.__name__} cannot run on pages: tried on {len(rows)} small tensors for {_STEPS} steps, "
            f"{what} came out otherwise when it was called for one tensor at a time, as pages need it, than for all at "
            "once. It couples tensors (by a norm over all gradients?), or counts the calls of its step outside of "
            "param_groups and state. Use torch.nn.utils.clip_grad_norm_ for norms, and state[p] for counts."
        )
    if rows and _same(whole.values, [value for _, value in rows]):
        logger.warning(
            "the optimizer %s changed none of %d small tensors in %d steps. If it goes by a list of its own in the "
            "place of param_groups, it will not change what is on pages.",
            cls.__name__,
            len(rows),
            _STEPS,
        )
    return max((whole.full_size(at) for at in range(len(rows))), default=0)


def _small(optimizer: torch.optim.Optimizer, *, masters: bool, device: torch.device) -> list[_Row]:
    """Small tensors in the place of some parameters of some groups, with as many dimensions."""
    generator = torch.Generator().manual_seed(0)
    rows: list[_Row] = []
    for index, group in list(enumerate(optimizer.param_groups))[:_GROUPS]:
        trained = [param for param in group["params"] if param.requires_grad]
        by_dims = {param.dim(): param for param in reversed(trained)}
        for param in {id(p): p for p in (*trained[:1], *by_dims.values(), *trained[-1:])}.values():
            shape = [min(size, _EDGE) for size in param.shape]
            narrow = param.is_floating_point() and param.dtype.itemsize < torch.float32.itemsize
            value = torch.randn(shape, generator=generator) * 0.1
            rows.append((index, value.to(device, torch.float32 if masters and narrow else param.dtype)))
    return rows


def _steps(optimizer: torch.optim.Optimizer, rows: Sequence[_Row], *, apart: bool) -> _Outcome:
    """Some steps over copies of small tensors, in one call each or in one for each tensor."""
    copy = object.__new__(type(optimizer))
    copy.__dict__.update({name: _of_its_own(value) for name, value in vars(optimizer).items()})
    groups = [_of_its_own({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]
    for group in groups:
        if "lr" in group and not group["lr"]:
            # A warm-up begins with none, and would hide what a step does.
            group["lr"] = group["lr"] + 1e-3
    params = [(index, nn.Parameter(value.clone())) for index, value in rows]
    copy.state = defaultdict(dict)
    # Whoever asked to be called at steps means those of the training.
    copy._optimizer_step_pre_hooks, copy._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    devices = [value.device for _, value in rows if value.is_cuda][:1]
    with torch.random.fork_rng(devices):
        # `torch.manual_seed` means all cards, also those that nobody has used yet.
        torch.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device.index].manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        for _ in range(_STEPS):
            for size, (_, param) in enumerate(params, 1):
                param.grad = (torch.randn(param.shape, generator=generator) * size).to(param.device, param.dtype)
            before = [dict(group) for group in groups]
            for part in [[row] for row in params] if apart else [params]:
                # As in `Arithmetic.update`: each part of a step starts from the same hyperparameters.
                called = [
                    {**values, "params": [param for index, param in part if index == at]}
                    for at, values in enumerate(before)
                ]
                copy.param_groups = [group for group in called if group["params"]]
                with torch.no_grad():
                    bare_step(copy)
                for at, group in enumerate(called):
                    if group["params"]:
                        groups[at] = {key: value for key, value in group.items() if key != "params"}
    return _Outcome([param.detach() for _, param in params], [dict(copy.state.get(p, {})) for _, p in params], groups)


def _of_its_own(value: Any) -> Any:
    """A copy that may be changed, of all that is known how to copy; of what is large, only its shape."""
    if isinstance(value, torch.Tensor):
        large = value.numel() > _LARGEST_OF_ITS_OWN
        return torch.empty_like(value, device="meta") if large else value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.clone_state()
    if isinstance(value, dict) and type(value) is dict:
        return {key: _of_its_own(entry) for key, entry in value.items()}
    if type(value) in (list, tuple, set):
        return type(value)(_of_its_own(entry) for entry in value)
    return value


def _same(one: Any, other: Any) -> bool:
    """Whether both are the same numbers, a NaN being the same as another."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return False
        return bool(((one == other) | ((one != one) & (other != other))).all())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(entry, other[key]) for key, entry in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, (bool, int, float, complex, str)):
        return bool(one == other or (one != one and other != other))
    # What an optimizer keeps beside numbers cannot be told apart from a copy of it.
    return type(one) is type(other)
