"""Runs of a Trainer, plain or on pages, with every number recorded."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from ptm_accel.integrations.transformers import Trainer as PagedTrainer
from torch import nn

from tests.plain_loop import STEPS, Record
from tests.tiers import config
from tests.zoo import BATCH, Entry

Optimizers = tuple[torch.optim.Optimizer | None, Any]


@dataclass(frozen=True)
class Job:
    """What a Trainer is asked to do.

    Attributes:
        accumulation: micro-batches per step.
        clip: `max_grad_norm`; 0 for none.
        checkpointing: `off`, `non-reentrant` or `reentrant`.
        bf16: `bf16=True`, autocast.
        arguments: more `TrainingArguments`, as items.
    """

    accumulation: int = 1
    clip: float = 1.0
    checkpointing: str = "off"
    bf16: bool = False
    arguments: tuple[tuple[str, Any], ...] = field(default=())

    def to_arguments(self, folder: Path) -> transformers.TrainingArguments:
        """As the Trainer wants it."""
        fixed: dict[str, Any] = {
            "output_dir": str(folder),
            "per_device_train_batch_size": BATCH,
            "max_steps": STEPS,
            "gradient_accumulation_steps": self.accumulation,
            "max_grad_norm": self.clip,
            "gradient_checkpointing": self.checkpointing != "off",
            "gradient_checkpointing_kwargs": {"use_reentrant": self.checkpointing == "reentrant"},
            "bf16": self.bf16,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            "lr_scheduler_type": "cosine",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "remove_unused_columns": False,
        }
        return transformers.TrainingArguments(**{**fixed, **dict(self.arguments)})


class _Recorded(transformers.Trainer):
    """Keeps the loss of every micro-batch as it is, not rounded as in the log.

    (Before backward: with a `training_step` of its own no update would begin in backward.)
    """

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.__dict__.setdefault("losses", []).append(loss.item())
        return loss


class _PlainTrainer(_Recorded):
    pass


class _PagedTrainer(PagedTrainer, _Recorded):
    pass


def samples(entry: Entry, count: int) -> list[dict[str, torch.Tensor]]:
    """A data set of `count` samples."""
    rows = []
    for number in range(-(-count // BATCH)):
        batch = entry.batch_at(number)
        rows += [{key: value[row] for key, value in batch.items()} for row in range(BATCH)]
    return rows[:count]


def run_trainer(
    model: nn.Module, entry: Entry, job: Job, folder: Path, *, paged: bool, optimizers: Optimizers = (None, None)
) -> Record:
    """Trains `model` by the plain Trainer, or by the one of ptm_accel.

    Args:
        model: the model; for the paged Trainer it may be on pages already.
        entry: where its data come from.
        job: what to do.
        folder: the Trainer's output directory.
        paged: which Trainer.
        optimizers: as for the Trainer.
    """
    if job.checkpointing == "reentrant" and hasattr(model, "peft_config"):
        model.enable_input_require_grads()  # type: ignore[operator]
    torch.manual_seed(7)
    given: dict[str, Any] = {
        "model": model,
        "args": job.to_arguments(folder),
        "train_dataset": samples(entry, BATCH * STEPS * job.accumulation),
        "optimizers": optimizers,
    }
    trainer = _PagedTrainer(**given, ptm_config=config()) if paged else _PlainTrainer(**given)
    trainer.train()
    log = [line for line in trainer.state.log_history if "grad_norm" in line]
    record = Record(
        losses=trainer.losses,
        norms=[line["grad_norm"] for line in log],
        rates=[line["learning_rate"] for line in log],
        weights={name: value.clone() for name, value in model.state_dict().items()},
        state=copy.deepcopy(trainer.optimizer.state_dict()["state"]),
    )
    trainer.callback_handler.model = trainer.model = trainer.model_wrapped = None
    return record
