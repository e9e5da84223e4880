"""The arithmetic of an update: the user's own optimizer, called with windows in the place of parameters.

What surrounds its kernel (a gradient is widened and scaled, a master is rounded into its parameter) costs little while
the elements are in a processor's cache, and as much as the kernel itself when each is a pass over all of memory. So on
a CPU, when an element-wise optimizer calls torch's fused kernel for whole windows, that call is carried out piece by
piece, with what surrounds it done for each piece (`InPieces`), and each core with pieces of its own (`CoreThreads`).
Neither the optimizer nor the numbers change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ptm_accel.memory.profiling import ranged
from ptm_accel.model.floor import OptimizerMemory
from ptm_accel.optim.core_threads import CoreThreads
from ptm_accel.optim.hyperparameters import NAMES, apart
from ptm_accel.optim.units import Entry, ParamState, Unit, parts_of

PIECE_ELEMENTS = 1 << 20
"""Elements that are updated at a time on a CPU; a multiple of 64.

With fewer the calls begin to cost, more do not stay in the cache (`tests/benchmarks/update.py`). Where cores have
pieces of their own, each has so many.
"""
LEAST_ELEMENTS = 1 << 16
"""The smallest piece that a core is given for itself."""

_TURNS = 4
"""Number of times that each thread is given pieces of a call that is large enough."""

_ALIGN = 64
"""Pieces begin at multiples of so many elements, or numbers would depend on where they do."""
_KERNELS = {
    torch.ops.aten._fused_adam_: torch._fused_adam_,
    torch.ops.aten._fused_adamw_: torch._fused_adamw_,
    torch.ops.aten._fused_sgd_: torch._fused_sgd_,
    torch.ops.aten._fused_adagrad_: torch._fused_adagrad_,
}
"""torch's fused kernels, each with its quicker way in: lists of tensors are updated element by element.

