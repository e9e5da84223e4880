"""Ctrl-C and other signals inside sections: passed on at their end, or in a wait, and never lost."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from ptm_accel.errors import PagedModelError
from ptm_accel.memory.copies import Chained
from ptm_accel.memory.fork_gate import FORK_GATE
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
        assert callable(mine)
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


# ---- handlers of other signals ---------------------------------------------------------------------------------


@pytest.fixture
def alarms() -> Iterator[list[str]]:
    """What a handler of SIGALRM has been called for, `signal.SIGALRM` being put off like any other."""
    called: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        while frame is not None and frame.f_code.co_filename != __file__:
            frame = frame.f_back
        called.append("" if frame is None else frame.f_code.co_name)

    before = signal.signal(signal.SIGALRM, handler)
    yield called
    signal.signal(signal.SIGALRM, before)


def ring(times: int = 1) -> None:
    for _ in range(times):
        signal.raise_signal(signal.SIGALRM)


def test_all_signals_are_put_off_and_each_is_handled_once_where_it_can_be(alarms: list[str]) -> None:
    order: list[str] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: order.append(f"SIGUSR1 after {len(alarms)}"))
    try:
        with INTERRUPTS.watched():
            with INTERRUPTS:
                ring(3)
                signal.raise_signal(signal.SIGUSR1)
                with BookLock():
                    pass
                assert alarms == []
            assert alarms == ["test_all_signals_are_put_off_and_each_is_handled_once_where_it_can_be"]
            assert order == ["SIGUSR1 after 1"]
            ring()
            assert alarms[1:] == ["ring"], "outside of sections it is called at once"
        assert signal.getsignal(signal.SIGALRM).__name__ == "handler"  # type: ignore[union-attr]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_raises_does_not_lose_the_others(alarms: list[str]) -> None:
    def both() -> None:
        with INTERRUPTS:
            press()
            ring()

    with INTERRUPTS.watched():
        with pytest.raises(KeyboardInterrupt):
            both()
        assert _comes(alarms), "although no section ends any more"
        time.sleep(0.02)
        assert len(alarms) == 1


def test_handlers_that_are_set_while_it_lasts_are_met_and_may_go_on_to_those_before(alarms: list[str]) -> None:
    with INTERRUPTS.watched():
        inner = signal.getsignal(signal.SIGALRM)
        assert callable(inner)

        def theirs(number: int, frame: Any) -> None:
            """As data loaders do: on to whoever was there before."""
            alarms.append("theirs")
            inner(number, frame)

        signal.signal(signal.SIGALRM, theirs)
        INTERRUPTS.meet_handlers()
        with INTERRUPTS:
            ring()
            assert alarms == []
        assert len(alarms) == 2
        assert alarms[0] == "theirs"
    assert signal.getsignal(signal.SIGALRM) is theirs
    ring()
    assert len(alarms) == 4, "theirs, and the one before"


def test_it_lasts_until_the_last_has_ended_in_whatever_thread(alarms: list[str]) -> None:
    INTERRUPTS.begin()
    INTERRUPTS.begin()
    INTERRUPTS.end()
    with INTERRUPTS:
        ring()
        assert alarms == []
    ending = threading.Thread(target=INTERRUPTS.end)
    ending.start()
    ending.join()
    with INTERRUPTS.watched():
        pass
    assert signal.getsignal(signal.SIGALRM).__name__ == "handler"  # type: ignore[union-attr]


def test_a_wait_without_end_calls_what_may_end_it(alarms: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []

    def look(number: int, frame: Any) -> None:
        try:
            INTERRUPTS.refuse_looks()
        except PagedModelError as error:
            refused.append(str(error))

    signal.signal(signal.SIGALRM, look)
    monkeypatch.setattr("ptm_accel.memory.interrupts.PATIENCE_S", 0.05)
    with INTERRUPTS.watched(), INTERRUPTS.uninterrupted():
        ring()
        INTERRUPTS.look(waited_s=0.1)
        assert refused == [], "it has just come"
        time.sleep(0.06)
        INTERRUPTS.look(waited_s=0.01)
        assert refused == [], "one of many short waits"
        INTERRUPTS.look(waited_s=0.1)
        assert [text[:34] for text in refused] == ["a handler of a signal looks at a m"]
        INTERRUPTS.refuse_looks()
        INTERRUPTS.look(waited_s=0.1)
    assert len(refused) == 1


def test_somebody_elses_ctrl_c_that_may_go_on_does_not_break_off_a_wait() -> None:
    pressed: list[str] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append("seen"))
    try:
        with INTERRUPTS.watched():
            with INTERRUPTS, INTERRUPTS.waiting():
                press()
                INTERRUPTS.look()
                assert pressed == []
            assert pressed == ["seen"]
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_while_a_process_forks_comes_after_it_and_in_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python loses what is raised before a fork."""
    monkeypatch.setattr(FORK_GATE, "holders", [_Pressing()])
    codes: list[int] = []

    def forks() -> None:
        child = os.fork()
        if child == 0:
            # Neither raises nor returns into pytest.
            os._exit(1 if INTERRUPTS._pressed else 0)
        codes.append(os.waitpid(child, 0)[1])

    def waits() -> None:
        if os.fork() == 0:
            os._exit(0)
        # Outside of all sections it comes soon.
        time.sleep(60)

    with INTERRUPTS.watched():
        with pytest.raises(KeyboardInterrupt), INTERRUPTS:
            forks()
        assert codes == [0]
        assert INTERRUPTS._sections == 0
        with pytest.raises(KeyboardInterrupt):
            waits()
        os.wait()


