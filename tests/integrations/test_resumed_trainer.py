"""Resuming over several processes: from one process's checkpoints, with the stock Trainer and accelerate beside."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from ptm_accel.integrations.accelerate.resuming import tell_of_processes

from tests.prepared import run_prepared, run_ranks

CHILD = Path(__file__).with_name("resumed_child.py")


def do(does: str, count: int, folder: Path) -> None:
    """So many processes do that."""
    command, environment = (CHILD, folder, *does.split()), {**os.environ, "OMP_NUM_THREADS": "1"}
    if count == 1:
        runs = [run_prepared(*command, cwd=folder, env=environment)]
    else:
        runs = run_ranks(*command, count=count, cwd=folder, env=environment)
    for run in runs:
        assert run.code == 0, "\n".join(each.err[-4000:] for each in runs)
        assert run.out.splitlines()[-1] == does.split()[-1]


def check(does: str, count: int, folder: Path) -> None:
    """So many processes do that, with checkpoints that one has made."""
    do("make", 1, folder)
    do(does, count, folder)


def test_two_processes_go_on_from_one(tmp_path: Path) -> None:
    check("trainers accelerators refusals", 2, tmp_path)


@pytest.mark.process
def test_what_else_two_processes_resume(tmp_path: Path) -> None:
    check("as_many replicas states_refused", 2, tmp_path)


@pytest.mark.process
def test_three_processes_go_on_from_one(tmp_path: Path) -> None:
    check("trainers replicas accelerators refusals states_refused", 3, tmp_path)


@pytest.mark.process
def test_what_two_processes_have_saved(tmp_path: Path) -> None:
    do("save", 2, tmp_path)
    for count in (2, 3, 1):
        do("saved_by_two", count, tmp_path)


@pytest.mark.parametrize(
    ("names", "now", "said"),
    [
        ("rng_state.pth", 1, None),
        ("rng_state.pth", 2, "1 process, and 2 train now: a step has 2 x 4 = 8 samples instead of 1 x 4 = 4"),
        ("rng_state_0.pth rng_state_1.pth", 2, None),
        (
            "rng_state_0.pth rng_state_1.pth",
            3,
            "2 processes, and 3 train now: a step has 3 x 4 = 12 samples instead of 2 x 4 = 8",
        ),
        (
            "random_states_0.pkl random_states_1.pkl",
            1,
            "2 processes, and 1 trains now: a step has 1 x 4 = 4 samples instead of 2 x 4 = 8",
        ),
        ("rng_state.pth rng_state_0.pth rng_state_1.pth", 2, None),
        ("rng_state_0.pth rng_state_1.pth rng_state.pth", 1, None),
        ("model.safetensors", 2, None),
    ],
)
def test_what_is_said_of_processes(
    names: str, now: int, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of files from several saves, those of the last one count."""
    for second, name in enumerate(names.split()):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (second, second))
    tell_of_processes(tmp_path, now, 4)
    remedy = "To keep the old number, set the batch size or the accumulation."
    assert caplog.messages == ([] if said is None else [f"{tmp_path} was saved by {said}. {remedy}"])
