"""The claim of the project, as a table: a Trainer on pages gives the numbers of the plain Trainer, bit for bit.

Every row also shows that pages did move where the budget is below the need.
Some rows of each model are chosen so that each model meets every value of every column and all models together meet
nearly every pair of values. By default the first two of each are run (the first one of models that others are like),
with `-m wide` the others of these, and all the rest with `-m matrix`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.plain_loop import Record, assert_same
from tests.tiers import BUDGETS, MEMORIES, budget_bytes, needs, on_pages
from tests.trainer_runs import Job, run_trainer
from tests.zoo import ALIKE, ENTRIES

pytestmark = pytest.mark.usefixtures("all_cores")
_ROWS_PER_MODEL = 4
_BY_DEFAULT = 2


@dataclass(frozen=True)
class Row:
    model: str
    accumulation: int
    clip: float
    checkpointing: str
    budget: str
    memory: str

    @property
    def job(self) -> Job:
        return Job(accumulation=self.accumulation, clip=self.clip, checkpointing=self.checkpointing)

    def __str__(self) -> str:
        clipping = "clip" if self.clip else "no-clip"
        return f"{self.model}-x{self.accumulation}-{clipping}-{self.checkpointing}-{self.budget}-{self.memory}"


def rows_of(model: str) -> list[Row]:
    """All rows of one model."""
    columns = ((1, 3), (0.1, 0.0), ENTRIES[model].checkpointing, BUDGETS, MEMORIES)
    return [Row(model, *values) for values in itertools.product(*columns)]


def _values(row: Row) -> frozenset[tuple[str, object]]:
    return frozenset((f.name, getattr(row, f.name)) for f in fields(row) if f.name != "model")


def _pairs(row: Row) -> set[tuple[object, object]]:
    return set(itertools.combinations(sorted(_values(row), key=str), 2))


def pruned() -> list[Row]:
    """Some rows of each model; each next one is the one that brings the most that is new."""
    chosen: list[Row] = []
    seen_pairs: set[tuple[object, object]] = set()
    for model in ENTRIES:
        seen: set[tuple[str, object]] = set()
        for _ in range(_ROWS_PER_MODEL):
            fresh = [r for r in rows_of(model) if r not in chosen]
            best = max(fresh, key=lambda r: (len(_values(r) - seen), len(_pairs(r) - seen_pairs)))
            chosen.append(best)
            seen |= _values(best)
            seen_pairs |= _pairs(best)
    return chosen


PRUNED = pruned()
REST = [row for model in ENTRIES for row in rows_of(model) if row not in PRUNED]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@cache
def plain_run(model: str, job: Job, folder: Path) -> Record:
    """The plain Trainer's numbers."""
    entry = ENTRIES[model]
    return run_trainer(entry.build(), entry, job, folder, paged=False)


@cache
def sizes(model: str, memory: str, folder: Path) -> tuple[int, int]:
    """Floor and need of a model."""
    return needs(ENTRIES[model].build(), folder, memory)


def check(row: Row, folder: Path, tmp_path: Path) -> None:
    plain = plain_run(row.model, row.job, folder)
    entry = ENTRIES[row.model]
    floor, need = sizes(row.model, row.memory, folder)
    model = entry.build()
    budget = budget_bytes(row.budget, floor, need)
    with on_pages(model, row.memory, budget, tmp_path) as engine:
        paged = run_trainer(model, entry, row.job, tmp_path, paged=True)
        evictions, peak = engine.pool.stats.evictions, engine.pool.budget.peak_bytes
        on_disk = engine.memory.disk.bytes_written if engine.memory.disk is not None else 0
    assert_same(paged, plain)
    assert (evictions > 0) == (row.budget != "fits")
    assert on_disk > 0 or row.budget == "fits" or row.memory == "mock+host"
    assert peak <= budget


def _of_each_model() -> Iterator[Any]:
    for number, row in enumerate(PRUNED):
        count = 1 if row.model in ALIKE else _BY_DEFAULT
        yield pytest.param(row, marks=[pytest.mark.wide] if number % _ROWS_PER_MODEL >= count else [], id=str(row))


@pytest.mark.parametrize("row", list(_of_each_model()))
def test_same_numbers(row: Row, scratch: Path, tmp_path: Path) -> None:
    check(row, scratch, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("row", REST, ids=str)
def test_same_numbers_everywhere(row: Row, scratch: Path, tmp_path: Path) -> None:
    check(row, scratch, tmp_path)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("model", ENTRIES)
def test_the_plain_trainer_has_the_same_numbers_twice(model: str, scratch: Path) -> None:
    """Else its numbers would show nothing."""
    entry, job = ENTRIES[model], Job(accumulation=3)
    assert_same(plain_run(model, job, scratch), run_trainer(entry.build(), entry, job, scratch, paged=False))


@pytest.mark.parametrize("model", ENTRIES)
def test_the_pruned_rows_meet_every_value(model: str) -> None:
    met = frozenset().union(*(_values(row) for row in PRUNED if row.model == model))
    assert met == frozenset().union(*(_values(row) for row in rows_of(model)))


def test_the_pruned_rows_meet_nearly_every_pair() -> None:
    met = set().union(*(_pairs(row) for row in PRUNED))
    every = set().union(*(_pairs(row) for model in ENTRIES for row in rows_of(model)))
    assert len(met) >= 0.95 * len(every), every - met


def test_the_thirty_percent_are_above_the_floor(scratch: Path) -> None:
    """Else two of the three budgets would be the same."""
    for model in ENTRIES:
        floor, need = sizes(model, "mock+host", scratch)
        assert floor < 0.3 * need, model
