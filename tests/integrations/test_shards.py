"""`shard: full`: what it refuses in several processes by name, and that it changes nothing in one."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration  # type: ignore[import-untyped]
from ptm_accel.integrations.accelerate import PTMAccelerator
from ptm_accel.integrations.accelerate.shards import tell_of_one
from ptm_accel.integrations.transformers import Trainer
from ptm_accel.integrations.transformers.shards import refuse_own_directories_of_nodes, refuse_saving_shards

from ptm_accel.config import PTMConfig
from ptm_accel.errors import UnsupportedError

FULL = PTMConfig(shard="full")
SAID = "shard: full has no effect with one process."


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators take themselves for one of two processes."""
    monkeypatch.setattr(PTMAccelerator, "num_processes", property(lambda self: 2))


ASKED: list[tuple[dict[str, Any], str]] = [
    ({"save_strategy": "steps"}, r"save_strategy='steps' \(set it to 'no'\)"),
    ({"save_strategy": "epoch"}, r"save_strategy='epoch' \(set it to 'no'\)"),
    ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint"),
    ({"push_to_hub": True}, "push_to_hub"),
    (
        {"save_strategy": "epoch", "eval_strategy": "epoch", "load_best_model_at_end": True},
        r"save_strategy='epoch' \(set it to 'no'\), load_best_model_at_end",
    ),
]


@pytest.mark.parametrize(("changes", "names"), ASKED)
def test_arguments_that_save(changes: dict[str, Any], names: str, tiny: ModuleType, tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path, **changes)
    message = (
        r"^layers that are cut over 3 processes \(shard: full\) cannot be saved yet; leave out "
        rf"{names}, or set shard to none\.$"
    )
    with pytest.raises(UnsupportedError, match=message):
        refuse_saving_shards(FULL, args, 3)
    refuse_saving_shards(FULL, args, 1)
    for shard in ("auto", "none"):
        refuse_saving_shards(PTMConfig(shard=shard), args, 3)


def test_arguments_that_do_not_save(tiny: ModuleType, tmp_path: Path) -> None:
    refuse_saving_shards(FULL, tiny.arguments(tmp_path, resume_from_checkpoint="checkpoint-2"), 3)


@pytest.mark.usefixtures("two")
def test_a_trainer_is_refused_before_it_trains(tiny: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="leave out save_strategy='steps'"):
        Trainer(tiny.model(), tiny.arguments(tmp_path, save_strategy="steps"), ptm_config={"shard": "full"})
    Trainer(tiny.model(), tiny.arguments(tmp_path, save_strategy="steps"), ptm_config={"shard": "none"})


@pytest.mark.usefixtures("two")
def test_a_trainer_that_is_told_later(tiny: ModuleType, tmp_path: Path) -> None:
    trainer = Trainer(tiny.model(), tiny.arguments(tmp_path), train_dataset=tiny.data(), ptm_config={"shard": "full"})
    with pytest.raises(UnsupportedError, match=r"leave out save_model\(\), or set shard to none"):
        trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved").exists()


@pytest.mark.usefixtures("two")
def test_states_of_an_accelerator(tmp_path: Path) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config=FULL)
    with pytest.raises(UnsupportedError, match=r"leave out save_state\(\), or set shard to none"):
        accelerator.save_state(str(tmp_path / "state"))
    assert not list(tmp_path.iterdir())


OWN_DIRECTORIES = (
    r"^save_on_each_node=True: layers are cut over [23] processes \(shard: full\), and each writes its part into the "
    r"one output directory\. Leave it out, with a directory that every machine sees, or set shard to none\.$"
)


def test_directories_that_not_all_processes_see(tiny: ModuleType, tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path, save_on_each_node=True)
    with pytest.raises(UnsupportedError, match=OWN_DIRECTORIES):
        refuse_own_directories_of_nodes(FULL, args, 3)
    refuse_own_directories_of_nodes(FULL, args, 1)
    refuse_own_directories_of_nodes(FULL, tiny.arguments(tmp_path), 3)
    for shard in ("auto", "none"):
        refuse_own_directories_of_nodes(PTMConfig(shard=shard), args, 3)


@pytest.mark.usefixtures("two")
def test_a_trainer_of_machines_with_directories_of_their_own(tiny: ModuleType, tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path, save_on_each_node=True)
    with pytest.raises(UnsupportedError, match=OWN_DIRECTORIES):
        Trainer(tiny.model(), args, ptm_config={"shard": "full"})
    for each, may in ((True, False), (False, True)):
        args = tiny.arguments(tmp_path, save_on_each_node=each)
        trainer = Trainer(tiny.model(), args, ptm_config={"shard": "auto"})
        assert trainer.accelerator._may_cut == may, "auto does not choose what is refused"


@pytest.mark.usefixtures("two")
def test_an_accelerator_of_machines_with_directories_of_their_own(tmp_path: Path) -> None:
    project = ProjectConfiguration(str(tmp_path), save_on_each_node=True)
    with pytest.raises(UnsupportedError, match=OWN_DIRECTORIES):
        PTMAccelerator(cpu=True, project_config=project, ptm_config=FULL)
    assert not PTMAccelerator(cpu=True, project_config=project, ptm_config={"shard": "auto"})._may_cut
    assert PTMAccelerator(cpu=True, ptm_config={"shard": "auto"})._may_cut


def test_one_process_trains_as_ever_and_says_so_once(
    tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = []
    for shard in ("none", "full"):
        args = tiny.arguments(tmp_path / shard, save_strategy="steps", save_steps=5)
        options = {**tiny.budget("tight", tmp_path), "shard": shard}
        trainer = Trainer(tiny.model(), args, train_dataset=tiny.data(), ptm_config=options)
        trainer.train()
        trainer.train(resume_from_checkpoint=True)
        trainer.save_model()
        found.append((tiny.history(trainer), tiny.weights(trainer.model)))
        assert caplog.messages.count(SAID) == (shard == "full")
    assert found[0][0] == found[1][0]
    assert tiny.same(found[0][1], found[1][1])


@pytest.mark.parametrize(("shard", "times"), [("full", 1), ("auto", 0), ("none", 0)])
def test_a_loop_in_one_process_is_told_once(
    shard: str, times: int, tiny: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB", "shard": shard})
    for seed in range(2):
        model = tiny.model(seed)
        accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    assert caplog.messages.count(SAID) == times


def test_several_processes_are_not_told_of_one(caplog: pytest.LogCaptureFixture) -> None:
    tell_of_one(FULL, 2)
    assert not caplog.messages
    tell_of_one(FULL, 1)
    assert caplog.messages == [SAID]
