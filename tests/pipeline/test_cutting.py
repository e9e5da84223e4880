"""How batches are cut by what has been measured."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ptm_accel.pipeline.cost import Cost
from ptm_accel.pipeline.cutting import Cutting
from ptm_accel.pipeline.stage import Stage
from tests.pipeline.models import VOCABULARY, build


@pytest.fixture
def cutting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Of two stages, of which this process has one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    found: Any = Cutting(Stage(build("llama"), 0, 1), 32, torch.float64, None)
    yield found
    dist.destroy_process_group()


def test_nothing_is_cut_before_it_is_measured(cutting: Any) -> None:
    assert cutting.parts(torch.zeros(3, 48)) == [(3, (48,))]


def test_short_batches_tell_nothing(cutting: Any) -> None:
    assert not cutting.measure(torch.zeros(2, 40, dtype=torch.int64))
    state = torch.get_rng_state()
    assert cutting.measure(torch.randint(0, VOCABULARY, (2, 96), generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.get_rng_state(), state), "dropout draws what it would have drawn"
    assert sorted(cutting._costs) == [1, 2]


@pytest.mark.parametrize("length", [1024, 1023, 1000, 700, 64, 1, 2000])
def test_slices_are_of_the_batch(length: int, cutting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda group=None: 4)
    cost = Cost((64, 128, 256, 512, 1024), (0.05, 0.09, 0.17, 0.33, 0.65), (0.0, 0.0, 0.0, 0.0))
    cutting._costs, cutting._longest = {1: [cost], 4: [cost]}, 1024
    parts = cutting.parts(torch.zeros(4, length))
    assert sum(rows for rows, _ in parts) == 4
    assert all(sum(slices) == length and min(slices) > 0 for _, slices in parts)
    assert len(parts) + len(parts[0][1]) > 2 or length < 128
    found = len(cutting._known)
    assert cutting.parts(torch.zeros(4, length)) == parts
    assert len(cutting._known) == found


def test_no_slice_is_faster_than_the_shortest_that_was_measured() -> None:
    """Below it a line through two measurements may be negative."""
    cost = Cost((512, 1024), (0.1, 1.2), (0.0, 0.0, 0.0, 0.0))
    assert cost.seconds(32, 0) == cost.seconds(512, 0) == 0.1
    assert cost.seconds(768, 0) == pytest.approx(0.65)
    assert cost.seconds(2048, 0) == pytest.approx(3.4)
