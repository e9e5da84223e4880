"""Updates in the compute tier: brings windows in, calls the user's optimizer for a batch of them, sends them to the
backing store.

The update itself is the user's own optimizer, unchanged: it is called with the windows as its parameters
(`ptm_accel.optim.arithmetic`). For element-wise optimizers a window is a slice of a few pages, so that a step needs
little more than the windows in memory; for any other it is the whole tensor.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from ptm_accel.errors import PTMError
from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.budget import Tag, Tier
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.transfer import round_up
from ptm_accel.memory.windows import Window, Windows, window_elements
from ptm_accel.model.floor import OptimizerMemory
from ptm_accel.optim.arithmetic import Arithmetic
from ptm_accel.optim.core_threads import CoreThreads
from ptm_accel.optim.units import ParamState, Unit

_LARGEST_WINDOW_BYTES = 32 << 20
"""Largest window beside a device: the calls and events of each cost the host as long as a fast link takes for a few
pages. On a CPU the disk is slower than that, and what is updated at a time stays in a cache.
"""


class ComputeUpdates:
    """Carries out updates of one optimizer in the compute tier.

    Args:
        inner: the user's optimizer.
        pool: where everything lives.
        optimizer_memory: what its update needs, and whether it may be cut.
        window_bytes: size of a window, in bytes of the tensor that is updated; the least, where a device has room.
        batch_bytes: tells how much may be held at a time, over all tensors.
        threads: who carries updates out on a CPU.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        pool: Pool,
        optimizer_memory: OptimizerMemory,
        window_bytes: int,
        batch_bytes: Callable[[], int],
        threads: CoreThreads,
    ) -> None:
        self.inner = inner
        self.pool = pool
        self.optimizer_memory = optimizer_memory
        self.window_bytes = window_bytes
        self.batch_bytes = batch_bytes
        self.threads = threads
        self.windows = Windows(pool)
        self._arithmetic = Arithmetic(inner, optimizer_memory, pool.compute.device, self.windows.shaped, threads)

    # ---- what it takes ---------------------------------------------------------------------------------------

    def window_elements(self, element_bytes: int) -> int:
        """Counts the elements of a window, where there is room for it: several of them on a device make a batch."""
        nbytes = self.window_bytes
        if self.pool.budget.tier is Tier.DEVICE:
            nbytes = max(nbytes, min(_LARGEST_WINDOW_BYTES, self.batch_bytes() // 8))
        return window_elements(nbytes, element_bytes)

    def cost_bytes(self, unit: Unit, *, moving_only: bool = False) -> int:
        """Bytes that opening and updating `unit` takes from what can be had; `moving_only`: from what is free."""
        total = self.beside_bytes(unit)
        for block in unit.blocks.values():
            if block.extent is not None:
                total += block.extent.reservation.nbytes if not moving_only and block in self.pool.eviction else 0
            elif self._comes_whole(block, unit):
                total += block.slot_bytes
            else:
                total += round_up((unit.stop - unit.start) * block.dtype.itemsize)
        return total

    def beside_bytes(self, unit: Unit) -> int:
        """Bytes that updating `unit` takes beside the tensors it involves."""
        grain = self._arithmetic.grain
        allocated = unit.extra_bytes(self.optimizer_memory, grain) + sum(unit.made_bytes(self.optimizer_memory))
        return allocated + unit.desk_bytes(grain) + unit.space_bytes(self.optimizer_memory)

    def _comes_whole(self, block: Block, unit: Unit) -> bool:
        """Returns whether all of a block is brought in for a window, and not the window alone."""
        if unit.whole and (block.parts == 1 or unit.together):
            return True
        return unit.start == 0 and self._admit(block, unit)

    def _admit(self, block: Block, unit: Unit) -> bool:
        """Whether a block that is away may come in whole: without a backing store it must, else if room is to spare."""
        if block.place.resident or self.pool.backing is None or not block.movable:
            return True
        kept = block.tag in (Tag.STATE, Tag.MASTER) or (unit.stays and block.tag is Tag.PARAM)
        return kept and (block.slot_bytes + self._margin_bytes <= self.pool.admission.room_bytes)

    @property
    def _margin_bytes(self) -> int:
        """Bytes that stay free for batches where tensors are let in for good.

        Two of them, and never less than windows of all that an update can involve.
        """
        return 2 * max(self.batch_bytes(), 8 * 4 * window_elements(self.window_bytes, 4))

    # ---- a window --------------------------------------------------------------------------------------------

    def open(self, unit: Unit) -> None:
        """Takes room for a unit and starts its loads.

        Raises:
            BudgetError: there is no room; nothing is held.
            DiskError: the disk has failed.
        """
        try:
            self._take_room(unit)
        except BaseException:
            self.give_up(unit)
            raise

    def _take_room(self, unit: Unit) -> None:
        name, grain = f"the update of {unit.state.slot.name}", self._arithmetic.grain
        if desk := unit.desk_bytes(grain):
            # Not torch's: the C library would give such memory back each time, and have it cleared for the next.
            unit.desk = self.pool.admission.take_buffer(desk, Tag.STAGING, name)
        if extra := unit.extra_bytes(self.optimizer_memory, grain):
            unit.extra = self.pool.admission.reserve(extra, Tag.STAGING, name)
        for made in unit.made_bytes(self.optimizer_memory):
            unit.made.append(self.pool.admission.reserve(made, Tag.STAGING, name))
        if space := unit.space_bytes(self.optimizer_memory):
            unit.space = self.pool.admission.reserve(space, Tag.STAGING, name)
        for key, part in unit.involved().items():
            block = unit.blocks[key]
            if not key and unit.overwrites and block.place is Place.AWAY:
                self.pool.occupy(block)
                unit.occupied = True
            elif not block.place.resident and self._comes_whole(block, unit) and not self.pool.prefetch(block):
                self.pool.fault(block)
            reads = bool(key) or not unit.state.overwritten
            unit.windows[key] = self.windows.open(part, unit.start, unit.stop, reads=reads)

    def give_up(self, unit: Unit) -> None:
        """Ends a unit without writing anything."""
        self._release(unit)
        self._release_made(unit)
        for key in list(unit.windows):
            # Whatever fails here is no more news: somebody is being told of a failure already, or will ask again.
            with suppress(PTMError):
                self.windows.close(unit.windows.pop(key), wrote=False)
        if unit.occupied:
            unit.occupied = False
            self.pool.vacate(unit.state.slot.own.block)

    def _release(self, unit: Unit) -> None:
        """Ends the charges for what only the arithmetic needs."""
        for reservation in (unit.space, unit.extra):
            if reservation is not None and reservation.live:
                reservation.release()
        desk, unit.desk = unit.desk, None
        if desk is not None:
            reservation, buffer = desk
            assert buffer.octets is not None
            self.pool.admission.released.add(buffer.octets, buffer, reservation)

    def _release_made(self, unit: Unit) -> None:
        while unit.made:
            unit.made.pop().release()

    # ---- a batch ---------------------------------------------------------------------------------------------

    def carry_out(self, batch: list[Unit], scale: torch.Tensor | None, hyper: list[dict[str, Any]]) -> None:
        """Updates units once they have arrived, and sends them to the backing store; those that fail are for `give_up`.

        Args:
            batch: which ones.
            scale: what gradients are multiplied by first, if anything.
            hyper: the hyperparameters of each group, as they were at the step.
        """
        left = deque(self._arithmetic.update(batch, scale, hyper))
        for unit in batch:
            # Windows that new state is copied to take what was held for the arithmetic.
            self._release(unit)
            for _, state, _ in unit.entries:
                self._harvest(unit, state, left.popleft())
            self._release_made(unit)
        for unit in batch:
            self._close(unit)

    def _harvest(self, unit: Unit, state: ParamState, after: dict[str, Any]) -> None:
        """Takes what the optimizer left in its state: new full-size tensors go on pages, the rest is kept as it is."""
        shape = state.slot.own.shape if unit.together or unit.whole else torch.Size([unit.stop - unit.start])
        small: dict[str, Any] = {}
        for key in list(after):
            # Nothing may keep a tensor once the charge for it ends.
            value = after.pop(key)
            part, window = state.paged.get(key), unit.windows.get(f"state.{key}")
            if unit.together and part is not None and window is not None:
                here = part.of(self.windows.ready(window))
            elif isinstance(value, torch.Tensor) and value.dim() and value.shape == shape and not unit.together:
                here = self.windows.shaped(window or self._first_window(unit, key, value))
            else:
                small[key] = value
                continue
            if here.data_ptr() != value.data_ptr():
                here.copy_(value.reshape(here.shape))
                del value
                if unit.made:
                    unit.made.pop().release()
        if unit.last:
            state.small = small

    def _first_window(self, unit: Unit, key: str, value: torch.Tensor) -> Window:
        state, slot = unit.state, unit.state.slot
        part = state.paged.get(key)
        if part is None:
            part = slot.group.part(slot.member, f".{key}", Tag.STATE, value.dtype, self.pool)
            state.paged[key] = part
            if unit.whole and part.alone and value.is_contiguous():
                if unit.made:
                    unit.made.pop().release()
                self.pool.adopt(part.block, value.view(slot.own.shape))
        if self._comes_whole(part.block, unit):
            self.pool.fault(part.block)
        window = unit.windows[f"state.{key}"] = self.windows.open(part, unit.start, unit.stop)
        return window

    def _close(self, unit: Unit) -> None:
        for _, state, _ in unit.entries:
            if state.master is not None:
                state.mastered = state.slot.own.numel if unit.together else max(state.mastered, unit.stop)
        unit.occupied = False
        for key in list(unit.windows):
            self.windows.close(unit.windows.pop(key), wrote=key != "grad")
        if unit.last:
            unit.end()
