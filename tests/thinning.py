"""Some cases of a test by default, the others with `-m wide`.

`@pytest.mark.thinned(n)` keeps `n` cases of a parametrised test that meet every value of every parameter, if so few
can, and as many pairs of values as they can; the others are marked `wide`. It says that what the others would show is
shown by these in part and by other tests, and is worth its time before a release, not at every change.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence

import pytest

_SPREAD = 0.6180339887498949
"""Multiples of the golden ratio, modulo 1, come everywhere early."""


def kept(cases: Sequence[Mapping[str, int]], count: int) -> set[int]:
    """Which cases stay.

    Args:
        cases: of each a number that stands for its value, by parameter.
        count: how many stay at the most.

    Returns:
        the indices of those that stay.
    """
    left = sorted(range(len(cases)), key=lambda index: (index * _SPREAD) % 1)
    chosen: set[int] = set()
    values: set[tuple[str, int]] = set()
    pairs: set[tuple[tuple[str, int], ...]] = set()

    def news(index: int) -> tuple[int, int]:
        case = sorted(cases[index].items())
        return len(set(case) - values), len(set(itertools.combinations(case, 2)) - pairs)

    while left and len(chosen) < count:
        best = max(left, key=news)
        left.remove(best)
        chosen.add(best)
        values |= set(cases[best].items())
        pairs |= set(itertools.combinations(sorted(cases[best].items()), 2))
    return chosen


def thin(items: Sequence[pytest.Item]) -> None:
    """Marks what is not kept of the tests that were collected."""
    tests: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("thinned") is not None:
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        mark = cases[0].get_closest_marker("thinned")
        assert mark is not None
        # The same value is the same object in all cases.
        values = [{name: id(value) for name, value in case.callspec.params.items()} for case in cases]
        stay = kept(values, *mark.args)
        for index, case in enumerate(cases):
            if index not in stay:
                case.add_marker(pytest.mark.wide)
