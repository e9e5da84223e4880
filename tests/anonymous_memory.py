"""Anonymous memory of this process, as the kernel counts it: what is mapped from files is no part of it."""

from __future__ import annotations

import threading
from pathlib import Path


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) << 10


class Peak:
    """The most there is within a block, looked at every millisecond.

    Attributes:
        start: what there was when it began.
        bytes: the most.
    """

    def __enter__(self) -> Peak:
        self.start = self.bytes = anonymous_bytes()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.001):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    @property
    def grown(self) -> int:
        """The most there was beyond what there was when it began."""
        return self.bytes - self.start
