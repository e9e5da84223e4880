"""Ctrl-C, put off to where nothing is half done.

Python raises `KeyboardInterrupt` between any two instructions of the main thread: with a charge that is taken and not
noted, a pin that nobody holds, a transfer that is noted and not queued, for which everybody would then wait. So while
`watched` lasts, Ctrl-C inside a section (`with INTERRUPTS:`) is passed on at the end of the outermost one; and in the
middle of one that waits for a transfer, where errors of the disk come out as well.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import get_ident
from types import FrameType

_MAIN = threading.main_thread().ident

Handler = Callable[[int, "FrameType | None"], object]


class Interrupts:
    """Of this process; the one instance is `INTERRUPTS`. Threads other than the main one are not concerned."""

    def __init__(self) -> None:
        self._handler: Handler | None = None
        self._pressed: list[Callable[[], object]] = []
        self._sections = self._waits = self._wholes = 0

    def __enter__(self) -> None:
        if get_ident() == _MAIN:
            self._sections += 1

    def __exit__(self, *exc: object) -> None:
        if get_ident() == _MAIN:
            self._sections -= 1
            if self._pressed and not self._sections:
                self._pass_on()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts sections are kept whole. A second Ctrl-C is passed on at once."""
        before, outer = signal.getsignal(signal.SIGINT), self._handler
        if get_ident() != _MAIN or not callable(before) or before == self._note:
            yield
            return
        try:
            self._handler = before
            signal.signal(signal.SIGINT, self._note)
            yield
        finally:
            # Whoever has put a handler in our place meanwhile has taken it over.
            if signal.getsignal(signal.SIGINT) == self._note:
                signal.signal(signal.SIGINT, before)
            self._handler = outer

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """A watched section in which waits are not broken off either, so that an update is done or not done."""
        with self.watched(), self:
            self._wholes += 1
            try:
                yield
            finally:
                self._wholes -= 1

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait that may be broken off: whoever is inside copes with an error in it."""
        main = get_ident() == _MAIN
        self._waits += main
        try:
            yield
        finally:
            self._waits -= main

    def look(self) -> None:
        """In the middle of a wait: passes on a Ctrl-C that was pressed meanwhile."""
        if self._pressed and self._waits and not self._wholes and get_ident() == _MAIN:
            self._pass_on()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._handler is not None:
            self._pressed.append(partial(self._handler, number, frame))
        if not self._sections or len(self._pressed) > 1:
            self._pass_on()

    def _pass_on(self) -> None:
        pressed, self._pressed = self._pressed, []
        for handle in pressed[-1:]:
            handle()


INTERRUPTS = Interrupts()


class BookLock:
    """A re-entrant lock; whoever holds it is in a section.

    It is taken thousands of times a step. So what `INTERRUPTS` does at a section's ends stands here once more.
    """

    __slots__ = ("_acquire", "_release")

    def __init__(self) -> None:
        lock = threading.RLock()
        self._acquire, self._release = lock.acquire, lock.release

    def __enter__(self) -> None:
        if get_ident() == _MAIN:
            INTERRUPTS._sections += 1
        self._acquire()

    def __exit__(self, *exc: object) -> None:
        self._release()
        if get_ident() == _MAIN:
            INTERRUPTS._sections -= 1
            if INTERRUPTS._pressed and not INTERRUPTS._sections:
                INTERRUPTS._pass_on()
