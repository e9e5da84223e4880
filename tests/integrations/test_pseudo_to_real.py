"""Pseudo-to-Real training in the Trainer: with pages as without, resumed in both stages, and what is refused."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import transformers
from ptm_accel.integrations.transformers import PseudoToReal, Trainer
from safetensors.torch import load_file

from ptm_accel.errors import CheckpointError, ConfigError, UnsupportedError
from ptm_accel.recipes.linking import is_linked
from tests.plain_loop import same_bits

STEPS = 8
CHANGES: dict[str, Any] = {
    "max_steps": STEPS,
    "gradient_accumulation_steps": 2,
    "max_grad_norm": 0.5,
    "lr_scheduler_type": "cosine",
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 3,
}


def build(tiny: ModuleType, folder: Path, options: Any, recipe: dict[str, Any], **changes: Any) -> Any:
    given: dict[str, Any] = {
        "args": tiny.arguments(folder, **{**CHANGES, **changes}),
        "train_dataset": tiny.data(),
        "eval_dataset": tiny.data(6),
    }
    if options is None:
        return transformers.Trainer(model=tiny.model(), callbacks=[PseudoToReal(**recipe)], **given)
    return Trainer(model=tiny.model(), ptm_config={**options, "pseudo_to_real": recipe}, **given)


def run(trainer: Any, tiny: ModuleType, **how: Any) -> tuple[Any, Any]:
    trainer.train(**how)
    return tiny.history(trainer), tiny.digest(trainer.model)


@pytest.fixture(scope="module", params=["copy", "scale", "reset"])
def plain(request: pytest.FixtureRequest, tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of the plain Trainer with the callback: its options, history and weights, and where its checkpoints are."""
    recipe = {"delink": 4, "moments": request.param}
    folder = tmp_path_factory.mktemp("plain")
    return recipe, *run(build(tiny, folder, None, recipe), tiny), folder


@pytest.mark.parametrize("budget", ["roomy", "tight"])
def test_pages_change_no_number(budget: str, plain: Any, tiny: ModuleType, tmp_path: Path) -> None:
    recipe, history, weights, _ = plain
    (tmp_path / "scratch").mkdir()
    trainer = build(tiny, tmp_path, tiny.budget(budget, tmp_path / "scratch"), recipe)
    assert run(trainer, tiny) == (history, weights)
    assert not is_linked(trainer.model)


@pytest.mark.thinned(7)
@pytest.mark.parametrize("saved", [2, 4, 6])
@pytest.mark.parametrize("budget", ["none", "tight"])
def test_both_stages_are_resumed(budget: str, saved: int, plain: Any, tiny: ModuleType, tmp_path: Path) -> None:
    """A checkpoint of step 4 is of the linked model: blocks are delinked as the next step begins."""
    recipe, history, weights, folder = plain
    checkpoint = folder / f"checkpoint-{saved}"
    if budget == "none":
        again = build(tiny, tmp_path, None, {**recipe, "resume_from_checkpoint": checkpoint})
    else:
        (tmp_path / "scratch").mkdir()
        options = tiny.budget("tight", tmp_path / "scratch")
        trainer = build(tiny, tmp_path / "first", options, recipe)
        run(trainer, tiny)
        checkpoint = tmp_path / "first" / f"checkpoint-{saved}"
        trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None
        again = build(tiny, tmp_path, options, recipe)
    found, values = run(again, tiny, resume_from_checkpoint=str(checkpoint))
    assert values == weights
    assert [line for line in found if "loss" in line] == [line for line in history if "loss" in line]


def test_a_checkpoint_of_either_stage_is_an_ordinary_one(plain: Any) -> None:
    _, _, _, folder = plain
    first, last = (load_file(folder / f"checkpoint-{step}" / "model.safetensors") for step in (4, STEPS))
    assert first.keys() == last.keys()
    name = "model.layers.{}.mlp.up_proj.weight"
    assert same_bits(first[name.format(0)], first[name.format(2)])
    assert not same_bits(last[name.format(0)], last[name.format(2)])
    transformers.AutoModelForCausalLM.from_pretrained(folder / "checkpoint-4")


def test_the_first_stage_is_delinked_by_itself(
    tiny: ModuleType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "integrations.transformers.pseudo_to_real")
    caplog.set_level(logging.INFO, "ptm_accel.integrations.transformers.pseudo_to_real")
    trainer = build(tiny, tmp_path, None, {}, save_strategy="no")
    trainer.train()
    assert not is_linked(trainer.model)
    assert f"blocks are delinked after step {STEPS // 2}: 50% of the {STEPS} steps are done" in caplog.text
    assert "3 blocks share their weights" in caplog.text
    assert "optimizer state: scale" in caplog.text


