"""A pipeline over processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.prepared import run_ranks

CHILD = Path(__file__).with_name("pipeline_child.py")


@pytest.mark.parametrize("count", [2, 3])
def test_processes_train_as_the_whole_model_does(count: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = run_ranks(CHILD, tmp_path, "train", count=count, cwd=tmp_path, env=environment)
    for rank, run in enumerate(runs):
        assert run.code == 0, run.err[-4000:]
        assert run.out == f"stage {rank} agrees over 20 steps\n"


@pytest.mark.parametrize("what", ["raise", "kill"])
def test_a_rank_that_fails_ends_the_others(what: str, tmp_path: Path) -> None:
    """The launcher ends those who wait for it, and says which one it was."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(CHILD)]
    begin = time.monotonic()
    done = subprocess.run(
        [*command, str(tmp_path), what],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert time.monotonic() - begin < 60
    assert done.returncode != 0
    assert ("rank 1: something is wrong" if what == "raise" else "SIGKILL") in done.stderr
    ours = [process for process in psutil.process_iter(["cmdline"]) if str(tmp_path) in (process.info["cmdline"] or [])]
    assert not ours
