"""Snapshots: the values of paged tensors for those who look from outside, at no charge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ptm_accel.memory.budget import Tier
from ptm_accel.memory.paged import PagedTensor, Place

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool

_ALIASED = 4
"""Views of extents that are given out may keep this part of the budget from moving."""


class Snapshots:
    """Gives them out, and knows which extents are viewed by them.

    Args:
        pool: whose tensors.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        # With what each keeps; one may be given another shape meanwhile.
        self._aliased: dict[PagedTensor, int] = {}
        self._aliased_bytes = 0
        # How many are asked for before all that were given out are looked through again: each is looked at twice a
        # snapshot on average, however many there are.
        self._patience = 0

    def take(self, tensor: PagedTensor) -> torch.Tensor:
        """See `Pool.snapshot`."""
        pool = self._pool
        if pool.owed is not None:
            # Snapshots are taken of many, and those that are kept leave little room to work in.
            pool.owed.finish()
        if tensor.place is Place.BLANK:
            return torch.full((), tensor.fill, dtype=tensor.dtype).expand(tensor.shape)
        if tensor.place is Place.ARRIVING:
            pool.ahead.receive(tensor)
        if tensor.extent is not None and tensor.origin is not None:
            # What is looked at may be written over the very file that it came in.
            tensor.place, tensor.origin = Place.DIRTY, None
        if tensor.extent is not None and pool.budget.tier is Tier.HOST and self._may_alias(tensor):
            return tensor.extent.tensor.detach()
        if tensor.extent is not None:
            pool.flush(tensor)
        pool.traffic.settle(tensor)
        if tensor.stored_bytes < tensor.nbytes:
            # An interrupted sweep has left the home unwritten; the rest is the fill value.
            pool.fault(tensor, write=True)
            pool.flush(tensor)
        assert pool.home is not None
        octets = pool.home.snapshot(tensor.handle)
        return octets[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _may_alias(self, tensor: PagedTensor) -> bool:
        """Whether somebody may keep a view of an extent: where it could not be moved away anyhow, or few are kept."""
        pool = self._pool
        if pool.home is None or not tensor.movable or tensor.pins:
            return True
        capacity = pool.budget.capacity_bytes
        if 0 < pool.whole_bytes <= capacity:
            # Nothing ever moves.
            return True
        self._aliased_bytes -= self._aliased.pop(tensor, 0)
        limit = min(capacity // _ALIASED, capacity - pool.least_bytes) - tensor.slot_bytes
        if self._kept_bytes() > limit:
            self._look_through()
        if self._kept_bytes() > limit:
            return False
        self._aliased[tensor] = tensor.slot_bytes
        self._aliased_bytes += tensor.slot_bytes
        return True

    def _look_through(self) -> None:
        """Forgets aliases that nobody keeps any more, if that is likely to find some."""
        if self._patience:
            self._patience -= 1
            return
        kept = [each for each in self._aliased if each.viewed]
        self._aliased = {each: each.slot_bytes for each in kept}
        self._aliased_bytes = sum(self._aliased.values())
        self._patience = len(self._aliased) // 2

    def _kept_bytes(self) -> int:
        return self._aliased_bytes + self._pool.room.leaving_bytes
