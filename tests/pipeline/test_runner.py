"""A pipeline over processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.prepared import run_ranks

CHILD = Path(__file__).with_name("pipeline_child.py")


@pytest.mark.process
def test_processes_train_as_the_whole_model_does(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = run_ranks(CHILD, tmp_path, count=3, cwd=tmp_path, env=environment)
    for rank, run in enumerate(runs):
        assert run.code == 0, run.err[-4000:]
        assert run.out == f"stage {rank} agrees over 20 steps\n"
