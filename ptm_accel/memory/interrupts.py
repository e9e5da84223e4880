"""Signals, put off to where nothing is half done.

Python calls handlers of signals, which raise `KeyboardInterrupt` or look at the model, between any two instructions of
the main thread: with a charge that is taken and not noted, a pin that nobody holds, a transfer that is noted and not
queued, for which everybody would then wait. So while there is a model on pages (`watched`), those that come inside a
section (`with INTERRUPTS:`) are called at the end of the outermost one. Ctrl-C is passed on in the middle of one that
waits for a transfer as well, where errors of the disk come out, too.

What stands in the place of a handler is not shown to those who ask whose it is (asyncio, unittest) or put an older one
back: `signal.signal` and `signal.getsignal` know of it meanwhile.
"""

from __future__ import annotations

import _thread
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import get_ident
from types import FrameType
from typing import Any, ParamSpec, TypeVar

from ptm_accel.errors import PagedModelError

_MAIN = threading.main_thread().ident

_Given = ParamSpec("_Given")
_Back = TypeVar("_Back")

Handler = Callable[[int, "FrameType | None"], object]

PATIENCE_S = 10.0
"""A wait in which a handler was put off for so long may not end: what is to put an end to it (an alarm) is called."""


_AFTER_S = 0.001
"""What was put off and has no section to end with comes after so long."""


class _PutOff:
    """Stands in the place of somebody's handler."""

    __slots__ = ("handle", "interrupts")

    def __init__(self, handle: Handler, interrupts: Interrupts) -> None:
        self.handle, self.interrupts = handle, interrupts

    def __call__(self, number: int, frame: FrameType | None) -> None:
        interrupts = self.interrupts
        interrupts._arrived(_Put(self.handle, number, interrupts._sent.pop(number, None)), frame)


class _Put:
    """One signal that has come, and is still to be handled.

    It does not keep the frame that it came in, which would keep tensors there. A handler that was put off is given that
    of the code which has called us.
    """

    __slots__ = ("_handle", "number", "sent", "since")

    def __init__(self, handle: Handler, number: int, before: _Put | None = None) -> None:
        self._handle, self.number = handle, number
        self.since: float = time.perf_counter() if before is None else before.since
        # How often it was sent again.
        self.sent: int = 0 if before is None else before.sent + 1

    @property
    def raises(self) -> bool:
        """Whether it is known to end what it comes into."""
        return self._handle is signal.default_int_handler

    def handle(self, frame: FrameType | None = None) -> None:
        self._handle(self.number, frame or _callers_frame())


