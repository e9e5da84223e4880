"""Several processes, each with the whole model on pages, beside DDP."""

from __future__ import annotations

import os
from pathlib import Path

from tests.prepared import run_ranks

CHILD = Path(__file__).with_name("replicas_child.py")


def test_two_processes_train_as_ddp_does_to_the_bit(tmp_path: Path) -> None:
    runs = run_ranks(CHILD, tmp_path, count=2, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for rank, run in enumerate(runs):
        assert run.code == 0, run.err[-4000:]
        assert run.out == f"process {rank} agrees over 4 steps\n"
