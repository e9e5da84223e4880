"""The loss of a small language model with lock-free updating, by how many steps each parameter lacks.

    OMP_WAIT_POLICY=passive python tests/benchmarks/lock_free_loss.py FOLDER [--steps 400] [--seeds 5]

A Llama over bytes of Python's own sources. The updater works only while training waits for it, so that staleness is as
large as `max_staleness` allows, in each step. All runs of a seed see the same tokens. The loss is that of held-out text
at the end. Prints Markdown.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from lock_free import text
from machine_facts import facts
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.optim.lock_free import LockFreeUpdates

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.lazy_updates import lazily

LENGTH, ROWS, HELD_OUT = 128, 16, 64


def batch(tokens: torch.Tensor, rows: int, generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(0, len(tokens) - LENGTH, (rows,), generator=generator)
    return torch.stack([tokens[start : start + LENGTH] for start in starts]).long()


def train(staleness: int | None, seed: int, steps: int, lr: float, folder: str) -> tuple[float, int]:
    """Returns the loss of held-out text, and the most steps that were applied as one.

    Args:
        staleness: as `max_staleness`; None for exact updates.
        seed: of weights and tokens.
        steps: how many.
        lr: the highest learning rate.
        folder: for pages.
    """
    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False))
    lagging = {} if staleness is None else {"update": "lock_free", "max_staleness": staleness}
    config = PTMConfig(host_memory="20MiB", disk=folder, page_size="64KiB", **lagging)
    engine = Engine.attach(model, config, device=torch.device("cpu"))
    optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95)))
    schedule = get_cosine_schedule_with_warmup(optimizer, steps // 20, steps)
    tokens, generator = text(), torch.Generator().manual_seed(seed)
    known, held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    with nullcontext() if staleness is None else lazily():
        for _ in range(steps):
            ids = batch(known, ROWS, generator)
            model(input_ids=ids, labels=ids).loss.backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        updates = optimizer.updates
        most = updates._sweeps.most if isinstance(updates, LockFreeUpdates) else 1
        model.eval()
        with torch.no_grad():
            ids = batch(held_out, HELD_OUT, torch.Generator().manual_seed(0))
            loss = model(input_ids=ids, labels=ids).loss.item()
        engine.close()
    return loss, most


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("# The loss of lock-free updating\n")
    print(facts(f"python tests/benchmarks/{Path(__file__).name} FOLDER --steps {asked.steps} --seeds {asked.seeds}"))
    print(f"\n{asked.steps} steps of {ROWS} x {LENGTH} bytes, AdamW, at most {asked.lr:g}, clipped;", end=" ")
    print("loss of held-out text.\n")
    print("| max_staleness | mean loss | to exact | each seed | steps in one update |\n| --- | --- | --- | --- | --- |")
    exact = 0.0
    for staleness in (None, 1, 2, 4, 8):
        found = [train(staleness, seed, asked.steps, asked.lr, asked.folder) for seed in range(asked.seeds)]
        mean = statistics.fmean(loss for loss, _ in found)
        exact = exact or mean
        name = "exact" if staleness is None else staleness
        each = ", ".join(f"{loss:.3f}" for loss, _ in found)
        most = max(count for _, count in found)
        print(f"| {name} | {mean:.4f} | {mean / exact - 1:+.2%} | {each} | up to {most} |", flush=True)


if __name__ == "__main__":
    main()
