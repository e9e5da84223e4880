"""What ranks need and keep, beside what was estimated for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.prepared import run_ranks

CHILD = Path(__file__).with_name("estimated_child.py")


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.process)])
def test_ranks_need_and_keep_what_was_estimated(ranks: int, tmp_path: Path) -> None:
    runs = run_ranks(CHILD, tmp_path, count=ranks, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert not any(run.code for run in runs), "\n".join(f"{run.out}{run.err[-4000:]}" for run in runs)
    assert all(run.out == "3 agree\n" for run in runs)
