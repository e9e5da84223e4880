"""Pseudo-to-Real training: all layers of a Llama share one layer's weights at first, and get their own half way.

    python examples/pseudo_to_real.py            # on pages, 200 steps
    python examples/pseudo_to_real.py --plain    # the same without pages, by the callback
    python examples/pseudo_to_real.py --small    # a few steps

The text is the source code of Python's own standard library, a token is a byte, and nothing is downloaded. What it
prints for each stage: the mean loss, the time of a step, and, on pages, what was moved.
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
from ptm_accel.integrations.transformers import PseudoToReal
from transformers import LlamaConfig, LlamaForCausalLM, TrainerCallback, TrainingArguments

from ptm_accel import Trainer

LENGTH = 128


def rows_of_text(count: int) -> list[dict[str, torch.Tensor]]:
    """So many sequences of `LENGTH` bytes of Python's own sources."""
    text = b""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= count * LENGTH:
            break
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)[:count]]


class Stages(TrainerCallback):
    """Prints a line for each stage: what was logged before the layers were delinked, and after."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.begin = time.perf_counter()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **parts: Any) -> None:  # noqa: ARG002
        """Keeps what is logged."""
        if "loss" in logs:
            now = time.perf_counter()
            self.lines.append({**logs, "step_s": (now - self.begin) / args.logging_steps, "step": state.global_step})
            self.begin = now

    def show(self, delinked_at: int) -> None:
        """Prints both."""
        for name, lines in (
            ("shared", [line for line in self.lines if line["step"] <= delinked_at]),
            ("own", [line for line in self.lines if line["step"] > delinked_at]),
        ):
            keys = [key for key in ("ptm_loaded_gib", "ptm_stored_gib") if key in lines[0]]
            means = {key: sum(float(line[key]) for line in lines) / len(lines) for key in ("loss", "step_s", *keys)}
            print(f"{name:7}", ", ".join(f"{key} {value:.4f}" for key, value in means.items()))


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plain", action="store_true", help="Without pages.")
    parser.add_argument("--small", action="store_true", help="A few steps.")
    parser.add_argument("--delink", default="0.5", help="auto, a step, or a fraction of the training.")
    parser.add_argument("--moments", default="scale", help="copy, scale or reset.")
    parser.add_argument("--host_memory", default="24MiB", help="What may be used; the states take eight times as much.")
    asked = parser.parse_args()
    steps = 8 if asked.small else 200
    transformers.set_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 12, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, use_cache=False, **sizes))
    stages = Stages()
    with tempfile.TemporaryDirectory(prefix="ptm-accel-") as folder:
        given: dict[str, Any] = {
            "model": model,
            "train_dataset": rows_of_text(steps * 2),
            "args": TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=2,
                max_steps=steps,
                logging_steps=max(1, steps // 40),
                learning_rate=1e-3,
                warmup_steps=steps // 10,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                dataloader_pin_memory=torch.cuda.is_available(),
            ),
        }
        recipe = {"delink": asked.delink, "moments": asked.moments}
        if asked.plain:
            trainer = transformers.Trainer(**given, callbacks=[stages, PseudoToReal(**recipe)])
        else:
            config = {"host_memory": asked.host_memory, "page_size": "256KiB", "disk": folder, "pseudo_to_real": recipe}
            trainer = Trainer(**given, callbacks=[stages], ptm_config=config)
        trainer.train()
        (found,) = (one for one in trainer.callback_handler.callbacks if isinstance(one, PseudoToReal))
        stages.show(found.delinks_at or steps)
        # The pages lie in the folder.
        trainer.model = trainer.model_wrapped = trainer.callback_handler.model = None


if __name__ == "__main__":
    main()
