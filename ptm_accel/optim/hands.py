"""Hands: threads that compute on one core each, for work that is cut into pieces.

An operation over several cores ends with the slowest of them. Over a piece that stays in a cache that takes about as
long as the arithmetic itself, and so do three operations a piece. Where each core has pieces of its own nobody waits
for another before the end. The kernels are torch's, and give the same bits on one core as on several.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

import torch

from ptm_accel.memory.copies import raise_first
from ptm_accel.memory.own_threads import OwnThread

MOST = 16
"""More do not help: between its operations each needs Python, which runs in one thread at a time."""

Piece = Callable[[], object]
Jobs = SimpleQueue["Piece | None"]


class Hands:
    """Threads, as many as torch computes with; they begin with the first work and end with their owner.

    Args:
        name: of the threads.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_afresh()

    @property
    def count(self) -> int:
        """How many work: as many as an operation of the calling thread has cores."""
        return min(torch.get_num_threads(), MOST)

    def _start_afresh(self) -> None:
        self._process = os.getpid()
        self._queue: Jobs = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        # They know the queue alone: their owner is free to go.
        self._stop = weakref.finalize(self, _end, self._queue, self._threads)

    @contextmanager
    def at_work(self) -> Iterator[Callable[[Piece], None]]:
        """Work of which nothing is left at its end, whatever happens within it.

        Yields:
            a function that gives a piece to whoever is free; pieces must not depend on each other.

        Raises:
            BaseException: the first that was raised by a piece, or within; pieces that had not begun are left out.
        """
        self._begin(self.count)
        round_ = _Round()
        # Whoever is interrupted in the middle would leave threads behind that write to memory of others.
        try:
            yield lambda piece: round_.give(self._queue, piece)
        except BaseException:
            round_.off = True
            raise
        finally:
            round_.wait()
        raise_first(round_.errors)

    def _begin(self, count: int) -> None:
        assert self._stop.alive, f"{self._name}: work after the end"
        if os.getpid() != self._process:
            # A fork has no threads. One of them may have been about to take something from the queue: it would be
            # waited for in vain.
            self._stop.detach()
            self._start_afresh()
        with self._lock:
            # One that could not be started is none.
            self._threads[:] = [thread for thread in self._threads if thread.is_alive()]
            missing = count - len(self._threads)
            if missing <= 0:
                return
            threads = torch.get_num_threads()
            ready: SimpleQueue[None] = SimpleQueue()
            for _ in range(missing):
                thread = OwnThread(_work, (self._queue, ready), self._name)
                self._threads.append(thread)
                thread.start()
            for _ in range(missing):
                ready.get()
            # Each has set this for itself, and with that for threads that have not computed yet.
            torch.set_num_threads(threads)

    def close(self) -> None:
        """Ends the threads. Idempotent; no work is under way."""
        self._stop()


class _Round:
    """What was given in one piece of work.

    Attributes:
        off: what has not begun is not to begin any more.
        errors: what pieces have raised.
    """

    def __init__(self) -> None:
        self.off = False
        self.errors: list[BaseException] = []
        self._ended: SimpleQueue[None] = SimpleQueue()
        self._given = 0

    def give(self, queue: Jobs, piece: Piece) -> None:
        self._given += 1
        queue.put(partial(self._carry_out, piece))

    def _carry_out(self, piece: Piece) -> None:
        try:
            if not self.off:
                piece()
        except BaseException as error:
            # Whatever it is belongs to the thread that gave it.
            self.off = True
            self.errors.append(error)
        finally:
            self._ended.put(None)

    def wait(self) -> None:
        for _ in range(self._given):
            self._ended.get()
        self._given = 0


def _work(queue: Jobs, ready: SimpleQueue[None]) -> None:
    # With OpenMP each thread has its own number; that of all is taken over when it is first asked for, not after that.
    torch.get_num_threads()
    torch.set_num_threads(1)
    ready.put(None)
    with torch.no_grad():
        while (job := queue.get()) is not None:
            job()
            # Until the next one comes nothing here may keep what was worked on.
            del job


def _end(queue: Jobs, threads: list[threading.Thread]) -> None:
    for _ in threads:
        queue.put(None)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join()
