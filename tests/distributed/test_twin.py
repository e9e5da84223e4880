"""The oracle of sharded blocks, beside DDP: it shows something only where it is right itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.prepared import run_ranks

CHILD = Path(__file__).with_name("twin_child.py")


@pytest.mark.parametrize(("ranks", "compared"), [(2, 6), pytest.param(3, 1, marks=pytest.mark.process)])
def test_the_twin_averages_as_ddp_does(ranks: int, compared: int, tmp_path: Path) -> None:
    """To the bit with two ranks; with three, where both add in other orders, but for rounding."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for rank, run in enumerate(run_ranks(CHILD, count=ranks, cwd=tmp_path, env=environment)):
        assert run.code == 0, run.err[-4000:]
        assert run.out == f"rank {rank}: {compared} agree\n"
