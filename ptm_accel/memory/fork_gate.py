"""Nothing moves while the process forks.

A child made by `fork` shares memory pages with its parent until one of them writes, and a direct transfer into such a
page can land in the wrong one of the two copies (see open(2)). Data loaders fork while training runs. So whatever moves
memory waits for what is under way, and begins nothing, until the fork is there.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class HoldsStill(Protocol):
    """What moves memory that a fork would share."""

    def hold_still(self) -> None:
        """Waits until nothing moves; until `go_on` nothing begins to."""

    def go_on(self) -> None:
        """Ends `hold_still`, in the parent as in the child."""


class ForkGate:
    """Holds all of a process still while it forks.

    Attributes:
        holders: what is to hold still, for as long as it is there.
    """

    def __init__(self) -> None:
        self.holders: weakref.WeakSet[HoldsStill] = weakref.WeakSet()
        self._lock = threading.RLock()
        self._held: list[HoldsStill] = []
        self._closed_by: int | None = None

    def close(self) -> None:
        """Before a fork."""
        self._lock.acquire()
        self._closed_by = threading.get_ident()
        for holder in list(self.holders):
            holder.hold_still()
            # One that an interrupt let go again is not let go twice.
            self._held.append(holder)

    def open(self) -> None:
        """After it."""
        if self._closed_by == threading.get_ident():
            for holder in reversed(self._held):
                holder.go_on()
            self._held = []
            self._closed_by = None
            self._lock.release()


# Python has no way to take this back, so it is done once and not for each tier.
FORK_GATE = ForkGate()
os.register_at_fork(before=FORK_GATE.close, after_in_parent=FORK_GATE.open, after_in_child=FORK_GATE.open)
