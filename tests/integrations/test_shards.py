"""`shard: full`: what it refuses in several processes by name, and that it changes nothing in one."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate.utils import ProjectConfiguration  # type: ignore[import-untyped]
from ptm_accel.integrations.accelerate import PTMAccelerator
from ptm_accel.integrations.accelerate.shards import refuse_beside_cut, refuse_unknown_processes, tell_of_one
from ptm_accel.integrations.transformers import Trainer
from ptm_accel.integrations.transformers.shards import beside_cut

from ptm_accel.config import PTMConfig
from ptm_accel.errors import UnsupportedError

FULL = PTMConfig(shard="full")
SAID = "shard: full has no effect with one process."


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerators take themselves for one of two processes."""
    monkeypatch.setattr(PTMAccelerator, "num_processes", property(lambda self: 2))


def refused(names: str) -> str:
    return (
        rf"^{names}: layers are cut over [23] processes \(shard: full\), which save between the same two steps, "
        rf"into one directory that all of them see\. Leave {names} out, or set shard to none\.$"
    )


OWN_DIRECTORIES = refused("save_on_each_node=True")


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"save_on_each_node": True}, "save_on_each_node=True"),
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint=True"),
    ],
)
def test_arguments_that_are_refused(changes: dict[str, Any], names: str, tiny: ModuleType, tmp_path: Path) -> None:
    asked = beside_cut(tiny.arguments(tmp_path, **changes))
    with pytest.raises(UnsupportedError, match=refused(names)):
        refuse_beside_cut(FULL, 3, asked)
    refuse_beside_cut(FULL, 1, asked)
    for shard in ("auto", "none"):
        refuse_beside_cut(PTMConfig(shard=shard), 3, asked)


def test_arguments_that_are_not(tiny: ModuleType, tmp_path: Path) -> None:
    assert not beside_cut(tiny.arguments(tmp_path, resume_from_checkpoint="checkpoint-2", save_strategy="steps"))


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


@pytest.mark.parametrize(("shard", "connected", "known"), [("full", 2, 1), ("full", 2, 2), ("none", 2, 1)])
def test_processes_that_accelerate_takes_for_one_each(
    shard: str, connected: int, known: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: connected)
    said = r"connects 2 processes, and accelerate takes each for the only one, .* Set use_cpu=True"
    refuses = shard == "full" and known < connected
    with pytest.raises(UnsupportedError, match=said) if refuses else nullcontext():
        refuse_unknown_processes(PTMConfig(shard=shard), known)


def test_several_processes_are_not_told_of_one(caplog: pytest.LogCaptureFixture) -> None:
    tell_of_one(FULL, 2)
    assert not caplog.messages
    tell_of_one(FULL, 1)
    assert caplog.messages == [SAID]
