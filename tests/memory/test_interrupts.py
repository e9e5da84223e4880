"""Ctrl-C inside sections: passed on at their end, or in a wait, and never lost."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from ptm_accel.memory.copies import Chained
from ptm_accel.memory.interrupts import INTERRUPTS, BookLock


def press() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    assert signal.getsignal(signal.SIGINT) is before
    assert (INTERRUPTS._sections, INTERRUPTS._waits, INTERRUPTS._wholes) == (0, 0, 0)
    assert not INTERRUPTS._pressed


def sections(done: list[str], lock: BookLock, presses: int = 1) -> None:
    with INTERRUPTS.watched(), INTERRUPTS:
        with lock:
            for _ in range(presses):
                press()
            done.append("inner")
        done.append("outer")
    done.append("after")


def test_it_is_passed_on_at_the_end_of_the_outermost_section() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        sections(done, BookLock())
    assert done == ["inner", "outer"]


def test_a_second_one_is_passed_on_at_once_and_the_lock_is_free() -> None:
    done: list[str] = []
    lock = BookLock()
    with pytest.raises(KeyboardInterrupt):
        sections(done, lock, presses=2)
    assert done == []
    free = threading.Thread(target=lambda: lock.__enter__())
    free.start()
    free.join(30)
    assert not free.is_alive()


def test_outside_sections_and_unwatched_it_is_as_ever() -> None:
    done: list[str] = []

    def pressed() -> None:
        press()
        done.append("after")

    with pytest.raises(KeyboardInterrupt), INTERRUPTS.watched():
        pressed()
    with pytest.raises(KeyboardInterrupt), INTERRUPTS:
        pressed()
    assert not done


def test_a_wait_is_broken_off_but_in_what_must_be_whole() -> None:
    done: list[str] = []

    def wait() -> None:
        with INTERRUPTS.waiting():
            press()
            INTERRUPTS.look()
            done.append("waited")

    def look_without_waiting() -> None:
        press()
        INTERRUPTS.look()
        done.append("nobody waits here")

    with INTERRUPTS.watched():
        with pytest.raises(KeyboardInterrupt), INTERRUPTS:
            wait()
        assert done == []
        with pytest.raises(KeyboardInterrupt), INTERRUPTS.uninterrupted():
            wait()
        assert done == ["waited"]
        with pytest.raises(KeyboardInterrupt), INTERRUPTS:
            look_without_waiting()
        assert done == ["waited", "nobody waits here"]


def test_a_handler_of_the_users_own_is_called_once() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: called.append(number))
    try:
        sections([], BookLock())
        assert called == [signal.SIGINT]
        with INTERRUPTS.watched():
            # Whoever sets another meanwhile keeps it.
            mine = signal.getsignal(signal.SIGINT)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert mine == INTERRUPTS._note
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_are_not_concerned() -> None:
    done: list[str] = []

    def work() -> None:
        with INTERRUPTS.uninterrupted(), INTERRUPTS.waiting(), BookLock():
            done.append(f"{INTERRUPTS._sections} {INTERRUPTS._waits}")

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == ["0 0"]


class _Broken:
    """A transfer whose first wait is broken off."""

    def __init__(self) -> None:
        self.waits = 0

    def done(self) -> bool:
        return self.waits > 1

    def wait(self) -> None:
        self.waits += 1
        if self.waits == 1:
            raise KeyboardInterrupt

    order = wait


def test_a_chained_copy_whose_wait_is_broken_off_can_be_waited_for_again() -> None:
    before, started = _Broken(), []

    def start() -> _Broken:
        started.append(True)
        copy = _Broken()
        copy.waits = 1
        return copy

    chained = Chained([before], start)
    with pytest.raises(KeyboardInterrupt):
        chained.wait()
    assert not started
    chained.wait()
    assert started
    assert chained.done()


@pytest.mark.parametrize("ask", ["done", "wait", "order"])
def test_a_chained_copy_that_a_handler_asks_for_while_it_is_waited_for_starts_once(ask: str) -> None:
    class Asks(_Broken):
        def wait(self) -> None:
            self.waits += 1
            if self.waits == 1:
                getattr(chained, ask)()

        order = wait

    def start() -> _Broken:
        started.append(True)
        copy = _Broken()
        copy.waits = 1
        return copy

    before, started = Asks(), []
    chained = Chained([before], start)
    chained.wait()
    assert started == [True]
    assert chained.done()
