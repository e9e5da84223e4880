"""Damage of a checkpoint: it is resumed from bit for bit, or an error names the file and nothing has changed."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ptm_accel.integrations.accelerate import PTMAccelerator
from ptm_accel.integrations.transformers import Trainer
from ptm_accel.integrations.transformers.loading import from_pretrained, read_if_too_large
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from ptm_accel import cli
from ptm_accel.checkpoint.manifest import MANIFEST_NAME, covered
from ptm_accel.config import PTMConfig
from ptm_accel.errors import CheckpointError

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "attention_dropout": 0.1}
CHANGES = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}


def build(tiny: ModuleType, folder: Path, seed: int = 0, **changes: Any) -> Trainer:
    options = {**tiny.budget("roomy", folder), **changes.pop("options", {})}
    arguments = tiny.arguments(folder, **{**CHANGES, **changes})
    return Trainer(model=tiny.model(seed, **SIZES), args=arguments, train_dataset=tiny.data(), ptm_config=options)


@pytest.fixture(scope="module")
def run(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run's folder with two checkpoints, one of another run, and the weights at the end of five steps."""
    folder = tmp_path_factory.mktemp("run")
    trainer = build(tiny, folder / "run")
    trainer.train()
    shutil.rmtree(folder / "run" / "checkpoint-5")
    other = build(tiny, folder / "other", seed=3, learning_rate=0.02, save_steps=4)
    other.train()
    return {"folder": folder, "end": tiny.digest(trainer.model), "begin": tiny.digest(tiny.model(**SIZES))}


