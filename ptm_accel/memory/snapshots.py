"""Snapshots: the values of paged tensors for code outside of the pool, at no charge."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ptm_accel.memory.budget import Tier
from ptm_accel.memory.paged import PagedTensor, Place

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool


def snapshot(pool: Pool, tensor: PagedTensor) -> torch.Tensor:
    """See `Pool.snapshot`."""
    if pool.owed is not None:
        # Snapshots are taken of many, and those that are kept leave little room to work in.
        pool.owed.finish()
    if tensor.place is Place.BLANK:
        return torch.full((), tensor.fill, dtype=tensor.dtype).expand(tensor.shape)
    if tensor.place is Place.ARRIVING:
        pool.ahead.receive(tensor)
    if tensor.extent is not None:
        if pool.budget.tier is Tier.HOST and not _may_leave(pool, tensor):
            return tensor.extent.tensor.detach()
        pool.flush(tensor)
    pool.traffic.settle(tensor)
    if tensor.stored_bytes < tensor.nbytes:
        # An interrupted sweep has left the home unwritten; the rest is the fill value.
        pool.fault(tensor, write=True)
        pool.flush(tensor)
    assert pool.home is not None
    octets = pool.home.snapshot(tensor.handle)
    return octets[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def _may_leave(pool: Pool, tensor: PagedTensor) -> bool:
    """Whether an extent may be evicted, which a view of it would keep in memory."""
    all_fits = 0 < pool.whole_bytes <= pool.budget.capacity_bytes
    return pool.home is not None and tensor.movable and not tensor.pins and not all_fits
