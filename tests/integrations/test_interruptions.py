"""Disks that are slow, hang, fail or are full, Ctrl-C and SIGTERM, in the middle of planned passes and chased updates.

All of it through the Trainer: the numbers are those of the plain one or there is an error with a name, nothing hangs,
and the last checkpoint resumes bit for bit.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import Trainer

from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import DiskError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.diskio import Lanes
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.room import Room
from ptm_accel.memory.scratch import Direction
from tests.integrations.faulty_disk import HANGS_S, FaultyDisk, FromStep, call_at, in_backward

STEPS = 6
CHILD = Path(__file__).with_name("interrupted_child.py")

pytestmark = pytest.mark.timeout(280)


class _Keeps(transformers.TrainerCallback):
    """Keeps the weights after each step."""

    def __init__(self, tiny: ModuleType) -> None:
        self.tiny = tiny
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append(self.tiny.weights(model))


def build(tiny: ModuleType, cls: Any, folder: Path, callbacks: list[Any] | None = None, **extra: Any) -> Any:
    arguments = tiny.arguments(folder, max_steps=STEPS, save_strategy="steps", save_steps=2)
    return cls(model=tiny.model(), args=arguments, train_dataset=tiny.data(), callbacks=callbacks, **extra)


@pytest.fixture(scope="module")
def plain(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The plain Trainer's weights, at the beginning and after each step, and its log."""
    keeps = _Keeps(tiny)
    trainer = build(tiny, transformers.Trainer, tmp_path_factory.mktemp("plain"), [keeps])
    first = tiny.weights(trainer.model)
    trainer.train()
    return {"history": _lines(tiny.history(trainer)), "weights": [first, *keeps.weights]}


@pytest.fixture
def dials(tiny: ModuleType, tmp_path: Path) -> dict[str, Any]:
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


def _assert_saves_and_trains_on(tiny: ModuleType, trainer: Any, plain: dict[str, Any], folder: Path) -> None:
    """After Ctrl-C: the step that it fell into is done, or it is not, and the Trainer is of use."""
    engine = _engine(trainer)
    trainer.save_model(str(folder / "saved"))
    saved = tiny.weights(transformers.LlamaForCausalLM.from_pretrained(folder / "saved"))
    step = trainer.state.global_step
    assert any(tiny.same(saved, plain["weights"][done]) for done in (step, step + 1))
    engine.check_integrity()
    trainer.callback_handler.remove_callback(FromStep)
    trainer.train()
    assert trainer.state.global_step == STEPS
    engine.check_integrity()
    engine.detach()
    held = engine.pool.budget.used_by_tag()
    assert not any(nbytes for tag, nbytes in held.items() if tag is not Tag.BUFFER), held


# ---- slow, and hanging for a while -----------------------------------------------------------------------------


