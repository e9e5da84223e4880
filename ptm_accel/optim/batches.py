"""The work of a step in batches of windows: the transfers of one run while another is updated.

Where there is room, the next batch is opened before the present one is computed; where there is none, it waits. So a
step needs room for a single window at the least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.memory.block import Block
from ptm_accel.memory.windows import window_elements
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.optim.units import Entry, Unit, Work, count_pending, group_at, ordered, uncount_pending

_AT_ONCE = 2
"""Most batches that are open: the transfers of one run while the other is updated."""

_MANY = 16
"""Batch-size multiplier for tensors that stay on the device: one call of the optimizer updates hundreds of them, nearly
as without pages. What is allocated beside them counts in full.
"""


class Batches:
    """Cuts work into windows, opens them a batch at a time, and has them updated in that order.

    Args:
        compute: opens windows, and carries updates out.
        work: what it goes over; more may be added.
        scale: what gradients are multiplied by first, if anything.
        hyper: the hyperparameters of each group, as they were at the step.
        stays: parameters are read right after their update, so that they are brought in whole if they can be; then
            only stores of what has left are waited for to open a window, unless it must be open now.
        sent_for: tells of a parameter, by name, that what its update needs will be sent for in time: until that has
            been done there is no use in opening windows of it.

    Attributes:
        work: see above.
        sparing: open one partial slice at a time; a second would evict data that is needed next.
        done: how many parameters have been updated.
        pending_updates: how many updates that were added and are still to be done use a block.
    """

    def __init__(
        self,
        compute: ComputeUpdates,
        work: Work,
        scale: torch.Tensor | None,
        hyper: list[dict[str, Any]],
        *,
        stays: bool = False,
        sent_for: Callable[[str], bool] | None = None,
    ) -> None:
        self.work = work
        self.sparing = False
        self.done = 0
        self.pending_updates: dict[Block, int] = {}
        self._compute = compute
        self._pool = compute.pool
        self._scale = scale
        self._hyper = hyper
        self._stays = stays
        self._sent_for = sent_for
        self._batches: deque[list[Unit]] = deque()
        # The parameter it is at; the first of its elements that is in no window yet; and whether the optimizer had not
        # met it before this step.
        self._index = self._start = 0
        self._new = False
        self._group: tuple[int, Unit | None] = (-1, None)

    def __bool__(self) -> bool:
        """Returns whether a batch is open."""
        return bool(self._batches)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of tensors that move and that open windows alone pin, where a whole parameter is updated."""
        whole = (unit for batch in self._batches for unit in batch if unit.whole)
        involved = (block for unit in whole for block in unit.blocks.values())
        pinned = (block.extent for block in involved if block.movable and block.pins == 1)
        return sum(extent.reservation.nbytes for extent in pinned if extent is not None)

    def add(self, entry: Entry) -> None:
        """Adds one parameter to update."""
        count_pending(self.pending_updates, entry)
        self.work.append(entry)

    def reorder(self, order: dict[str, int]) -> None:
        """Puts what has not begun in the order in which it will be needed."""
        begun = self._index + (self._start > 0)
        self.work[begun:] = ordered(self.work[begun:], order)
        self._group = -1, None

    # ---- opening ---------------------------------------------------------------------------------------------

    @property
    def could_open(self) -> bool:
        """Whether `open` has something to begin with that it need not be made to open: a quick look."""
        if len(self._batches) >= _AT_ONCE:
            return False
        unit = self._next()
        return unit is not None and not self._is_to_come(unit)

    def open(self, *, insist: bool) -> list[Unit]:
        """Opens one more batch, if not enough are open, with as many windows as there is room for.

        Args:
            insist: it has one window at least.

        Raises:
            BudgetError: there is no room for the one.
        """
        batch: list[Unit] = []
        if len(self._batches) >= _AT_ONCE:
            return batch
        cost = 0
        # Known from the first window on, so that all of them are ended after a failure.
        self._batches.append(batch)
        try:
            while (unit := self._next()) is not None:
                needed = self._compute.cost_bytes(unit)
                held = needed
                if self._pool.fits_on_card:
                    held = max(self._compute.beside_bytes(unit), needed // _MANY)
                if batch and cost + held > self._compute.batch_bytes():
                    break
                opened = self._open(unit, needed, must=insist and not batch)
                if opened is None:
                    break
                batch.append(opened)
                cost += held
                self._advance(opened)
                if self.sparing and not opened.whole:
                    break
        finally:
            if not batch:
                self._batches.pop()
        return batch

    def _open(self, unit: Unit, needed: int, *, must: bool) -> Unit | None:
        """Opens a window, or a part of it if it `must` and there is no room for more; None if there is none."""
        if not must and self._sent_for is not None and self._is_to_come(unit):
            return None
        if not must and self._stays:
            moving = self._compute.cost_bytes(unit, moving_only=True)
            if not self._pool.admission.make_way(moving):
                return None
        if needed <= self._pool.budget.free_bytes or needed <= self._pool.admission.available_bytes():
            try:
                self._compute.open(unit)
                return unit
            except BudgetError:
                # What was to come free may be in somebody's use. A part of it may do.
                if not must:
                    return None
        elif not must:
            return None
        part = self._next(cut=True)
        assert part is not None
        self._slim(part)
        self._compute.open(part)
        return part

    def _is_to_come(self, unit: Unit) -> bool:
        return self._sent_for is not None and self._sent_for(unit.state.block_name) and not unit.under_way()

    def _slim(self, unit: Unit) -> None:
        """Moves away what a window of `unit` would hold whole, so that it holds no more than the window."""
        for block in unit.blocks.values():
            if block in self._pool.eviction and block.numel > unit.stop - unit.start:
                self._pool.admission.evict(block)

    # ---- cutting ---------------------------------------------------------------------------------------------

    def _next(self, *, cut: bool = False) -> Unit | None:
        """The next window: the whole parameter if that costs no moving or if it may not be cut, unless `cut`."""
        if self._index == len(self.work):
            return None
        entry, start = self.work[self._index], self._start
        state = entry[1]
        if not (cut or start or state.slot.own.block.parts == 1):
            unit = self._all_of_group()
            if unit is not None and self._has_room(unit):
                return unit
        numel, new = state.slot.own.numel, self._new if start else state.fresh
        unit = Unit([entry], start, numel, last=True, new=new, stays=self._stays)
        size = state.wide.dtype.itemsize
        step = self._compute.window_elements(size)
        if cut:
            step = min(step, window_elements(self._compute.window_bytes, size))
        if self._compute.optimizer_memory.whole or numel - start <= step:
            return unit
        if start == 0 and not cut and self._has_room(unit):
            return unit
        unit.stop, unit.last = start + step, False
        return unit

    def _all_of_group(self) -> Unit | None:
        """Returns all parameters of the group that comes next, if they come one after another."""
        index, unit = self._group
        if index != self._index or (unit is not None and unit.entries[0] is not self.work[index]):
            entries = group_at(self.work, self._index)
            unit = None
            if entries:
                stop = entries[0][1].slot.own.block.numel
                unit = Unit(entries, 0, stop, last=True, new=False, stays=self._stays)
            elif self._index + self.work[self._index][1].slot.own.block.parts > len(self.work):
                # More may come.
                return None
            self._group = self._index, unit
        return unit

    def _has_room(self, unit: Unit) -> bool:
        """Returns whether what has to be moved for a unit finds room without an eviction."""
        # What comes free in a moment is worth waiting for: a parameter that is read next would be moved twice in parts.
        return self._compute.cost_bytes(unit, moving_only=True) <= self._pool.admission.room_bytes

    def _advance(self, unit: Unit) -> None:
        self._new = unit.new
        last = unit.last
        self._index, self._start = (self._index + len(unit.entries), 0) if last else (self._index, unit.stop)

    # ---- updating --------------------------------------------------------------------------------------------

    def wait(self) -> None:
        """Waits for what the first batch reads."""
        with self._pool.traffic.stalled():
            for transfer in [transfer for unit in self._batches[0] for transfer in unit.awaited()]:
                # An error is raised again by the update itself.
                with suppress(DiskError):
                    transfer.order()

    def update(self) -> list[Block]:
        """Updates the first batch (`ComputeUpdates.carry_out`); returns the blocks of the parameters that it ends."""
        ended = []
        batch = self._batches[0]
        self._compute.carry_out(batch, self._scale, self._hyper)
        self._batches.popleft()
        for unit in batch:
            if unit.last:
                self.done += len(unit.entries)
                ended.append(unit.blocks[""])
                if self.pending_updates:
                    uncount_pending(self.pending_updates, unit)
        return ended

    def abandon(self) -> None:
        """Ends what is open without updating it; nothing is pending any more."""
        self.pending_updates.clear()
        while self._batches:
            for unit in self._batches.popleft():
                self._compute.give_up(unit)
