"""A thread for arithmetic, and what it is given to do."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from ptm_accel.memory.copies import raise_first
from ptm_accel.memory.own_threads import OwnThread
from ptm_accel.optim.units import Unit


class Worker:
    """A thread that carries out jobs one after the other; it begins with the first and ends with its owner."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._name = name
        self._thread: threading.Thread | None = None
        self._stop = weakref.finalize(self, self._queue.put, None)

    def submit(self, job: Job) -> None:
        """Has a job carried out after those before it.

        Raises:
            RuntimeError: the system lets no more threads start; the job is nobody's then.
        """
        assert self._stop.alive, f"{self._name}: a job after the end"
        if self._thread is None:
            # It knows the queue alone: its owner is free to go.
            thread = OwnThread(_work, (self._queue,), self._name)
            thread.start()
            self._thread = thread
        self._queue.put(job)

    def close(self) -> None:
        """Ends the thread after the jobs that there are."""
        self._stop()
        if self._thread is not None:
            self._thread.join()


def _work(queue: SimpleQueue[Job | None]) -> None:
    while (job := queue.get()) is not None:
        job.run()
        # Until the next one comes nothing here may keep what was worked on.
        del job


class Job:
    """The arithmetic of one window, in another thread.

    Args:
        unit: the window.
        prepare: waits for what it needs; nothing has been changed as long as that has not ended.
        update: does it; what it returns is `after`.

    Attributes:
        unit: see above.
        after: what the optimizer has left in its state.
        cancelled: it is not to begin any more.
        touched: it has begun to change what is in the window.
    """

    def __init__(self, unit: Unit, prepare: Callable[[Unit], object], update: Callable[[Unit], dict[str, Any]]) -> None:
        self.unit = unit
        self.after: dict[str, Any] = {}
        self.cancelled = self.touched = False
        self._prepare = prepare
        self._update = update
        self._errors: list[BaseException] = []
        self._ended = threading.Event()

    def run(self) -> None:
        """For the worker only."""
        try:
            if not self.cancelled:
                self._prepare(self.unit)
                self.touched = True
                self.after = self._update(self.unit)
        except BaseException as error:
            # Whatever it is belongs to the thread that trains, which asks for it.
            self._errors.append(error)
        finally:
            self._ended.set()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Blocks until it has ended, well or not; it may wait for a disk itself."""
        self._ended.wait()

    def result(self) -> dict[str, Any]:
        """What it left, once it has ended; raises its error, once, with the traceback of the thread that worked."""
        raise_first(self._errors)
        return self.after
