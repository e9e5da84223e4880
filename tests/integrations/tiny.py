"""A tiny model, its data and its Trainer's arguments, the same for tests and for the processes they start."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

VOCABULARY = 512
TIGHT_BYTES = 3 << 19


def model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A Llama of 0.2M parameters; states of about 3.4 MB."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, "num_attention_heads": 4, "num_key_value_heads": 2, **changes}))


def data(count: int = 40, length: int = 24) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, VOCABULARY, (length,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(output_dir: Path, cls: type[TrainingArguments] = TrainingArguments, **changes: Any) -> TrainingArguments:
    fixed = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 2,
        "max_steps": 5,
        "logging_steps": 1,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return cls(**{**fixed, **changes})


def budget(name: str, folder: Path) -> dict[str, Any]:
    """Options under which everything fits (`roomy`), or most must be on disk (`tight`)."""
    if name == "roomy":
        return {"host_memory": "64MiB"}
    return {"host_memory": TIGHT_BYTES, "page_size": 4096, "disk": str(folder)}


def history(trainer: transformers.Trainer) -> list[dict[str, Any]]:
    """The log without what is measured: times, and the figures of ptm_accel."""
    measured = ("ptm_", "runtime", "per_second", "preparation_time")
    return [
        {key: value for key, value in line.items() if not any(part in key for part in measured)}
        for line in trainer.state.log_history
    ]


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def same(ours: dict[str, torch.Tensor], plain: dict[str, torch.Tensor]) -> bool:
    """Bit for bit; NaN equals NaN."""
    return ours.keys() == plain.keys() and all(
        torch.equal(value.view(torch.uint8), plain[name].view(torch.uint8)) for name, value in ours.items()
    )


def digest(model: torch.nn.Module) -> dict[str, str]:
    """A digest of each weight, for comparing across processes."""
    return digest_of(model.state_dict())


def state_digest(optimizer: dict[str, Any]) -> dict[str, str]:
    """A digest of each tensor of an optimizer's `state_dict()`."""
    parts = ((index, name, value) for index, parts in optimizer["state"].items() for name, value in parts.items())
    return digest_of({f"{index}.{name}": value for index, name, value in parts})


def digest_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """A digest of each tensor."""
    return {
        name: hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in tensors.items()
    }
