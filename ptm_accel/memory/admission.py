"""Admission to the compute tier: grants and refuses charges, and evicts idle tensors to make room.

What is evicted next is of the model that is furthest beyond its share: what its plan wants last, or else the least
recently used.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.errors import BudgetError, DeviceBudgetError
from ptm_accel.memory.activation_reserve import ActivationReserve, Shapes
from ptm_accel.memory.block import Block, Extent, Place
from ptm_accel.memory.budget import Budget, Reservation, Tag
from ptm_accel.memory.card_memory import CardMemory
from ptm_accel.memory.copies import joined, order_behind
from ptm_accel.memory.device import DeviceTier
from ptm_accel.memory.eviction_queue import EvictionQueue
from ptm_accel.memory.released import ReleasedMemory
from ptm_accel.memory.slabs import Run
from ptm_accel.memory.tenants import Tenants
from ptm_accel.memory.traffic import Traffic
from ptm_accel.memory.transfer import Buffer, ComputeTier, Transfer, round_up
from ptm_accel.units import format_bytes


class Admission:
    """The budget of the compute tier, and who may hold what of it.

    Args:
        compute: the tier.
        budget: its budget.
        traffic: stores what is evicted.
        tenants: the pools over the tier.
        lock: guards it.
        card: memory that blocks share with torch's; None on a CPU.

    Attributes:
        eviction: the idle tensors, in order.
        released: memory that was let go of and is still charged.
        activation_reserve: watches the memory of the device that is not pages'; None on a CPU.
    """

    def __init__(
        self,
        compute: ComputeTier,
        budget: Budget,
        traffic: Traffic,
        tenants: Tenants,
        lock: threading.RLock,
        card: CardMemory | None,
    ) -> None:
        self.compute = compute
        self.budget = budget
        self.activation_reserve: ActivationReserve | None = None
        self.eviction = EvictionQueue(has_backing=traffic.backing is not None)
        is_own = None if card is None else cast("DeviceTier", compute).is_own
        self.released = ReleasedMemory(compute, traffic, is_own, lock)
        self._traffic = traffic
        self._tenants = tenants
        self._lock = lock
        self._card = card

    # ---- charges -------------------------------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int:
        """Bytes that the tier was given: its capacity, and what other memory takes of it at present."""
        return self.budget.capacity_bytes if self.activation_reserve is None else self.activation_reserve.total_bytes

    @property
    def room_bytes(self) -> int:
        """Bytes that are free, or will be when running transfers have ended: the same however long those take."""
        return self.budget.free_bytes + self.released.ending_bytes

    def available_bytes(self) -> int:
        """Returns what could be charged if everything idle were evicted and every running transfer had ended."""
        with self._lock:
            self.released.collect()
            return self.room_bytes + self.eviction.nbytes

    def pinned_bytes(self) -> int:
        """Charged bytes of pinned tensors, which cannot leave now."""
        return sum(tensor.slot_bytes for tensor in self._tenants.pinned())

    def reserve(self, nbytes: int, tag: Tag, name: str, *, allocates: bool = False) -> Reservation:
        """Charges `nbytes` of the compute tier, evicting idle tensors if need be.

        Args:
            nbytes: how many.
            tag: what they are for.
            name: whose they are.
            allocates: the compute tier is asked for them next.

        Raises:
            BudgetError: nothing more can be evicted; says who holds what.
        """
        with self._lock:
            if self.activation_reserve is not None:
                self.activation_reserve.look()
            if nbytes > self.budget.free_bytes:
                self._make_room(nbytes, name)
            elif self.released and self.budget.used_bytes + nbytes > self.budget.peak_bytes:
                # Only for a new peak, which evicted memory is no part of.
                self.released.collect()
            return self.budget.reserve(nbytes, tag, name, allocates=allocates)

    def _make_room(self, nbytes: int, name: str) -> None:
        self.released.collect()
        while nbytes > self.budget.free_bytes:
            if not self.released.wait_for_one() and not self.evict_one():
                # The last transfer may have ended since its memory was last asked for.
                self.released.collect()
                if nbytes > self.budget.free_bytes and self.released.running() is None:
                    raise self._refusal(nbytes, name)
            self.released.collect()

    def _refusal(self, nbytes: int, name: str) -> BudgetError:
        held = sorted(self._tenants.pinned(), key=lambda t: -t.nbytes)[:3]
        holders = [f"{t.name} ({format_bytes(t.nbytes)}, pinned)" for t in held]
        holders += [f"{r.name} ({format_bytes(r.nbytes)}, a view is alive)" for r in self.released.first(3)]
        below = (
            "" if self._traffic.backing is not None else " There is no tier below: set disk to a directory on an SSD."
        )
        refusal = self.budget.refusal(nbytes, name)
        return type(refusal)(f"{refusal} Largest holders: {', '.join(holders) or 'none'}.{below}")

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
            if kept:
                self.released.watch(kept[0], reservation)
            else:
                reservation.release()

    # ---- memory --------------------------------------------------------------------------------------------------

    def take_buffer(
        self, nbytes: int, tag: Tag, name: str, *, moves: bool = True, ordered: bool = True
    ) -> tuple[Reservation, Buffer]:
        """A charged buffer for at least `nbytes`; ends with `released.add`.

        Args:
            nbytes: how many.
            tag: what they are for.
            name: whose they are.
            moves: whether to evict where the tier has no such buffer although the budget has room.
            ordered: whether compute may write to it; else the caller sees to `Buffer.behind`.

        Raises:
            BudgetError: nothing more can be evicted.
            DeviceBudgetError: the card has no such buffer.
        """
        size = round_up(max(nbytes, 1))
        if not ordered and (into := self._take_over(size, tag, name)) is not None:
            return into
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

    def _take_over(self, nbytes: int, tag: Tag, name: str) -> tuple[Reservation, Buffer] | None:
        """See `ReleasedMemory.take_over`; None as well where there is room that nothing uses."""
        with self._lock:
            if nbytes > self.budget.free_bytes:
                self.released.collect()
            return self.released.take_over(self.budget, nbytes, tag, name) if nbytes > self.budget.free_bytes else None

    def _allocate(self, nbytes: int, moves: bool) -> Buffer:
        """Returns a buffer; the free memory of a card may be in pieces that are too small."""
        while True:
            try:
                return self.compute.allocate(nbytes)
            except DeviceBudgetError:
                with self._lock:
                    if not moves:
                        raise
                    left = len(self.released)
                    self.released.collect()
                    if len(self.released) != left or self.released.wait_for_one():
                        continue
                    if self._evict_range(nbytes) or self.evict_one():
                        continue
                    if self._card is None:
                        raise
                    # Nothing can be evicted any more: out of what is kept free for other memory.
                    return self._card.allocate(nbytes, anywhere=True)

    def make(
        self,
        tensor: Block,
        *,
        moves: bool = True,
        ordered: bool = True,
        into: tuple[Reservation, Buffer] | None = None,
    ) -> Extent:
        """Gives a tensor an extent whose bytes are still to be written (`moves`, `ordered`: see `take_buffer`).

        Raises:
            BudgetError: no room.
        """
        if torch.is_inference_mode_enabled():
            # It may be used outside of this inference mode, too.
            with torch.inference_mode(False):
                return self.make(tensor, moves=moves, ordered=ordered, into=into)
        size = tensor.slot_bytes
        taken = into or self.take_buffer(size, tensor.tag, tensor.name, moves=moves, ordered=ordered)
        reservation, buffer = taken
        octets = buffer.octets
        assert octets is not None
        used = octets if tensor.nbytes == buffer.nbytes else octets[: tensor.nbytes]
        tensor.extent = Extent(used.view(tensor.dtype).view(tensor.shape), octets, buffer, reservation)
        return tensor.extent

    def take_back(self, tensor: Block, transfer: Transfer | None = None, *, alone: bool = False) -> None:
        """Takes the extent from a tensor; its memory is free once nobody views it and `transfer` has ended."""
        extent, tensor.extent = tensor.extent, None
        assert extent is not None
        self.released.add(extent.octets, extent.buffer, extent.reservation, transfer, alone=alone)

    def let_go(self, tensor: Block, place: Place, store: Transfer | None = None, *, alone: bool = False) -> None:
        """As `take_back`, from a tensor that was resident, whose bytes are at `place` from now on."""
        assert tensor.extent is not None
        if tensor.occupant is not None:
            tensor.occupant.leaving(tensor.extent.tensor)
        self.eviction.take(tensor)
        self.take_back(tensor, store, alone=alone)
        tensor.become(place)

    # ---- eviction ------------------------------------------------------------------------------------------------

    def evict(self, tensor: Block) -> None:
        """Evicts an idle tensor, storing it first if it is dirty; its memory is free once the store has ended.

        Raises:
            BudgetError: the backing store has no room; nothing has changed.
            DiskError: the disk has failed.
        """
        with self._lock:
            assert tensor.extent is not None and not tensor.pins and self._traffic.backing is not None, tensor
            if tensor.place is Place.ARRIVING:
                self.turn_back(tensor)
            else:
                tensor.note_changes()
                store, alone = None, False
                if tensor.place is Place.DIRTY:
                    alone = not tensor.viewed
                    self._traffic.start_store_whole(tensor)
                    store = joined(tensor.stores)
                self.let_go(tensor, Place.AWAY, store, alone=alone)
            self._traffic.stats.evictions += 1

    def turn_back(self, tensor: Block) -> None:
        """Gives up a load: ARRIVING -> AWAY. The memory is free once the transfer has ended."""
        load, tensor.arrival = tensor.arrival, None
        assert load is not None
        self.eviction.take(tensor)
        # Nobody has seen the extent.
        self.take_back(tensor, load, alone=True)
        tensor.become(Place.AWAY)

    def victim(self) -> Block | None:
        """Returns what leaves next: what a plan wants last, or else the least recently used; None if nothing can."""
        pool, idle = self._tenants.giver(self.eviction.in_order())
        if pool is not None and pool.next_use is not None:
            return max(idle, key=pool.next_use, default=None) or self.eviction.last_resort()
        return next(iter(idle), None) or self.eviction.last_resort()

    def evict_one(self) -> bool:
        """Evicts an idle tensor, or makes a pending update that holds memory; False if there is neither."""
        victim = self.victim()
        if victim is not None:
            self.evict(victim)
            return True
        return self._tenants.give_way()

    def make_way(self, nbytes: int) -> bool:
        """Starts evicting idle tensors, as far as the backing store has room; returns whether `nbytes` come free."""
        with self._lock:
            if nbytes > self.budget.free_bytes:
                self.released.collect()
            while nbytes > self.room_bytes and (victim := self.victim()):
                try:
                    self.evict(victim)
                except BudgetError:
                    # The backing store is full; a fault raises.
                    break
                self.released.collect()
            return nbytes <= self.room_bytes

    def _evict_range(self, nbytes: int) -> bool:
        """Evicts what lies in a contiguous range of a slab; False if no range is long enough.

        It is the cheapest one, or of those that a plan wants last.
        """
        if self._card is None or not self._card.cuts(nbytes):
            return False
        next_use, slabs = self._tenants.next_use, self._card.slabs
        movable = {
            run: tensor
            for tensor in self.eviction.free()
            if (run := _run_of(tensor)) is not None and tensor.place is not Place.ARRIVING and not tensor.viewed
        }
        order = list(movable)
        if next_use is not None:
            order.sort(key=lambda run: -next_use(movable[run]))
            fewest = bisect_left(range(len(order)), True, key=lambda n: bool(slabs.cheapest_range(nbytes, order[:n])))
            order = order[:fewest]
        runs = slabs.cheapest_range(nbytes, order)
        for run in runs or ():
            if movable[run] in self.eviction:
                self.evict(movable[run])
        return bool(runs)

    def _drain(self) -> None:
        """Evicts what lies in slabs that are to be given back."""
        if self._card is None or not self._card.slabs.draining:
            return
        for tensor in self.eviction.free():
            run = _run_of(tensor)
            if run is not None and run.slab.draining and tensor in self.eviction:
                self.evict(tensor)
        # torch may write to the slabs as soon as they are empty.
        self.released.settle()

    def shrink(self) -> None:
        """Evicts idle tensors until what is used is within a capacity that has been lowered."""
        with self._lock:
            self.released.collect()
            self._drain()
            while self.budget.free_bytes < 0 and (self.released.wait_for_one() or self.evict_one()):
                self.released.collect()
            self.budget.make_real_room()

    # ---- other memory of a card ----------------------------------------------------------------------------------

    def glance(self) -> None:
        """Looks at the card's other memory in forwards where all pages are resident, and nothing is charged."""
        if self.activation_reserve is not None:
            self._adjust(self.activation_reserve.look)

    def sample(self) -> None:
        """Looks at it now, where what has been taken decides about the next pass."""
        if self.activation_reserve is not None:
            self._adjust(self.activation_reserve.sample)

    def expect(self, nbytes: int) -> None:
        """Leaves so much to it from now on (`ActivationReserve.expect`)."""
        if self.activation_reserve is not None:
            self._adjust(partial(self.activation_reserve.expect, nbytes))

    def begin_pass(self, shapes: Shapes, *, evaluates: bool) -> None:
        """A forward begins whose activations may need more than those before it (`ActivationReserve.begin_pass`).

        Raises:
            DeviceBudgetError: they leave less than the least that pages can work with.
        """
        if self.activation_reserve is not None:
            self._adjust(partial(self.activation_reserve.begin_pass, shapes, evaluates=evaluates))

    def lend(self, nbytes: int) -> None:
        """Leaves `nbytes` of what is charged for torch to allocate from now on; 0 ends that."""
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


def _run_of(tensor: Block) -> Run | None:
    """Returns the run of a slab that a tensor lies in; None for one that lies in none."""
    extent = tensor.extent
    region = None if extent is None or extent.buffer is None else extent.buffer.region
    return region if isinstance(region, Run) else None