def test_a_disk_that_becomes_slow_changes_no_number(
    tiny: ModuleType, plain: dict[str, Any], dials: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk("preadv", "pwritev", delay_s=0.003)
    disk.install(monkeypatch)
    trainer = build(tiny, Trainer, tmp_path / "run", [FromStep(3, disk.armed.set)], ptm_config=dials)
    trainer.train()
    assert disk.met.is_set()
    assert _engine(trainer).pool.stats.hits > 0, "nothing was planned"
    _assert_as_plain(tiny, trainer, plain)


def test_a_disk_that_hangs_for_a_while_is_waited_for(
    tiny: ModuleType, plain: dict[str, Any], dials: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FaultyDisk("preadv", "pwritev", hangs=True)
    disk.install(monkeypatch)
    trainer = build(tiny, Trainer, tmp_path / "run", [FromStep(3, disk.armed.set)], ptm_config=dials)
    trainer.train()
    assert disk.gave_up == 2
    _assert_as_plain(tiny, trainer, plain)


@pytest.mark.parametrize(
    ("place", "call"), [("forward", "preadv"), ("update", "preadv"), ("update", "pwritev"), ("backward", "preadv")]
)
def test_ctrl_c_while_the_disk_hangs(
    place: str,
    call: str,
    tiny: ModuleType,
    plain: dict[str, Any],
    dials: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk(call, hangs=True)
    # A write is waited for to its end; nobody is kept by a read, however long it takes.
    disk.hangs_s = HANGS_S if call == "pwritev" else 30.0
    disk.install(monkeypatch)
    disk.on_hang = lambda: os.kill(os.getpid(), signal.SIGINT)
    trainer = build(tiny, Trainer, tmp_path / "run", [call_at(place, disk.armed.set, monkeypatch)], ptm_config=dials)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert not disk.gave_up or call == "pwritev", "who waits for a read is not kept until the disk answers"
    disk.answers.set()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    _assert_saves_and_trains_on(tiny, trainer, plain, tmp_path)


# ---- failing and full ------------------------------------------------------------------------------------------


def _assert_ended_well(tiny: ModuleType, trainer: Any, plain: dict[str, Any], dials: dict[str, Any]) -> None:
    """After a fault: memory can be closed, nothing is left, and the last checkpoint resumes."""
    run = Path(trainer.args.output_dir)
    # The place that the fault waits for may be first come to after the step that ends with the second checkpoint.
    assert {path.name for path in run.iterdir()} in ({"checkpoint-2"}, {"checkpoint-2", "checkpoint-4"})
    disk = _engine(trainer).memory.disk
    assert disk is not None
    _engine(trainer).close()
    assert not any(thread.is_alive() for thread in disk._lanes._threads), "an I/O thread was left"
    assert list(Path(dials["disk"]).iterdir()) == [], "a scratch file was left"
    again = build(tiny, Trainer, run, ptm_config=dials)
    again.train(resume_from_checkpoint=True)
    _assert_as_plain(tiny, again, plain)


@pytest.mark.parametrize(
    ("place", "call", "code"),
    [
        ("forward", "preadv", errno.EIO),
        ("update", "preadv", errno.EIO),
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
    dials: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = FaultyDisk(call, code=code)
    with monkeypatch.context() as patch:
        disk.install(patch)
        trainer = build(tiny, Trainer, tmp_path / "run", [call_at(place, disk.armed.set, patch)], ptm_config=dials)
        what = "read" if call == "preadv" else "write"
        text = rf"{what} of \S+ failed: .*{os.strerror(code)} \(errno {code}\)"
        with pytest.raises(DiskError, match=text) as caught:
            trainer.train()
        assert (caught.value.errno, caught.value.filename) == (code, dials["disk"])
    # Closing works although the disk still fails.
    _assert_ended_well(tiny, trainer, plain, dials)


def test_a_disk_that_is_full_when_the_scratch_file_grows(
    tiny: ModuleType, plain: dict[str, Any], dials: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"

    def stop() -> None:
        raise KeyboardInterrupt

    trainer = build(tiny, Trainer, run, [FromStep(3, stop)], ptm_config=dials)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    _engine(trainer).close()
    disk = FaultyDisk("posix_fallocate", code=errno.ENOSPC)
    with monkeypatch.context() as patch:
        disk.install(patch)
        patch.setattr("ptm_accel.memory.slots.GROWTH_BYTES", 1 << 16)
        trainer = build(tiny, Trainer, run, [FromStep(2, disk.armed.set)], ptm_config=dials)
        text = r"the scratch file in .* cannot grow by .*: No space left on device, .* free on .*; free space there"
        with pytest.raises(DiskError, match=text):
            trainer.train(resume_from_checkpoint=True)
    _assert_ended_well(tiny, trainer, plain, dials)


# ---- the update itself, and Ctrl-C -----------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["at once", "update"])
def test_an_update_that_raises_is_told_to_the_user(
    place: str,
    tiny: ModuleType,
    plain: dict[str, Any],
    dials: dict[str, Any],
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
        run = tmp_path / "run"
        trainer = build(tiny, Trainer, run, [arm], ptm_config=dials)
        with pytest.raises(ArithmeticError, match="no such update"):
            trainer.train()
    armed.clear()
    _assert_ended_well(tiny, trainer, plain, dials)


CTRL_C = {
    "a charge that nobody holds yet": (Room, "reserve", "after"),
    "a pin that nobody holds yet": (Pool, "pin", "after"),
    "a store that is not queued yet": (Lanes, "_enqueue", "before"),
}


@pytest.mark.parametrize("where", CTRL_C)
def test_ctrl_c_in_the_middle_of_the_books(
    where: str,
    tiny: ModuleType,
    plain: dict[str, Any],
    dials: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    owner, name, when = CTRL_C[where]
    real = getattr(owner, name)
    begun: list[bool] = []

    def here(first: Any, *rest: Any) -> bool:
        if owner is Pool:
            return not first._silent and not in_backward()
        return in_backward() and (owner is Room or rest[0].direction is Direction.WRITE)

    def press(*given: Any) -> None:
        if begun and threading.current_thread() is threading.main_thread() and here(*given):
            begun.clear()
            signal.raise_signal(signal.SIGINT)

    def pressing(*args: Any, **kwargs: Any) -> Any:
        if when == "before":
            press(*args)
        result = real(*args, **kwargs)
        if when == "after":
            press(*args)
        return result

    monkeypatch.setattr(owner, name, pressing)
    trainer = build(tiny, Trainer, tmp_path / "run", [FromStep(3, lambda: begun.append(True))], ptm_config=dials)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    _assert_saves_and_trains_on(tiny, trainer, plain, tmp_path)


@pytest.mark.parametrize("place", ["first step", "update"])
def test_ctrl_c_in_the_middle_of_an_update(
    place: str,
    tiny: ModuleType,
    plain: dict[str, Any],
    dials: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first step is made at once, having no plan; the later ones beside the forwards."""
    armed: list[bool] = []
    step = torch.optim.AdamW.step

    def pressing(self: Any, closure: Any = None) -> None:
        step(self, closure)
        if armed:
            armed.clear()
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(torch.optim.AdamW, "step", pressing)
    arm = FromStep(0, lambda: armed.append(True))
    if place == "update":
        arm = call_at(place, lambda: armed.append(True), monkeypatch)
    trainer = build(tiny, Trainer, tmp_path / "run", [arm], ptm_config=dials)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    armed.clear()
    monkeypatch.undo()
    _assert_saves_and_trains_on(tiny, trainer, plain, tmp_path)


# ---- processes -------------------------------------------------------------------------------------------------


def _child(job: dict[str, Any]) -> tuple[int, str]:
    command = [sys.executable, str(CHILD), json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stderr[-4000:]


@pytest.mark.parametrize(("sent", "place", "hangs"), [("SIGTERM", "update", False), ("SIGINT", "forward", True)])
def test_a_process_ends_and_its_last_checkpoint_resumes(
    sent: str,
    place: str,
    hangs: bool,
    tiny: ModuleType,
    plain: dict[str, Any],
    dials: dict[str, Any],
    tmp_path: Path,
) -> None:
    run = tmp_path / "run"
    job = {"folder": str(run), "dials": dials, "steps": STEPS, "signal": sent, "place": place, "hangs": hangs}
    code, told = _child(job)
    assert code == -getattr(signal, sent), told
    assert {path.name for path in run.iterdir()} in ({"checkpoint-2"}, {"checkpoint-2", "checkpoint-4"})
    assert list((tmp_path / "scratch").iterdir()) == [], "a scratch file was left"
    trainer = build(tiny, Trainer, run, ptm_config=dials)
    trainer.train(resume_from_checkpoint=True)
    _assert_as_plain(tiny, trainer, plain)


def test_sigterm_with_a_checkpoint_on_request(
    tiny: ModuleType, plain: dict[str, Any], dials: dict[str, Any], tmp_path: Path
) -> None:
    """`enable_jit_checkpoint`: the Trainer saves between a backward and its step, and ends after that step."""
    run = tmp_path / "run"
    job = {"folder": str(run), "dials": dials, "steps": STEPS, "signal": "SIGTERM", "place": "arrival", "jit": True}
    code, told = _child(job)
    assert code == 0, told
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    assert list((tmp_path / "scratch").iterdir()) == [], "a scratch file was left"
    trainer = build(tiny, Trainer, run, ptm_config=dials)
    trainer.train(resume_from_checkpoint=str(run / "checkpoint-3"))
    _assert_as_plain(tiny, trainer, plain)
