"""The Trainer over several processes that each have a part of the model, beside the stock one."""

from __future__ import annotations

import os
from pathlib import Path

from tests.prepared import run_ranks

CHILD = Path(__file__).with_name("sharded_child.py")


def test_two_processes_train_as_the_stock_trainer_does(tmp_path: Path) -> None:
    runs = run_ranks(CHILD, tmp_path, count=2, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    for run in runs:
        assert run.code == 0, run.err[-4000:]
        assert run.out.splitlines()[-1] == "agree"
