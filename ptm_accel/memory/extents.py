"""Extents of paged tensors: made and filled in the compute tier, and given back to it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ptm_accel.memory.block import Block, Extent, Place
from ptm_accel.memory.transfer import Transfer

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool


class Extents:
    """Gives tensors their extents, and takes them back. Called with the pool's lock held.

    Args:
        pool: whose tensors.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def make(self, tensor: Block, *, moves: bool = True, ordered: bool = True) -> Extent:
        """Gives a tensor an extent whose bytes are still to be written (`moves`, `ordered`: see
        `Admission.take_buffer`).

        Raises:
            BudgetError: no room.
        """
        if torch.is_inference_mode_enabled():
            # It may be used outside of this inference mode, too.
            with torch.inference_mode(False):
                return self.make(tensor, moves=moves, ordered=ordered)
        assert not self._pool.closed, f"the model of {tensor.name} is no longer on pages"
        admission, size = self._pool.admission, tensor.slot_bytes
        reservation, buffer = admission.take_buffer(size, tensor.tag, tensor.name, moves=moves, ordered=ordered)
        octets = buffer.octets
        assert octets is not None
        used = octets if tensor.nbytes == buffer.nbytes else octets[: tensor.nbytes]
        tensor.extent = Extent(used.view(tensor.dtype).view(tensor.shape), octets, buffer, reservation)
        return tensor.extent

    def wrap(self, tensor: Block, data: torch.Tensor) -> None:
        """Makes `data`, which is alone in its storage, the extent of a tensor.

        Raises:
            BudgetError: no room.
        """
        reservation = self._pool.admission.reserve(tensor.nbytes, tensor.tag, tensor.name)
        # A view would keep its base, which would count as viewed.
        own = data.data
        tensor.extent = Extent(own, own.view(-1).view(torch.uint8), None, reservation)

    def bring(self, tensor: Block) -> None:
        """Brings in a tensor that is blank or away, while the caller waits.

        Raises:
            BudgetError: no room can be made.
            DiskError: the transfer failed.
        """
        pool = self._pool
        pool.stats.faults += 1
        if tensor.place is Place.BLANK:
            self.make(tensor).tensor.fill_(tensor.fill)
            self.settle_in(tensor, Place.DIRTY)
            return
        load = self.begin_load(tensor)
        try:
            if (adviser := pool.listener) is not None:
                adviser.awaited(tensor)
            if load is not None:
                pool.traffic.order(load)
        except BaseException:
            self.take_back(tensor)
            raise
        self.settle_in(tensor, self.place_when_loaded(tensor))

    def begin_load(self, tensor: Block, *, moves: bool = True) -> Transfer | None:
        """Makes the extent of a tensor that is away and starts filling it; None if there was nothing to load.

        Raises:
            BudgetError: no room.
            DiskError: an earlier store of it failed.
        """
        extent = self.make(tensor, moves=moves, ordered=False)
        assert extent.buffer is not None
        behind, extent.buffer.behind = extent.buffer.behind, ()
        try:
            return self._pool.traffic.start_load(tensor, 0, extent.octets, extent.tensor, behind)
        except BaseException:
            self.take_back(tensor)
            raise

    def place_when_loaded(self, tensor: Block) -> Place:
        """What a tensor is once it has been loaded: dirty if the backing store lacks the end of it."""
        return Place.CLEAN if tensor.stored_bytes >= tensor.slot_bytes else Place.DIRTY

    def settle_in(self, tensor: Block, place: Place) -> None:
        """The bytes are in the extent: the tensor may be used, and evicted."""
        tensor.place = place
        if not tensor.pins:
            self._pool.eviction.touch(tensor)
        if tensor.occupant is not None:
            assert tensor.extent is not None
            tensor.occupant.arrived(tensor.extent.tensor)

    def leave_to_viewers(self, tensor: Block) -> None:
        """Gives a pinned tensor other memory with the same bytes if anybody else views what it has, and so keeps that.

        Raises:
            BudgetError: no room for both.
        """
        assert tensor.pins and tensor.extent is not None, tensor
        if not tensor.viewed:
            return
        tensor.note_changes()
        old = tensor.extent
        new = self.make(tensor)
        new.tensor.copy_(old.tensor)
        if tensor.occupant is not None:
            tensor.occupant.leaving(old.tensor)
            tensor.occupant.arrived(new.tensor)
        self._pool.admission.leave(old.octets, old.buffer, old.reservation)

    def take_back(self, tensor: Block, transfer: Transfer | None = None) -> None:
        """Takes the extent from a tensor; its memory is free once nobody views it and `transfer` has ended."""
        extent, tensor.extent = tensor.extent, None
        assert extent is not None
        self._pool.admission.leave(extent.octets, extent.buffer, extent.reservation, transfer)

    def let_go(self, tensor: Block, store: Transfer | None = None) -> None:
        """As `take_back`, from a tensor that was resident."""
        assert tensor.extent is not None
        if tensor.occupant is not None:
            tensor.occupant.leaving(tensor.extent.tensor)
        self._pool.eviction.take(tensor)
        self.take_back(tensor, store)