class _Pressing:
    """Lanes in which somebody presses Ctrl-C while they are held still."""

    def __init__(self, presses: int = 1) -> None:
        self._presses = presses

    def hold_still(self) -> None:
        for _ in range(self._presses):
            press()

    def go_on(self) -> None:
        pass


def test_what_waits_keeps_no_frame_and_none_of_its_tensors(alarms: list[str]) -> None:
    class Held:
        pass

    def inner() -> weakref.ref[Held]:
        held = Held()
        ring()
        return weakref.ref(held)

    with INTERRUPTS.watched(), INTERRUPTS:
        held = inner()
        assert held() is None
        assert alarms == []


def test_what_a_lock_of_the_books_ends_with_is_called_by_a_section_around(alarms: list[str]) -> None:
    """Where it ends, a pin may be taken that nobody holds yet."""
    with INTERRUPTS.watched():
        with INTERRUPTS:
            with BookLock():
                ring()
            assert alarms == []
        assert len(alarms) == 1


def test_a_second_ctrl_c_while_another_thread_has_the_lock(alarms: list[str]) -> None:
    lock, held, done = BookLock(), threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            assert done.wait(60)

    def wait() -> None:
        with lock:
            pass

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    presses = [threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT)) for delay in (0.1, 0.2)]
    try:
        with INTERRUPTS.watched():
            for timer in presses:
                timer.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            assert INTERRUPTS._sections == 0
            ring()
            assert len(alarms) == 1
    finally:
        done.set()
        thread.join()


def test_a_second_ctrl_c_while_a_process_forks_leaves_no_section(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is lost, as Python loses what is raised before a fork."""
    monkeypatch.setattr(FORK_GATE, "holders", [_Pressing(2)])
    monkeypatch.setattr("sys.unraisablehook", lambda unraisable: None)
    with INTERRUPTS.watched():
        child = os.fork()
        if child == 0:
            os._exit(1 if INTERRUPTS._sections else 0)
        assert os.waitpid(child, 0)[1] == 0
        assert INTERRUPTS._sections == 0
    taken: list[bool] = []

    def take() -> None:
        taken.append(FORK_GATE._lock.acquire(timeout=30))
        FORK_GATE._lock.release()

    other = threading.Thread(target=take)
    other.start()
    other.join()
    assert taken == [True]


FORKING = """
import os, signal, sys, threading
from ptm_accel.memory import diskio
from ptm_accel.memory.interrupts import INTERRUPTS

by_main, alarms, codes = sys.argv[1] == "main", [], []

def handler(number, frame):
    alarms.append(number)

def fork():
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGALRM)
        at_once = len(alarms) == 1 and signal.getsignal(signal.SIGALRM) is handler
        left = INTERRUPTS._sections - by_main or INTERRUPTS._waits or INTERRUPTS._pressed
        os._exit(0 if at_once and not left else 1)
    codes.append(os.waitpid(child, 0)[1])

signal.signal(signal.SIGALRM, handler)
with INTERRUPTS.watched(), INTERRUPTS:
    if by_main:
        fork()
    else:
        thread = threading.Thread(target=fork)
        thread.start()
        thread.join()
