"""Which cases the default run keeps of tests that have many."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from tests.thinning import kept


def product(**sizes: int) -> list[dict[str, int]]:
    return [
        dict(zip(sizes, values, strict=True)) for values in itertools.product(*(range(size) for size in sizes.values()))
    ]


@pytest.mark.parametrize("sizes", [{"a": 2, "b": 2}, {"a": 2, "b": 3, "c": 5}, {"a": 7, "b": 2}])
def test_every_value_is_met_by_as_few_as_can(sizes: dict[str, int]) -> None:
    cases = product(**sizes)
    stay = kept(cases, max(sizes.values()))
    assert len(stay) == max(sizes.values())
    for name, size in sizes.items():
        assert {cases[index][name] for index in stay} == set(range(size))


def test_then_pairs_of_values() -> None:
    cases = product(a=3, b=3, c=3)
    stay = kept(cases, 12)
    pairs = {pair for index in stay for pair in itertools.combinations(sorted(cases[index].items()), 2)}
    assert len(stay) == 12
    assert len(pairs) == 27


def test_cases_of_one_parameter_are_spread() -> None:
    stay = sorted(kept([{"a": index} for index in range(40)], 10))
    assert len(stay) == 10
    assert max(after - before for before, after in itertools.pairwise([-1, *stay, 40])) <= 7


@pytest.mark.parametrize("count", [4, 9])
def test_all_stay_where_there_are_no_more(count: int) -> None:
    assert kept(product(a=2, b=2), count) == {0, 1, 2, 3}


@pytest.mark.thinned(2)
@pytest.mark.parametrize("one", range(2))
@pytest.mark.parametrize("other", range(2))
def test_others_are_marked(one: int, other: int, request: pytest.FixtureRequest) -> None:
    name = request.node.nodeid.partition("[")[0]
    alike = [item for item in request.session.items if item.nodeid.partition("[")[0] == name]
    marked = Counter(item.get_closest_marker("wide") is not None for item in alike)
    assert marked[False] <= 2
    assert marked[True] <= 2
    # Chosen among all four, and not where only some of them are run by name.
    if len(alike) == 4:
        assert (request.node.get_closest_marker("wide") is None) == (one == other)
