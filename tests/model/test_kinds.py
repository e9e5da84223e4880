"""Plans hold for kinds of passes, whatever the lengths of batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ptm_accel.model.kinds import Kind, Place, StepSoFar
from tests import faults
from tests.faults import llama, paged
from tests.tiers import PAGE


def places(step: StepSoFar, count: int) -> list[Place | None]:
    found = [step.next(True, True, b"\1").place for _ in range(count)]
    step.end()
    return found


def test_the_place_of_a_micro_batch_is_told_or_counted() -> None:
    step = StepSoFar()
    assert places(step, 3) == [Place.FIRST, Place.LATER, Place.LATER]
    assert step.next(True, False, b"\1") == Kind(True, False, b"\1"), "without gradients it has none"
    for follow, expected in (
        ([False], [Place.ONLY]),
        ([True, True, False], [Place.FIRST, Place.MIDDLE, Place.LAST]),
        ([False, False], [Place.ONLY, Place.LAST]),
    ):
        step.more_follow = iter(follow).__next__
        assert places(step, len(follow)) == expected


def test_graphs_whose_backward_has_not_begun_make_a_kind() -> None:
    step, trained = StepSoFar(), b"\1"
    opened = [step.next(True, True, trained).open_graphs for _ in range(4)]
    assert opened == [0, 1, 2, 2]
    assert step.next(True, False, trained).open_graphs == 2
    step.backward = True
    assert step.next(True, True, trained).open_graphs == 0


@pytest.mark.parametrize("rows", [[4, 8, 6], [8, 4, 6]])
def test_a_plan_is_for_the_largest_batch_so_far(rows: list[int], tmp_path: Path) -> None:
    model = llama(64, layers=8)
    with paged(model, 2 << 20, PAGE, tmp_path) as (engine, _), torch.no_grad():
        for number, count in enumerate([4, 4, *rows]):
            ids = torch.randint(0, faults.VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(number))
            model(input_ids=ids)
        engine.run_ahead.end()
        (route,) = engine.run_ahead.routes.values()
        assert route.elements == 64
        assert route.has_plan
