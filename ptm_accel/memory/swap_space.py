"""Slots on a disk for pages that leave their frames, two of them set aside so that an exchange is always possible.

Two spare slots guarantee an exchange when both tiers are full; without them no page could move. Proof: two pages' worth
of bytes are always free. Where a page does not fit the frames, less than one page is free there, so more than one page
is free on the disk.
"""

from __future__ import annotations

from typing import Any

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.frame_pages import FileStore
from ptm_accel.memory.transfer import Transfer

SPARES = 2


class SwapSpace:
    """A backing store for whole pages.

    Args:
        disk: where the slots are; owned, `close` closes it.
        page_bytes: the largest page.
    """

    def __init__(self, disk: FileStore, page_bytes: int) -> None:
        self.disk = disk
        self._page_bytes = page_bytes
        self._spares: list[Any] = []

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be set aside."""
        return (SPARES - len(self._spares)) * self._page_bytes

    def refill(self) -> BudgetError | None:
        """Sets aside what is missing, as far as there is room; returns the refusal if there is not enough."""
        try:
            while len(self._spares) < SPARES:
                self._spares.append(self.disk.new(self._page_bytes, Tag.STAGING, "exchanging pages"))
        except BudgetError as refusal:
            return refusal
        return None

    def take_spare(self, nbytes: int, tag: Tag, name: str) -> Any:
        """Returns a slot from what is set aside; raises `BudgetError` if nothing is."""
        if self._spares:
            self.disk.free(self._spares.pop())
        return self.disk.new(nbytes, tag, name)

    def write(self, slot: Any, source: torch.Tensor) -> Transfer:
        """Starts storing a page; its slot is freed if that fails at once."""
        try:
            return self.disk.store(slot, 0, source)
        except BaseException:
            self.disk.free(slot)
            raise

    def close(self) -> None:
        """Gives back what is set aside, and closes the disk. Idempotent."""
        while self._spares:
            self.disk.free(self._spares.pop())
        self.disk.close()
