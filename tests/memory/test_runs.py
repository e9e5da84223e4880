"""The run allocator against a set of taken units."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.memory.runs import RunSpace


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.booleans()), max_size=60))
def test_runs_never_overlap_and_come_back(steps: list[tuple[int, int, bool]]) -> None:
    space = RunSpace(32)
    taken: list[tuple[int, int]] = []
    for length, align, give in steps:
        if give and taken:
            space.give(*taken.pop(length % len(taken)))
        else:
            start = space.take(length, align)
            units = {unit for begin, n in taken for unit in range(begin, begin + n)}
            if start is None:
                fits = (set(range(s, s + length)).isdisjoint(units) for s in range(0, 32 - length + 1, align))
                assert not any(fits)
            else:
                assert start % align == 0
                assert start + length <= 32
                assert units.isdisjoint(range(start, start + length))
                taken.append((start, length))
        assert space.free == 32 - sum(n for _, n in taken)
        space.check_integrity()
    for run in taken:
        space.give(*run)
    assert space.gaps() == [(0, 32)]


def test_a_range_can_be_made_longer() -> None:
    space = RunSpace(0)
    space.extend(4)
    assert (space.take(3), space.tail) == (0, 1)
    space.extend(4)
    assert (space.tail, space.gaps()) == (5, [(3, 5)])
    assert (space.take(5), space.tail) == (3, 0)
    space.give(0, 3)
    assert space.tail == 0
    space.check_integrity()


def test_small_runs_fill_the_gaps_that_large_ones_cannot_use() -> None:
    space = RunSpace(16)
    assert [space.take(1), space.take(4, 4), space.take(1), space.take(4, 4)] == [0, 4, 1, 8]


def test_giving_what_is_free_is_an_error() -> None:
    space = RunSpace(8)
    space.take(4)
    space.give(0, 4)
    with pytest.raises(AssertionError, match=r"run 2\+2 is free already"):
        space.give(2, 2)
    with pytest.raises(AssertionError, match=r"run 6\+4 outside 8"):
        space.give(6, 4)


def test_check_integrity_has_the_numbers() -> None:
    space = RunSpace(8)
    space.free = 7
    with pytest.raises(AssertionError, match="gaps sum to 8, free is 7, of 8"):
        space.check_integrity()
