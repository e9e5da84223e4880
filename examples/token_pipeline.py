"""A Llama on long sequences, with the Trainer of transformers; nothing here knows of a pipeline.

    python examples/token_pipeline.py                      # one process
    accelerate launch --cpu --num_processes 2 --use_ptm --ptm_pipeline_stages 2 examples/token_pipeline.py

The second command cuts the model into two stages, each in a process, and each sequence into slices of tokens that the
stages compute one after the other. Both print the same losses. `--small` takes a few steps on short sequences.

The text is the source code of Python's own standard library, a token is a byte, and nothing is downloaded.
"""

from __future__ import annotations

import os

# Before torch is imported: spinning OpenMP threads beside a busy neighbour are tens of times slower, silently.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments


def rows_of_text(count: int, length: int) -> list[dict[str, torch.Tensor]]:
    """So many sequences of bytes of Python's own sources."""
    text = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= count * length:
            break
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // length * length].view(-1, length)[:count]]


class Steps(TrainerCallback):
    """Prints the loss of each step, and the time that it took."""

    def __init__(self) -> None:
        self.begin = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **parts: Any) -> None:  # noqa: ARG002
        """Of the first process alone."""
        now = time.perf_counter()
        if "grad_norm" in logs and state.is_world_process_zero:
            print(f"step {state.global_step}: loss {logs['loss']:.4f}, {now - self.begin:.2f} s", flush=True)
        self.begin = now


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="A few steps on short sequences.")
    parser.add_argument("--length", type=int, default=2048, help="Tokens of a sequence.")
    parser.add_argument("--steps", type=int, default=10)
    asked = parser.parse_args()
    length, steps = (128, 3) if asked.small else (asked.length, asked.steps)
    transformers.set_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=length, use_cache=False, **sizes))
    with tempfile.TemporaryDirectory(prefix="ptm-accel-") as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=1,
            max_steps=steps,
            logging_steps=1,
            learning_rate=1e-3,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        rows = rows_of_text(steps, length)
        Trainer(model, arguments, train_dataset=rows, callbacks=[Steps()]).train()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
