"""The dynamic program finds what brute force finds; the simulator has the time of Eq. 5."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.pipeline.scheme import Seconds, best_scheme, pipeline_seconds, times_of
from ptm_accel.pipeline.simulate import Work, simulate


def compositions(total: int, parts: tuple[int, ...] | None = None) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered sum, of given parts."""
    if total == 0:
        yield ()
    for first in range(1, total + 1) if parts is None else [part for part in parts if part <= total]:
        for rest in compositions(total - first, parts):
            yield first, *rest


def brute_force(seconds: Seconds, rows: int, length: int, stages: int) -> float:
    sizes = tuple(sorted({*(1 << power for power in range(8) if 1 << power <= rows), rows}))
    cuts = list(compositions(length))
    least = math.inf
    for batch in compositions(rows, sizes):
        if list(batch) != sorted(batch):
            # The time does not depend on the order.
            continue
        for slices in itertools.product(cuts, repeat=len(batch)):
            parts = list(zip(batch, slices, strict=True))
            least = min(least, pipeline_seconds(times_of(parts, seconds), stages))
    return least


COSTS = st.tuples(*(st.floats(0.01, 3.0) for _ in range(4)), st.integers(1, 6))


def cost(options: tuple[float, float, float, float, int]) -> Seconds:
    fixed, linear, context, product, flat = options

    def seconds(rows: int, tokens: int, before: int) -> float:
        return fixed + linear * max(rows * tokens, flat) + rows * (context * before + product * tokens * before) * 0.1

    return seconds


@settings(max_examples=60, deadline=None)
@given(options=COSTS, length=st.integers(1, 9), stages=st.integers(1, 9))
def test_tokens_are_cut_as_by_brute_force(
    options: tuple[float, float, float, float, int], length: int, stages: int
) -> None:
    scheme = best_scheme(cost(options), rows=1, length=length, stages=stages, grain=1)
    assert scheme.seconds == pytest.approx(brute_force(cost(options), 1, length, stages), rel=1e-12)
    assert sum(scheme.parts[0][1]) == length
    assert scheme.seconds == pipeline_seconds(times_of(scheme.parts, cost(options)), stages)


@settings(max_examples=40, deadline=None)
@given(options=COSTS, rows=st.integers(1, 3), length=st.integers(1, 5), stages=st.integers(1, 9))
def test_rows_and_tokens_are_cut_as_by_brute_force(
    options: tuple[float, float, float, float, int], rows: int, length: int, stages: int
) -> None:
    scheme = best_scheme(cost(options), rows=rows, length=length, stages=stages, grain=1)
    assert scheme.seconds == pytest.approx(brute_force(cost(options), rows, length, stages), rel=1e-12)
    assert sum(size for size, _ in scheme.parts) == rows


def test_known_cuts() -> None:
    """Later tokens see more of the others, so their slices are shorter; one stage is not cut at all."""
    seconds = cost((0.0, 1.0, 0.0, 1.0, 1))
    scheme = best_scheme(seconds, rows=1, length=12, stages=4, grain=1)
    assert list(scheme.parts[0][1]) == sorted(scheme.parts[0][1], reverse=True)
    assert len(scheme.parts[0][1]) > 1
    assert best_scheme(cost((1.0, 1.0, 0.1, 0.1, 1)), rows=1, length=12, stages=1, grain=1).parts == ((1, (12,)),)


def test_what_is_left_of_the_length_is_a_slice_as_well() -> None:
    scheme = best_scheme(cost((0.1, 1.0, 0.1, 0.1, 1)), rows=1, length=21, stages=6, grain=8)
    assert sum(scheme.parts[0][1]) == 21
    assert all(tokens % 8 == 0 for tokens in scheme.parts[0][1][:-1])


def test_a_long_sequence_takes_less_than_a_minute() -> None:
    """2048 tokens in steps of 8, 48 stages; seven seconds where it was written."""
    begin = time.thread_time()
    scheme = best_scheme(cost((0.5, 0.01, 1e-4, 1e-5, 100)), rows=1, length=2048, stages=48)
    assert time.thread_time() - begin < 60
    assert len(scheme.parts[0][1]) > 4


@given(
    times=st.lists(st.floats(0.1, 2.0), min_size=1, max_size=8),
    stages=st.integers(1, 6),
)
def test_the_simulator_has_the_time_of_the_formula(times: list[float], stages: int) -> None:
    """The formula is exact for equal slices, and a lower bound for others; links add their delays."""
    found = simulate([Work(each, 0.0) for each in times], stages)
    assert found <= pipeline_seconds(times, stages) + 1e-9
    equal = [times[0]] * len(times)
    assert simulate([Work(each, 2 * each) for each in equal], stages) == pytest.approx(
        pipeline_seconds([3 * each for each in equal], stages)
    )
    late = simulate([Work(each, each, 0.5) for each in equal], stages)
    assert late == pytest.approx(pipeline_seconds([2 * each for each in equal], stages) + 2 * 0.5 * (stages - 1))
