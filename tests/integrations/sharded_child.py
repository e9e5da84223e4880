"""One of two processes: the stock Trainer, and ours with `shard: full` and with `auto`, on the same data.

Started by torchrun with one argument: a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ptm_accel.integrations.transformers import Trainer
from torch import nn
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

import ptm_accel
from ptm_accel.engine import engine_of
from ptm_accel.errors import UnsupportedError

VOCABULARY, LENGTH = 131, 12


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Random texts; an odd number of batches, so that ranks have different evaluations at the end."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(number))
        return {"input_ids": ids, "labels": ids}


def model() -> nn.Module:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=VOCABULARY,
    )
    return LlamaForCausalLM(config)


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Without saving, and without clipping, whose norms are others than of whole gradients."""
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": 2,
        "max_steps": 5,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "seed": 0,
    }
    return TrainingArguments(**{**given, **changes})


def trainer_of(trained: nn.Module, args: TrainingArguments, options: dict[str, Any] | None, **more: Any) -> Any:
    """Ours with options, or the stock one."""
    kind, own = (transformers.Trainer, {}) if options is None else (Trainer, {"ptm_config": options})
    return kind(model=trained, args=args, train_dataset=Texts(), eval_dataset=Texts(), **own, **more)


def losses(trainer: Any) -> list[float]:
    """What was logged."""
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]


def train(folder: Path, options: dict[str, Any] | None) -> tuple[list[Any], nn.Module]:
    """Returns what was logged, and the model."""
    trained = model()
    trainer = trainer_of(trained, arguments(folder), options)
    trainer.train()
    return losses(trainer), trained


def main(folder: Path) -> None:
    expected, _ = train(folder, None)
    for name, options in {
        "full": {"shard": "full", "host_memory": "10MB", "disk": str(folder)},
        "auto": {"host_memory": "21MB"},
        "replicas": {"host_memory": "64MB"},
    }.items():
        logged, trained = train(folder, {"page_size": "16KiB", **options})
        assert logged == expected, (name, logged, expected)
        engine = engine_of(trained)
        assert engine is not None
        assert (engine.training.shards is not None) == (name != "replicas"), name
        copied = ptm_accel.plain_copy(trained)
        with ptm_accel.gathered(trained):
            for param, same in zip(trained.parameters(), copied.parameters(), strict=True):
                assert torch.equal(param, same), name
        if engine.training.shards is not None:
            with pytest.raises(UnsupportedError, match="each rank has a range of the state"):
                engine.optimizer.state_dict()
        engine.check_integrity()
        engine.detach()
    sys.stdout.write("agree\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
