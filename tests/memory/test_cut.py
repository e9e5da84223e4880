"""Ranges of a parameter over processes: in order, without gaps, at multiples of 64."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptm_accel.memory.cut import Cut, can_be_cut

# Around multiples of 64, where something may be off by one, as well as anywhere.
NUMELS = st.one_of(
    st.integers(0, 1 << 40),
    st.builds(lambda blocks, odd: max(0, 64 * blocks + odd), st.integers(0, 40), st.integers(-1, 1)),
)
COUNTS = st.one_of(st.integers(1, 9), st.integers(1, 300))


def ranges(numel: int, count: int) -> list[Cut]:
    return [Cut(numel, count, rank) for rank in range(count)]


@pytest.mark.parametrize(
    ("numel", "lengths"),
    [
        (0, [0, 0, 0]),
        (1, [1, 0, 0]),
        (64, [64, 0, 0]),
        (65, [64, 1, 0]),
        (129, [64, 64, 1]),
        (192, [64, 64, 64]),
        (193, [128, 65, 0]),
        (256, [128, 128, 0]),
        (257, [128, 128, 1]),
        (1000, [384, 384, 232]),
    ],
)
def test_lengths(numel: int, lengths: list[int]) -> None:
    assert [cut.length for cut in ranges(numel, 3)] == lengths
    assert can_be_cut(numel, 3) is (0 not in lengths)


@given(NUMELS, COUNTS)
def test_ranges_are_the_whole_in_order(numel: int, count: int) -> None:
    cuts = ranges(numel, count)
    assert (cuts[0].start, cuts[-1].stop) == (0, numel)
    assert all(before.stop == after.start for before, after in pairwise(cuts))
    assert sum(cut.length for cut in cuts) == numel
    assert all(0 <= cut.length == cut.stop - cut.start <= cut.span for cut in cuts)


@given(NUMELS, COUNTS)
def test_ranges_begin_at_multiples_of_64(numel: int, count: int) -> None:
    for cut in ranges(numel, count):
        assert cut.span % 64 == 0
        # One that has no elements begins where the parameter ends.
        assert cut.start % 64 == 0 if cut.length else cut.start == numel


@given(NUMELS, COUNTS)
def test_ranges_are_as_long_as_one_another_but_for_the_end(numel: int, count: int) -> None:
    cuts = ranges(numel, count)
    assert len({(cut.span, cut.padded) for cut in cuts}) == 1
    span = cuts[0].span
    # Not 64 elements more room than it takes for all.
    assert cuts[0].padded == count * span >= numel
    assert not span or count * (span - 64) < numel
    full, rest = divmod(numel, span) if span else (0, 0)
    assert [cut.length for cut in cuts] == [*[span] * full, rest, *[0] * count][:count]


@given(NUMELS, COUNTS)
def test_a_parameter_can_be_cut_if_every_rank_has_some_of_it(numel: int, count: int) -> None:
    assert can_be_cut(numel, count) is all(cut.length > 0 for cut in ranges(numel, count))


@given(NUMELS)
def test_one_rank_has_all(numel: int) -> None:
    cut = Cut(numel, 1, 0)
    assert (cut.start, cut.stop, cut.length) == (0, numel, numel)
    assert can_be_cut(numel, 1) is (numel > 0)


def test_a_cut_is_a_value() -> None:
    assert Cut(1000, 2, 1) == Cut(1000, 2, 1) != Cut(1000, 2, 0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Cut(1000, 2, 1).rank = 0  # type: ignore[misc]


@pytest.mark.parametrize(("numel", "count", "rank"), [(-1, 1, 0), (1, 0, 0), (1, 2, 2), (1, 2, -1)])
def test_what_is_no_cut(numel: int, count: int, rank: int) -> None:
    with pytest.raises(AssertionError):
        Cut(numel, count, rank)
