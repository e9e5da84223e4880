"""What one rank does alone, or what happens to it, ends on all ranks with an error, and nothing hangs."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.prepared import Run, run_ranks

CHILD = Path(__file__).with_name("sharded_faults_child.py")
KILLED = "killed_at"
_LONGEST_S = 60


def start(fault: str, shard: str, folder: Path) -> list[Run]:
    """How two processes end in which that goes wrong."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return run_ranks(CHILD, folder, fault, shard, count=2, cwd=folder, env=environment)


@pytest.mark.parametrize(
    ("fault", "shard", "shown"),
    [
        pytest.param("models", "none", "models_differ", marks=pytest.mark.process),
        ("alone", "full", "reads_alone"),
        pytest.param("alone-after-steps", "full", "reads_alone_after_steps", marks=pytest.mark.process),
        pytest.param("nobody-else", "full", "nobody_else_reads", marks=pytest.mark.process),
        ("unlike", "full", "models_differ dtypes_differ options_differ"),
        pytest.param("budget", "full", "budget_refused", marks=pytest.mark.process),
    ],
)
def test_all_ranks_have_the_error(fault: str, shard: str, shown: str, tmp_path: Path) -> None:
    for run in start(fault, shard, tmp_path):
        assert run.code == 0, f"{run.out}{run.err[-4000:]}"
        assert run.out.split() == shown.split()


@pytest.mark.parametrize(
    ("where", "shard"),
    [
        pytest.param("backward", "none", marks=pytest.mark.process),
        ("backward", "full"),
        pytest.param("forward", "full", marks=pytest.mark.process),
        pytest.param("step", "full", marks=pytest.mark.process),
    ],
)
def test_a_killed_rank_ends_the_others(where: str, shard: str, tmp_path: Path) -> None:
    left, killed = start(f"killed-{where}", shard, tmp_path)
    took_s = time.time() - float(Path(tmp_path, KILLED).read_text())
    assert killed.code == -signal.SIGKILL, killed.err[-4000:]
    assert left.code != 0, left.out
    assert took_s < _LONGEST_S, f"{took_s:.1f} s: {left.err[-4000:]}"
    assert "trained on alone" not in left.out
