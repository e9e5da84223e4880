"""A save in which a process ends, hangs or meets a full disk leaves the checkpoint before, or the new one, whole."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.distributed.saving_faults_child import RESUMED, TIMEOUT_S, Asked
from tests.prepared import Run, run_ranks

CHILD = Path(__file__).with_name("saving_faults_child.py")
_SLACK_S = 60
KILLS = [(index % 2, (index + random.Random(index).random()) / 20) for index in range(20)]
"""The process that is killed, and how far the save is then."""


def start(folder: Path, asked: Asked, count: int = 2) -> list[Run]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return run_ranks(CHILD, folder, json.dumps(asdict(asked)), count=count, cwd=folder, env=environment)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both checkpoints of a run in which nothing goes wrong."""
    folder = tmp_path_factory.mktemp("whole")
    for run in start(folder, Asked()):
        assert run.code == 0, run.err[-4000:]
    return folder / "run"


def content(folder: Path) -> dict[str, bytes]:
    """Weights and optimizer state."""
    found = {path.name: path.read_bytes() for name in ("*.safetensors", "optimizer.json") for path in folder.glob(name)}
    assert len(found) == 3
    return found


def check_resumed(folder: Path, whole: Path, count: int) -> int:
    """Processes resume from the newest whole checkpoint, and have what was saved; returns its step."""
    for run in start(folder, Asked("resume"), count):
        assert run.code == 0, run.err[-4000:]
    again = folder / RESUMED
    step = int((again / "step").read_text())
    assert content(again) == content(whole / f"checkpoint-{step}")
    assert {path.name for path in (folder / "run").iterdir()} == {f"checkpoint-{n}" for n in range(1, step + 1)}
    shutil.rmtree(again)
    return step


@pytest.mark.parametrize(
    ("rank", "at"),
    [
        kill if number in (5, 12) else pytest.param(*kill, marks=pytest.mark.process)
        for number, kill in enumerate(KILLS)
    ],
)
def test_a_killed_process(rank: int, at: float, whole: Path, tmp_path: Path) -> None:
    runs = start(tmp_path, Asked("kill", rank, at))
    assert runs[rank].code == -signal.SIGKILL
    assert runs[1 - rank].code != 0 or (tmp_path / "run" / "checkpoint-2").exists()
    steps = {check_resumed(tmp_path, whole, count) for count in (2, 1)}
    assert len(steps) == 1
    assert steps < {1, 2}


@pytest.mark.process
@pytest.mark.parametrize("at", [0.3, 0.6])
def test_a_process_that_ends_as_if_all_were_well(at: float, whole: Path, tmp_path: Path) -> None:
    runs = start(tmp_path, Asked("exit", 1, at))
    assert runs[1].code == 0
    assert runs[0].code != 0
    check_resumed(tmp_path, whole, 2)


@pytest.mark.parametrize(("rank", "at"), [(1, 0.5), pytest.param(0, 0.5, marks=pytest.mark.process)])
def test_a_process_that_hangs(rank: int, at: float, whole: Path, tmp_path: Path) -> None:
    begun = time.monotonic()
    runs = start(tmp_path, Asked("hang", rank, at))
    assert time.monotonic() - begun < 3 * TIMEOUT_S + _SLACK_S
    assert runs[1 - rank].code == 1
    said = runs[1 - rank].err.rsplit("UnsupportedError", 1)[1]
    assert "has written its part of a checkpoint" in said
    assert re.search(rf"[Rr]anks? {rank} |rank {rank}[.]", said), said
    check_resumed(tmp_path, whole, 2)


@pytest.mark.parametrize(("rank", "at"), [(1, 0.4), pytest.param(0, 0.7, marks=pytest.mark.process)])
def test_a_disk_that_is_full_for_one_process(rank: int, at: float, whole: Path, tmp_path: Path) -> None:
    runs = start(tmp_path, Asked("full", rank, at))
    for run in runs:
        assert run.code == 1
        assert "DiskError" in run.err
        assert "No space left on device" in run.err
    assert f"rank {rank}: " in runs[1 - rank].err
    assert check_resumed(tmp_path, whole, 2) == 1
