"""A Trainer whose loss has parameters of its own, as sentence-transformers' has, gives the numbers of the plain one."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import ptm_trainer
from torch import nn

from ptm_accel.checkpoint.plain_state import write_plain_state


class WithHead(transformers.Trainer):
    """Its loss has a layer and a temperature, which are updated with the model and are not the model's."""

    def __init__(self, *args: Any, head: nn.Module, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.head = head

    def compute_loss(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        outputs = model(**inputs, output_hidden_states=True)
        loss: torch.Tensor = outputs.loss + self.head(outputs.hidden_states[-1].mean(1)).square().mean()
        return loss

    def get_optimizer_cls_and_kwargs(self, args: Any, model: Any = None) -> Any:  # type: ignore[override]
        cls, kwargs = super().get_optimizer_cls_and_kwargs(args, model)
        both = nn.ModuleList([self.head, self.model])
        decays = set(self.get_decay_parameter_names(both))
        named = list(both.named_parameters())
        groups = [
            {"params": [p for n, p in named if n in decays], "weight_decay": args.weight_decay},
            {"params": [p for n, p in named if n not in decays], "weight_decay": 0.0},
        ]
        return cls, {**kwargs, "optimizer_dict": groups}


def head() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 7), nn.LayerNorm(7))


def build(tiny: ModuleType, cls: Any, folder: Path, loss: nn.Module, **changes: Any) -> Any:
    extra = {}
    if cls is not WithHead:
        (folder.parent / "scratch").mkdir(exist_ok=True)
        extra["ptm_config"] = tiny.budget("tight", folder.parent / "scratch")
    args = tiny.arguments(folder, **{"max_grad_norm": 0.5, **changes})
    return cls(model=tiny.model(), args=args, train_dataset=tiny.data(), head=loss, **extra)


def outcome(tiny: ModuleType, trainer: Any) -> dict[str, Any]:
    state = copy.deepcopy(trainer.optimizer.state_dict())
    return {
        "history": [line for line in tiny.history(trainer) if "loss" in line],
        "weights": tiny.digest(trainer.model),
        "head": tiny.digest(trainer.head),
        "groups": state["param_groups"],
        "state": [{key: value.tolist() for key, value in entry.items()} for entry in state["state"].values()],
    }


@pytest.mark.parametrize("changes", [{}, {"max_grad_norm": 0.0}, {"gradient_accumulation_steps": 2, "bf16": True}])
def test_the_numbers_are_the_plain_ones(changes: dict[str, Any], tiny: ModuleType, tmp_path: Path) -> None:
    plain = build(tiny, WithHead, tmp_path / "plain", head(), **changes)
    plain.train()
    paged = build(tiny, ptm_trainer(WithHead), tmp_path / "paged", head(), **changes)
    paged.train()
    assert outcome(tiny, paged) == outcome(tiny, plain)


@pytest.mark.thinned(1)
@pytest.mark.parametrize(("first", "second"), [("paged", "paged"), ("plain", "paged"), ("paged", "plain")])
def test_runs_are_resumed(first: str, second: str, tiny: ModuleType, tmp_path: Path) -> None:
    """With pages and without. As in the plain Trainer, what the loss has is for its owner to save."""
    kinds = {"plain": WithHead, "paged": ptm_trainer(WithHead)}

    def run(begins: str, goes_on: str, folder: Path) -> dict[str, Any]:
        loss = head()
        trainer = build(tiny, kinds[begins], folder, loss, save_strategy="steps", save_steps=3, max_steps=3)
        trainer.train()
        if (begins, goes_on) == ("paged", "plain"):
            write_plain_state(folder / "checkpoint-3", folder / "checkpoint-3" / "optimizer.pt")
        trainer = build(tiny, kinds[goes_on], folder, loss, max_steps=6)
        trainer.train(resume_from_checkpoint=True)
        return outcome(tiny, trainer)

    assert run(first, second, tmp_path / "ours") == run("plain", "plain", tmp_path / "theirs")