The first list is of parameters, the second of their gradients.
"""


def _first(units: list[Unit]) -> str:
    return units[0].state.slot.name


class Arithmetic:
    """Updates windows by calling an optimizer.

    Args:
        inner: the user's optimizer.
        optimizer_memory: what its update needs, and whether it may be cut.
        device: where the windows are.
        ready: gives the elements of a window once they have arrived, in the shape of what it is all of, else 1-D.
        threads: who carries pieces out.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        optimizer_memory: OptimizerMemory,
        device: torch.device,
        ready: Callable[[Any], torch.Tensor],
        threads: CoreThreads,
    ) -> None:
        self._threads = threads
        self._inner = inner
        self._device = device
        self._ready = ready
        self._cuts = not optimizer_memory.whole and device.type == "cpu"

    @property
    def grain(self) -> int | None:
        """Most elements of a window that are updated at a time; None for all of them."""
        if not self._in_pieces(self._inner.param_groups):
            return None
        return PIECE_ELEMENTS * self._threads.count

    def _in_pieces(self, groups: list[dict[str, Any]]) -> bool:
        """Whether groups of these hyperparameters are updated in pieces; a state that is loaded may change them."""
        return self._cuts and all(group.get("fused") for group in groups)

    @ranged("update", _first)
    def update(
        self, units: list[Unit], scale: torch.Tensor | None, hyper: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """Updates windows in one step of the optimizer, once they have arrived.

        Args:
            units: the windows; what they hold as `extra` covers what is allocated here.
            scale: what gradients are multiplied by first (clipping), if anything.
            hyper: the hyperparameters of each group (`hyperparameters`).

        Returns:
            what the optimizer has left in its state for each window.
        """
        inner = self._inner
        # Its own may be other ones by now.
        groups: list[dict[str, Any]] = [
            {**values, "params": []} | ({NAMES: []} if NAMES in values else {}) for values in hyper
        ]
        params: list[nn.Parameter] = []
        made: list[tuple[ParamState, nn.Parameter, dict[str, torch.Tensor]]] = []
        pieces = InPieces(scale, self._threads) if self._in_pieces(hyper) else None
        try:
            for unit in units:
                for (index, state, _), tensors, desk in self._rows(unit):
                    param = self._parameter(unit, state, tensors, desk, scale, pieces, hyper[index])
                    group = groups[index]
                    group["params"].append(param)
                    if NAMES in group:
                        group[NAMES].append(hyper[index][NAMES].get(id(state.slot.param), state.slot.name))
                    params.append(param)
                    made.append((state, param, tensors))
            with pieces if pieces is not None else nullcontext():
                step_over(inner, groups, hyper)
            if pieces is not None:
                pieces.check_done()
            for state, param, tensors in made:
                param.grad = None
                if pieces is None:
                    _keep(state, param, tensors)
            made.clear()
            return [inner.state.pop(param, {}) for param in params]
        finally:
            for param in params:
                inner.state.pop(param, None)

    def _rows(self, unit: Unit) -> Iterator[tuple[Entry, dict[str, torch.Tensor], torch.Tensor | None]]:
        """Yields the parameters of a unit, with the tensors of each and the memory to widen its gradient in."""
        tensors = {key: self._ready(window) for key, window in unit.windows.items()}
        desk = None if unit.desk is None else unit.desk[1].octets
        if not unit.together:
            if unit.whole:
                # The parameter may have been given data of another shape since its state was made.
                shape = unit.state.slot.own.shape
                tensors = {key: each if each.shape == shape else each.view(shape) for key, each in tensors.items()}
            yield unit.entries[0], tensors, desk
            return
        sizes = [4 * elements for elements in unit.desk_elements(self.grain)] or [0] * len(unit.entries)
        desks = [None] * len(sizes) if desk is None else desk[: sum(sizes)].split(sizes)
        for entry, part_of_desk in zip(unit.entries, desks, strict=True):
            yield entry, {key: part.of(tensors[key]) for key, part in parts_of(entry).items()}, part_of_desk

    def _parameter(
        self,
        unit: Unit,
        state: ParamState,
        tensors: dict[str, torch.Tensor],
        desk: torch.Tensor | None,
        scale: torch.Tensor | None,
        pieces: InPieces | None,
        options: dict[str, Any],
    ) -> nn.Parameter:
        """Returns a parameter, or a window of it, as the optimizer is to see it; `options` are the hyperparameters."""
        value, grad, master = tensors[""], tensors["grad"], tensors.get("master")
        if master is not None:
            _follow(unit, state, master, value)
        param = nn.Parameter(value if master is None else master)
        # What somebody has noted on a parameter (a rate of its own) an optimizer may read.
        vars(param).update(vars(state.slot.param))
        if pieces is not None:
            grad = pieces.take(param, grad, None if master is None else value, desk)
        else:
            grad = grad.float() if master is not None and grad.dtype != master.dtype else grad
            grad = grad if scale is None else grad.mul_(scale)
        param.grad = grad
        if not unit.new:
            # Every window starts from the same counts; the last one's are kept.
            small = state.small if unit.last else {key: apart(entry) for key, entry in state.small.items()}
            small = {key: self._beside(entry, options) for key, entry in small.items()}
            self._inner.state[param] = {**small, **{key: tensors[f"state.{key}"] for key in state.paged}}
        return param

    def _beside(self, entry: Any, options: dict[str, Any]) -> Any:
        """A step count where the optimizer wants it: the update before this one may have been on another device."""
        if not isinstance(entry, torch.Tensor) or entry.device.type == self._device.type:
            return entry
        # As `Optimizer.load_state_dict` has it.
        wanted = self._device.type == "cpu" or options.get("fused") or options.get("capturable")
        # What was counted on the CPU is in pinned memory, since it was brought there from the device.
        return entry.to(self._device, non_blocking=True) if wanted else entry


@dataclass(slots=True)
class _Row:
    """The tensors of one parameter, or pieces of them.

    Attributes:
        tensors: as the kernel has them.
        value: what the parameter is rounded to, if anything.
        desks: where a piece of its gradient can be widened; of those that are not in use.
    """

    tensors: list[Any]
    value: torch.Tensor | None
    desks: list[torch.Tensor]


@dataclass(slots=True)
class _Operand:
    """Surroundings of the kernel for one tensor: its gradient, the value to round to, and room to widen."""

    grad: torch.Tensor
    value: torch.Tensor | None
    desk: torch.Tensor | None


class InPieces(TorchDispatchMode):
    """Runs torch's fused kernels piece by piece over the tensors that were taken, while it lasts.

    Args:
        scale: what gradients are multiplied by first, if anything.
        threads: who carries pieces out.
    """

    def __init__(self, scale: torch.Tensor | None, threads: CoreThreads) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._scale = scale
        self._threads = threads
        self._operands: dict[int, _Operand] = {}
        self._piece = PIECE_ELEMENTS
        self._by_threads = False

    def take(
        self, param: torch.Tensor, grad: torch.Tensor, value: torch.Tensor | None, desk: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Has the kernel run over `param` in pieces, if anything surrounds it.

        Args:
            param: what will be updated.
            grad: its gradient, as wide or narrower; it is scaled in place if it is as wide.
            value: what `param` is rounded into afterwards, if anything.
            desk: memory as octets to widen the gradient in, for as many elements as are updated at a time; where there
                is none it is allocated.

        Returns:
            what the optimizer is to take for the gradient.
        """
        narrow = grad.dtype != param.dtype
        if not param.numel() or not (narrow or value is not None or self._scale is not None):
            return grad.to(param.dtype)
        if narrow and desk is None:
            # In this thread: what another allocates the C library keeps for that one.
            desk = torch.empty(min(grad.numel(), PIECE_ELEMENTS * self._threads.count), dtype=torch.float32)
        wide = desk.view(torch.float32) if narrow and desk is not None else None
        self._operands[param.data_ptr()] = _Operand(grad, value, wide)
        if not narrow:
            return grad
        # Not a number, so that it shows if anybody should compute with it.
        return torch.full((), torch.nan, dtype=param.dtype).expand(param.shape)

    def check_done(self) -> None:
        """Asserts that the optimizer has called its kernel for all that was taken."""
        assert not self._operands, f"{len(self._operands)} windows were not updated"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kernel = _KERNELS.get(func.overloadpacket)
        if kernel is None:
            return func(*args, **(kwargs or {}))
        total = sum(param.numel() for param in args[0])
        with self._given(total) as give:
            rows: list[_Row] = []
            # Handing a piece to a thread takes longer than some take: each thread gets a few of them at a time.
            several = _Several(give, total // (_TURNS * self._threads.count) if self._by_threads else 0)
            elements = 0
            for index in range(len(args[0])):
                for row in self._cut([column[index] if column else None for column in args]):
                    rows.append(row)
                    elements += row.tensors[0].numel()
                    # Small tensors share a call; the piece that fills it is its last.
                    if elements >= self._piece:
                        # One that is not cut is for all cores.
                        here = self._by_threads and elements > 2 * self._piece
                        piece = partial(self._run, kernel, rows, args, kwargs)
                        if here:
                            piece()
                        else:
                            several.give(piece, elements)
                        rows, elements = [], 0
            if rows:
                several.give(partial(self._run, kernel, rows, args, kwargs), elements)
            several.end()
        return None

    @contextmanager
    def _given(self, elements: int) -> Iterator[Callable[[Callable[[], object]], object]]:
        """Who carries out the pieces of a call over so many elements, of which each core has one at least."""
        count = self._threads.count if self._operands else 1
        self._by_threads = count > 1 and elements >= 2 * LEAST_ELEMENTS
        if not self._by_threads:
            self._piece = PIECE_ELEMENTS
            yield _at_once
            return
        self._piece = max(min(PIECE_ELEMENTS, -(-elements // count) // _ALIGN * _ALIGN), LEAST_ELEMENTS)
        with self._threads.at_work() as give:
            yield give

    def _cut(self, tensors: list[Any]) -> Iterator[_Row]:
        numel = tensors[0].numel()
        operand = self._operands.pop(tensors[0].data_ptr(), None)
        value = None
        if operand is not None:
            tensors, value = [tensors[0], operand.grad, *tensors[2:]], operand.value
        if self._by_threads:
            # In another thread torch would count each change of what it is a view of once more.
            tensors = [tensor if tensor is None else tensor.data for tensor in tensors]
            value = None if value is None else value.data
        if operand is None or numel <= self._piece:
            yield _Row(tensors, value, [] if operand is None or operand.desk is None else [operand.desk])
            return
        # What is not of this size belongs to the tensor as a whole: a step count.
        cut = [
            repeat(tensor) if tensor is None or tensor.numel() != numel else tensor.view(-1).split(self._piece)
            for tensor in [*tensors, value]
        ]
        desks = self._desks(operand.desk, numel)
        for (*piece, rounded), free in zip(zip(*cut, strict=False), desks, strict=False):
            yield _Row(piece, rounded, free)

    def _desks(self, desk: torch.Tensor | None, numel: int) -> Iterable[list[torch.Tensor]]:
        """Finds room to widen each piece of a tensor: a place of its own, or one of those that are free by then."""
        if desk is None:
            return repeat([])
        if desk.numel() >= numel:
            return ([part] for part in desk.split(self._piece))
        # Of whole pieces there are as many as are under way at a time.
        return repeat([part for part in desk.split(self._piece) if part.numel() == self._piece])

    def _run(self, kernel: Any, rows: list[_Row], columns: Any, kwargs: Any) -> None:
        used: list[tuple[list[torch.Tensor], torch.Tensor]] = []
        for row in rows:
            param, grad = row.tensors[0], row.tensors[1]
            if grad.dtype != param.dtype:
                desk = row.desks.pop()
                used.append((row.desks, desk))
                row.tensors[1] = grad = desk[: grad.numel()].view(param.shape).copy_(grad)
            if self._scale is not None:
                grad.mul_(self._scale)
        columns = ([row.tensors[at] for row in rows] if column else [] for at, column in enumerate(columns))
        kernel(*columns, **(kwargs or {}))
        for row in rows:
            if row.value is not None:
                row.value.copy_(row.tensors[0])
        for desks, desk in used:
            desks.append(desk)


class _Several:
    """Hands pieces on, so many at a time that they have `least` elements together."""

    def __init__(self, give: Callable[[Callable[[], object]], object], least: int) -> None:
        self._give = give
        self._least = least
        self._pieces: list[Callable[[], object]] = []
        self._elements = 0

    def give(self, piece: Callable[[], object], elements: int) -> None:
        """Takes a piece of so many elements."""
        self._pieces.append(piece)
        self._elements += elements
        if self._elements >= self._least:
            self.end()

    def end(self) -> None:
        """Hands on what is left."""
        pieces, self._pieces, self._elements = self._pieces, [], 0
        if pieces:
            self._give(partial(_all, pieces))


def _all(pieces: list[Callable[[], object]]) -> None:
    for piece in pieces:
        piece()


def _at_once(piece: Callable[[], object]) -> None:
    piece()


def _keep(state: ParamState, param: nn.Parameter, tensors: dict[str, torch.Tensor]) -> None:
    """Sees to it that what the optimizer has made of a window is in it, and rounds a master into its parameter."""
    updated = tensors["" if state.master is None else "master"]
    if param.data_ptr() != updated.data_ptr():
        # It was given other data (`p.data = ...`).
        updated.copy_(param.view(updated.shape))
    if state.master is not None:
        rounded = tensors[""]
        rounded.copy_(param.view(rounded.shape))


def _follow(unit: Unit, state: ParamState, master: torch.Tensor, value: torch.Tensor) -> None:
    """Takes the master from the parameter: all of it at first, later where it has been written from outside."""
    if unit.start >= state.mastered:
        master.copy_(value)
    elif state.differs:
        master.copy_(torch.where(master.to(value.dtype) == value, master, value.float()))


def step_over(
    optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], hyper: Sequence[Mapping[str, Any]]
) -> None:
    """Makes one step over other parameters than the optimizer's groups have; what it changes in them is changed.

    Some count steps in their groups: every part of a step starts from the same count.

    Args:
        optimizer: the user's.
        groups: what the step is to find as its groups; those without parameters are left out.
        hyper: the hyperparameters of each group, as they were at the beginning of the step.
    """
    present = optimizer.param_groups
    optimizer.param_groups = [group for group in groups if group["params"]]
    try:
        bare_step(optimizer)
    finally:
        optimizer.param_groups = present
    # Those whose updates may come after their step change nothing in them.
    for group, before, now in zip(groups, hyper, present, strict=False):
        now.update({k: v for k, v in group.items() if k not in ("params", NAMES) and v is not before.get(k)})


def bare_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without its step hooks, which belong to a whole step and not to each part of it."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)
