"""Sharded blocks under loops that do more than to train: same numbers, in one order on all ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.prepared import run_ranks

CHILD = Path(__file__).with_name("sharded_loops_child.py")


@pytest.mark.parametrize(
    "loops",
    [
        "gradients_looked_at unfrozen parts_called taken_off resized kinds_of_numbers",
        pytest.param("averages_and_evaluations two_forwards skipped_steps", marks=pytest.mark.process),
    ],
)
def test_two_ranks_do_as_code_with_whole_models_does(loops: str, tmp_path: Path) -> None:
    names = loops.split()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for run in run_ranks(CHILD, tmp_path, *names, count=2, cwd=tmp_path, env=environment):
        assert run.code == 0, f"{run.out}{run.err[-4000:]}"
        assert run.out.split() == names
