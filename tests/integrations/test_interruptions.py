"""Disks that are slow, hang, fail or are full, Ctrl-C and SIGTERM, in the middle of a step.

All of it through the Trainer: the numbers are those of the plain one or there is an error with a name, nothing hangs,
and the last checkpoint resumes bit for bit.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import Trainer

from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import DiskError
from tests.integrations.faulty_disk import FaultyDisk, FromStep, call_at
from tests.prepared import run_prepared

STEPS = 6
CHILD = Path(__file__).with_name("interrupted_child.py")
PLACES = [("forward", "preadv"), ("update", "pwritev"), ("backward", "preadv")]

pytestmark = pytest.mark.timeout(280)


class _Keeps(transformers.TrainerCallback):
    """Keeps the weights after each step."""

    def __init__(self, tiny: ModuleType) -> None:
        self.tiny = tiny
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append(self.tiny.weights(model))


def build(tiny: ModuleType, cls: Any, folder: Path, callback: Any = None, **extra: Any) -> Any:
    arguments = tiny.arguments(folder, max_steps=STEPS, save_strategy="steps", save_steps=2)
    callbacks = [] if callback is None else [callback]
    return cls(model=tiny.model(), args=arguments, train_dataset=tiny.data(), callbacks=callbacks, **extra)


@pytest.fixture(scope="module")
def plain(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plain Trainer's weights, at the beginning and after each step, and its log."""
    keeps = _Keeps(tiny)
    trainer = build(tiny, transformers.Trainer, tmp_path_factory.mktemp("plain"), keeps)
    first = tiny.weights(trainer.model)
    trainer.train()
    return {"history": _lines(tiny.history(trainer)), "weights": [first, *keeps.weights]}


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "scratch").mkdir()
    # Larger pages than in other tests, so that a step makes about a hundred system calls; parameters do not all stay.
    return {"host_memory": "1MiB", "page_size": 32768, "disk": str(tmp_path / "scratch")}


def _lines(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in history if "loss" in line]


def _engine(trainer: Any) -> Engine:
    engine = engine_of(trainer.model)
    assert engine is not None
    return engine


def _assert_as_plain(tiny: ModuleType, trainer: Any, plain: dict[str, Any]) -> None:
    assert _lines(tiny.history(trainer)) == plain["history"]
    assert tiny.same(tiny.weights(trainer.model), plain["weights"][STEPS])


def _assert_last_checkpoint_resumes(
    tiny: ModuleType, plain: dict[str, Any], options: dict[str, Any], run: Path
) -> None:
    # The place of a fault may be first come to after the step that ends with the second checkpoint.
    assert {path.name for path in run.iterdir()} in ({"checkpoint-2"}, {"checkpoint-2", "checkpoint-4"})
    assert list(Path(options["disk"]).iterdir()) == [], "a scratch file was left"
    again = build(tiny, Trainer, run, ptm_config=options)
    again.train(resume_from_checkpoint=True)
    _assert_as_plain(tiny, again, plain)