print(codes, alarms)
"""


@pytest.mark.parametrize("forks", ["main", "another"])
def test_a_fork_has_the_handlers_that_were_there(forks: str) -> None:
    """Also one that another thread makes while the main one is in a section, of which nobody is left to end it."""
    # In a process of its own: not every library that others have loaded bears a fork by another thread.
    done = subprocess.run(
        [sys.executable, "-c", FORKING, forks], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "[0] []\n", done.stderr


def test_a_whole_section_that_another_thread_ends() -> None:
    with INTERRUPTS.watched():
        whole = INTERRUPTS.uninterrupted()
        whole.__enter__()
        ending = threading.Thread(target=whole.__exit__, args=(None, None, None))
        ending.start()
        ending.join()
    assert (INTERRUPTS._sections, INTERRUPTS._wholes) == (0, 0)


def test_what_stands_in_for_a_handler_is_not_shown(alarms: list[str]) -> None:
    stock = signal.signal, signal.getsignal
    before = signal.getsignal(signal.SIGALRM)

    def another(number: int, frame: FrameType | None) -> None:
        pass

    with INTERRUPTS.watched():
        set_early = stock[0]
        assert signal.getsignal(signal.SIGALRM) is before
        assert signal.signal(signal.SIGALRM, another) is before
        assert signal.getsignal(signal.SIGALRM) is another
        assert stock[1](signal.SIGALRM) is not another, "put off all the same"
        with pytest.raises(TypeError, match="signal handler must be"):
            signal.signal(signal.SIGALRM, "nothing")  # type: ignore[arg-type]
        with INTERRUPTS.watched():
            pass
        ours = set_early(signal.SIGALRM, another)
        assert signal.signal(signal.SIGALRM, ours) is another
        assert signal.signal(signal.SIGALRM, before) is another
    assert (signal.signal, signal.getsignal) == stock
    assert signal.getsignal(signal.SIGALRM) is before


def test_asyncio_puts_its_own_handler_back() -> None:
    """It asks whether the handler is still its own."""

    async def begins() -> None:
        INTERRUPTS.begin()

    try:
        asyncio.run(begins())
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        INTERRUPTS.end()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_handlers_see_where_the_users_code_is() -> None:
    seen: list[str] = []

    def handler(number: int, frame: FrameType | None) -> None:
        seen.append("" if frame is None else frame.f_code.co_name)

    def computes() -> None:
        ring()

    def works() -> None:
        with INTERRUPTS:
            ring()

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with INTERRUPTS.watched():
            computes()
            works()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert seen == ["ring", "works"]


def test_a_second_ctrl_c_does_not_lose_the_first_of_somebody_who_counts() -> None:
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        with INTERRUPTS.watched(), INTERRUPTS:
            press()
            assert pressed == []
            press()
            assert len(pressed) == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_signals_without_a_name_are_put_off(alarms: list[str]) -> None:
    number = signal.SIGRTMIN + 3
    came: list[int] = []
    before = signal.signal(number, lambda *_: came.append(INTERRUPTS._sections))
    try:
        with INTERRUPTS.watched(), INTERRUPTS:
            signal.raise_signal(number)
        assert came == [0]
    finally:
        signal.signal(number, before)


def _comes(found: list[Any]) -> bool:
    """Whether something is called soon, although no section ends any more."""
    late = time.monotonic() + 30
    while not found and time.monotonic() < late:
        time.sleep(0.001)
    return bool(found)


@pytest.mark.parametrize("how", ["lock", "fork"])
def test_what_comes_where_nothing_can_be_called_is_called_soon_all_the_same(how: str, alarms: list[str]) -> None:
    with INTERRUPTS.watched():
        if how == "lock":
            with BookLock():
                ring()
                assert alarms == []
        else:
            FORK_GATE.close()
            ring()
            FORK_GATE.open()
        assert _comes(alarms)
        assert INTERRUPTS._sections == 0


def test_what_comes_while_weak_references_are_told_comes_after_it(alarms: list[str]) -> None:
    """Python loses what is raised there, in its own code."""
    told: Any = weakref.WeakKeyDictionary()
    there: Any = SimpleNamespace(f_code=told._remove.__code__, f_globals=told._remove.__globals__)
    stock = signal.getsignal
    with INTERRUPTS.watched():
        stand_in: Any = stock(signal.SIGALRM)
        stand_in(signal.SIGALRM, there)
        assert alarms == []
        assert _comes(alarms)


def test_nothing_is_put_off_for_ever(alarms: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where every try comes to where nothing can be called, or somebody waits there for what does not come."""
    monkeypatch.setattr("ptm_accel.memory.interrupts._is_at_an_end", lambda frame: True)
    monkeypatch.setattr("ptm_accel.memory.interrupts.PATIENCE_S", 0.05)
    with INTERRUPTS.watched():
        ring()
        assert alarms == []
        assert _comes(alarms)
        time.sleep(0.1)
        assert len(alarms) == 1