class Interrupts:
    """Of this process; the one instance is `INTERRUPTS`. Threads other than the main one are not concerned."""

    def __init__(self) -> None:
        self._pressed: dict[int, _Put] = {}
        self._sent: dict[int, _Put] = {}
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
        """See `begin`; what is ended in a thread other than the main one is put back when a signal comes next."""
        with self._lock:
            self._watchers -= 1
            last = not self._watchers
        if last and get_ident() == _MAIN:
            self._put_back()

    def _put_back(self) -> None:
        for name, (ours, stock) in _SHOWN.items():
            if vars(signal)[name] is ours:
                vars(signal)[name] = stock
        for number in _SIGNALS:
            # Whoever has put a handler in our place meanwhile has taken it over; or put back an older one of ours.
            now = _get(number)
            if isinstance(now, _PutOff):
                _set(number, _theirs(now))

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While it lasts sections are kept whole (see `begin`)."""
        main = get_ident() == _MAIN
        self._sections += main
        try:
            self.begin()
        finally:
            self._sections -= main
        try:
            self.meet_handlers()
            yield
        finally:
            self.end()
            if self._pressed and not self._sections and get_ident() == _MAIN:
                self._pass_on()

    def meet_handlers(self) -> None:
        """Takes the place of handlers that have been set since, by those who had `signal.signal` before us."""
        if not self._watchers or get_ident() != _MAIN:
            return
        for name, (ours, stock) in _SHOWN.items():
            if vars(signal)[name] is stock:
                vars(signal)[name] = ours
        for number in _SIGNALS:
            self._meet(number)

    def _meet(self, number: int) -> None:
        now = _get(number)
        if callable(now) and not isinstance(now, (_PutOff, signal.Handlers)):
            # A new one each time: theirs may go on to the one of ours that they have replaced.
            _set(number, _PutOff(now, self))

    def met(self, number: int, handler: Any) -> Any:
        """As `signal.signal`: somebody sets a handler, and is given theirs that was there before."""
        before = _set(number, handler)
        if self._watchers:
            self._meet(number)
        return _theirs(before)

    # ---- sections ----------------------------------------------------------------------------------------------

    def leave_quietly(self, *, here: bool = True) -> None:
        """Ends a section where nothing can be raised: what was put off is called at the end of the next one.

        Args:
            here: in the process that the signal came to, and not in a fork of it.
        """
        if get_ident() == _MAIN:
            self._sections -= 1
        if not here:
            self._begin_fork()
        elif self._pressed and not self._sections:
            self.send_again()

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """A section that ends where nothing can be raised (`leave_quietly`)."""
        self.__enter__()
        try:
            yield
        finally:
            self.leave_quietly()

    def _begin_fork(self) -> None:
        """A fork has none of the transfers, and its main thread is the one that has forked."""
        global _MAIN  # noqa: PLW0603 (an attribute would cost thousands of look-ups a step)
        if get_ident() != _MAIN:
            # The sections are those of a thread that is not there.
            self._sections = self._waits = self._wholes = 0
            _MAIN = get_ident()
        self._in_a_wait = False
        self._lock = threading.RLock()
        self._pressed.clear()
        self._sent.clear()
        self._put_back()

    @contextmanager
    def uninterrupted(self) -> Iterator[None]:
        """A watched section in which waits are not broken off either, so that an update is done or not done."""
        # It may be ended in another thread.
        main = get_ident() == _MAIN
        self.begin()
        self._sections += main
        self._wholes += main
        try:
            yield
        finally:
            self._wholes -= main
            self._sections -= main
            self.end()
            if self._pressed and not self._sections and get_ident() == _MAIN:
                self._pass_on()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """A wait that may be broken off: whoever is inside copes with an error in it."""
        main = get_ident() == _MAIN
        self._waits += main
        try:
            yield
        finally:
            self._waits -= main

    def look(self, waited_s: float = 0.0) -> None:
        """In the middle of a wait: passes on a Ctrl-C that may break it off, and what has waited in it for very long.

        Where somebody handles Ctrl-C otherwise than Python does, that is put off like all else: it may go on.

        Args:
            waited_s: how long this wait has lasted.
        """
        if not self._pressed or get_ident() != _MAIN:
            return
        late = time.perf_counter() - PATIENCE_S
        for put in list(self._pressed.values()):
            stuck = waited_s > PATIENCE_S and put.since < late
            if stuck or (put.raises and self._waits and not self._wholes):
                del self._pressed[put.number]
                self._handle_in_a_wait(put)

    def _handle_in_a_wait(self, put: _Put, frame: FrameType | None = None) -> None:
        before, self._in_a_wait = self._in_a_wait, True
        try:
            put.handle(frame)
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

    def _arrived(self, put: _Put, frame: FrameType | None) -> None:
        first = self._pressed.get(put.number)
        # Nowhere is forever.
        at_an_end = _is_at_an_end(frame) and put.since > time.perf_counter() - PATIENCE_S
        if (
            put.number == signal.SIGINT
            and first is not None
            and not (at_an_end and first.since > time.perf_counter() - PATIENCE_S)
        ):
            del self._pressed[put.number]
            if not first.raises:
                self._handle_in_a_wait(first, frame)
            self._handle_in_a_wait(put, frame)
        elif self._sections or at_an_end:
            # Like the system, which keeps one of a kind until it is taken.
            self._pressed.setdefault(put.number, put)
            if not self._sections:
                self.send_again()
        else:
            if not self._watchers:
                self._put_back()
            put.handle(frame)

    def send_again(self) -> None:
        """What was put off comes once more from elsewhere, for want of a section at whose end it could be called."""
        while self._pressed:
            number, put = self._pressed.popitem()
            self._sent[number] = put
            try:
                _thread.start_new_thread(self._send, (put,))
            except RuntimeError:
                # No thread is to be had. It is called at the end of the next section.
                self._pressed[number] = self._sent.pop(number)
                return

    def _send(self, put: _Put) -> None:
        # By then whoever could not be interrupted has returned. Where nobody handles it any more, nothing comes of it.
        time.sleep(_AFTER_S * 2 ** min(put.sent, 6))
        _thread.interrupt_main(put.number)  # type: ignore[arg-type]
        time.sleep(_AFTER_S)
        # Who waits in the system is only woken by the signal itself.
        if self._sent.get(put.number) is put and isinstance(_get(put.number), _PutOff):
            signal.pthread_kill(threading.main_thread().ident or 0, put.number)

    def _pass_on(self) -> None:
        """Calls what was put off, as it came; if one raises, the others come after it."""
        while self._pressed:
            put = self._pressed.pop(next(iter(self._pressed)))
            try:
                put.handle()
            except BaseException:
                self.send_again()
                raise


_SIGNALS = sorted(signal.valid_signals())

INTERRUPTS = Interrupts()


def _theirs(handler: Any) -> Any:
    """The handler that one of ours stands for."""
    while isinstance(handler, _PutOff):
        handler = handler.handle
    return handler


def _callers_frame() -> FrameType | None:
    """Where the code that has called us stands: a debugger or a profiler wants to know."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith("ptm_accel."):
        frame = frame.f_back
    return frame