def test_a_fraction_of_the_training(tiny: ModuleType, tmp_path: Path) -> None:
    trainer = build(tiny, tmp_path, {"host_memory": "64MiB"}, {"delink": 0.25})
    trainer.train()
    said = json.loads((tmp_path / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    attributes = said["stateful_callbacks"]["PseudoToReal"]["attributes"]
    assert attributes["delinks_at"] == 2
    assert attributes["stage"] == "real"


def test_the_launchers_flags(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_PTM", "true")
    monkeypatch.setenv("PTM_PSEUDO_TO_REAL", "3")
    monkeypatch.setenv("PTM_MOMENTS", "scale")
    monkeypatch.setenv("PTM_HOST_MEMORY", "64MiB")
    trainer = Trainer(model=tiny.model(), args=tiny.arguments(tmp_path), train_dataset=tiny.data())
    trainer.train()
    (recipe,) = [c for c in trainer.callback_handler.callbacks if isinstance(c, PseudoToReal)]
    assert (recipe.delinks_at, recipe.config.moments, recipe.stage) == (3, "scale", "real")


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [None, {"host_memory": "64MiB"}])
def test_delinking_beyond_the_last_step(options: Any, tiny: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"8 steps, but the training has {STEPS}.*set it to at most 7"):
        build(tiny, tmp_path, options, {"delink": STEPS}).train()


@pytest.mark.parametrize("value", [0, -1, 1.5, 0.0, "soon", True, {"delink": "later"}])
def test_when_is_not_understood(value: Any, tiny: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"pseudo_to_real\.delink: got"):
        Trainer(model=tiny.model(), args=tiny.arguments(tmp_path), ptm_config={"pseudo_to_real": value})


def test_moments_and_keys_are_checked(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"pseudo_to_real\.moments: got 'half'"):
        PseudoToReal(moments="half")
    with pytest.raises(ConfigError, match="unknown key 'moment'; did you mean 'moments'"):
        Trainer(model=tiny.model(), args=tiny.arguments(tmp_path), ptm_config={"pseudo_to_real": {"moment": "copy"}})
    monkeypatch.setenv("ACCELERATE_USE_PTM", "true")
    monkeypatch.setenv("PTM_MOMENTS", "scale")
    with pytest.raises(ConfigError, match="no blocks are linked; set pseudo_to_real as well"):
        Trainer(model=tiny.model(), args=tiny.arguments(tmp_path))


def test_a_model_without_repeated_blocks(tiny: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="no repeated blocks"):
        transformers.Trainer(
            model=tiny.model(num_hidden_layers=1), args=tiny.arguments(tmp_path), callbacks=[PseudoToReal()]
        )


def test_a_model_that_is_made_as_training_begins(tiny: ModuleType, tmp_path: Path) -> None:
    given: dict[str, Any] = {
        "model_init": lambda: tiny.model(),
        "args": tiny.arguments(tmp_path),
        "train_dataset": tiny.data(),
    }
    with pytest.raises(UnsupportedError, match="model_init"):
        Trainer(**given, ptm_config={"pseudo_to_real": "auto"})


def test_others_who_place_parameters(tiny: ModuleType, tmp_path: Path) -> None:
    args = tiny.arguments(tmp_path)
    args.fsdp = "full_shard"
    with pytest.raises(UnsupportedError, match="FSDP"):
        PseudoToReal().on_init_end(args, None, None, model=tiny.model())  # type: ignore[arg-type]


def test_several_processes_without_pages(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = tiny.arguments(tmp_path)
    monkeypatch.setattr(type(args), "world_size", 2)
    with pytest.raises(UnsupportedError, match="works in one process, and there are 2"):
        PseudoToReal().on_init_end(args, None, None, model=tiny.model())  # type: ignore[arg-type]


def test_a_checkpoint_of_another_training(tiny: ModuleType, tmp_path: Path) -> None:
    given: dict[str, Any] = {"args": tiny.arguments(tmp_path, save_strategy="steps", save_steps=2, max_steps=2)}
    transformers.Trainer(model=tiny.model(), train_dataset=tiny.data(), **given).train()
    with pytest.raises(CheckpointError, match="without Pseudo-to-Real"):
        PseudoToReal(resume_from_checkpoint=tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-2" / "trainer_state.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be read"):
        PseudoToReal(resume_from_checkpoint=tmp_path / "checkpoint-2")
    again = Trainer(model=tiny.model(), train_dataset=tiny.data(), ptm_config={"pseudo_to_real": 1}, **given)
    with pytest.raises(CheckpointError):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
