"""The comparison of two runs of a script sees what it is there to see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.scripts.outcomes import collect, differences

LOG = "12:00 - INFO - epoch 0: {'accuracy': 0.5}\nsomething else\n"


def write(folder: Path, loss: float = 1.25, runtime: float = 3.0, first_weight: float = 1.0) -> Path:
    """A run's output."""
    (folder / "checkpoint-3").mkdir(parents=True)
    history = [{"step": 1, "loss": loss, "train_runtime": runtime, "eval_steps_per_second": 1 / runtime}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    save_file({"w": torch.tensor([first_weight, 2.0])}, folder / "checkpoint-3" / "model.safetensors")
    return folder


def test_equal_runs_agree_and_times_do_not_count(tmp_path: Path) -> None:
    first, second = collect(write(tmp_path / "a"), LOG), collect(write(tmp_path / "b", runtime=4.0), LOG)
    assert differences(first, second) == []
    assert len(first.numbers) == 3
    assert len(first.weights) == 1


@pytest.mark.parametrize(
    ("changed", "log", "expected"),
    [
        ({"loss": 1.2500000000000002}, LOG, "trainer_state.json.0.loss: 1.25 became 1.2500000000000002"),
        ({"loss": float("nan")}, LOG, "trainer_state.json.0.loss: 1.25 became nan"),
        ({"first_weight": 1.0000001}, LOG, "checkpoint-3/model.safetensors: w: differs by up to 1.19e-07"),
        ({"first_weight": -1.0}, LOG, "checkpoint-3/model.safetensors: w: differs by up to 2"),
        ({}, LOG.replace("0.5", "0.25"), "printed line 0: \"epoch 0: {'accuracy': 0.5}\" became"),
        ({}, "", "printed line 0: \"epoch 0: {'accuracy': 0.5}\" became 'absent'"),
    ],
)
def test_one_difference_is_named(tmp_path: Path, changed: dict[str, float], log: str, expected: str) -> None:
    (line,) = differences(collect(write(tmp_path / "a"), LOG), collect(write(tmp_path / "b", **changed), log))
    assert line.startswith(expected)


def test_a_zero_of_the_other_sign_and_a_missing_file_differ(tmp_path: Path) -> None:
    first = write(tmp_path / "a", first_weight=0.0)
    second = write(tmp_path / "b", first_weight=-0.0)
    assert len(differences(collect(first, LOG), collect(second, LOG))) == 1
    (second / "checkpoint-3" / "model.safetensors").unlink()
    (line,) = differences(collect(first, LOG), collect(second, LOG))
    assert line == "checkpoint-3/model.safetensors: w: only in the plain run"
