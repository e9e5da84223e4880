"""Ordinary copies of what is on pages."""

from __future__ import annotations

import torch

from ptm_accel.memory.block import Part
from ptm_accel.memory.pool import Pool


def copied(pool: Pool, part: Part, device: torch.device) -> torch.Tensor:
    """Returns a copy in ordinary memory, beside the budgets. Nothing is loaded, evicted or stored for it.

    Args:
        pool: has the part.
        part: of a block.
        device: where the copy is.

    Raises:
        DiskError: what is away cannot be read.
    """
    with pool.lock:
        if pool.pending_updates is not None:
            pool.pending_updates.finish()
        # A block that is being loaded has a buffer without values.
        if part.place.resident:
            extent = part.block.extent
            assert extent is not None
            return part.of(extent.tensor).detach().to(device, copy=True)
        return pool.snapshot(part).to(device, copy=True).contiguous()
