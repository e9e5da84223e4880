"""A disk that is slower than the one that is there."""

from __future__ import annotations

import threading
import time
from typing import Any

from ptm_accel.memory.scratch import ScratchFile


def slow_down(rate: float) -> None:
    """Has the disk move so many megabytes a second at most, reads and writes in turns."""
    stock, lock = ScratchFile._move_all, threading.Lock()

    def move(self: Any, direction: Any, address: int, offset: int, nbytes: int) -> None:
        with lock:
            until = time.perf_counter() + nbytes / rate / 1e6
            stock(self, direction, address, offset, nbytes)
            time.sleep(max(until - time.perf_counter(), 0.0))

    ScratchFile._move_all = move  # type: ignore[method-assign]
