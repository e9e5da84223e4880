"""Extents that code outside uses as ordinary tensors: they stay where they are as long as somebody views them.

What is read or written through such a view is what the tensor holds, whenever that happens. It costs no memory that
the view would not hold by itself: an extent that left would stay charged until its last view has died.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.pin import Pin

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool


class Handouts:
    """Gives them out, and pins what is still viewed.

    Args:
        pool: whose tensors.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._pins: dict[PagedTensor, Pin] = {}

    def give(self, tensor: PagedTensor) -> torch.Tensor:
        """The tensor's values, to be read and written by whoever holds them, as long as they are held.

        Raises:
            BudgetError: no room can be made.
            DiskError: the transfer failed.
        """
        pool = self._pool
        with pool.lock, pool.unadvised():
            # What was given out before and is not viewed any more may have to leave for it.
            self.collect()
            values = pool.lend(tensor)
            if tensor not in self._pins:
                self._pins[tensor] = pool.pin(tensor)
            return values.detach()

    def collect(self) -> bool:
        """Lets go of what nobody views any more; returns whether there was any."""
        if not self._pins:
            return False
        with self._pool.lock:
            ended = [t for t in self._pins if not t.viewed]
            for tensor in ended:
                self.end(tensor)
        return bool(ended)

    def end(self, tensor: PagedTensor) -> None:
        """Lets go of a tensor: whoever views what it held keeps that for themselves."""
        pin = self._pins.pop(tensor, None)
        if pin is not None:
            pin.release()

    def holds(self, tensor: PagedTensor) -> bool:
        """Whether somebody may be viewing the tensor."""
        return tensor in self._pins

    def viewed(self, tensor: PagedTensor) -> bool:
        """Whether somebody views the tensor."""
        self.collect()
        return tensor in self._pins
