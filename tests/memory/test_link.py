"""What has been moved over a link, and for how long it was busy."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ptm_accel.memory.device import CopyDirection, LinkMeter, Moved

IN, OUT = CopyDirection


def test_copies_at_the_same_time_count_once() -> None:
    meter = LinkMeter()
    assert meter.read() == Moved(0, 0, 0.0, 0.0)
    meter.add(IN, 100, -3.0, -1.0)
    meter.add(OUT, 10, -2.0, 0.0)
    assert meter.read() == Moved(100, 10, 3.0, 1.0)
    meter.add(IN, 1, 5.0, 5.5)
    meter.add(OUT, 1, 4.0, 6.0)
    assert meter.read() == Moved(101, 11, 5.0, 1.5)


def test_what_has_been_read_is_not_counted_again() -> None:
    meter = LinkMeter()
    meter.add(IN, 1, 0.0, 2.0)
    assert meter.read().busy_s == 2.0
    # It was under way when that was read.
    meter.add(OUT, 1, 1.0, 3.0)
    assert meter.read().busy_s == 3.0
    assert meter.read().busy_s == 3.0


def test_nothing_is_kept_of_many_copies() -> None:
    meter = LinkMeter()
    for number in range(5000):
        meter.add(IN, 2, number, number + 0.5)
    assert len(meter._spans) < 2000
    assert meter.read() == Moved(10_000, 0, 2500.0, 0.0)


@given(st.lists(st.tuples(st.sampled_from(CopyDirection), st.integers(0, 50), st.integers(0, 9)), max_size=40))
def test_it_is_the_time_that_any_of_them_covers(copies: list[tuple[CopyDirection, int, int]]) -> None:
    meter = LinkMeter()
    covered: dict[CopyDirection, set[int]] = {IN: set(), OUT: set()}
    for direction, begin, length in copies:
        meter.add(direction, 1, begin, begin + length)
        covered[direction].update(range(begin, begin + length))
    assert meter.read()[2:] == (len(covered[IN] | covered[OUT]), len(covered[IN] & covered[OUT]))