def test_one_signal_is_one_call_however_often_it_was_sent_again() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: came.append(number))
    try:
        with INTERRUPTS.watched():
            with INTERRUPTS.quietly():
                signal.raise_signal(signal.SIGUSR1)
            until = time.monotonic() + 0.3
            while time.monotonic() < until:
                with INTERRUPTS.quietly():
                    time.sleep(0.0005)
            assert _comes(came)
            time.sleep(0.2)
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_without_a_thread_to_send_it_again_it_waits_for_the_next_section(
    alarms: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    with INTERRUPTS.watched():
        with monkeypatch.context() as patch:
            patch.setattr("_thread.start_new_thread", none)
            with INTERRUPTS.quietly():
                ring()
        assert alarms == []
        with INTERRUPTS:
            pass
        assert len(alarms) == 1


def test_what_was_ended_in_another_thread_is_put_back_with_the_next_signal(alarms: list[str]) -> None:
    stock = signal.signal
    INTERRUPTS.begin()
    assert signal.signal is not stock
    ending = threading.Thread(target=INTERRUPTS.end)
    ending.start()
    ending.join()
    ring()
    assert len(alarms) == 1
    assert signal.signal is stock
    assert signal.getsignal(signal.SIGALRM).__name__ == "handler"  # type: ignore[union-attr]


def _lock_many(lock: BookLock) -> None:
    with INTERRUPTS:
        for _ in range(100_000):
            with lock:
                pass


def _many_sections(lock: BookLock) -> None:
    with INTERRUPTS:
        for _ in range(100_000):
            with INTERRUPTS:
                pass


def _many_whole_sections(lock: BookLock) -> None:
    for _ in range(500):
        with INTERRUPTS.uninterrupted():
            for _ in range(10):
                with INTERRUPTS:
                    pass


@pytest.fixture(name="quick_turns")
def _quick_turns() -> Iterator[None]:
    """The one thread may be anywhere when the other presses."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize("work", [_lock_many, _many_sections, _many_whole_sections])
@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_leaves_no_section_behind_wherever_it_comes(
    work: Callable[[BookLock], None], times: int, quick_turns: None
) -> None:
    chance = random.Random(0)
    lock = BookLock()
    armed = False
    main = threading.main_thread().ident
    assert main is not None

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise KeyboardInterrupt

    def presses(waits_s: float, between_s: float) -> None:
        time.sleep(waits_s)
        for _ in range(times):
            signal.pthread_kill(main, signal.SIGINT)
            until = time.perf_counter() + between_s
            while time.perf_counter() < until:
                pass

    def is_free(found: list[bool]) -> None:
        found.append(lock._acquire(timeout=30))
        lock._release()

    before = signal.signal(signal.SIGINT, handler)
    broken_off = 0
    try:
        with INTERRUPTS.watched():
            for _ in range(20):
                presser = threading.Thread(target=presses, args=(chance.uniform(0, 5e-4), chance.uniform(0, 3e-4)))
                presser.start()
                try:
                    armed = True
                    work(lock)
                    armed = False
                except KeyboardInterrupt:
                    armed = False
                    broken_off += 1
                presser.join()
                with INTERRUPTS:
                    pass
                left = INTERRUPTS._sections, INTERRUPTS._waits, INTERRUPTS._wholes, INTERRUPTS._watchers
                assert left == (0, 0, 0, 1)
                found: list[bool] = []
                asking = threading.Thread(target=is_free, args=(found,))
                asking.start()
                asking.join()
                assert found == [True]
    finally:
        armed = False
        signal.signal(signal.SIGINT, before)
    assert broken_off > 5
