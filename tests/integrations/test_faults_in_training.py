"""A disk that fails in the middle of training: a named error, nothing hangs, nothing is lost or left behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from ptm_accel.integrations.transformers import Trainer

from ptm_accel.engine import engine_of
from ptm_accel.errors import DiskError, LostStepError
from ptm_accel.memory.scratch import Io

STEPS = 6


class _Arms(transformers.TrainerCallback):
    """Lets the disk fail from the fourth step on."""

    def __init__(self, armed: threading.Event) -> None:
        self.armed = armed

    def on_step_begin(self, args: Any, state: transformers.TrainerState, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            self.armed.set()


def failing_io(armed: threading.Event, call: str, code: int) -> Callable[[], Io]:
    def failing(real: Callable[..., int]) -> Callable[..., int]:
        def run(*args: Any) -> int:
            if armed.is_set():
                raise OSError(code, os.strerror(code))
            return real(*args)

        return run

    return lambda: Io(**{call: failing(getattr(os, call))})


def build(tiny: ModuleType, cls: Any, folder: Path, **extra: Any) -> Any:
    arguments = tiny.arguments(folder, max_steps=STEPS, save_strategy="steps", save_steps=2)
    return cls(model=tiny.model(), args=arguments, train_dataset=tiny.data(), **extra)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(
    ("call", "code"), [("preadv", errno.EIO), ("pwritev", errno.EIO), ("pwritev", errno.ENOSPC)], ids=str
)
@pytest.mark.timeout(280)
def test_a_disk_that_fails_ends_training_with_a_name_and_the_last_checkpoint_resumes(
    call: str, code: int, tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch, run = tmp_path / "scratch", tmp_path / "run"
    scratch.mkdir()
    plain = build(tiny, transformers.Trainer, tmp_path / "plain")
    plain.train()

    armed = threading.Event()
    monkeypatch.setattr("ptm_accel.memory.disk.Io", failing_io(armed, call, code))
    options = tiny.budget("tight", scratch)
    threads = set(threading.enumerate())
    trainer = build(tiny, Trainer, run, ptm_config=options, callbacks=[_Arms(armed)])
    with pytest.raises(DiskError, match=os.strerror(code)) as caught:
        trainer.train()
    assert caught.value.errno == code
    assert str(scratch) in str(caught.value)
    assert [path.name for path in run.iterdir()] == ["checkpoint-2"]

    armed.clear()
    engine = engine_of(trainer.model)
    assert engine is not None
    engine.close()
    assert not set(threading.enumerate()) - threads, "an I/O thread was left"
    assert list(scratch.iterdir()) == [], "a scratch file was left"

    again = build(tiny, Trainer, run, ptm_config=options)
    again.train(resume_from_checkpoint=True)
    assert tiny.digest(again.model) == tiny.digest(plain.model)
    later = engine_of(again.model)
    assert later is not None
    later.check_integrity()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("only_model", [True, False])
def test_a_checkpoint_after_a_lost_update_is_refused(only_model: bool, tiny: ModuleType, tmp_path: Path) -> None:
    """As by whoever catches what `train` raises, and saves what there is."""
    plain = build(tiny, transformers.Trainer, tmp_path / "plain")
    plain.train()
    trainer = build(tiny, Trainer, tmp_path / "run", ptm_config=tiny.budget("tight", tmp_path))

    class Fails(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: transformers.TrainerState, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                patch.setattr("ptm_accel.optim.compute_updates.ComputeUpdates.carry_out", fails)

    def fails(*args: Any) -> None:
        raise DiskError("the disk is gone")

    trainer.add_callback(Fails)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DiskError, match="the disk is gone"):
        trainer.train()
    trainer.args.save_only_model = only_model
    with pytest.raises(LostStepError, match=r"the update of step \d failed, and \d+ parameters were not updated"):
        trainer._save_checkpoint(trainer.model, None)
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-2"]
    trainer.args.save_only_model = False
    trainer.remove_callback(Fails)
    trainer.train(resume_from_checkpoint=True)
    assert tiny.digest(trainer.model) == tiny.digest(plain.model)
