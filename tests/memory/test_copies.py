"""Transfers made of others."""

from __future__ import annotations

import pytest

from ptm_accel.memory.copies import Chained, joined, settle


class Step:
    """A transfer that ends when it is told to, or when it is waited for."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.ended = False
        self.asked: list[str] = []

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.asked.append("wait")
        self.ended = True
        if self.error is not None:
            raise self.error

    def order(self) -> None:
        self.asked.append("order")
        if self.error is not None:
            raise self.error


def test_settle_waits_for_all_and_returns_the_first_error() -> None:
    steps = [Step(), Step(OSError("one")), Step(OSError("two")), Step()]
    assert str(settle(steps)) == "one"
    assert all(step.ended for step in steps)
    assert settle([Step()]) is None


def test_joined_ends_with_the_last_part() -> None:
    parts = [Step(), Step()]
    whole = joined(parts)
    parts[0].ended = True
    assert not whole.done()
    parts[1].ended = True
    assert whole.done()
    whole.order()
    whole.wait()
    assert [part.asked for part in parts] == [["order", "wait"]] * 2
    assert joined(parts[:1]) is parts[0]


def test_joined_waits_for_all_parts_even_if_one_fails() -> None:
    parts = [Step(OSError("first")), Step()]
    for _ in range(2):
        with pytest.raises(OSError, match="first"):
            joined(parts).wait()
    assert parts[1].ended


def test_joined_orders_all_parts_even_if_one_fails() -> None:
    parts = [Step(OSError("first")), Step(OSError("second")), Step()]
    with pytest.raises(OSError, match="first"):
        joined(parts).order()
    assert [part.asked for part in parts] == [["order"]] * 3


def test_chained_starts_once_and_only_after_what_comes_before() -> None:
    before, copy = Step(), Step()
    starts = []
    chained = Chained([before], lambda: (starts.append(before.ended), copy)[1])
    assert not chained.done()
    assert not starts
    before.ended = True
    assert not chained.done()
    assert starts == [True]
    copy.ended = True
    assert chained.done()
    chained.order()
    chained.wait()
    assert starts == [True]
    assert copy.asked == ["order", "wait"]


@pytest.mark.parametrize("ask", ["wait", "order"])
def test_chained_waits_for_what_comes_before(ask: str) -> None:
    before, copy = Step(), Step()
    getattr(Chained([before], lambda: copy), ask)()
    assert before.asked == ["wait"]
    assert copy.asked == [ask]


def test_an_error_before_is_that_of_the_chained_and_nothing_is_started() -> None:
    before = Step(OSError("read failed"))
    chained = Chained([before], lambda: pytest.fail("started"))
    before.ended = True
    assert chained.done()
    for ask in (chained.wait, chained.order, chained.wait):
        with pytest.raises(OSError, match="read failed"):
            ask()


def test_an_error_at_the_start_is_kept() -> None:
    def start() -> Step:
        raise OSError("closed")

    chained = Chained([], start)
    assert chained.done()
    for _ in range(2):
        with pytest.raises(OSError, match="closed"):
            chained.wait()
