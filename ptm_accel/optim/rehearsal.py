"""Whether an optimizer that nobody knows gives the same numbers one tensor at a time as all at once, and what it keeps.

On pages it is called for some tensors at a time, whichever fit, and which those are must change nothing. Nothing in an
optimizer's class says that it sums a norm over all gradients, or counts the calls of its own `step`. So before it is
taken, it makes a few steps over a few small tensors: once as a plain run has it, once cut up as pages need it.
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import nn

from ptm_accel.errors import UnsupportedError
from ptm_accel.model.norms import is_narrow
from ptm_accel.optim.arithmetic import bare_step
from ptm_accel.optim.hyperparameters import NAMES
from ptm_accel.optim.isolation import Copied, copy_of, knows_parameters, nothing_drawn, optimizers_in

logger = logging.getLogger(__name__)

_STEPS = 3
"""The first makes the state; what couples tensors through it alone shows in the one after."""
_GROUPS = 4
"""How many parameter groups have tensors in it: enough to see what one group has to do with another."""
_LARGE_GRADIENTS = 1e4
"""What gradients are multiplied by in one step: a norm of all that is limited shows where it is above the limit."""
_LONGEST_TEXT = 200
"""Characters of an error of somebody's own that are shown."""
_EDGE = 8
"""Dimensions up to this one stay as long as they are; of the longer ones, each length becomes one a little above it."""
_KNOWN = ("torch.optim", "transformers.optimization")
"""Modules whose optimizers update each tensor by itself, but for those that are refused by name."""


@dataclass
class _Row:
    """A small tensor in the place of a parameter, the number of its group and its name there, if it has one."""

    group: int
    value: torch.Tensor
    param: nn.Parameter
    name: str | None


