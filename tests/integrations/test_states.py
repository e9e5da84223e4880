"""Saving and resuming in a loop of one's own: `save_state` and `load_state`, with pages and without, both ways."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import accelerate
import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from ptm_accel.integrations.accelerate import PTMAccelerator
from safetensors.torch import load_file

from ptm_accel.checkpoint.manifest import MANIFEST_NAME
from ptm_accel.checkpoint.plain_state import write_plain_state
from ptm_accel.errors import CheckpointError, ConfigError, DiskError, LostStepError


@pytest.fixture(autouse=True)
def fresh(fresh_accelerate: Callable[[], None]) -> Callable[[], None]:
    return fresh_accelerate


class Loop:
    """A loop that can be saved and resumed at any step."""

    def __init__(self, tiny: ModuleType, folder: Path, ptm_options: dict[str, Any] | None, **changes: Any) -> None:
        options = {"cpu": True, "project_config": ProjectConfiguration(project_dir=str(folder), **changes)}
        self.accelerator = (
            Accelerator(**options) if ptm_options is None else PTMAccelerator(**options, ptm_config=ptm_options)
        )
        torch.manual_seed(0)
        model = tiny.model(attention_dropout=0.1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        self.rows = tiny.data(6)
        self.model, self.optimizer, self.schedule = self.accelerator.prepare(model, optimizer, schedule)
        self.weights: Callable[[Any], Any] = tiny.weights

    def run(self, begin: int, end: int) -> list[float]:
        losses = []
        for row in self.rows[begin:end]:
            loss = self.model(**{name: value[None] for name, value in row.items()}).loss
            self.accelerator.backward(loss)
            self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def end(self) -> Any:
        return self.weights(self.accelerator.unwrap_model(self.model))


@pytest.mark.thinned(3)
@pytest.mark.parametrize(("first", "second"), [("paged", "paged"), ("paged", "plain"), ("plain", "paged")])
@pytest.mark.parametrize("budget", ["roomy", "tight"])
def test_resuming_goes_on_exactly(
    first: str, second: str, budget: str, tiny: ModuleType, tmp_path: Path, fresh: Callable[[], None]
) -> None:
    (tmp_path / "scratch").mkdir()
    ptm_options = tiny.budget(budget, tmp_path / "scratch")
    whole = Loop(tiny, tmp_path, None)
    losses, expected = whole.run(0, 6), whole.end()
    fresh()
    loop = Loop(tiny, tmp_path, ptm_options if first == "paged" else None)
    assert loop.run(0, 3) == losses[:3]
    loop.accelerator.save_state(str(tmp_path / "state"))
    assert loop.run(3, 6) == losses[3:], "saving changes nothing"
    fresh()
    resumed = Loop(tiny, tmp_path, ptm_options if second == "paged" else None)
    if (first, second) == ("paged", "plain"):
        assert not (tmp_path / "state" / "optimizer.bin").exists(), "nothing is pickled unasked"
        write_plain_state(tmp_path / "state", tmp_path / "state" / "optimizer.bin")
    resumed.accelerator.load_state(str(tmp_path / "state"))
    assert resumed.run(3, 6) == losses[3:]
    assert tiny.same(resumed.end(), expected)
    assert not list(tmp_path.glob("_incomplete*"))


def test_weights_are_those_of_the_plain_run(tiny: ModuleType, tmp_path: Path, fresh: Callable[[], None]) -> None:
    for name, ptm_options in (("plain", None), ("paged", tiny.budget("tight", tmp_path))):
        loop = Loop(tiny, tmp_path, ptm_options)
        loop.run(0, 2)
        loop.accelerator.save_state(tmp_path / name)
        loop.accelerator.save_model(loop.model, str(tmp_path / f"{name} model"), max_shard_size="300KB")
        fresh()
    read = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "paged")]
    assert read[0] == read[1]
    files = {path.name for path in (tmp_path / "plain model").iterdir()}
    assert files == {path.name for path in (tmp_path / "paged model").iterdir()}
    assert len(files) > 2
    for file in files:
        assert (tmp_path / "plain model" / file).read_bytes() == (tmp_path / "paged model" / file).read_bytes()


def test_names_and_rotation_as_in_accelerate(tiny: ModuleType, tmp_path: Path, fresh: Callable[[], None]) -> None:
    folder = tmp_path / "run"
    loop = Loop(tiny, folder, tiny.budget("tight", tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    for _ in range(3):
        loop.run(0, 1)
        loop.accelerator.save_state()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["checkpoint_1", "checkpoint_2"]
    before = loop.end()
    loop.run(0, 1)
    loop.accelerator.load_state()
    assert tiny.same(loop.end(), before)
    loop.accelerator.project_configuration.iteration = 2
    with pytest.raises(ValueError, match="already exists. Please manually override `self.save_iteration`"):
        loop.accelerator.save_state()


def test_what_a_killed_save_left_is_never_loaded_and_goes(
    tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    loop = Loop(tiny, tmp_path / "run", tiny.budget("tight", tmp_path), automatic_checkpoint_naming=True)
    # No process has this number: it is above what the kernel gives out.
    leftover = folder / f"_incomplete-checkpoint_1-{2**22 + 1}"
    leftover.mkdir(parents=True)
    (folder / "copy_of_7").mkdir()
    with pytest.raises(CheckpointError, match="has 0 directories checkpoint_<number>. Set project_dir"):
        loop.accelerator.load_state()
    leftover.rename(tmp_path / "aside")
    loop.accelerator.save_state()
    (tmp_path / "aside").rename(leftover)
    before = loop.end()
    loop.run(0, 1)
    loop.accelerator.load_state()
    assert tiny.same(loop.end(), before)
    assert leftover.exists(), "loading removes nothing"
    loop.accelerator.save_state()
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_0", "checkpoint_1", "copy_of_7"]
    assert f"{leftover} was left by a save that did not end" in caplog.text


def test_the_oldest_goes_only_when_the_newest_is_there(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run" / "checkpoints"
    loop = Loop(tiny, tmp_path / "run", tiny.budget("tight", tmp_path), automatic_checkpoint_naming=True, total_limit=1)
    loop.accelerator.save_state()
    before = loop.end()
    loop.run(0, 1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ptm_accel.checkpoint.training_state.save_file", full)
    with pytest.raises(DiskError, match="No space left on device"):
        loop.accelerator.save_state()
    assert [path.name for path in folder.iterdir()] == ["checkpoint_0"]
    loop.accelerator.load_state()
    assert tiny.same(loop.end(), before)
    monkeypatch.undo()
    loop.accelerator.project_configuration.iteration = 5
    loop.accelerator.save_state()
    assert [path.name for path in folder.iterdir()] == ["checkpoint_5"]
    loop.accelerator.project_configuration.iteration = 2
    loop.accelerator.save_state()
    assert [path.name for path in folder.iterdir()] == ["checkpoint_2"], "the new one stays, whatever its number is"


def test_files_of_others_stay(tiny: ModuleType, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    (state / "README.md").write_text("mine")
    loop = Loop(tiny, tmp_path, tiny.budget("tight", tmp_path))
    loop.accelerator.save_state(str(state))
    loop.run(0, 1)
    loop.accelerator.save_state(str(state))
    assert (state / "README.md").read_text() == "mine"
    before = loop.end()
    loop.run(0, 1)
    loop.accelerator.load_state(str(state))
    assert tiny.same(loop.end(), before)


@pytest.mark.parametrize("order", ["plain, ours", "ours, plain", "plain, ours, plain", "ours, plain, ours"])
def test_of_two_states_in_a_directory_the_last_counts(
    order: str, tiny: ModuleType, tmp_path: Path, fresh: Callable[[], None]
) -> None:
    """Each run goes on from the one before, one step, and saves where that one has; then both go on."""
    whole = Loop(tiny, tmp_path, None)
    turns = order.split(", ")
    losses = whole.run(0, len(turns) + 1)
    expected = whole.end()
    for number, kind in enumerate([*turns, "ours"]):
        fresh()
        loop = Loop(tiny, tmp_path, tiny.budget("tight", tmp_path) if kind == "ours" else None)
        if number:
            if kind == "plain":
                # It can read no other.
                write_plain_state(tmp_path / "state", tmp_path / "state" / "optimizer.bin")
            loop.accelerator.load_state(str(tmp_path / "state"))
        assert loop.run(number, number + 1) == losses[number : number + 1]
        if number < len(turns):
            loop.accelerator.save_state(str(tmp_path / "state"))
            # A plain run must not find what is out of date.
            assert (tmp_path / "state" / "optimizer.bin").exists() == (kind == "plain")
    assert tiny.same(loop.end(), expected)


def test_the_same_of_two_optimizers(tiny: ModuleType, tmp_path: Path, fresh: Callable[[], None]) -> None:
    expected: list[Any] = []
    for stage, kind in enumerate(["ours", "plain", "ours"]):
        fresh()
        ptm_options = {"ptm_config": tiny.budget("roomy", tmp_path)} if kind == "ours" else {}
        accelerator = (PTMAccelerator if ptm_options else Accelerator)(cpu=True, **ptm_options)
        models = [tiny.model(seed) for seed in (0, 1)]
        optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) for model in models]
        prepared = accelerator.prepare(*models, *optimizers)
        for model, optimizer in zip(prepared[:2], prepared[2:], strict=True):
            for _ in range(2 - stage):
                accelerator.backward(model(**{k: v[None] for k, v in tiny.data(1)[0].items()}).loss)
                optimizer.step()
                optimizer.zero_grad()
        if stage == 2:
            accelerator.load_state(str(tmp_path / "state"))
        buffers = [
            [state["momentum_buffer"].clone() for state in optimizer.state_dict()["state"].values()]
            for optimizer in prepared[2:]
        ]
        expected.append(buffers)
        accelerator.save_state(str(tmp_path / "state"))
        assert (tmp_path / "state" / "optimizer_1.bin").exists() == (kind == "plain")
    for ours, plain in zip(expected[2], expected[1], strict=True):
        assert all(map(torch.equal, ours, plain))
    assert not torch.equal(expected[0][1][0], expected[1][1][0])


def test_a_save_that_fails_leaves_the_one_before(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = Loop(tiny, tmp_path, tiny.budget("tight", tmp_path))
    loop.accelerator.save_state(str(tmp_path / "state"))
    before = {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    loop.run(0, 1)

    def full(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("ptm_accel.checkpoint.training_state.save_file", full)
    with pytest.raises(DiskError, match="No space left on device"):
        loop.accelerator.save_state(str(tmp_path / "state"))
    assert {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()} == before
    with pytest.raises(DiskError, match="No space left on device"):
        loop.accelerator.save_state(str(tmp_path / "other"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state"]
    monkeypatch.undo()
    loop.accelerator.save_state(str(tmp_path / "other"))


def test_what_is_between_two_steps_is_not_saved(tiny: ModuleType, tmp_path: Path) -> None:
    whole = Loop(tiny, tmp_path, None)
    losses, expected = whole.run(0, 5), whole.end()
    loop = Loop(tiny, tmp_path, tiny.budget("tight", tmp_path))
    loop.run(0, 3)
    loop.accelerator.save_state(str(tmp_path / "state"))
    loop.run(3, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptm_accel.optim.compute_updates.ComputeUpdates.carry_out", _fails)
        with pytest.raises(DiskError, match="the disk is gone"):
            loop.run(4, 5)
    with pytest.raises(LostStepError, match=r"the update of step \d failed, and \d+ parameters were not updated"):
        loop.accelerator.save_state(str(tmp_path / "other"))
    assert not list(tmp_path.glob("*other*"))
    loop.accelerator.load_state(str(tmp_path / "state"))
    assert loop.run(3, 5) == losses[3:]
    assert tiny.same(loop.end(), expected)
    loop.accelerator.save_state(str(tmp_path / "other"))


def _fails(*args: Any) -> None:
    raise DiskError("the disk is gone")


def test_what_is_not_there_is_said_before_anything_changes(tiny: ModuleType, tmp_path: Path) -> None:
    loop = Loop(tiny, tmp_path, tiny.budget("tight", tmp_path))
    loop.accelerator.save_state(str(tmp_path / "state"))
    loop.run(0, 1)
    before = loop.end()
    (tmp_path / "state" / "optimizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"optimizer.json is damaged: it is missing, and had \d+ bytes when"):
        loop.accelerator.load_state(str(tmp_path / "state"))
    (tmp_path / "state" / MANIFEST_NAME).unlink()
    with pytest.raises(CheckpointError, match="has no state of optimizer 0 .*Load another one"):
        loop.accelerator.load_state(str(tmp_path / "state"))
    assert tiny.same(loop.end(), before)
    with pytest.raises(ValueError, match="folder does not exist"):
        loop.accelerator.load_state(str(tmp_path / "none"))
    with pytest.raises(ValueError, match="No input_dir provided"):
        loop.accelerator.load_state()


def test_a_state_without_a_directory(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    loop = Loop(tiny, tmp_path, tiny.budget("tight", tmp_path))
    for nowhere in (None, ""):
        with pytest.raises(ConfigError, match="save_state was given no output_dir, and automatic_checkpoint_naming is"):
            loop.accelerator.save_state(nowhere)
    assert not list((tmp_path / "here").iterdir())


def test_two_models_with_an_optimizer_each(tiny: ModuleType, tmp_path: Path) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config=tiny.budget("roomy", tmp_path))
    models = [tiny.model(seed) for seed in (0, 1)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in models]
    prepared = accelerator.prepare(*models, *optimizers)

    def step() -> None:
        for model, optimizer in zip(prepared[:2], prepared[2:], strict=True):
            accelerator.backward(model(**{k: v[None] for k, v in tiny.data(1)[0].items()}).loss)
            optimizer.step()
            optimizer.zero_grad()

    step()
    accelerator.save_state(str(tmp_path / "state"))
    assert json.loads((tmp_path / "state" / "optimizer_1" / "optimizer.json").read_text())["state"]
    assert set(load_file(tmp_path / "state" / "model_1.safetensors")) == set(models[1].state_dict())
    step()
    expected = [tiny.weights(model) for model in models]
    accelerator.load_state(str(tmp_path / "state"))
    step()
    assert all(tiny.same(tiny.weights(model), value) for model, value in zip(models, expected, strict=True))


def test_weights_are_never_read_onto_a_card_as_a_whole(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As accelerate does it where each of several processes has a card."""
    loop = Loop(tiny, tmp_path, tiny.budget("roomy", tmp_path))
    loop.run(0, 1)
    loop.accelerator.save_state(str(tmp_path / "state"))
    seen: list[Any] = []
    load = accelerate.accelerator.load_accelerator_state

    def note(*args: Any, **kwargs: Any) -> Any:
        seen.append(args[7])
        return load(*args, **kwargs)

    monkeypatch.setattr("accelerate.accelerator.load_accelerator_state", note)
    with monkeypatch.context() as patch:
        patch.setattr(PTMAccelerator, "multi_device", property(lambda self: True), raising=False)
        patch.setattr(PTMAccelerator, "num_processes", property(lambda self: 2))
        loop.accelerator.load_state(str(tmp_path / "state"))
    assert seen == ["cpu"]
    loop.accelerator.load_state(str(tmp_path / "state"), map_location="on_device")
    assert seen == ["cpu", "on_device"]
