"""One optimizer step as a sweep over the parameters: a batch of windows at a time is brought in, updated, sent home.

The update itself is the user's own optimizer, unchanged: it is called with the windows as its parameters. For
element-wise optimizers a window is a slice of a few pages, so that a step needs little more than the windows in memory;
for any other it is the whole tensor. The next batch is opened before the present one is computed, so that its transfers
run meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ptm_accel.memory.budget import Tag
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.windows import Window
from ptm_accel.model.gradients import GradSlot
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.support import Grain

WINDOW_ALIGN = 4096
"""Window starts are multiples of this many elements: aligned bytes for every dtype, and a multiple of 64 elements."""

NEW_STATE_FACTOR = 3
"""Full-size state tensors that an element-wise optimizer may make for a parameter on its first step (amsgrad: 3)."""


@dataclass(slots=True)
class ParamState:
    """What the optimizer keeps for one parameter.

    Attributes:
        slot: the parameter.
        paged: full-size tensors by the optimizer's own key.
        small: all the rest (step counts, factored moments).
        master: the fp32 master of a narrower parameter, where master weights are on.
        mastered: how many elements of the master, from the start, have been taken from the parameter.
    """

    slot: ParamSlot
    paged: dict[str, PagedTensor] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)
    master: PagedTensor | None = None
    mastered: int = 0

    @property
    def empty(self) -> bool:
        """Whether the optimizer has not met this parameter yet."""
        return not self.paged and not self.small

    @property
    def wide(self) -> PagedTensor:
        """What the optimizer updates: the master if there is one, else the parameter."""
        return self.master if self.master is not None else self.slot.value


@dataclass(slots=True)
class _Unit:
    """A window of one parameter with everything its update reads and writes."""

    group: int
    state: ParamState
    grad: GradSlot
    start: int
    stop: int
    last: bool
    new: bool
    windows: dict[str, Window] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)
    wide_grad: torch.Tensor | None = None

    @property
    def cost_bytes(self) -> int:
        """Bytes of the parameter in this window."""
        return (self.stop - self.start) * self.state.wide.dtype.itemsize


class Sweep:
    """Runs steps of one optimizer over paged parameters.

    Args:
        inner: the user's optimizer.
        pool: where everything lives.
        grain: how finely its update may be cut.
        window_bytes: size of a window, in bytes of the tensor that is updated.
        batch_bytes: how much of that is brought in at a time.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, pool: Pool, grain: Grain, window_bytes: int, batch_bytes: int
    ) -> None:
        self.inner = inner
        self.pool = pool
        self.grain = grain
        self.window_bytes = window_bytes
        self.batch_bytes = max(batch_bytes, window_bytes)

    def run(self, work: list[tuple[int, ParamState, GradSlot]], scale: torch.Tensor | None) -> None:
        """Updates every parameter that has a gradient, and drops the gradients.

        Args:
            work: group index, state and gradient of each parameter, in the optimizer's order.
            scale: what gradients are multiplied by first (clipping), if anything.
        """
        batches = self._batches(work)
        hyper = [{k: v for k, v in group.items() if k != "params"} for group in self.inner.param_groups]
        with ExitStack() as cleanup:
            opened: list[_Unit] = []
            cleanup.callback(lambda: self._abandon(opened))
            current = self._open(next(batches, None), opened)
            while current:
                following = self._open(next(batches, None), opened)
                self._update(current, scale, hyper)
                self._close(current, opened)
                current = following

    # ---- cutting ---------------------------------------------------------------------------------------------

    def _batches(self, work: list[tuple[int, ParamState, GradSlot]]) -> Iterator[list[_Unit]]:
        batch: list[_Unit] = []
        cost = 0
        for group, state, grad in work:
            for unit in self._units(group, state, grad):
                # What is resident counts as well: while a batch is open, none of it can make room.
                if batch and cost + unit.cost_bytes > self.batch_bytes:
                    yield batch
                    batch, cost = [], 0
                batch.append(unit)
                cost += unit.cost_bytes
        if batch:
            yield batch

    def _units(self, group: int, state: ParamState, grad: GradSlot) -> Iterator[_Unit]:
        """The windows of one parameter; whole if that costs no moving, or if it may not be cut."""
        numel = state.slot.value.numel
        new = state.empty
        step = self.window_bytes // state.wide.dtype.itemsize // WINDOW_ALIGN * WINDOW_ALIGN
        whole = self.grain is Grain.TENSOR or numel <= max(step, WINDOW_ALIGN) or self._all_here(state, grad)
        step = numel if whole else max(step, WINDOW_ALIGN)
        for start in range(0, max(numel, 1), max(step, 1)):
            stop = min(start + step, numel)
            yield _Unit(group, state, grad, start, stop, last=stop == numel, new=new)

    def _all_here(self, state: ParamState, grad: GradSlot) -> bool:
        """Whether all that the update needs is resident, or fits without moving anything away."""
        assert grad.value is not None
        involved = [state.slot.value, grad.value, *state.paged.values()]
        if state.master is not None:
            involved.append(state.master)
        missing = sum(t.slot_bytes for t in involved if not t.place.resident)
        if state.empty:
            missing += NEW_STATE_FACTOR * state.slot.value.numel * state.wide.dtype.itemsize
        return missing + self.batch_bytes <= self.pool.budget.free_bytes or missing == 0

    # ---- one batch -------------------------------------------------------------------------------------------

    def _open(self, units: list[_Unit] | None, opened: list[_Unit]) -> list[_Unit]:
        for unit in units or []:
            opened.append(unit)
            self._open_unit(unit)
        return units or []

    def _open_unit(self, unit: _Unit) -> None:
        state, grad = unit.state, unit.grad.value
        assert grad is not None
        whole = unit.start == 0 and unit.last
        named = {"": state.slot.value, "grad": grad}
        if state.master is not None:
            named["master"] = state.master
        if not unit.new:
            named |= {f"state.{key}": tensor for key, tensor in state.paged.items()}
        for key, tensor in named.items():
            if whole or (unit.start == 0 and self._admit(tensor)):
                self.pool.fault(tensor)
            unit.windows[key] = self.pool.windows.open(tensor, unit.start, unit.stop)
        if whole or unit.last:
            unit.small = state.small
        else:
            unit.small = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.small.items()}

    def _admit(self, tensor: PagedTensor) -> bool:
        """Whether a tensor that is away may come in whole: without a home it must, else if room is to spare."""
        if tensor.place.resident or self.pool.home is None or not tensor.movable:
            return True
        return tensor.tag in (Tag.STATE, Tag.MASTER) and (
            tensor.slot_bytes + 2 * self.batch_bytes <= self.pool.budget.free_bytes
        )

    def _update(self, units: list[_Unit], scale: torch.Tensor | None, hyper: list[dict[str, Any]]) -> None:
        inner = self.inner
        groups = inner.param_groups
        saved = [group["params"] for group in groups]
        pseudo: list[list[nn.Parameter]] = [[] for _ in groups]
        made: list[tuple[_Unit, nn.Parameter]] = []
        try:
            for unit in units:
                param = self._pseudo_parameter(unit, scale)
                pseudo[unit.group].append(param)
                made.append((unit, param))
            for group, params, values in zip(groups, pseudo, hyper, strict=True):
                group["params"] = params
                # Some optimizers count steps in their groups; every part of a step starts from the same count.
                group.update(values)
            inner.param_groups = [group for group in groups if group["params"]]
            _bare_step(inner)
            for unit, param in made:
                self._harvest(unit, inner.state.pop(param, {}))
                param.grad = None
        finally:
            inner.param_groups = groups
            for group, params in zip(groups, saved, strict=True):
                group["params"] = params
            for _, param in made:
                inner.state.pop(param, None)

    def _pseudo_parameter(self, unit: _Unit, scale: torch.Tensor | None) -> nn.Parameter:
        tensors = {key: self.pool.windows.ready(window) for key, window in unit.windows.items()}
        slot, master = unit.state.slot, unit.state.master
        shape = slot.value.shape if unit.start == 0 and unit.last else torch.Size([unit.stop - unit.start])
        grad = tensors["grad"]
        target = tensors[""]
        if master is not None:
            target = tensors["master"]
            if unit.start >= unit.state.mastered:
                target.copy_(tensors[""])
            if grad.dtype != torch.float32:
                grad = unit.wide_grad = grad.float()
        if scale is not None:
            grad.mul_(scale)
        param = nn.Parameter(target.view(shape))
        param.grad = grad.view(shape)
        if not unit.new:
            paged = {k: tensors[f"state.{k}"].view(shape) for k in unit.state.paged}
            self.inner.state[param] = {**unit.small, **paged}
        return param

    def _harvest(self, unit: _Unit, after: dict[str, Any]) -> None:
        """Takes what the optimizer left in its state: new full-size tensors go on pages, the rest is kept as it is."""
        state = unit.state
        shape = (unit.stop - unit.start,)
        small: dict[str, Any] = {}
        for key, value in after.items():
            if not self._full_size(value, shape[0]):
                small[key] = value
                continue
            window = unit.windows.get(f"state.{key}")
            if window is None:
                window = self._first_window(unit, key, value)
            here = self.pool.windows.ready(window)
            if here.data_ptr() != value.data_ptr():
                here.copy_(value.reshape(-1))
        if unit.last:
            state.small = small

    def _full_size(self, value: Any, numel: int) -> bool:
        return isinstance(value, torch.Tensor) and value.numel() == numel and value.dim() > 0

    def _first_window(self, unit: _Unit, key: str, value: torch.Tensor) -> Window:
        state, slot = unit.state, unit.state.slot
        tensor = state.paged.get(key)
        if tensor is None:
            name = f"{slot.name}.{key}"
            tensor = self.pool.create(name, Tag.STATE, slot.value.shape, value.dtype, movable=slot.value.movable)
            state.paged[key] = tensor
            if unit.start == 0 and unit.last and value.is_contiguous():
                self.pool.adopt(tensor, value.view(slot.value.shape))
        if unit.start == 0 and (unit.last or self._admit(tensor)):
            self.pool.fault(tensor)
        window = unit.windows[f"state.{key}"] = self.pool.windows.open(tensor, unit.start, unit.stop)
        return window

    def _close(self, units: list[_Unit], opened: list[_Unit]) -> None:
        for unit in units:
            state = unit.state
            if state.master is not None:
                value, master = unit.windows[""].tensor, unit.windows["master"].tensor
                assert value is not None and master is not None
                value.copy_(master)
                state.mastered = max(state.mastered, unit.stop)
            unit.wide_grad = None
            for key in list(unit.windows):
                self.pool.windows.close(unit.windows.pop(key), wrote=key != "grad")
            opened.remove(unit)
            if unit.last:
                unit.grad.drop()
                state.slot.generation += 1

    def _abandon(self, opened: list[_Unit]) -> None:
        """After a failure in the middle: ends the windows that are still open, writing nothing more."""
        for unit in opened:
            for window in unit.windows.values():
                self.pool.windows.close(window, wrote=False)
            unit.windows.clear()
        opened.clear()


def _bare_step(optimizer: torch.optim.Optimizer) -> None:
    """`optimizer.step()` without its step hooks, which belong to a whole step and not to each part of it."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer)