def _is_at_an_end(frame: FrameType | None) -> bool:
    """Whether nothing should be raised: a section begins or ends, which it would leave behind, or a lock.

    Or something is collected of which weak references are told, where Python loses what is raised.
    """
    if frame is None:
        return False
    if frame.f_code not in _ENDS:
        told = frame.f_globals.get("__name__") in ("weakref", "_weakrefset")
        return told and frame.f_code.co_name in ("remove", "_remove")
    # Where a lock is waited for, nothing has been taken.
    return frame.f_code is not BookLock.__enter__.__code__ or frame.f_locals["self"].mine


_set, _get = signal.signal, signal.getsignal


@wraps(_set)
def _signal(signalnum: Any, handler: Any) -> Any:
    return INTERRUPTS.met(signalnum, handler)


@wraps(_get)
def _getsignal(signalnum: Any) -> Any:
    return _theirs(_get(signalnum))


_SHOWN: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "signal": (_signal, _set),
    "getsignal": (_getsignal, _get),
}
"""What is shown of handlers while there is a model on pages, and what comes with Python."""


def in_section(function: Callable[_Given, _Back]) -> Callable[_Given, _Back]:
    """Decorates what is called from outside and is one section as a whole."""

    @wraps(function)
    def inside(*args: _Given.args, **kwargs: _Given.kwargs) -> _Back:
        with INTERRUPTS:
            return function(*args, **kwargs)

    return inside


class BookLock:
    """A re-entrant lock; whoever holds it is in a section, at whose end nothing is called (`leave_quietly`).

    It is taken thousands of times a step. So what `INTERRUPTS` does at a section's ends stands here once more.
    """

    __slots__ = ("_acquire", "_lock", "_release")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._acquire, self._release = self._lock.acquire, self._lock.release

    @property
    def mine(self) -> bool:
        """Whether this thread has it."""
        owned: bool = self._lock._is_owned()  # type: ignore[attr-defined]
        return owned

    def __enter__(self) -> None:
        if get_ident() != _MAIN:
            self._acquire()
            return
        INTERRUPTS._sections += 1
        try:
            self._acquire()
        except BaseException:
            # A second Ctrl-C, while another thread had it.
            INTERRUPTS._sections -= 1
            raise

    def __exit__(self, *exc: object) -> None:
        self._release()
        if get_ident() == _MAIN:
            # What was put off is called at the end of a section around: nobody holds yet what was taken here.
            INTERRUPTS._sections -= 1
            if INTERRUPTS._pressed and not INTERRUPTS._sections:
                INTERRUPTS.send_again()


_ENDS = frozenset(
    function.__code__
    for function in (
        Interrupts.__enter__,
        Interrupts.__exit__,
        Interrupts.begin,
        Interrupts.end,
        Interrupts.leave_quietly,
        Interrupts.watched.__wrapped__,  # type: ignore[attr-defined]
        Interrupts.uninterrupted.__wrapped__,  # type: ignore[attr-defined]
        Interrupts.waiting.__wrapped__,  # type: ignore[attr-defined]
        BookLock.__enter__,
        BookLock.__exit__,
    )
)
"""Where sections begin and end."""
