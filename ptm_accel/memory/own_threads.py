"""Threads of our own, and what must not be done in one of them.

The garbage collector runs in whichever thread allocates, and closes what is garbage. Closing waits for our threads to
end; a thread of ours that closes would wait for itself.
"""

from __future__ import annotations

import _thread
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol


class OwnThread(threading.Thread):
    """A daemon thread that calls `work(*args)`."""

    def __init__(self, work: Callable[..., object], args: tuple[object, ...], name: str) -> None:
        super().__init__(target=work, args=args, name=name, daemon=True)


def do_elsewhere_if_own(step: Callable[[], object]) -> None:
    """Calls `step`; in a thread of our own it leaves that to another thread, and does not wait."""
    if isinstance(threading.current_thread(), OwnThread):
        # Not by `threading`: the collector may have interrupted that module, which has a lock of its own.
        _thread.start_new_thread(step, ())
    else:
        step()


class Job(Protocol):
    """Work for a `Worker`; errors are kept for whoever asks for the result."""

    def run(self) -> None:
        """Does it; raises nothing."""
        ...


class Worker:
    """A thread that carries out jobs one after the other; it begins with the first and ends with its owner."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Job | None] = SimpleQueue()
        self._name = name
        self._thread: OwnThread | None = None
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
