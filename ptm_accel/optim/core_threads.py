"""Threads that compute on one core each, for updates that are cut into pieces.

An operation over several cores waits for the slowest of them, which over a small piece takes as long as the arithmetic.
With a piece for each core no core waits before the end. torch's kernels give the same bits on one core as on several.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

MOST = 16
"""More do not help: between its operations each needs Python, which runs in one thread at a time."""


class CoreThreads:
    """Threads, as many as torch computes with; they begin with the first work and end with their owner.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._threads: ThreadPoolExecutor | None = None
        self._made_for = (0, 0)

    @property
    def count(self) -> int:
        """Number of threads that work: as many as an operation of the calling thread has cores."""
        return min(torch.get_num_threads(), MOST)

    @contextmanager
    def at_work(self) -> Iterator[Callable[[Callable[[], object]], object]]:
        """Work of which nothing is left at its end, whatever happens within it.

        Yields:
            a function that gives a piece to the next free thread; pieces must not depend on each other.

        Raises:
            BaseException: the first that was raised by a piece, or within; then pieces that had not begun are left out.
        """
        threads = self._started()
        futures: list[Future[object]] = []
        try:
            yield lambda piece: futures.append(threads.submit(piece))
            for future in futures:
                future.result()
        finally:
            # A thread that went on would write to memory that is used for something else by then.
            running = [future for future in futures if not future.cancel()]
            for future in running:
                future.exception()

    def _started(self) -> ThreadPoolExecutor:
        # A forked process has none of the threads.
        wanted = (os.getpid(), self.count)
        if self._threads is None or self._made_for != wanted:
            if self._made_for[0] == wanted[0]:
                self.close()
            self._made_for = wanted
            self._threads = ThreadPoolExecutor(self.count, self._name, _compute_on_one_core)
            begun = threading.Barrier(self.count + 1)
            for _ in range(self.count):
                self._threads.submit(begun.wait)
            before = torch.get_num_threads()
            begun.wait()
            # Each has set this for itself, and with that for threads that have not computed yet.
            torch.set_num_threads(before)
        return self._threads

    def close(self) -> None:
        """Ends the threads; no work is in flight. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None


def _compute_on_one_core() -> None:
    # With OpenMP each thread has its own number, which it takes over from the process at the first call.
    torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
