"""Trains a small Llama in a process of its own and reports its memory: run by test_hard_budgets.py.

    python tests/budget_child.py plain|paged OUTPUT_DIR [HOST_MEMORY]

Prints one line of JSON: resident bytes before the model exists (and how much of them is mapped from files) and at the
peak, the bytes of the model's states
(parameters, gradients, AdamW's moments), the losses, and for a paged run the peak of the host budget.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["OMP_WAIT_POLICY"] = "passive"

import torch
from ptm_accel.integrations.transformers import Trainer as PagedTrainer
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments

import ptm_accel

CONFIG = LlamaConfig(
    hidden_size=640, intermediate_size=1792, num_hidden_layers=5, num_attention_heads=10, vocab_size=4096
)
BYTES_PER_PARAMETER = 16
BATCH = 2


class Tokens(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random tokens."""

    def __init__(self) -> None:
        self.rows = torch.randint(0, CONFIG.vocab_size, (64, 128), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def memory(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(key)


def activations(model: torch.nn.Module) -> int:
    """Bytes that one training forward leaves behind for backward, measured as resident memory."""
    rows = Tokens().rows[:BATCH]
    before = memory("VmRSS")
    loss = model(input_ids=rows, labels=rows).loss
    grown = memory("VmRSS") - before
    del loss
    return grown


def main() -> None:
    """Trains three steps."""
    kind, directory = sys.argv[1], sys.argv[2]
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=3,
        per_device_train_batch_size=BATCH,
        save_strategy="no",
        use_cpu=True,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    warm = AutoModelForCausalLM.from_config(
        LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, vocab_size=16)
    )
    warm(input_ids=torch.zeros(1, 4, dtype=torch.long), labels=torch.zeros(1, 4, dtype=torch.long)).loss.backward()
    del warm
    before, mapped = memory("VmRSS"), memory("RssFile")
    torch.manual_seed(0)
    if kind == "plain":
        model = AutoModelForCausalLM.from_config(CONFIG).train()
        forward_bytes = activations(model)
        trainer: Trainer = Trainer(model=model, args=arguments, train_dataset=Tokens())
    else:
        config = {"host_memory": sys.argv[3], "disk": directory, "page_size": "1MiB"}
        model = ptm_accel.from_config(AutoModelForCausalLM, CONFIG, config)
        trainer = PagedTrainer(model=model, args=arguments, train_dataset=Tokens(), ptm_config=config)
    trainer.train()
    report = {
        "before_bytes": before,
        "mapped_bytes": mapped,
        "peak_bytes": memory("VmHWM"),
        "states_bytes": sum(p.numel() for p in model.parameters()) * BYTES_PER_PARAMETER,
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    }
    if kind == "plain":
        report["activations_bytes"] = forward_bytes
    else:
        engine = ptm_accel.engine_of(model)
        report["host_peak_bytes"] = engine.memory.pool.budget.peak_bytes
        report["evictions"] = engine.pool.stats.evictions
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
