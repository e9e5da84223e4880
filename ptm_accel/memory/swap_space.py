"""Slots on a disk for pages that leave their frames, with a little set aside so that an exchange is always possible.

To bring a page in when the frames are full, another must go out first, and it needs a slot while the slot of the first
is still taken. With frames and disk both full to the last byte nothing could move any more. So two slots of a whole
page are set aside. Two suffice: bytes that are free in the frames when a page does not fit there are fewer than a
page, so of two pages' worth of free bytes in sum, more than one page's worth is on the disk.
"""

from __future__ import annotations

from typing import Any

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.transfer import Home, Transfer

SPARES = 2


class SwapSpace:
    """A home for whole pages.

    Args:
        disk: where the slots are; owned, `close` closes it.
        page_bytes: the largest page.
    """

    def __init__(self, disk: Home, page_bytes: int) -> None:
        self.disk = disk
        self._page_bytes = page_bytes
        self._spares: list[Any] = []

    @property
    def missing_bytes(self) -> int:
        """How much of what is to be set aside is not, at present."""
        return (SPARES - len(self._spares)) * self._page_bytes

    def refill(self) -> BudgetError | None:
        """Sets aside what is missing, as far as there is room; returns the refusal if there is not enough."""
        try:
            while len(self._spares) < SPARES:
                self._spares.append(self.disk.new(self._page_bytes, Tag.STAGING, "exchanging pages"))
        except BudgetError as refusal:
            return refusal
        return None

    def take(self, nbytes: int, tag: Tag, name: str) -> Any:
        """A slot from what is not set aside.

        Raises:
            BudgetError: there is no room.
        """
        return self.disk.new(nbytes, tag, name)

    def take_spare(self, nbytes: int, tag: Tag, name: str) -> Any:
        """A slot, if need be from what is set aside.

        Raises:
            BudgetError: nothing is set aside any more, and there is no room.
        """
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

    def read(self, slot: Any, into: torch.Tensor) -> Transfer:
        """Starts loading a page."""
        return self.disk.load(slot, 0, into)

    def free(self, slot: Any) -> None:
        """Gives a page's slot back."""
        self.disk.free(slot)

    def close(self) -> None:
        """Gives back what is set aside, and closes the disk. Idempotent."""
        while self._spares:
            self.disk.free(self._spares.pop())
        self.disk.close()
