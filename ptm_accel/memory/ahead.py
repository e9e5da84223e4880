"""Moves that nobody waits for: tensors that are sent for before they are used, and sent away behind compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptm_accel.errors import BudgetError, DeviceBudgetError
from ptm_accel.memory.copies import joined
from ptm_accel.memory.paged import PagedTensor, Place

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool


class Ahead:
    """The part of a pool that runs ahead of its accesses. What an access returns does not depend on it.

    Args:
        pool: whose tensors.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def prefetch(self, tensor: PagedTensor, beside_bytes: int = 0) -> bool:
        """Sends for a tensor that is away, if that can be done without waiting and without moving anything.

        Args:
            tensor: which one.
            beside_bytes: of the room, so much is to stay free.

        Returns:
            whether the tensor is there or on its way now.
        """
        pool = self._pool
        with pool.lock:
            if tensor.place is not Place.AWAY:
                return tensor.place is not Place.BLANK
            if pool.owed is not None and pool.owed.elsewhere(tensor):
                return False
            needed = tensor.slot_bytes + beside_bytes
            if needed > pool.budget.free_bytes:
                pool.room.collect()
            if needed > pool.budget.free_bytes:
                return False
            try:
                load = pool.extents.begin_load(tensor, moves=False)
            except DeviceBudgetError:
                # A card whose free memory is in pieces, or that others fill. Whoever must have the tensor makes room,
                # or is told; a step that cannot go on is refused at its end at the latest.
                return False
            if load is None:
                pool.extents.settle_in(tensor, Place.DIRTY)
                return True
            tensor.arrival, tensor.place = load, Place.ARRIVING
            pool.shelf.touch(tensor)
            return True

    def receive(self, tensor: PagedTensor) -> None:
        """Waits for a tensor that was sent for: ARRIVING -> CLEAN.

        Raises:
            DiskError: the load failed; the tensor is away again.
        """
        pool, load = self._pool, tensor.arrival
        assert load is not None
        try:
            pool.traffic.order(load)
        except BaseException:
            self.turn_back(tensor)
            raise
        pool.stats.hits += 1
        tensor.arrival = None
        pool.extents.settle_in(tensor, pool.extents.place_when_loaded(tensor))

    def turn_back(self, tensor: PagedTensor) -> None:
        """Gives up a tensor that was sent for: ARRIVING -> AWAY. Its memory is free once the transfer has ended."""
        pool, load, extent = self._pool, tensor.arrival, tensor.extent
        assert load is not None and extent is not None
        pool.shelf.take(tensor)
        tensor.arrival = tensor.extent = None
        tensor.place = Place.AWAY
        octets, block, reservation = extent.octets, extent.block, extent.reservation
        del extent
        pool.room.leave(octets, block, reservation, load)

    def evict(self, tensor: PagedTensor) -> None:
        """As `Pool.evict`, without waiting: the store runs beside compute, and the memory is free once it has ended.

        Raises:
            BudgetError: the home has no room; nothing has changed.
            DiskError: the disk has failed.
        """
        pool = self._pool
        with pool.lock:
            if tensor.place.resident:
                tensor.note_changes()
            if tensor.place is not Place.DIRTY:
                pool.evict(tensor)
                return
            assert not tensor.pins and pool.home is not None, tensor
            pool.traffic.start_store_whole(tensor)
            pool.stats.evictions += 1
            pool.extents.let_go(tensor, joined(tensor.stores))
            tensor.place = Place.AWAY

    def make_way(self, nbytes: int) -> bool:
        """Has idle tensors leave so that there will be room, without waiting, as long as the home takes them.

        Returns:
            whether the room is there already; if not, it comes free as the stores end.
        """
        pool, room = self._pool, self._pool.room
        with pool.lock:
            if nbytes > pool.budget.free_bytes:
                room.collect()
            while nbytes > pool.budget.free_bytes + room.ending_bytes and (victim := pool.victim()) is not None:
                try:
                    self.evict(victim)
                except BudgetError:
                    # The home is full. Whoever must have the room will be told.
                    break
                room.collect()
            return nbytes <= pool.budget.free_bytes
