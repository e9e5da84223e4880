"""`token_slices` in the Trainer: the plain run's losses but for rounding, with checkpointing and with adapters."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import transformers
from ptm_accel.integrations.transformers import Trainer

from ptm_accel.errors import UnsupportedError


def losses(trainer: Any) -> list[float]:
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


@pytest.mark.parametrize("slices", [3, "auto"])
@pytest.mark.parametrize("checkpointing", [None, False, True])
@pytest.mark.parametrize("adapters", [False, True])
def test_losses_are_those_of_whole_sequences(
    slices: Any, checkpointing: bool | None, adapters: bool, tiny: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    changes: dict[str, Any] = {"max_steps": 4, "gradient_accumulation_steps": 2}
    if checkpointing is not None:
        changes |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": checkpointing}}
    found = []
    for options in (None, {**tiny.budget("tight", tmp_path / "scratch"), "token_slices": slices}):
        model: Any = tiny.model()
        if adapters:
            model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.0))
        given: dict[str, Any] = {"model": model, "train_dataset": tiny.data()}
        given["args"] = tiny.arguments(tmp_path, **changes)
        found.append(losses(transformers.Trainer(**given) if options is None else Trainer(**given, ptm_config=options)))
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_model_that_cannot_be_sliced_is_refused_before_anything_is_done(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.model()
    model.config.sliding_window = 8
    trainer = Trainer(
        model=model, args=tiny.arguments(tmp_path), train_dataset=tiny.data(), ptm_config={"token_slices": 2}
    )
    with pytest.raises(UnsupportedError, match="sliding_window"):
        trainer.train()
