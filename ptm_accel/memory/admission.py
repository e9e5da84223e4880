"""Room in the compute tier: every charge goes through here, and is granted or refused with the numbers.

A view of an extent may outlive its eviction (autograd, or the user, may hold one). Its memory then stays valid and
*charged* until the last view has died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.errors import BudgetError, DeviceBudgetError, DiskError
from ptm_accel.memory.activation_reserve import ActivationReserve, Shapes
from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.budget import Reservation, Tag
from ptm_accel.memory.copies import order_behind, parts_of, settle
from ptm_accel.memory.slabs import Run
from ptm_accel.memory.transfer import Buffer, Transfer, round_up
from ptm_accel.units import format_bytes

if TYPE_CHECKING:
    from ptm_accel.memory.device import DeviceTier
    from ptm_accel.memory.pool import Pool


@dataclass(slots=True, eq=False)
class _Released:
    """Memory that was let go of; it stays charged until neither a view nor a transfer uses it.

    Attributes:
        storage: dies with the last view.
        buffer: is recycled then; None for memory of torch's.
        reservation: the charge.
        transfer: reads or writes the memory; None once it is known to have ended.
        kept: memory of torch's that only the transfer still needs.
    """

    storage: StorageWeakRef
    buffer: Buffer | None
    reservation: Reservation
    transfer: Transfer | None
    kept: torch.Tensor | None = None

    def is_unused(self) -> bool:
        """Whether the memory can be taken back."""
        if self.transfer is not None and self.transfer.done():
            self.transfer = self.kept = None
        return self.transfer is None and self.storage.expired()

    def is_reusable(self, is_own: Callable[[Transfer], bool]) -> bool:
        """Whether the memory can be used again behind the copies of the device (`is_own`) that use it."""
        if self.buffer is None or not isinstance(self.buffer.region, Run) or not self.storage.expired():
            return False
        assert self.transfer is not None
        if not all(map(is_own, parts := parts_of(self.transfer))):
            return False
        self.buffer.behind = parts
        return True

    def is_viewed(self, is_own: Callable[[Transfer], bool]) -> bool:
        """Whether somebody else than a transfer holds the memory."""
        ended = self.transfer is None or all(map(is_own, parts_of(self.transfer)))
        return ended and self.kept is None and not self.storage.expired()


class Admission:
    """The budget of the compute tier and the memory that is on its way out of it.

    Args:
        pool: the first pool over the tier; it evicts tensors of all of them.

    Attributes:
        activation_reserve: watches the memory of the device that is not pages'; None on a CPU.
    """

    def __init__(self, pool: Pool) -> None:
        self.compute = pool.compute
        self.budget = pool.budget
        self.activation_reserve: ActivationReserve | None = None
        self._traffic = pool.traffic
        self._pool = pool
        self._released: list[_Released] = []
        self._lock = pool.lock
        self._card = pool.card
        self._is_own: Callable[[Transfer], bool] | None = None
        if pool.card is not None:
            self._is_own = cast("DeviceTier", pool.compute).is_own

    @property
    def limit_bytes(self) -> int:
        """What the tier was given: its capacity, and what other memory takes of it at present."""
        return self.budget.capacity_bytes if self.activation_reserve is None else self.activation_reserve.total_bytes

    def reserve(self, nbytes: int, tag: Tag, name: str, *, allocates: bool = False) -> Reservation:
        """Charges `nbytes` of the compute tier, moving idle tensors away if need be.

        Args:
            nbytes: how many.
            tag: what they are for.
            name: whose they are.
            allocates: the compute tier is asked for them next.

        Raises:
            BudgetError: nothing more can be moved; says who holds what.
        """
        with self._lock:
            if self.activation_reserve is not None:
                self.activation_reserve.look()
            if nbytes > self.budget.free_bytes:
                self._make_room(nbytes, name)
            elif self._released and self.budget.used_bytes + nbytes > self.budget.peak_bytes:
                # Only for a new peak, which evicted memory is no part of.
                self.collect()
            return self.budget.reserve(nbytes, tag, name, allocates=allocates)

    def take_buffer(
        self, nbytes: int, tag: Tag, name: str, *, moves: bool = True, ordered: bool = True
    ) -> tuple[Reservation, Buffer]:
        """A charged buffer for at least `nbytes`; ends with `leave`.

        Args:
            nbytes: how many.
            tag: what they are for.
            name: whose they are.
            moves: whether to evict where the tier has no such buffer although the budget has room.
            ordered: whether compute may write to it; else the caller sees to `Buffer.behind`.

        Raises:
            BudgetError: nothing more can be moved.
            DeviceBudgetError: the card has no such buffer.
        """
        size = round_up(max(nbytes, 1))
        reservation = self.reserve(size, tag, name, allocates=True)
        try:
            buffer = self._allocate(size, moves)
            if ordered and buffer.behind:
                order_behind(buffer.behind)
                buffer.behind = ()
            return reservation, buffer
        except BaseException:
            reservation.release()
            raise

    def _allocate(self, nbytes: int, moves: bool) -> Buffer:
        """A buffer; the free memory of a card may be in pieces that are too small."""
        while True:
            try:
                return self.compute.allocate(nbytes)
            except DeviceBudgetError:
                with self._lock:
                    if not moves:
                        raise
                    left = len(self._released)
                    self.collect()
                    if len(self._released) != left or self._wait_for_one():
                        continue
                    if self._evict_range(nbytes) or self._pool.evict_one():
                        continue
                    if self._card is None:
                        raise
                    # Nothing can be evicted any more: out of what is kept free for other memory.
                    return self._card.allocate(nbytes, anywhere=True)

    def _evict_range(self, nbytes: int) -> bool:
        """Evicts what lies in the cheapest contiguous range of a slab; False if no range is long enough."""
        if self._card is None or not self._card.cuts(nbytes):
            return False
        movable = {
            run: tensor
            for tensor in self._pool.eviction.free()
            if (run := _run_of(tensor)) is not None and tensor.place is not Place.ARRIVING and not tensor.viewed
        }
        runs = self._card.slabs.cheapest_range(nbytes, list(movable))
        for run in runs or ():
            if movable[run] in self._pool.eviction:
                self._pool.evict_behind(movable[run])
        return bool(runs)

    def _drain(self) -> None:
        """Evicts what lies in slabs that are to be given back."""
        if self._card is None or not self._card.slabs.draining:
            return
        for tensor in self._pool.eviction.free():
            run = _run_of(tensor)
            if run is not None and run.slab.draining and tensor in self._pool.eviction:
                self._pool.evict(tensor)
        self.collect()

    def _wait_for_one(self) -> bool:
        """Waits for a transfer that uses released memory; False if there is none."""
        running = self._running()
        if running is None:
            return False
        self._wait(running)
        return True

    def _wait(self, transfer: Transfer) -> None:
        """Waits for a transfer to end; its error is that of its own tensor. Raises `DiskError` if it can never end."""
        with self._traffic.stalled():
            try:
                transfer.wait()
            except DiskError:
                if not transfer.done():
                    raise

    @contextmanager
    def charged(self, nbytes: int, tag: Tag, name: str) -> Iterator[Callable[[torch.Tensor], None]]:
        """Charges memory that torch allocates within the block, for as long as its storage lives.

        Yields:
            a function that takes the tensor that was made.
        """
        reservation = self.reserve(nbytes, tag, name)
        kept: list[StorageWeakRef] = []
        try:
            yield lambda tensor: kept.append(StorageWeakRef(tensor.untyped_storage()))
        finally:
            with self._lock:
                if kept:
                    self._released.append(_Released(kept[0], None, reservation, None))
                else:
                    reservation.release()

    def leave(
        self,
        octets: torch.Tensor,
        buffer: Buffer | None,
        reservation: Reservation,
        transfer: Transfer | None = None,
    ) -> None:
        """Lets go of memory: it is taken back when its last view has died and `transfer` has ended.

        Args:
            octets: the memory.
            buffer: what the tier takes back; None for memory of torch's.
            reservation: the charge.
            transfer: reads or writes it.
        """
        storage = StorageWeakRef(octets.untyped_storage())
        if buffer is not None:
            buffer.octets = None
        with self._lock:
            kept = octets if buffer is None and transfer is not None else None
            self._released.append(_Released(storage, buffer, reservation, transfer, kept))

    def collect(self) -> None:
        """Takes back released memory that is no longer used."""
        with self._lock:
            still: list[_Released] = []
            for each in self._released:
                if not each.is_unused() and (self._is_own is None or not each.is_reusable(self._is_own)):
                    still.append(each)
                    continue
                each.reservation.release()
                if each.buffer is not None:
                    self.compute.recycle(each.buffer)
            self._released = still

    def glance(self) -> None:
        """Looks at the card's other memory in forwards where all pages are resident, and nothing is charged."""
        if self.activation_reserve is not None:
            self._adjust(self.activation_reserve.look)

    def begin_pass(self, shapes: Shapes, *, evaluates: bool) -> None:
        """A forward begins whose activations may need more than those before it (`ActivationReserve.begin_pass`).

        Raises:
            DeviceBudgetError: they leave less than the least that pages can work with.
        """
        if self.activation_reserve is not None:
            self._adjust(partial(self.activation_reserve.begin_pass, shapes, evaluates=evaluates))

    def lend(self, nbytes: int) -> None:
        """So much of what is charged is torch's to allocate from now on; 0 ends that."""
        if self.activation_reserve is not None:
            with self._lock:
                self.activation_reserve.lend(nbytes)
                if nbytes:
                    self._drain()

    def _adjust(self, look: Callable[[], None]) -> None:
        """Evicts what is too much where a look at other memory lowers the capacity."""
        with self._lock:
            before = self.budget.capacity_bytes
            look()
            if self.budget.capacity_bytes < before:
                self.shrink()

    def shrink(self) -> None:
        """Moves idle tensors away until what is used is within a capacity that has been lowered."""
        with self._lock:
            self.collect()
            self._drain()
            while self.budget.free_bytes < 0 and self._pool.evict_one():
                self.collect()
            self.budget.make_real_room()

    def settle(self) -> None:
        """Waits for all transfers that use released memory; their errors are those of their own tensors."""
        with self._lock:
            settle([each.transfer for each in self._released if each.transfer is not None])
            self.collect()

    def available_bytes(self) -> int:
        """What could be charged if everything idle were evicted and every running transfer had ended."""
        with self._lock:
            self.collect()
            return self.budget.free_bytes + self.ending_bytes + self._pool.idle_bytes

    @property
    def ending_bytes(self) -> int:
        """Charged bytes that come free as running transfers end."""
        return sum(each.reservation.nbytes for each in self._released if each.transfer is not None)

    @property
    def leaving_bytes(self) -> int:
        """Charged bytes of released memory that is still in use."""
        return sum(each.reservation.nbytes for each in self._released)

    def pinned_bytes(self) -> int:
        """Charged bytes of pinned tensors, which cannot leave now."""
        return sum(tensor.slot_bytes for tensor in self._pool.pinned())

    def _make_room(self, nbytes: int, name: str) -> None:
        self.collect()
        while nbytes > self.budget.free_bytes:
            if not self._wait_for_one() and not self._pool.evict_one():
                # The last transfer may have ended since its memory was last asked for.
                self.collect()
                short = nbytes > self.budget.free_bytes
                if short and self._running() is None:
                    raise self._refusal(nbytes, name)
            self.collect()

    def _running(self) -> Transfer | None:
        """A running transfer that uses released memory."""
        # A device's own copies hold nothing: what is left beside them is viewed, and does not come free with them.
        ending = (each for each in self._released if self._is_own is None or not each.is_viewed(self._is_own))
        transfers = (each.transfer for each in ending if each.transfer is not None)
        return next((transfer for transfer in transfers if not transfer.done()), None)

    def _refusal(self, nbytes: int, name: str) -> BudgetError:
        held = sorted(self._pool.pinned(), key=lambda t: -t.nbytes)[:3]
        holders = [f"{t.name} ({format_bytes(t.nbytes)}, pinned)" for t in held]
        viewed = [each.reservation for each in self._released[:3]]
        holders += [f"{r.name} ({format_bytes(r.nbytes)}, a view is alive)" for r in viewed]
        below = (
            "" if self._traffic.backing is not None else " There is no tier below: set disk to a directory on an SSD."
        )
        refusal = self.budget.refusal(nbytes, name)
        return type(refusal)(f"{refusal} Largest holders: {', '.join(holders) or 'none'}.{below}")


def _run_of(tensor: Block) -> Run | None:
    """Where a tensor lies in a slab; None for one that does not."""
    extent = tensor.extent
    region = None if extent is None or extent.buffer is None else extent.buffer.region
    return region if isinstance(region, Run) else None
