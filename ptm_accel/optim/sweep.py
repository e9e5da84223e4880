"""One optimizer step as a sweep over the parameters: a batch of windows at a time is brought in, updated, sent home.

The update itself is the user's own optimizer, unchanged: it is called with the windows as its parameters
(`ptm_accel.optim.arithmetic`). For element-wise optimizers a window is a slice of a few pages, so that a step needs
little more than the windows in memory; for any other it is the whole tensor. The next batch is opened before the
present one is computed, so that its transfers run meanwhile; where there is no room for that it waits. So a step needs
room for a single window at the least.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import torch

from ptm_accel.errors import BudgetError, PTMError
from ptm_accel.memory.budget import Tag, Tier
from ptm_accel.memory.paged import PagedTensor, Place
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.transfer import round_up
from ptm_accel.memory.windows import Window, window_elements
from ptm_accel.model.floor import Appetite
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.optim.arithmetic import Arithmetic
from ptm_accel.optim.core_threads import CoreThreads
from ptm_accel.optim.hyperparameters import hyperparameters
from ptm_accel.optim.units import Cursor, Entry, ParamState, Unit, Work

_LARGEST_WINDOW_BYTES = 32 << 20
"""Of a window beside a device: what surrounds each (calls, events) costs the host as long as a fast link takes for a
few pages. On a CPU the disk is slower than that, and what is updated at a time stays in a cache.
"""

_MANY = 16
"""Of tensors that are on a card anyway, and never leave it, a batch may have so many times the bytes: one call of the
optimizer does for hundreds of them, nearly as without pages. What is allocated beside them counts in full.
"""


class Sweep:
    """Runs steps of one optimizer over paged parameters.

    Args:
        inner: the user's optimizer.
        pool: where everything lives.
        appetite: what its update needs, and whether it may be cut.
        window_bytes: size of a window, in bytes of the tensor that is updated; the least, where a device has room.
        batch_bytes: tells how much may be held at a time, over all tensors.
        threads: who carries updates out on a CPU.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        pool: Pool,
        appetite: Appetite,
        window_bytes: int,
        batch_bytes: Callable[[], int],
        threads: CoreThreads,
    ) -> None:
        self.inner = inner
        self._arithmetic = Arithmetic(inner, appetite, pool.compute.device, pool.windows.shaped, threads)
        self.pool = pool
        self.appetite = appetite
        self.window_bytes = window_bytes
        self.batch_bytes = batch_bytes

    @property
    def _margin_bytes(self) -> int:
        """What must stay free for batches when something is let in for good.

        Two of them, and never less than windows of all that an update can involve.
        """
        return 2 * max(self.batch_bytes(), 8 * 4 * window_elements(self.window_bytes, 4))

    def run(self, work: Work, scale: torch.Tensor | None, touched: Callable[[], object] = lambda: None) -> None:
        """Updates every parameter that has a gradient, and drops the gradients.

        Args:
            work: what to update.
            scale: what gradients are multiplied by first (clipping), if anything.
            touched: called before anything is changed that counts.
        """
        cursor = Cursor(work)
        hyper = hyperparameters(self.inner.param_groups)
        fresh = [(state, grad, dict(state.small)) for _, state, grad in work if state.fresh]
        with ExitStack() as cleanup:
            opened: list[Unit] = []
            cleanup.callback(lambda: self._forget_half_made(fresh))
            cleanup.callback(lambda: self.abandon(opened))
            current = self.open(cursor, opened, insist=True)
            while current:
                following = self.open(cursor, opened, insist=False)
                touched()
                self.carry_out(current, opened, scale, hyper)
                current = following or self.open(cursor, opened, insist=True)

    def carry_out(
        self, batch: list[Unit], opened: list[Unit], scale: torch.Tensor | None, hyper: list[dict[str, Any]]
    ) -> None:
        """Updates the windows of a batch, once they have arrived, and sends them home.

        Args:
            batch: which ones.
            opened: all that are open; these are taken off.
            scale: what gradients are multiplied by first, if anything.
            hyper: the hyperparameters of each group, as they were at the step.
        """
        self._update(batch, scale, hyper)
        self._close(batch, opened)

    # ---- cutting ---------------------------------------------------------------------------------------------

    def _next(self, cursor: Cursor, *, cut: bool = False) -> Unit | None:
        """The next window: the whole parameter if that costs no moving or if it may not be cut, unless `cut`."""
        if cursor.index == len(cursor.work):
            return None
        entry = cursor.work[cursor.index]
        state = entry[1]
        if not (cut or cursor.start or state.slot.value.block.parts == 1):
            unit = cursor.group()
            if unit is not None and self._has_room(unit):
                return unit
        numel, start = state.slot.value.numel, cursor.start
        new = cursor.new if start else state.fresh
        unit = Unit([entry], start, numel, last=True, new=new, stays=cursor.stays)
        step = self._window_elements(state.wide.dtype.itemsize)
        if cut:
            step = min(step, window_elements(self.window_bytes, state.wide.dtype.itemsize))
        if self.appetite.whole or numel - start <= step:
            return unit
        if start == 0 and not cut and self._has_room(unit):
            return unit
        unit.stop, unit.last = start + step, False
        return unit

    def _has_room(self, unit: Unit) -> bool:
        """Whether what has to be moved for a unit finds room that is free."""
        # What comes free in a moment is worth waiting for: a parameter that is read next would be moved twice in parts.
        free = self.pool.budget.free_bytes + (self.pool.room.ending_bytes if unit.stays else 0)
        return self._cost(unit, moving_only=True) <= free

    def _window_elements(self, element_bytes: int) -> int:
        """How many elements a window has, where there is room for it: several of them on a device make a batch."""
        nbytes = self.window_bytes
        if self.pool.budget.tier is Tier.DEVICE:
            nbytes = max(nbytes, min(_LARGEST_WINDOW_BYTES, self.batch_bytes() // 8))
        return window_elements(nbytes, element_bytes)

    def _cost(self, unit: Unit, *, moving_only: bool = False) -> int:
        """Bytes that opening and updating `unit` takes from what can be had; `moving_only`: from what is free."""
        total = self._beside(unit)
        for block in unit.blocks.values():
            if block.extent is not None:
                total += block.extent.reservation.nbytes if not moving_only and block in self.pool.shelf else 0
            elif self._comes_whole(block, unit):
                total += block.slot_bytes
            else:
                total += round_up((unit.stop - unit.start) * block.dtype.itemsize)
        return total

    def _beside(self, unit: Unit) -> int:
        """Bytes that updating `unit` takes beside the tensors it involves."""
        grain = self._arithmetic.grain
        return unit.extra_bytes(self.appetite, grain) + unit.desk_bytes(grain) + unit.space_bytes(self.appetite)

    def _slim(self, unit: Unit) -> None:
        """Moves away what a window of `unit` would hold whole, so that it holds no more than the window."""
        for block in unit.blocks.values():
            if block in self.pool.shelf and block.numel > unit.stop - unit.start:
                self.pool.evict(block)

    # ---- one batch -------------------------------------------------------------------------------------------

    def could_open(self, cursor: Cursor) -> bool:
        """Whether `open` has something to begin with that it need not be made to open: a quick look."""
        unit = self._next(cursor)
        return unit is not None and not self._is_to_come(unit, cursor)

    @staticmethod
    def _is_to_come(unit: Unit, cursor: Cursor) -> bool:
        return cursor.sent_for(unit.state.block_name) and not unit.under_way()

    def open(self, cursor: Cursor, opened: list[Unit], *, insist: bool) -> list[Unit]:
        """Opens as many windows as a batch may hold; with `insist` at least one, else none if there is no room.

        Raises:
            BudgetError: there is no room for the one.
        """
        batch: list[Unit] = []
        cost = 0
        while (unit := self._next(cursor)) is not None:
            needed = self._cost(unit)
            must = insist and not batch
            if not must and self._is_to_come(unit, cursor):
                break
            held = max(self._beside(unit), needed // _MANY) if self.pool.fits_on_card else needed
            if batch and cost + held > self.batch_bytes():
                break
            if cursor.stays and not must and not self.pool.ahead.make_way(self._cost(unit, moving_only=True)):
                break
            if needed > self.pool.budget.free_bytes and needed > self.pool.room.available_bytes():
                if not must:
                    break
                unit = self._next(cursor, cut=True)
                assert unit is not None
                self._slim(unit)
            try:
                self._open_unit(unit, opened)
            except BudgetError:
                if not must:
                    break
                # What was to come free may be in somebody's use. A part of it may do.
                unit = self._next(cursor, cut=True)
                assert unit is not None
                self._slim(unit)
                self._open_unit(unit, opened)
            batch.append(unit)
            cost += held
            cursor.advance(unit)
            if cursor.sparing and not unit.whole:
                break
        return batch

    def _open_unit(self, unit: Unit, opened: list[Unit]) -> None:
        opened.append(unit)
        try:
            self._take_room(unit)
        except BudgetError:
            self._give_up(unit, opened)
            raise

    def _take_room(self, unit: Unit) -> None:
        name, grain = f"the update of {unit.state.slot.name}", self._arithmetic.grain
        if desk := unit.desk_bytes(grain):
            # Not torch's: the C library would give such memory back each time, and have it cleared for the next.
            unit.desk = self.pool.room.take_block(desk, Tag.STAGING, name)
        if extra := unit.extra_bytes(self.appetite, grain):
            unit.extra = self.pool.room.reserve(extra, Tag.STAGING, name)
        if space := unit.space_bytes(self.appetite):
            unit.space = self.pool.room.reserve(space, Tag.STAGING, name)
        blocks = unit.blocks
        for key, part in unit.involved().items():
            block = blocks[key]
            if not key and unit.overwrites and block.place is Place.AWAY:
                self.pool.occupy(block)
                unit.occupied = True
            elif not block.place.resident and self._comes_whole(block, unit) and not self.pool.ahead.prefetch(block):
                self.pool.fault(block)
            reads = bool(key) or not unit.state.overwritten
            unit.windows[key] = self.pool.windows.open(part, unit.start, unit.stop, reads=reads)

    def _comes_whole(self, block: PagedTensor, unit: Unit) -> bool:
        """Whether all of a block is brought in for a window, and not the window alone."""
        if unit.whole and (block.parts == 1 or unit.together):
            return True
        return unit.start == 0 and self._admit(block, unit)

    def _admit(self, block: PagedTensor, unit: Unit) -> bool:
        """Whether a block that is away may come in whole: without a home it must, else if room is to spare."""
        if block.place.resident or self.pool.home is None or not block.movable:
            return True
        kept = block.tag in (Tag.STATE, Tag.MASTER) or (unit.stays and block.tag is Tag.PARAM)
        return kept and (block.slot_bytes + self._margin_bytes <= self.pool.budget.free_bytes)

    def _update(self, units: list[Unit], scale: torch.Tensor | None, hyper: list[dict[str, Any]]) -> None:
        left = deque(self._arithmetic.update(units, scale, hyper))
        for unit in units:
            # Nothing here may keep what it was charged for.
            if not unit.together:
                self._harvest(unit, left.popleft())
                continue
            for entry in unit.entries:
                self._harvest_member(unit, entry, left.popleft())
            self._release(unit)

    def _harvest_member(self, unit: Unit, entry: Entry, after: dict[str, Any]) -> None:
        """As `_harvest`, for one of the parameters of a group, whose state has been made before."""
        _, state, _ = entry
        small: dict[str, Any] = {}
        for key, value in after.items():
            part = state.paged.get(key)
            if part is None:
                small[key] = value
                continue
            here = part.of(self.pool.windows.ready(unit.windows[f"state.{key}"]))
            if here.data_ptr() != value.data_ptr():
                here.copy_(value)
        state.small = small

    def _harvest(self, unit: Unit, after: dict[str, Any]) -> None:
        """Takes what the optimizer left in its state: new full-size tensors go on pages, the rest is kept as it is."""
        state = unit.state
        shape = state.slot.value.shape if unit.whole else torch.Size([unit.stop - unit.start])
        small: dict[str, Any] = {}
        # What was held for the state becomes the charge of the state itself, or of the windows it is copied to.
        self._release(unit, extra=unit.whole)
        for key, value in after.items():
            if not isinstance(value, torch.Tensor) or not value.dim() or value.shape != shape:
                small[key] = value
                continue
            window = unit.windows.get(f"state.{key}")
            if window is None:
                window = self._first_window(unit, key, value)
            here = self.pool.windows.shaped(window)
            if here.data_ptr() != value.data_ptr():
                here.copy_(value.reshape(here.shape))
        self._release(unit)
        if unit.last:
            state.small = small

    def _release(self, unit: Unit, *, extra: bool = True) -> None:
        for reservation in (unit.space, unit.extra if extra else None):
            if reservation is not None and reservation.live:
                reservation.release()
        desk, unit.desk = unit.desk, None
        if desk is not None:
            reservation, block = desk
            assert block.buffer is not None
            self.pool.room.leave(block.buffer, block, reservation)

    def _first_window(self, unit: Unit, key: str, value: torch.Tensor) -> Window:
        state, slot = unit.state, unit.state.slot
        part = state.paged.get(key)
        if part is None:
            part = slot.group.part(slot.member, f".{key}", Tag.STATE, value.dtype, self.pool)
            state.paged[key] = part
            if unit.whole and part.alone and value.is_contiguous():
                self.pool.adopt(part.block, value.view(slot.value.shape))
        if self._comes_whole(part.block, unit):
            self.pool.fault(part.block)
        window = unit.windows[f"state.{key}"] = self.pool.windows.open(part, unit.start, unit.stop)
        return window

    def _close(self, units: list[Unit], opened: list[Unit]) -> None:
        for unit in units:
            for _, state, _ in unit.entries:
                if state.master is not None:
                    state.mastered = state.slot.value.numel if unit.together else max(state.mastered, unit.stop)
            unit.occupied = False
            for key in list(unit.windows):
                self.pool.windows.close(unit.windows.pop(key), wrote=key != "grad")
            opened.remove(unit)
            if unit.last:
                for _, state, grad in unit.entries:
                    grad.drop()
                    state.agree()
                    state.slot.generation += 1

    def _give_up(self, unit: Unit, opened: list[Unit]) -> None:
        """Ends a window without writing anything."""
        opened.remove(unit)
        self._release(unit)
        for key in list(unit.windows):
            # Whatever fails here is no more news: somebody is being told of a failure already, or will ask again.
            with suppress(PTMError):
                self.pool.windows.close(unit.windows.pop(key), wrote=False)
        if unit.occupied:
            self.pool.vacate(unit.state.slot.value.block)

    def abandon(self, opened: list[Unit]) -> None:
        """After a failure in the middle: ends the windows that are still open."""
        for unit in list(opened):
            self._give_up(unit, opened)

    def _forget_half_made(self, fresh: list[tuple[ParamState, GradSlot, dict[str, Any]]]) -> None:
        """Forgets what the optimizer has made for parameters that it was meeting when a step failed.

        Without the rest of it, it is no state that an update could start from. All others have used their gradients up.
        """
        for state, grad, small in fresh:
            if grad.value is not None:
                while state.paged:
                    self.pool.forget(state.paged.popitem()[1])
                state.small = small