def contents(folder: Path) -> dict[str, Any]:
    """The files of a folder and what they hold; pipes and folders by their kind."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else path.is_dir()
        for path in folder.rglob("*")
    }


# ---- at random -------------------------------------------------------------------------------------------------------


def _flip(chance: random.Random, path: Path, others: list[Path]) -> None:
    octets = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 3])):
        octets[chance.randrange(len(octets))] ^= 1 << chance.randrange(8)
    path.write_bytes(octets)


def _zero(chance: random.Random, path: Path, others: list[Path]) -> None:
    octets = bytearray(path.read_bytes())
    begin = chance.randrange(len(octets))
    end = min(len(octets), begin + chance.choice([1, 64, 4096]))
    octets[begin:end] = bytes(end - begin)
    path.write_bytes(octets)


def _truncate(chance: random.Random, path: Path, others: list[Path]) -> None:
    os.truncate(path, chance.choice([0, chance.randrange(path.stat().st_size)]))


def _lengthen(chance: random.Random, path: Path, others: list[Path]) -> None:
    path.write_bytes(path.read_bytes() + chance.randbytes(chance.choice([1, 5000])))


def _delete(chance: random.Random, path: Path, others: list[Path]) -> None:
    path.unlink()


def _swap(chance: random.Random, path: Path, others: list[Path]) -> None:
    other = chance.choice(others)
    mine, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(mine)


def _take_foreign(chance: random.Random, path: Path, others: list[Path]) -> None:
    """The file of the same name of another checkpoint, or of another run."""
    from_other = chance.choice([path.parents[1] / "checkpoint-2", path.parents[2] / "other" / "checkpoint-4"])
    shutil.copy2(from_other / path.name, path)


def _put_folder(chance: random.Random, path: Path, others: list[Path]) -> None:
    path.unlink()
    path.mkdir()


def _put_pipe(chance: random.Random, path: Path, others: list[Path]) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = (_flip, _flip, _zero, _truncate, _lengthen, _delete, _swap, _take_foreign, _put_folder, _put_pipe)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("seed", range(200))
def test_any_damage_is_named_or_changes_nothing(
    seed: int, run: dict[str, Any], tiny: ModuleType, tmp_path: Path
) -> None:
    chance = random.Random(seed)
    for name in ("run", "other"):
        shutil.copytree(run["folder"] / name, tmp_path / name)
    checkpoint = tmp_path / "run" / "checkpoint-4"
    before = contents(checkpoint)
    listed = covered(checkpoint)
    files = sorted(checkpoint.iterdir())
    for number in range(chance.choice([1, 1, 2])):
        if number:
            # Without it nothing is noticed.
            files.remove(checkpoint / MANIFEST_NAME)
        sound = [path for path in files if path.is_file() and path.stat().st_size]
        path = chance.choice(sound)
        chance.choice(DAMAGES)(chance, path, [other for other in sound if other != path])
        if MANIFEST_NAME not in contents(checkpoint):
            break
    if alone := chance.random() < 0.2:
        (tmp_path / "run" / "checkpoint-2" / "scheduler.pt").unlink()
    after = contents(checkpoint)
    changed = {name for name in before if after.get(name) != before[name]}
    gone = MANIFEST_NAME not in after
    must_fail = not gone and bool(changed & {*listed, MANIFEST_NAME}) and not _is_same_json(checkpoint, before, changed)
    _resume(tiny, run, checkpoint, changed, must_fail=must_fail, alone=alone)
    assert contents(checkpoint).keys() == after.keys()


def _is_same_json(checkpoint: Path, before: dict[str, Any], changed: set[str]) -> bool:
    """Whether only white space of the manifest has changed."""
    path = checkpoint / MANIFEST_NAME
    if changed != {MANIFEST_NAME} or not path.is_file():
        return False
    with suppress(ValueError):
        same: bool = json.loads(path.read_bytes()) == json.loads(before[MANIFEST_NAME])
        return same
    return False


def _resume(
    tiny: ModuleType, run: dict[str, Any], checkpoint: Path, changed: set[str], *, must_fail: bool, alone: bool
) -> None:
    seen = contents(checkpoint)
    trainer = build(tiny, checkpoint.parent)
    trainer.args.save_strategy = "no"  # type: ignore[assignment]
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    except CheckpointError as error:
        text = str(error)
        # A manifest of another checkpoint is sound, and then any file may be the one that is not of it.
        names = changed if MANIFEST_NAME not in changed else changed | {*contents(checkpoint)}
        assert any(str(checkpoint / name) in text or f"no {name}," in text for name in names), text
        whole = f"The newest whole one beside it is {checkpoint.parent / 'checkpoint-2'}."
        assert ("There is no whole one beside it." if alone else whole) in text
        assert tiny.digest(trainer.model) == run["begin"]
        assert trainer.optimizer is None
        assert trainer.state.global_step == 0
        assert contents(checkpoint) == seen
    else:
        assert not must_fail, changed
        assert tiny.digest(trainer.model) == run["end"]


# ---- one by one ------------------------------------------------------------------------------------------------------


@pytest.fixture
def checkpoint(run: dict[str, Any], tmp_path: Path) -> Path:
    """Of an older version: without a manifest."""
    shutil.copytree(run["folder"] / "run", tmp_path / "run")
    (tmp_path / "run" / "checkpoint-4" / MANIFEST_NAME).unlink()
    return tmp_path / "run" / "checkpoint-4"


def edit(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def save(path: Path, change: Callable[[Any], object]) -> None:
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


SHARD = "optimizer-00001-of-00001.safetensors"
WITHOUT_MANIFEST: list[tuple[str, Callable[[Path], object], str]] = [
    ("scheduler.pt", lambda p: p.write_bytes(p.read_bytes()[:200]), "it cannot be read: "),
    ("scheduler.pt", lambda p: p.write_bytes(b""), "it cannot be read: "),
    ("scheduler.pt", lambda p: torch.save([1], p), "it holds a list, and no state of a schedule"),
    (
        "scheduler.pt",
        lambda p: save(p, lambda c: c.update(last_epoch="4")),
        "last_epoch is '4', and no number of steps",
    ),
    ("rng_state.pth", lambda p: p.write_bytes(b"no"), "it cannot be read: "),
    ("rng_state.pth", lambda p: torch.save([], p), "it holds no states of random numbers: "),
    ("rng_state.pth", lambda p: save(p, lambda c: c.pop("cpu")), "it holds no states of random numbers: 'cpu'"),
    ("trainer_state.json", lambda p: p.write_text("{"), "Expecting property name"),
    ("trainer_state.json", lambda p: p.write_text("[" * 100_000), "maximum recursion depth exceeded"),
    ("trainer_state.json", lambda p: p.write_text("[]"), ""),
    ("trainer_state.json", lambda p: edit(p, lambda c: c.update(new=1)), "got an unexpected keyword argument 'new'"),
    ("trainer_state.json", lambda p: edit(p, lambda c: c.update(global_step="4")), "global_step is '4', and no number"),
    ("trainer_state.json", lambda p: edit(p, lambda c: c.update(global_step=4.5)), "global_step is 4.5, and no number"),
    ("trainer_state.json", lambda p: edit(p, lambda c: c.update(max_steps=1e999)), "max_steps is inf, and no number"),
    ("trainer_state.json", lambda p: edit(p, lambda c: c.update(log_history={})), "log_history is {}, and no list"),
    ("optimizer.json", lambda p: edit(p, lambda c: c.update(state=[])), "state is a list, and no dict"),
    (SHARD, lambda p: os.truncate(p, 5000), ""),
    (SHARD, lambda p: os.truncate(p, p.stat().st_size - 1), ""),
    (SHARD, lambda p: (p.unlink(), os.mkfifo(p)), "it is no regular file"),
    ("model.safetensors", lambda p: os.truncate(p, p.stat().st_size - 1), ""),
]


@pytest.mark.parametrize(("name", "damage", "text"), WITHOUT_MANIFEST)
def test_what_cannot_be_read_is_named_without_a_manifest_too(
    name: str, damage: Callable[[Path], object], text: str, run: dict[str, Any], tiny: ModuleType, checkpoint: Path
) -> None:
    damage(checkpoint / name)
    trainer = build(tiny, checkpoint.parent)
    with pytest.raises(CheckpointError) as refused:
        trainer.train(resume_from_checkpoint=str(checkpoint))
    assert text in str(refused.value)
    assert str(refused.value).startswith(str(checkpoint / name))
    assert str(refused.value).endswith(
        f"The newest whole one beside it is {checkpoint.parent / 'checkpoint-2'}. Nothing was changed."
    )
    assert tiny.digest(trainer.model) == run["begin"]
    if name == SHARD:
        # The one that was named is resumed from.
        trainer.train(resume_from_checkpoint=str(checkpoint.parent / "checkpoint-2"))
        assert tiny.digest(trainer.model) == run["end"]


def test_a_checkpoint_without_a_manifest_resumes(run: dict[str, Any], tiny: ModuleType, checkpoint: Path) -> None:
    trainer = build(tiny, checkpoint.parent)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    assert tiny.digest(trainer.model) == run["end"]


def test_another_optimizer_is_refused_before_weights_are_loaded(
    run: dict[str, Any], tiny: ModuleType, checkpoint: Path
) -> None:
    for changes in ({"optim": "sgd"}, {"options": {"master_weights": "fp32"}}):
        trainer = build(tiny, checkpoint.parent, **changes)
        with pytest.raises(CheckpointError, match=r"cannot load the optimizer state in .*The optimizer is as it was"):
            trainer.train(resume_from_checkpoint=str(checkpoint))
        assert tiny.digest(trainer.model) == run["begin"]
        assert trainer.optimizer is None


def test_hashes_are_left_out_on_request(run: dict[str, Any], tiny: ModuleType, tmp_path: Path) -> None:
    shutil.copytree(run["folder"] / "run", tmp_path / "run")
    checkpoint = tmp_path / "run" / "checkpoint-4"
    edit(checkpoint / "trainer_state.json", lambda c: c.update(best_metric=1.0))
    with pytest.raises(CheckpointError, match=r"trainer_state.json is damaged: .* set checkpoint_hashes to false"):
        build(tiny, tmp_path / "run").train(resume_from_checkpoint=True)
    trainer = build(tiny, tmp_path / "run", options={"checkpoint_hashes": False})
    trainer.train(resume_from_checkpoint=True)
    assert tiny.digest(trainer.model) == run["end"]
    assert MANIFEST_NAME not in os.listdir(tmp_path / "run" / "checkpoint-5")
    # Nor does the one of a checkpoint before stay, where it is saved again.
    trainer.state.global_step = 4
    trainer._save_checkpoint(trainer.model, None)
    assert MANIFEST_NAME not in os.listdir(checkpoint)


def test_an_incomplete_one_names_the_newest_that_is_whole(
    run: dict[str, Any], tiny: ModuleType, checkpoint: Path
) -> None:
    (checkpoint / "trainer_state.json").unlink()
    text = r"no trainer_state.json, which is written last\. .*The newest whole one beside it is \S+checkpoint-2\."
    with pytest.raises(CheckpointError, match=text):
        build(tiny, checkpoint.parent).train(resume_from_checkpoint=str(checkpoint))


# ---- the command line, and save_state --------------------------------------------------------------------------------


def test_a_checkpoint_is_checked_by_command(run: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(run["folder"] / "run" / "checkpoint-4", tmp_path / "c")

    def check(folder: Path) -> Any:
        return CliRunner().invoke(cli.app, ["check", str(folder)])

    found = check(tmp_path / "c")
    assert found.exit_code == 0
    count = len(covered(tmp_path / "c"))
    assert f"c: {count} files, " in found.output
    assert "are as they were saved (" in found.output
    os.truncate(tmp_path / "c" / "scheduler.pt", 20)
    refused = check(tmp_path / "c").exception
    assert isinstance(refused, CheckpointError)
    assert f"{tmp_path / 'c' / 'scheduler.pt'} is damaged: it has 20 bytes, and had" in str(refused)
    (tmp_path / "c" / MANIFEST_NAME).unlink()
    assert "scheduler.pt is damaged: it cannot be read" in str(check(tmp_path / "c").exception)
    (tmp_path / "c" / "scheduler.pt").unlink()
    told = check(tmp_path / "c").output
    assert "c: can be read. It has no ptm_manifest.json, so a changed byte is not noticed." in told
    assert "no such directory: " in str(check(tmp_path / "none").exception)


def test_damaged_weights_that_are_read_by_themselves_name_the_newest_whole_checkpoint(
    run: dict[str, Any], tmp_path: Path
) -> None:
    shutil.copytree(run["folder"] / "run", tmp_path / "run")
    damaged, whole = (tmp_path / "run" / f"checkpoint-{step}" for step in (4, 2))
    os.truncate(damaged / "model.safetensors", 5000)
    options = {"host_memory": "8MiB", "page_size": 4096}
    beside = f"The newest whole one beside it is {whole}."
    with pytest.raises(CheckpointError) as caught:
        from_pretrained(AutoModelForCausalLM, damaged, options)
    assert str(caught.value).startswith(f"{damaged / 'model.safetensors'} (5000 B) is damaged: ")
    assert str(caught.value).endswith(beside)
    # As with --use_ptm, where a model that fits is read by transformers.
    with pytest.raises(CheckpointError) as caught:
        read_if_too_large(AutoModelForCausalLM.from_pretrained, PTMConfig.load(options), 1 << 30, damaged)
    assert str(caught.value).startswith(f"{damaged / 'model.safetensors'} (5000 B) is damaged: ")
    assert str(caught.value).endswith(beside)
    refused = CliRunner().invoke(cli.app, ["check", str(damaged)]).exception
    assert "model.safetensors is damaged: it has 5000 bytes, and had" in str(refused)
    assert str(refused).endswith(beside)


@pytest.mark.usefixtures("fresh_accelerate")
def test_a_state_of_an_accelerator_is_compared_before_it_is_loaded(tiny: ModuleType, tmp_path: Path) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config=tiny.budget("roomy", tmp_path))
    model = tiny.model(**SIZES)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))

    def step() -> None:
        accelerator.backward(model(**{name: value[None] for name, value in tiny.data(1)[0].items()}).loss)
        optimizer.step()
        optimizer.zero_grad()

    step()
    for number in (1, 2):
        accelerator.save_state(str(tmp_path / f"checkpoint_{number}"))
    saved = tiny.digest(model)
    step()
    before, state = tiny.digest(model), tmp_path / "checkpoint_2"
    names = covered(state)
    assert set(names) >= {"model.safetensors", "optimizer.json", SHARD, "random_states_0.pkl"}
    for name in names:
        content = (state / name).read_bytes()
        os.truncate(state / name, len(content) - 1)
        with pytest.raises(CheckpointError) as refused:
            accelerator.load_state(str(state))
        assert f"{state / name} is damaged: it has {len(content) - 1} bytes" in str(refused.value)
        whole = tmp_path / "checkpoint_1"
        assert str(refused.value).endswith(f"The newest whole one beside it is {whole}. Nothing was changed.")
        assert tiny.digest(model) == before
        (state / name).write_bytes(content)
    # Without a manifest, what is ours is looked through before weights are loaded.
    (state / MANIFEST_NAME).rename(tmp_path / "manifest")
    edit(state / "optimizer.json", lambda index: index.update(weight_map={}))
    with pytest.raises(CheckpointError, match="it does not say where"):
        accelerator.load_state(str(state))
    assert tiny.digest(model) == before
    shutil.copy2(tmp_path / "checkpoint_1" / "optimizer.json", state / "optimizer.json")
    (tmp_path / "manifest").rename(state / MANIFEST_NAME)
    accelerator.load_state(str(state))
    assert tiny.digest(model) == saved
