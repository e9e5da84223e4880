"""Signals, put off to where nothing is half done.

Python calls handlers of signals, which raise `KeyboardInterrupt` or look at the model, between any two instructions of
the main thread: with a charge that is taken and not noted, a pin that nobody holds, a transfer that is noted and not
queued, for which everybody would then wait. So while there is a model on pages (`watched`), those that come inside a
section (`with INTERRUPTS:`) are called at the end of the outermost one. Ctrl-C is passed on in the middle of one that
waits for a transfer as well, where errors of the disk come out, too.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from types import FrameType
from typing import ParamSpec, TypeVar

from ptm_accel.errors import PagedModelError

_MAIN = threading.main_thread().ident

_Given = ParamSpec("_Given")
_Back = TypeVar("_Back")

Handler = Callable[[int, "FrameType | None"], object]

PATIENCE_S = 10.0
"""A wait in which a handler was put off for so long may not end: what is to put an end to it (an alarm) is called."""


class _PutOff:
    """Stands in the place of somebody's handler."""

    __slots__ = ("handle", "interrupts")

    def __init__(self, handle: Handler, interrupts: Interrupts) -> None:
        self.handle, self.interrupts = handle, interrupts

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.interrupts._arrived(_Put(self.handle, number))


class _Put:
    """One signal that has come, and is still to be handled.

    It does not keep the frame that it came in, which would keep tensors there. A handler is given the one where it is
    called, as Python does itself.
    """

    __slots__ = ("_handle", "number", "since")

    def __init__(self, handle: Handler, number: int) -> None:
        self._handle, self.number = handle, number
        self.since = time.perf_counter()

    @property
    def raises(self) -> bool:
        """Whether it is known to end what it comes into."""
        return self._handle is signal.default_int_handler

    def handle(self) -> None:
        self._handle(self.number, sys._getframe(1))


class Interrupts:
    """Of this process; the one instance is `INTERRUPTS`. Threads other than the main one are not concerned."""

    def __init__(self) -> None:
        self._pressed: dict[int, _Put] = {}
        self._in_place: dict[int, _PutOff] = {}
        self._sections = self._waits = self._wholes = self._watchers = 0
        self._in_a_wait = False
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if get_ident() == _MAIN:
            self._sections += 1

    def __exit__(self, *exc: object) -> None:
        if get_ident() == _MAIN:
            self._sections -= 1
            if self._pressed and not self._sections:
                self._pass_on()

    # ---- whose handlers ----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """From now on sections are kept whole, until `end` was called as often. A second Ctrl-C is called at once."""
        with self._lock:
            self._watchers += 1
            first = self._watchers == 1
        if first:
            self.meet_handlers()

    def end(self) -> None:
        """See `begin`; in a thread other than the main one handlers are put off until the next one has ended."""
        with self._lock:
            self._watchers -= 1
            if self._watchers or get_ident() != _MAIN:
                return
        for number, mine in self._in_place.items():
            # Whoever has put a handler in our place meanwhile has taken it over.
            now = signal.getsignal(number)
            if isinstance(now, _PutOff) and now is mine:
                signal.signal(number, now.handle)
        self._in_place.clear()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts sections are kept whole (see `begin`)."""
        self.begin()
        try:
            self.meet_handlers()
            yield
        finally:
            self.end()

    def meet_handlers(self) -> None:
        """Takes the place of handlers that have been set since, as callbacks and data loaders do while they train."""
        if not self._watchers or get_ident() != _MAIN:
            return
        for number in _SIGNALS:
            now = signal.getsignal(number)
            if callable(now) and not isinstance(now, (_PutOff, signal.Handlers)):
                # A new one each time: theirs may go on to the one of ours that they have replaced.
                self._in_place[number] = mine = _PutOff(now, self)
                signal.signal(number, mine)

    # ---- sections ----------------------------------------------------------------------------------------------

    def leave_quietly(self, *, here: bool = True) -> None:
        """Ends a section where nothing can be raised: what was put off is called at the end of the next one.

        Args:
            here: in the process that the signal came to, and not in a fork of it.
        """
        if get_ident() == _MAIN:
            self._sections -= 1
        if not here:
            self._pressed.clear()

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """A watched section in which waits are not broken off either, so that an update is done or not done."""
        self.begin()
        try:
            with self:
                self._wholes += 1
                try:
                    yield
                finally:
                    self._wholes -= 1
        finally:
            self.end()

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
        """In the middle of a wait: passes on a Ctrl-C that was pressed meanwhile, and what has waited for very long.

        Where somebody handles Ctrl-C otherwise than Python does, that is put off like all else: it may go on.
        """
        if not self._pressed or not self._waits or get_ident() != _MAIN:
            return
        late = time.perf_counter() - PATIENCE_S
        for put in list(self._pressed.values()):
            if put.since < late or (put.raises and not self._wholes):
                del self._pressed[put.number]
                self._handle_in_a_wait(put)

    def _handle_in_a_wait(self, put: _Put) -> None:
        before, self._in_a_wait = self._in_a_wait, True
        try:
            put.handle()
        finally:
            self._in_a_wait = before

    def refuse_looks(self) -> None:
        """Says that a handler that was called in the middle of a wait cannot see the model.

        Raises:
            PagedModelError: one is being carried out.
        """
        if self._in_a_wait and get_ident() == _MAIN:
            raise PagedModelError(
                "a handler of a signal looks at a model on pages while a transfer is waited for that does not come: "
                "what it would see is half of a step. Set a flag in the handler, and look at the model after the step."
            )

    def _arrived(self, put: _Put) -> None:
        if put.number == signal.SIGINT and self._pressed.pop(put.number, None) is not None:
            self._handle_in_a_wait(put)
        elif self._sections:
            # Like the system, which keeps one of a kind until it is taken.
            self._pressed.setdefault(put.number, put)
        else:
            put.handle()

    def _pass_on(self) -> None:
        """Calls what was put off, as it came; if one raises, the others are called at the end of the next section."""
        while self._pressed:
            self._pressed.pop(next(iter(self._pressed))).handle()


_SIGNALS = sorted(signal.valid_signals() & set(signal.Signals))

INTERRUPTS = Interrupts()


def in_section(function: Callable[_Given, _Back]) -> Callable[_Given, _Back]:
    """Decorates what is called from outside and is one section as a whole."""

    @wraps(function)
    def inside(*args: _Given.args, **kwargs: _Given.kwargs) -> _Back:
        with INTERRUPTS:
            return function(*args, **kwargs)

    return inside


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
