"""Prefetch, and eviction beside compute."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptm_accel.errors import BudgetError, DeviceBudgetError
from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.copies import joined

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool


class Ahead:
    """Loads and stores ahead of the accesses. What an access returns does not depend on them.

    Args:
        pool: whose tensors.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def prefetch(self, tensor: Block) -> bool:
        """Starts loading a tensor that is away, if there is room without waiting and without evicting.

        Returns:
            whether the tensor is resident or arriving now.
        """
        pool = self._pool
        with pool.lock:
            if tensor.place is not Place.AWAY:
                return tensor.place is not Place.BLANK
            if pool.pending_updates is not None and pool.pending_updates.elsewhere(tensor):
                return False
            if tensor.slot_bytes > pool.budget.free_bytes:
                pool.admission.collect()
            if tensor.slot_bytes > pool.budget.free_bytes:
                return False
            try:
                load = pool.extents.begin_load(tensor, moves=False)
            except DeviceBudgetError:
                # The card's free memory is in pieces, or taken by others. A fault makes room, or raises.
                return False
            if load is None:
                pool.extents.settle_in(tensor, Place.DIRTY)
                return True
            tensor.arrival, tensor.place = load, Place.ARRIVING
            pool.eviction.touch(tensor)
            return True

    def receive(self, tensor: Block) -> None:
        """Waits for the load of a tensor: ARRIVING -> CLEAN.

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

    def turn_back(self, tensor: Block) -> None:
        """Gives up a load: ARRIVING -> AWAY. The memory is free once the transfer has ended."""
        self._pool.eviction.take(tensor)
        load, tensor.arrival, tensor.place = tensor.arrival, None, Place.AWAY
        assert load is not None
        self._pool.extents.take_back(tensor, load)

    def evict(self, tensor: Block) -> None:
        """As `Pool.evict`, without waiting: the memory is free once the store has ended.

        Raises:
            BudgetError: the backing store has no room; nothing has changed.
            DiskError: the disk has failed.
        """
        pool = self._pool
        with pool.lock:
            if tensor.place.resident:
                tensor.note_changes()
            if tensor.place is not Place.DIRTY:
                pool.evict(tensor)
                return
            assert not tensor.pins and pool.backing is not None, tensor
            pool.traffic.start_store_whole(tensor)
            pool.stats.evictions += 1
            pool.extents.let_go(tensor, joined(tensor.stores))
            tensor.place = Place.AWAY

    def make_way(self, nbytes: int) -> bool:
        """Starts evicting idle tensors, as far as the backing store has room; returns whether `nbytes` are free
        already.
        """
        pool, admission = self._pool, self._pool.admission
        with pool.lock:
            if nbytes > pool.budget.free_bytes:
                admission.collect()
            while nbytes > pool.budget.free_bytes + admission.ending_bytes and (victim := pool.victim()) is not None:
                try:
                    self.evict(victim)
                except BudgetError:
                    # The backing store is full; a fault raises.
                    break
                admission.collect()
            return nbytes <= pool.budget.free_bytes