# ---- slow, and hanging for a while -----------------------------------------------------------------------------


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("hangs", "delay_s"), [(False, 0.003), (True, 0.0)], ids=["slow", "hangs"])
def test_a_disk_that_is_slow_or_hangs_for_a_while_changes_no_number(
    hangs: bool,
    delay_s: float,
    tiny: ModuleType,
    plain: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk("preadv", "pwritev", delay_s=delay_s, hangs=hangs)
    disk.install(monkeypatch)
    trainer = build(tiny, Trainer, tmp_path / "run", FromStep(3, disk.armed.set), ptm_config=options)
    trainer.train()
    assert disk.met.is_set()
    assert disk.gave_up == 2 * hangs
    assert _engine(trainer).pool.stats.hits > 0, "nothing was planned"
    _assert_as_plain(tiny, trainer, plain)


# ---- Ctrl-C ----------------------------------------------------------------------------------------------------


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("place", "call"), PLACES)
def test_ctrl_c_ends_training_after_the_step(
    place: str,
    call: str,
    tiny: ModuleType,
    plain: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Pressed while the disk hangs; the disk is waited for, and the Trainer is of use afterwards."""
    disk = FaultyDisk(call, hangs=True)
    disk.hangs_s = 0.5
    disk.on_hang = lambda: os.kill(os.getpid(), signal.SIGINT)
    with monkeypatch.context() as patch:
        disk.install(patch)
        trainer = build(tiny, Trainer, tmp_path / "run", call_at(place, disk.armed.set, patch), ptm_config=options)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    assert disk.gave_up == 1
    assert any("Ctrl-C: ends after this step" in record.message for record in caplog.records)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    trainer.save_model(str(tmp_path / "saved"))
    saved = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "saved")
    assert 3 < trainer.state.global_step < STEPS
    assert tiny.same(tiny.weights(saved), plain["weights"][trainer.state.global_step])
    trainer.callback_handler.remove_callback(FromStep)
    trainer.train()
    assert trainer.state.global_step == STEPS
    _engine(trainer).check_integrity()


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("place", "call"), PLACES)
def test_a_second_ctrl_c_does_not_wait(
    place: str,
    call: str,
    tiny: ModuleType,
    plain: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def press_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGINT)

    disk = FaultyDisk(call, hangs=True)
    disk.hangs_s, disk.on_hang = 30.0, press_twice
    with monkeypatch.context() as patch:
        disk.install(patch)
        trainer = build(tiny, Trainer, tmp_path / "run", call_at(place, disk.armed.set, patch), ptm_config=options)
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        assert not disk.gave_up
        disk.answers.set()
        _engine(trainer).close()
    _assert_last_checkpoint_resumes(tiny, plain, options, tmp_path / "run")


# ---- failing and full ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "call", "code"),
    [
        ("forward", "preadv", errno.EIO),
        ("update", "pwritev", errno.ENOSPC),
        ("backward", "preadv", errno.EIO),
        ("gradient", "pwritev", errno.ENOSPC),
    ],
)
def test_a_disk_that_fails_in_the_middle(
    place: str,
    call: str,
    code: int,
    tiny: ModuleType,
    plain: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk(call, code=code)
    with monkeypatch.context() as patch:
        disk.install(patch)
        trainer = build(tiny, Trainer, tmp_path / "run", call_at(place, disk.armed.set, patch), ptm_config=options)
        what = "read" if call == "preadv" else "write"
        text = rf"{what} of \S+ failed: .*{os.strerror(code)} \(errno {code}\)"
        with pytest.raises(DiskError, match=text) as caught:
            trainer.train()
        assert (caught.value.errno, caught.value.filename) == (code, options["disk"])
    lanes = _engine(trainer).memory.disk._lanes  # type: ignore[union-attr]
    # Closing works although the disk still fails.
    _engine(trainer).close()
    assert not any(thread.is_alive() for thread in lanes._threads), "an I/O thread was left"
    _assert_last_checkpoint_resumes(tiny, plain, options, tmp_path / "run")


def test_a_disk_that_is_full_when_the_scratch_file_grows(
    tiny: ModuleType, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk("posix_fallocate", code=errno.ENOSPC)
    disk.install(monkeypatch)
    monkeypatch.setattr("ptm_accel.memory.slots.GROWTH_BYTES", 1 << 16)
    trainer = build(tiny, Trainer, tmp_path / "run", FromStep(0, disk.armed.set), ptm_config=options)
    text = r"the scratch file in .* cannot grow by .*: No space left on device, .* free on .*; free space there"
    with pytest.raises(DiskError, match=text):
        trainer.train()
    # No step was made, so the model is an ordinary one again, of which nothing was lost.
    assert engine_of(trainer.model) is None
    assert tiny.same(tiny.weights(trainer.model), tiny.weights(tiny.model()))
    assert list(Path(options["disk"]).iterdir()) == [], "a scratch file was left"


@pytest.mark.parametrize("place", ["at once", "update"])
def test_an_update_that_raises_is_told_to_the_user(
    place: str,
    tiny: ModuleType,
    plain: dict[str, Any],
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    armed = threading.Event()
    step = torch.optim.AdamW.step

    def raising(self: Any, closure: Any = None) -> None:
        if armed.is_set():
            raise ArithmeticError("no such update")
        step(self, closure)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", raising)
        arm = FromStep(2, armed.set) if place == "at once" else call_at(place, armed.set, patch)
        trainer = build(tiny, Trainer, tmp_path / "run", arm, ptm_config=options)
        with pytest.raises(ArithmeticError, match="no such update"):
            trainer.train()
    _engine(trainer).close()
    _assert_last_checkpoint_resumes(tiny, plain, options, tmp_path / "run")


# ---- processes -------------------------------------------------------------------------------------------------


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("sent", "times"), [("SIGTERM", 1), ("SIGINT", 2)])
def test_a_process_ends_and_its_last_checkpoint_resumes(
    sent: str, times: int, tiny: ModuleType, plain: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    code, told = _child({"folder": str(run), "options": options, "signal": sent, "times": times, "place": "update"})
    assert code == -getattr(signal, sent), told
    _assert_last_checkpoint_resumes(tiny, plain, options, run)


@pytest.mark.slow
def test_sigterm_with_a_checkpoint_on_request(
    tiny: ModuleType, plain: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """`enable_jit_checkpoint`: the Trainer saves between a backward and its step, and ends after that step."""
    run = tmp_path / "run"
    code, told = _child({"folder": str(run), "options": options, "signal": "SIGTERM", "place": "arrival", "jit": True})
    assert code == 0, told
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    assert list((tmp_path / "scratch").iterdir()) == [], "a scratch file was left"
    trainer = build(tiny, Trainer, run, ptm_config=options)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-3"))
    _assert_as_plain(tiny, trainer, plain)


def _child(job: dict[str, Any]) -> tuple[int, str]:
    done = run_prepared(CHILD, json.dumps({"steps": STEPS, **job}), cwd=CHILD.parent)
    return done.code, done.err[-4000:]
