"""Transfers in the background, carried out by a thread of the test's through calls that may fail, or wait."""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ptm_accel.memory.background import NEVER_STARTED
from ptm_accel.memory.mapping import view_at

Call = Callable[[int, list[memoryview], int], int]


class Started:
    """A transfer; its result is None until it has ended."""

    def __init__(self, call: Call, fd: int, view: memoryview, offset: int) -> None:
        self.call, self.fd, self.view, self.offset = call, fd, view, offset
        self.result: int | None = NEVER_STARTED


class PlayedBackground:
    """See `ptm_accel.memory.background.Background`. One thread, in order, whatever the descriptor.

    Attributes:
        refuses: what to raise in the place of starting anything.
        started: how many were.
        cancelled: how many were taken back before they had begun.
    """

    def __init__(self, preadv: Call = os.preadv, pwritev: Call = os.pwritev) -> None:
        self._calls = preadv, pwritev
        self._queue: deque[Started] = deque()
        self._changed = threading.Condition()
        self.refuses: BaseException | None = None
        self.started = self.cancelled = 0
        threading.Thread(target=self._work, daemon=True).start()

    def prepared(self, fd: int, *, writes: bool, address: int, offset: int, nbytes: int) -> Any:
        return Started(self._calls[writes], fd, view_at(address, nbytes), offset)

    def start(self, prepared: Any) -> None:
        if self.refuses is not None:
            raise self.refuses
        with self._changed:
            prepared.result = None
            self.started += 1
            self._queue.append(prepared)
            self._changed.notify_all()

    def result(self, prepared: Any) -> int | None:
        result: int | None = prepared.result
        return result

    def wait(self, started: Sequence[Any]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: any(each.result is not None for each in started), 0.2)

    def cancel(self, fd: int) -> None:
        with self._changed:
            for started in [each for each in self._queue if each.fd == fd]:
                self._queue.remove(started)
                started.result = -errno.ECANCELED
                self.cancelled += 1

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue)
                started = self._queue.popleft()
            try:
                result = started.call(started.fd, [started.view], started.offset)
            except OSError as error:
                result = -(error.errno or errno.EIO)
            except BaseException:
                result = -errno.EIO
            with self._changed:
                started.result = result
                self._changed.notify_all()
