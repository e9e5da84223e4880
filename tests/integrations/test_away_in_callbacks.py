"""Callbacks that use parameters and gradients through torch, under the Trainer: the numbers of the plain Trainer.

As tests/model/test_away_parameters.py, for code that a Trainer calls. The row `plain` compares the plain Trainer with
itself.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import Trainer
from transformers import TrainerCallback
from trl.trainer.callbacks import BEMACallback, SyncRefModelCallback

from ptm_accel.engine import engine_of
from tests.plain_loop import same_bits

STEPS = 4


class Sees(TrainerCallback):
    """Keeps what it sees."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def see(self, *values: torch.Tensor) -> None:
        self.seen += [value.detach().clone() for value in values]


class ReadsGradients(Sees):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for p in model.parameters():
            self.see(p.grad.norm(), p.grad)


class ScalesGradients(Sees):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for number, p in enumerate(model.parameters()):
            p.grad.mul_(0.5 + number)


class DropsGradients(Sees):
    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step < 2:
            model.lm_head.weight.grad = None
            model.model.layers[1].zero_grad()


class Averages(Sees):
    """Logs norms, and keeps an average that it puts in and takes out again."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.ema = [p.detach().clone() for p in model.parameters()]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for e, p in zip(self.ema, model.parameters(), strict=True):
            e.mul_(0.9).add_(p.data, alpha=0.1)
            self.see(e, p.norm())
        kept = [p.data.clone() for p in model.parameters()]
        for e, p in zip(self.ema, model.parameters(), strict=True):
            p.data.copy_(e)
        with torch.no_grad():
            self.see(model(input_ids=torch.arange(8)[None]).logits)
        for value, p in zip(kept, model.parameters(), strict=True):
            p.data.copy_(value)


class Clamps(Sees):
    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for p in model.parameters():
            p.data.clamp_(-0.03, 0.03)


class OfTrl(Sees):
    """TRL's bias-corrected average."""

    def __init__(self) -> None:
        super().__init__()
        self.bema = BEMACallback(update_freq=1, update_after=1)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bema.on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bema.on_step_end(args, state, control, **kwargs)
        self.see(*self.bema.running_model.parameters())


class MovesReference(Sees):
    """TRL's reference model that follows the trained one; on pages where the Trainer's accelerator prepares it."""

    def __init__(self, prepares: bool) -> None:
        super().__init__()
        self.prepares = prepares
        self.trainer: Any = None
        self.reference: Any = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.reference = type(model)(model.config).requires_grad_(False)
        if self.prepares:
            self.reference = self.trainer.accelerator.prepare_model(self.reference, evaluation_mode=True)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        SyncRefModelCallback.sync_target_model(model, self.reference, 0.3)
        with torch.no_grad():
            self.see(self.reference(input_ids=torch.arange(8)[None]).logits)
        self.see(*self.reference.state_dict().values())


CALLBACKS = {
    "reads gradients": ReadsGradients,
    "scales gradients": ScalesGradients,
    "drops gradients": DropsGradients,
    "averages": Averages,
    "clamps": Clamps,
    "bema": OfTrl,
    "moves a reference": lambda: MovesReference(prepares=False),
    "moves a prepared reference": lambda: MovesReference(prepares=True),
}


def run(tiny: ModuleType, name: str, clip: float, folder: Path, options: dict[str, Any] | None) -> dict[str, Any]:
    arguments = tiny.arguments(folder, max_steps=STEPS, max_grad_norm=clip)
    callback = CALLBACKS[name]()
    cls, given = (transformers.Trainer, {}) if options is None else (Trainer, {"ptm_config": options})
    trainer = cls(model=tiny.model(), args=arguments, train_dataset=tiny.data(), callbacks=[callback], **given)
    callback.trainer = trainer
    torch.manual_seed(5)
    trainer.train()
    if options is not None:
        engine = engine_of(trainer.model)
        assert engine is not None
        assert engine.pool.stats.evictions > 0 or "disk" not in options
    return {"seen": callback.seen, "log": tiny.history(trainer), "weights": tiny.weights(trainer.model)}


@cache
def plain(tiny: ModuleType, name: str, clip: float, folder: Path) -> dict[str, Any]:
    return run(tiny, name, clip, folder, None)


@pytest.mark.thinned(16)
@pytest.mark.parametrize("budget", ["plain", "tight", "roomy"])
@pytest.mark.parametrize("clip", [1.0, 0.0], ids=["clipped", "whole"])
@pytest.mark.parametrize("name", CALLBACKS)
def test_same_numbers(
    name: str, clip: float, budget: str, tiny: ModuleType, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    theirs = plain(tiny, name, clip, tmp_path_factory.getbasetemp() / "plain")
    ours = run(tiny, name, clip, tmp_path, None if budget == "plain" else tiny.budget(budget, tmp_path))
    assert len(ours["seen"]) == len(theirs["seen"])
    for at, (mine, other) in enumerate(zip(ours["seen"], theirs["seen"], strict=True)):
        assert same_bits(mine, other), f"seen[{at}]: {mine} and {other}"
    assert ours["log"] == theirs["log"]
    assert tiny.same(ours["weights"], theirs["weights"])
