"""Several processes, each with the whole model on pages, beside DDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

CHILD = Path(__file__).with_name("replicas_child.py")


def test_two_processes_train_as_ddp_does_to_the_bit(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(CHILD)]
    done = subprocess.run(
        [*command, str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert sorted(done.stdout.splitlines()) == [f"process {rank} agrees over 4 steps" for rank in (0, 1)]
