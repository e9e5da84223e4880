"""`SafePoints`: the first Ctrl-C waits for the next safe point, the second does not."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from ptm_accel.integrations.transformers.interrupts import SafePoints


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    after = signal.signal(signal.SIGINT, before)
    assert after is signal.default_int_handler, "a handler was left"


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def test_the_first_press_is_raised_at_the_next_safe_point(caplog: pytest.LogCaptureFixture) -> None:
    points = SafePoints()
    with points.watched(), caplog.at_level(logging.WARNING):
        points.check()
        press()
        with pytest.raises(KeyboardInterrupt):
            points.check()
    assert [record.message for record in caplog.records] == [
        "Ctrl-C: ends after this step. Press it again to end at once."
    ]
    points.check()


def test_the_second_press_is_raised_at_once() -> None:
    points = SafePoints()
    with points.watched():
        press()
        with pytest.raises(KeyboardInterrupt):
            press()
        points.check()


def test_a_press_that_no_safe_point_follows_is_raised_at_the_end() -> None:
    with pytest.raises(KeyboardInterrupt), SafePoints().watched():
        press()


def test_an_error_is_not_hidden_by_a_press_and_the_next_run_begins_afresh() -> None:
    points = SafePoints()

    def run() -> None:
        with points.watched():
            press()
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        run()
    with points.watched():
        points.check()


def test_only_the_outermost_of_nested_runs_defers() -> None:
    points, other = SafePoints(), SafePoints()
    with points.watched():
        outer = signal.getsignal(signal.SIGINT)
        for nested in (points, other):
            with nested.watched():
                assert signal.getsignal(signal.SIGINT) == outer
            assert signal.getsignal(signal.SIGINT) == outer
        with other.watched():
            press()
            other.check()
        with pytest.raises(KeyboardInterrupt):
            points.check()


def test_a_handler_of_the_users_is_left_alone() -> None:
    called: list[int] = []

    def own(number: int, frame: Any) -> None:
        called.append(number)

    signal.signal(signal.SIGINT, own)
    with SafePoints().watched():
        press()
    assert called == [signal.SIGINT]
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is own

    with SafePoints().watched():
        signal.signal(signal.SIGINT, own)
    assert signal.signal(signal.SIGINT, signal.default_int_handler) is own, "it was set meanwhile"


def test_another_thread_sets_no_handler() -> None:
    seen: list[Any] = []

    def run() -> None:
        with SafePoints().watched():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]