@dataclass
class _Outcome:
    """What some steps have left: values, state by tensor, hyperparameters by group."""

    values: list[torch.Tensor]
    states: list[dict[str, Any]]
    groups: list[dict[str, Any]]

    def full_size(self, at: int) -> int:
        """How many tensors of the shape and the width of one its state is as large as."""
        value = self.values[at]
        kept = [
            v for v in self.states[at].values() if isinstance(v, torch.Tensor) and v.dim() and v.shape == value.shape
        ]
        return -(-sum(tensor.dtype.itemsize for tensor in kept) // value.dtype.itemsize)

    def beside(self) -> tuple[str, torch.Size, torch.Size] | None:
        """A state tensor that does not go onto pages and is large, as (key, its shape, the parameter's)."""
        for value, state in zip(self.values, self.states, strict=True):
            for key, entry in state.items():
                for kept in entry if isinstance(entry, (list, tuple)) else (entry,):
                    # Sums over rows or columns are small. Tensors in a list never go onto pages.
                    large = isinstance(kept, torch.Tensor) and kept.numel() > 2 * sum(value.shape)
                    if large and (kept is not entry or kept.shape != value.shape):
                        return key, kept.shape, value.shape
        return None

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
        how many tensors of a parameter's shape its state has at the most; None where it was not tried, or trains none.

    Raises:
        UnsupportedError: it couples tensors, counts its calls, or is made around another optimizer.
    """
    cls = type(optimizer)
    if cls.__module__.startswith(_KNOWN):
        return None
    _refuse_objects(optimizer)
    rows = _small(optimizer, masters=masters, device=device)
    if not rows:
        return None
    try:
        # What is compiled for small tensors would count against what may be compiled for true ones.
        with torch.compiler.set_stance("force_eager"), nothing_drawn():
            whole = _steps(optimizer, rows, apart=False)
            apart = _steps(optimizer, rows, apart=True)
    except Exception as error:
        # It may still do its work on tensors of their true size, where an error of its own ends the step.
        logger.warning(
            "the optimizer %s could not be tried on small tensors (%s: %s). Pages call it for some tensors at a time; "
            "if it couples tensors, or counts the calls of its step, its numbers will differ from a plain run's.",
            cls.__name__,
            type(error).__name__,
            str(error).partition("\n")[0][:_LONGEST_TEXT],
        )
        return None
    _judge(cls, rows, whole, apart)
    return max(whole.full_size(at) for at in range(len(rows)))


def _refuse_objects(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that keeps what its step goes by as objects, and is given others in their place.

    Raises:
        UnsupportedError: another optimizer, parameters or groups.
    """
    cls = type(optimizer)
    for name, value in vars(optimizer).items():
        for other in optimizers_in(value):
            raise UnsupportedError(
                f"the optimizer {cls.__name__} cannot run on pages: it updates through another one (its attribute "
                f"{name!r}, {type(other).__name__}), which would not see what is on pages. Use that one by itself."
            )
    known = knows_parameters(optimizer)
    if known is not None:
        raise UnsupportedError(
            f"the optimizer {cls.__name__} cannot run on pages: its attribute {known!r} holds parameters or groups by "
            "the object, and its step is given others in their place. Keep what it says of a parameter in its group, "
            "in state[p], or on the parameter itself (p.rate = 0.1)."
        )


def _judge(cls: type[torch.optim.Optimizer], rows: Sequence[_Row], whole: _Outcome, apart: _Outcome) -> None:
    """Refuses an optimizer by what it did, or warns of it.

    Args:
        cls: its class.
        rows: the small tensors it was tried on.
        whole: what came of steps in one call.
        apart: what came of steps in one call for each tensor.

    Raises:
        UnsupportedError: it was not the same.
    """
    what = whole.differs_in(apart)
    if what is not None:
        raise UnsupportedError(
            f"the optimizer {cls.__name__} cannot run on pages: tried on {len(rows)} small tensors for {_STEPS} steps, "
            f"{what} came out otherwise when it was called for one tensor at a time, as pages need it, than for all at "
            "once. It couples tensors (by a norm over all gradients?), counts the calls of its step outside of "
            "param_groups and state, or keeps by parameter what belongs into state[p]. Use "
            "torch.nn.utils.clip_grad_norm_ for norms, and state[p] for all else."
        )
    if _same(whole.values, [row.value for row in rows]):
        logger.warning(
            "the optimizer %s changed none of %d small tensors in %d steps. If it goes by a list of its own in the "
            "place of param_groups, it will not change what is on pages.",
            cls.__name__,
            len(rows),
            _STEPS,
        )
    beside = whole.beside()
    if beside is not None:
        logger.warning(
            "the optimizer %s keeps state that is neither as its parameters are nor small (%r, of the shape %s where a "
            "parameter was tried as %s). It stays in memory, and beside what host_memory counts.",
            cls.__name__,
            beside[0],
            tuple(beside[1]),
            tuple(beside[2]),
        )


def _small(optimizer: torch.optim.Optimizer, *, masters: bool, device: torch.device) -> list[_Row]:
    """Small tensors in the place of some parameters of some groups; what is as long as another stays so."""
    chosen: list[tuple[int, nn.Parameter]] = []
    groups = ((at, [p for p in group["params"] if p.requires_grad]) for at, group in enumerate(optimizer.param_groups))
    for index, trained in islice((each for each in groups if each[1]), _GROUPS):
        by_dims = {param.dim(): param for param in reversed(trained)}
        some = {id(p): p for p in (trained[0], *by_dims.values(), trained[-1])}
        chosen += [(index, param) for param in some.values()]
    lengths = sorted({size for _, param in chosen for size in param.shape if size > _EDGE})
    shorter = {size: _EDGE + at for at, size in enumerate(lengths, 1)}
    generator = torch.Generator().manual_seed(0)
    rows: list[_Row] = []
    for index, param in chosen:
        value = torch.randn([shorter.get(size, size) for size in param.shape], generator=generator) * 0.1
        group = optimizer.param_groups[index]
        at = next(at for at, other in enumerate(group["params"]) if other is param)
        name = group[NAMES][at] if NAMES in group else None
        value = value.to(device, torch.float32 if masters and is_narrow(param.dtype) else param.dtype)
        rows.append(_Row(index, value, param, name))
    return rows


def _steps(optimizer: torch.optim.Optimizer, rows: Sequence[_Row], *, apart: bool) -> _Outcome:
    """Some steps over copies of small tensors, in one call each or in one for each tensor.

    One by one, every step has other tensors, as it has on pages: what an optimizer keeps by the tensor itself, and not
    in its state, is not found again.
    """
    copy, copied = copy_of(optimizer)
    groups = [
        copied.of({key: value for key, value in group.items() if key not in ("params", NAMES)})
        for group in optimizer.param_groups
    ]
    for group in groups:
        if "lr" in group and not group["lr"]:
            # A warm-up begins with none, and would hide what a step does.
            group["lr"] = group["lr"] + 1e-3
    params = [_parameter(row.value.clone(), row, copied) for row in rows]
    copy.state = defaultdict(dict)
    for param, row in zip(params, rows, strict=True):
        given = optimizer.state.get(row.param)
        if given:
            copy.state[param] = {key: _smaller(entry, row, copied) for key, entry in given.items()}
    # Kept, so that no other object comes to have their identity.
    left: list[nn.Parameter] = []
    kept: list[dict[str, Any]] = []
    devices = [row.value.device for row in rows if row.value.is_cuda][:1]
    with torch.random.fork_rng(devices):
        # `torch.manual_seed` means all cards, also those that nobody has used yet.
        torch.default_generator.manual_seed(0)
        for device in devices:
            torch.cuda.default_generators[device.index].manual_seed(0)
        generator = torch.Generator().manual_seed(1)
        for number in range(_STEPS):
            if apart and number:
                left += params
                params = [_moved(copy, *each, copied) for each in zip(params, rows, kept, strict=True)]
            kept = [dict(copy.state.get(param, {})) for param in params]
            for size, param in enumerate(params, 1):
                factor = size * (_LARGE_GRADIENTS if number == 1 else 1.0)
                param.grad = (torch.randn(param.shape, generator=generator) * factor).to(param.device, param.dtype)
            before = [dict(group) for group in groups]
            whole = list(zip(rows, params, strict=True))
            for part in [[one] for one in whole] if apart else [whole]:
                # As in `Arithmetic.update`: each part of a step starts from the same hyperparameters.
                called = [_called(values, at, part) for at, values in enumerate(before)]
                copy.param_groups = [group for group in called if group["params"]]
                with torch.no_grad():
                    bare_step(copy)
                for at, group in enumerate(called):
                    if group["params"]:
                        groups[at] = {key: value for key, value in group.items() if key not in ("params", NAMES)}
    return _Outcome([param.detach() for param in params], [dict(copy.state.get(p, {})) for p in params], groups)


def _called(values: dict[str, Any], at: int, part: Sequence[tuple[_Row, nn.Parameter]]) -> dict[str, Any]:
    """A group as a step sees it that is called for some of its parameters."""
    mine = [(row, param) for row, param in part if row.group == at]
    names = {NAMES: [row.name for row, _ in mine]} if any(row.name is not None for row, _ in mine) else {}
    return {**values, **names, "params": [param for _, param in mine]}


def _smaller(entry: Any, row: _Row, copied: Copied) -> Any:
    """What a constructor has put in a parameter's state, for the small tensor in its place."""
    if isinstance(entry, torch.Tensor) and entry.dim() and entry.shape == row.param.shape:
        return torch.zeros(row.value.shape, dtype=entry.dtype, device=row.value.device)
    return copied.of(entry)


def _parameter(value: torch.Tensor, row: _Row, copied: Copied) -> nn.Parameter:
    """In the place of another; with what somebody has noted on that."""
    param = nn.Parameter(value)
    vars(param).update(copied.of(vars(row.param)))
    return param


def _moved(
    copy: torch.optim.Optimizer, param: nn.Parameter, row: _Row, kept: dict[str, Any], copied: Copied
) -> nn.Parameter:
    """Another parameter with the values and the state of one; each entry of it is a tensor of its own.

    What goes onto pages stays there, also where a step has taken it out of the state.
    """
    other = _parameter(param.detach(), row, copied)
    paged = {key: v for key, v in kept.items() if isinstance(v, torch.Tensor) and v.dim() and v.shape == param.shape}
    state = {**paged, **copy.state.pop(param, {})}
    if state:
        copy.state[other] = {key: v.clone() if isinstance(v, torch.Tensor) else v for key, v in state.items()}
    return other


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
