"""A script that knows nothing of ptm_accel: a checkpoint is fine-tuned, evaluated, saved, and writes some text.

Started by hub.py: `hub_script.py CHECKPOINT OUT DTYPE STEPS`; prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key + ":"))


class Noted(TrainerCallback):
    """Notes when training begins, and when its first step is done: by then all that was put off has been done."""

    begun = stepped = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stepped = self.stepped or time.perf_counter()


def warm_up() -> None:
    """What the first pass of any model brings with it: libraries, threads, kernels."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=16))
    row = torch.zeros(1, 4, dtype=torch.long)
    model(input_ids=row, labels=row).loss.backward()


def main(checkpoint: str, out: str, dtype: str, steps: str) -> None:
    warm_up()
    told: dict[str, Any] = {"base_bytes": resident("VmRSS")}
    begin = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    told["read_s"] = time.perf_counter() - begin
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, model.config.vocab_size, (16, 128), generator=generator)
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        output_dir=out,
        max_steps=int(steps),
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    noted = Noted()
    trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4], callbacks=[noted])
    trainer.train()
    told["ready_s"], told["stepped_s"] = noted.begun - begin, noted.stepped - begin
    told["losses"] = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    told["eval_loss"] = trainer.evaluate()["eval_loss"]
    saving = time.perf_counter()
    trainer.save_model(out)
    told["save_s"] = time.perf_counter() - saving
    text = model.generate(rows[:1, :8], max_new_tokens=4, min_new_tokens=4, do_sample=False)
    told["text"] = text[0, 8:].tolist()
    told["peak_bytes"], told["end_s"] = resident("VmHWM"), time.perf_counter() - begin
    sys.stdout.write(f"HUB {json.dumps(told)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
