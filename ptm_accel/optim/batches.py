"""Batches of a step under way: the transfers of one run while the other is updated."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from typing import Any

import torch

from ptm_accel.errors import DiskError
from ptm_accel.optim.sweep import Sweep
from ptm_accel.optim.units import Cursor, Unit

_AT_ONCE = 2
"""How many batches may be open: one whose transfers run while the other is updated."""


class Batches:
    """Those that are open, in the order in which they are updated.

    Args:
        sweep: opens them, and carries them out.
        cursor: how far they have come.
    """

    def __init__(self, sweep: Sweep, cursor: Cursor) -> None:
        self._sweep = sweep
        self._cursor = cursor
        self._opened: list[Unit] = []
        self._batches: deque[list[Unit]] = deque()

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def enough(self) -> bool:
        """Whether as many are open as may be."""
        return len(self._batches) >= _AT_ONCE

    @property
    def could_open(self) -> bool:
        """Whether one more may be open, and what it needs need not be sent for first."""
        return not self.enough and self._sweep.could_open(self._cursor)

    @property
    def pinned_bytes(self) -> int:
        """What they alone pin of tensors that move, where a whole parameter is updated."""
        involved = (block for unit in self._opened if unit.whole for block in unit.blocks.values())
        pinned = (block.extent for block in involved if block.movable and block.pins == 1)
        return sum(extent.reservation.nbytes for extent in pinned if extent is not None)

    def arrived(self) -> bool:
        """Whether there is a first one, and nothing would have to be waited for to update it."""
        return bool(self._batches) and all(unit.arrived() for unit in self._batches[0])

    def open(self, *, insist: bool) -> None:
        """Opens one more, if not enough are open; with `insist` it has one window at least.

        Raises:
            BudgetError: there is no room for the one.
        """
        if not self.enough:
            batch = self._sweep.open(self._cursor, self._opened, insist=insist)
            if batch:
                self._batches.append(batch)

    def wait(self) -> None:
        """Waits for what the first one reads."""
        batch = self._batches[0]
        with self._sweep.pool.traffic.stalled():
            for transfer in [transfer for unit in batch for transfer in unit.awaited()]:
                # An error is raised again by the update itself.
                with suppress(DiskError):
                    transfer.order()

    def take(self) -> list[Unit]:
        """Takes the first one off, to be carried out."""
        return self._batches.popleft()

    def carry_out(self, batch: list[Unit], scale: torch.Tensor | None, hyper: list[dict[str, Any]]) -> None:
        """See `Sweep.carry_out`."""
        self._sweep.carry_out(batch, self._opened, scale, hyper)

    def clear(self) -> None:
        """Takes all of them off: none is to be carried out any more."""
        self._batches.clear()

    def abandon(self) -> None:
        """Ends what is open without updating it."""
        self._sweep.abandon(self._opened)
