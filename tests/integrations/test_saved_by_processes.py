"""What the Trainer and accelerate save where layers are cut over processes: the files of the stock ones."""

from __future__ import annotations

import os
from pathlib import Path

from tests.prepared import run_ranks

CHILD = Path(__file__).with_name("saved_child.py")


def test_two_processes_save_what_the_stock_trainer_and_accelerate_do(tmp_path: Path) -> None:
    runs = run_ranks(CHILD, tmp_path, count=2, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for run in runs:
        assert run.code == 0, "\n".join(f"{each.err[-4000:]}" for each in runs)
        assert run.out.splitlines()[-1] == "saved alike"
