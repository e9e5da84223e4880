"""The link between a device and host memory: its two directions, and what has been moved over it."""

from __future__ import annotations

import enum
import math
import threading
from collections import Counter
from typing import NamedTuple

_FOLD_AFTER = 1024
"""How many copies may wait to be added up."""


class CopyDirection(enum.Enum):
    """Which of a device's two copy streams a copy runs on."""

    IN = "host to device"
    OUT = "device to host"


class Moved(NamedTuple):
    """Running totals of a link, of copies that have ended.

    Attributes:
        in_bytes: bytes that came to the device.
        out_bytes: bytes that left it.
        busy_s: seconds in which at least one of these copies was under way.
    """

    in_bytes: int
    out_bytes: int
    busy_s: float


class LinkMeter:
    """Adds up copies that have ended. Safe to call from any thread."""

    def __init__(self) -> None:
        self._bytes: Counter[CopyDirection] = Counter()
        self._busy_s = 0.0
        self._busy_until_s = -math.inf
        self._spans: list[tuple[float, float]] = []
        self._lock = threading.RLock()

    def add(self, direction: CopyDirection, nbytes: int, began_s: float, ended_s: float) -> None:
        """Counts a copy that has ended.

        Args:
            direction: which way it went.
            nbytes: its length.
            began_s: when it began; on one scale for all of them, whatever its beginning.
            ended_s: when it ended.
        """
        with self._lock:
            self._bytes[direction] += nbytes
            self._spans.append((began_s, ended_s))
            if len(self._spans) >= _FOLD_AFTER:
                self._fold()

    def read(self) -> Moved:
        """The totals now."""
        with self._lock:
            self._fold()
            return Moved(self._bytes[CopyDirection.IN], self._bytes[CopyDirection.OUT], self._busy_s)

    def _fold(self) -> None:
        # Copies of the two directions overlap, and what they share counts once. They are in order within a direction
        # only. One that began before the last of these and is counted later loses what lies before that one's end: of a
        # thousand, one at the most.
        for began_s, ended_s in sorted(self._spans):
            self._busy_s += max(0.0, ended_s - max(began_s, self._busy_until_s))
            self._busy_until_s = max(self._busy_until_s, ended_s)
        self._spans.clear()
