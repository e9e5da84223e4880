"""Lock-free updating in the Trainer: exact without staleness, and checkpoints that any run goes on from."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import peft
import pytest
import torch
import transformers
from accelerate import Accelerator
from ptm_accel.integrations.accelerate import PTMAccelerator
from ptm_accel.integrations.transformers import Trainer

from ptm_accel.checkpoint.plain_state import write_plain_state
from ptm_accel.engine import engine_of
from ptm_accel.errors import UnsupportedError
from ptm_accel.optim.lock_free import LockFreeUpdates
from tests.lazy_updates import lazily


def options(folder: Path, **more: Any) -> dict[str, Any]:
    return {"host_memory": 5 << 20, "page_size": 4096, "disk": str(folder), **more}


def _lora(model: Any) -> Any:
    return peft.get_peft_model(model, peft.LoraConfig(r=32, target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.parametrize("adapter", [False, True], ids=["all", "lora"])
def test_without_staleness_a_trainer_has_the_plain_numbers(adapter: bool, tiny: ModuleType, tmp_path: Path) -> None:
    """With clipping, a schedule, accumulation, evaluations and checkpoints."""
    found = []
    for paged in (False, True):
        model = _lora(tiny.model()) if adapter else tiny.model()
        arguments = tiny.arguments(
            tmp_path / str(paged),
            max_grad_norm=0.3,
            gradient_accumulation_steps=2,
            eval_strategy="steps",
            eval_steps=2,
            save_strategy="steps",
            save_steps=3,
            lr_scheduler_type="cosine",
        )
        given: dict[str, Any] = {"train_dataset": tiny.data(), "eval_dataset": tiny.data(4)}
        if paged:
            asked = options(tmp_path, update="lock_free", max_staleness=0)
            trainer: transformers.Trainer = Trainer(model, arguments, ptm_config=asked, **given)
        else:
            trainer = transformers.Trainer(model, arguments, **given)
        trainer.train()
        if paged:
            engine = engine_of(model)
            assert engine is not None
            assert engine.optimizer is not None
            updates = engine.optimizer.updates
            assert isinstance(updates, LockFreeUpdates)
            assert updates._sweeps.count
        found.append((tiny.history(trainer), tiny.weights(model)))
    (plain, weights), (ours, our_weights) = found
    assert ours == plain
    assert tiny.same(our_weights, weights)


def test_a_checkpoint_is_of_all_steps_and_an_exact_run_goes_on_from_it(tiny: ModuleType, tmp_path: Path) -> None:
    """To the bits of a plain Trainer that resumes from it."""

    most = []

    def run(folder: Path, steps: int, asked: dict[str, Any] | None, resume: Path | None = None) -> Any:
        model = tiny.model(seed=0 if resume is None else 5)
        arguments = tiny.arguments(folder, max_steps=steps, save_strategy="steps", save_steps=3, eval_strategy="no")
        arguments.lr_scheduler_type = "constant"
        kind = transformers.Trainer if asked is None else Trainer
        given = {} if asked is None else {"ptm_config": asked}
        trainer = kind(model, arguments, train_dataset=tiny.data(), **given)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        found, engine = tiny.weights(model), engine_of(model)
        if engine is not None:
            updates = engine.optimizer.updates  # type: ignore[union-attr]
            most.append(updates._sweeps.most if isinstance(updates, LockFreeUpdates) else 0)
            engine.detach()
        return found

    lagging = options(tmp_path, update="lock_free", max_staleness=3)
    with lazily():
        run(tmp_path / "lagging", 5, lagging)
    assert most.pop() > 1, "no step has waited for another"
    checkpoint = tmp_path / "lagging" / "checkpoint-3"
    write_plain_state(checkpoint, checkpoint / "optimizer.pt")
    plain = run(tmp_path / "plain", 6, None, checkpoint)
    for asked in (options(tmp_path), options(tmp_path, update="lock_free", max_staleness=0)):
        assert tiny.same(run(tmp_path / "ours", 6, asked, checkpoint), plain)


def test_a_gradient_scaler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stock = Accelerator.__init__

    def with_scaler(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        self.scaler = torch.amp.GradScaler("cpu")

    monkeypatch.setattr(Accelerator, "__init__", with_scaler)
    with pytest.raises(UnsupportedError, match="lock_free cannot be used with mixed precision fp16"):
        PTMAccelerator(cpu=True, ptm_config=options(tmp_path, update="lock_free", max_staleness=1))
