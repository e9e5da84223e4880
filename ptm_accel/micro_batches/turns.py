"""Threads that take turns: of one that schedules and those that work, exactly one runs at any time.

A worker carries out one job at a time, and stops in the middle of it where the job says so (`Worker.stop`). What it has
on its stack is how far the job has come; so code that knows nothing of turns can be stopped within its own loops.
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from queue import SimpleQueue
from typing import Any

Enter = Callable[[], AbstractContextManager[Any]]
"""Makes a context that a job runs in."""


class Abandoned(BaseException):
    """Unwinds a job that nobody goes on with."""


class Worker:
    """One thread, which lives as long as this object, and carries out one job after the other.

    Attributes:
        over: whether its job has ended.
        result: what the job has returned.
    """

    def __init__(self, name: str) -> None:
        self.over, self.result = True, None
        self._error: BaseException | None = None
        self._running = self._abandoned = False
        self._job: Callable[[], Any] | None = None
        self._contexts: Sequence[Enter] = ()
        self._variables = contextvars.copy_context()
        # They wake a thread up, once too often after Ctrl-C; whose turn it is says `_running`.
        self._go: SimpleQueue[None] = SimpleQueue()
        self._back: SimpleQueue[None] = SimpleQueue()
        self.thread = threading.Thread(target=_serve, args=(weakref.ref(self), self._go), name=name, daemon=True)
        self.thread.start()
        # A thread that waits for a job ends where there is nobody to give it one.
        weakref.finalize(self, self._go.put, None)

    def begin(self, job: Callable[[], Any], contexts: Sequence[Enter]) -> None:
        """Gives it a job, which begins with its first turn.

        Args:
            job: the job.
            contexts: which the job runs in, beside the context variables of the caller.
        """
        assert self.over, "its job has not ended"
        self.over, self.result, self._error, self._abandoned = False, None, None, False
        self._job, self._contexts, self._variables = job, contexts, contextvars.copy_context()

    def turn(self) -> None:
        """Lets it run until its job stops, or ends.

        Raises:
            BaseException: of the job.
        """
        self._let_run()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _let_run(self) -> None:
        self._running = True
        self._go.put(None)
        self._wait()

    def _wait(self) -> None:
        while self._running:
            self._back.get()

    def stop(self) -> None:
        """In its own thread: waits for the next turn."""
        if not self._abandoned:
            self._running = False
            self._back.put(None)
            while not self._running:
                self._go.get()
        if self._abandoned:
            # Again, where somebody has caught it.
            raise Abandoned

    def abandon(self) -> None:
        """Ends its job where it has stopped; waits for that, however long it takes to come to a stop."""
        self._abandoned = True
        self._wait()
        while not self.over:
            self._let_run()
        self._error = None

    def run(self) -> None:
        """In its own thread: carries out its job."""
        job, self._job = self._job, None
        try:
            if not self._abandoned:
                assert job is not None
                self.result = self._variables.run(self._within, job)
        except BaseException as error:
            self._error = error
        self.over, self._contexts = True, ()
        # What the job referred to goes before the other thread goes on.
        del job
        self._running = False
        self._back.put(None)

    def _within(self, job: Callable[[], Any]) -> Any:
        with ExitStack() as stack:
            for enter in self._contexts:
                stack.enter_context(enter())
            return job()

    @property
    def has_turn(self) -> bool:
        """Whether it is to run now."""
        return self._running


def _serve(known: weakref.ref[Worker], go: SimpleQueue[None]) -> None:
    while True:
        go.get()
        worker = known()
        if worker is None:
            return
        if worker.has_turn:
            worker.run()
        del worker
