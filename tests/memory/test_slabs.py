"""Slabs: runs that never overlap, in pieces that are got as they are needed and given back as they become empty."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.memory.slabs import Run, Slabs

GRANULE = 16


class Source:
    """Memory that slabs are made of; it has so many bytes."""

    def __init__(self, nbytes: int = 1 << 40) -> None:
        self.left = nbytes
        self.asked: list[int] = []
        self.given_up: list[Any] = []
        self.releases = 0

    def acquire(self, nbytes: int) -> list[int] | None:
        self.asked.append(nbytes)
        if nbytes > self.left:
            return None
        self.left -= nbytes
        return [nbytes]

    def give_up(self, memory: list[int]) -> None:
        self.left += memory[0]
        self.given_up.append(memory)

    def released(self) -> None:
        self.releases += 1


def make(source: Source, limit: int | None = None) -> Slabs:
    slabs = Slabs(source.acquire, source.give_up, source.released, GRANULE)
    if limit is not None:
        slabs.confine(limit)
    return slabs


def taken(slabs: Slabs, nbytes: int) -> Run:
    run = slabs.take(nbytes)
    assert run is not None
    return run


def test_each_slab_is_as_large_as_those_before_it_and_a_run_that_is_larger_has_one_of_its_own() -> None:
    source = Source()
    slabs = make(source)
    first = 32 * GRANULE
    for _ in range(4):
        taken(slabs, first)
    assert source.asked == [first, first, 2 * first]
    large = taken(slabs, 10 * first + 1)
    assert (large.slab.nbytes, large.offset) == (10 * first + GRANULE, 0)


def test_a_run_goes_where_the_least_is_left_over() -> None:
    slabs = make(Source())
    first = 32 * GRANULE
    runs = [taken(slabs, nbytes) for nbytes in (first // 2, 40, first // 2 - 40)]
    slabs.give(runs[0])
    slabs.give(runs[1])
    assert taken(slabs, first // 2 + 40).slab is runs[0].slab, "the two are one gap"
    other = taken(slabs, 24)
    assert other.slab is not runs[0].slab


def test_the_limit_holds_and_empty_slabs_go_for_one_that_does_not_fit_into_them() -> None:
    source = Source()
    slabs = make(source, limit=100 * GRANULE)
    small = taken(slabs, 32 * GRANULE)
    assert slabs.take(80 * GRANULE) is None
    assert slabs.held_bytes == 32 * GRANULE
    slabs.give(small)
    assert taken(slabs, 80 * GRANULE).offset == 0
    assert slabs.held_bytes == 80 * GRANULE
    assert source.releases == 1


def test_the_rest_of_a_limit_need_not_be_a_multiple_of_the_granule() -> None:
    slabs = make(Source(), limit=GRANULE + 3)
    assert taken(slabs, GRANULE + 1).slab.nbytes == GRANULE + 3


def test_a_source_that_has_less_gives_what_the_run_needs() -> None:
    source = Source(nbytes=40 * GRANULE)
    slabs = make(source)
    taken(slabs, 32 * GRANULE)
    taken(slabs, 5 * GRANULE)
    assert source.asked[1:] == [32 * GRANULE, 5 * GRANULE]
    assert slabs.take(4 * GRANULE) is None


def test_what_is_too_much_leaves_as_it_becomes_empty_the_emptiest_first() -> None:
    source = Source()
    slabs = make(source)
    first = 32 * GRANULE
    runs = [taken(slabs, first) for _ in range(2)] + [taken(slabs, 2 * first)]
    slabs.give(runs[1])
    slabs.confine(3 * first)
    assert slabs.held_bytes == 3 * first, "the empty one goes at once"
    assert not slabs.draining
    slabs.confine(2 * first)
    assert slabs.draining
    assert [slab.draining for slab in slabs.usable()] == [False]
    assert slabs.take(GRANULE) is None
    slabs.give(runs[0])
    assert (slabs.held_bytes, slabs.draining) == (2 * first, False)
    slabs.confine(0)
    slabs.confine(2 * first)
    assert not slabs.draining, "it is wanted again"


def test_beyond_the_limit_as_a_last_resort() -> None:
    source = Source(nbytes=64 * GRANULE)
    slabs = make(source, limit=32 * GRANULE)
    taken(slabs, 32 * GRANULE)
    assert slabs.take(10) is None
    run = slabs.stretch(10)
    assert run is not None
    assert run.slab.nbytes == GRANULE
    slabs.confine(0)
    assert slabs.stretch(5) is not None, "out of one that drains"
    assert slabs.stretch(64 * GRANULE) is None


def test_closed_slabs_go_with_their_last_runs() -> None:
    source = Source(nbytes=100 * GRANULE)
    slabs = make(source)
    run = taken(slabs, 10)
    slabs.close()
    assert slabs.take(10) is None
    slabs.give(run)
    assert (slabs.held_bytes, source.left) == (0, 100 * GRANULE)


def test_integrity_names_what_does_not_add_up() -> None:
    slabs = make(Source())
    taken(slabs, 10)
    slabs.held_bytes -= 1
    with pytest.raises(AssertionError, match=r"slabs are 512 B, counted 511 B"):
        slabs.check_integrity()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_runs_never_overlap_and_what_is_held_stays_within_what_was_allowed(data: st.DataObject) -> None:
    source = Source(nbytes=data.draw(st.integers(20, 400)) * GRANULE)
    total, limit = source.left, data.draw(st.integers(0, 300)) * GRANULE
    slabs, live, most = make(source, limit), list[Run](), limit
    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(["take", "take", "give", "confine", "stretch"]))
        if action == "give" and live:
            slabs.give(live.pop(data.draw(st.integers(0, len(live) - 1))))
        elif action == "confine":
            limit = data.draw(st.integers(0, 300)) * GRANULE
            slabs.confine(limit)
        elif action in ("take", "stretch"):
            nbytes = data.draw(st.integers(1, 60 * GRANULE))
            run = slabs.take(nbytes) if action == "take" else slabs.stretch(nbytes)
            live += [] if run is None else [run]
            # Only a last resort goes beyond it; and what has been lowered falls as runs come back.
            most = max(most, slabs.held_bytes) if action == "stretch" else most
        most = max(most, limit)
        assert slabs.held_bytes <= most
        assert slabs.held_bytes + source.left == total
        assert slabs.used_bytes == sum(run.nbytes for run in live)
        slabs.check_integrity()
        spans = sorted((id(run.slab), run.offset, run.offset + run.nbytes) for run in live)
        for (slab, _, end), (other, start, _) in itertools.pairwise(spans):
            assert slab != other or end <= start
        for run in live:
            assert run.offset + run.nbytes <= run.slab.nbytes
    for run in live:
        slabs.give(run)
    slabs.confine(0)
    assert source.left == total


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_cheapest_range_is_that_of_a_search_over_all(data: st.DataObject) -> None:
    size = 32 * GRANULE
    slabs = make(Source(), limit=size)
    live: list[Run] = []
    while (run := slabs.take(data.draw(st.integers(1, 8 * GRANULE)))) is not None:
        live.append(run)
    for run in [run for run in live if data.draw(st.booleans())]:
        live.remove(run)
        slabs.give(run)
    movable = [run for run in live if data.draw(st.booleans())]
    nbytes = data.draw(st.integers(1, size))
    costs = list[int]()
    for start in range(size - nbytes + 1):
        inside = [run for run in live if run.offset < start + nbytes and start < run.offset + run.nbytes]
        if set(inside) <= set(movable):
            costs.append(sum(run.nbytes for run in inside))
    found = slabs.cheapest_range(nbytes, movable)
    assert (None if found is None else sum(run.nbytes for run in found)) == min(costs, default=None)
    for run in found or []:
        slabs.give(run)
    assert found is None or slabs.take(nbytes) is not None
