"""The loss of a small language model with late updates, by how late they are, after the same tokens.

    OMP_WAIT_POLICY=passive python tests/benchmarks/lock_free_loss.py FOLDER PICTURE [--steps 600] [--seeds 5]

A Llama over bytes of Python's own sources. All ways of a seed see the same tokens:

* exact: each step at once.
* lag k: each step by itself, k steps late, in a plain loop. A test holds that `max_staleness: 1` has the bits of k = 1
  where each step is late.
* at most k: `update: lock_free` with an updater that works only while training waits for it, so that each parameter
  lacks as many steps as it may; up to k steps that waited together are averaged.
* batch x k: exact, with k batches accumulated in each step.

The loss is that of held-out text at the end. Prints Markdown, and draws the loss of training.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from curves import picture
from lock_free import text
from machine_facts import facts
from torch.nn.utils import clip_grad_norm_
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.lazy_updates import lazily

LENGTH, ROWS, HELD_OUT, WINDOW, BETAS = 128, 8, 64, 20, (0.9, 0.95)
WAYS = ("exact", "lag 1", "lag 2", "lag 4", "lag 8", "at most 2", "at most 4", "at most 8")
WAYS += ("batch x 2", "batch x 4", "batch x 8")


class Run:
    """One model.

    Args:
        seed: of weights and tokens.
        steps: how many batches.
        lr: the highest learning rate.
        folder: for pages.
    """

    def __init__(self, seed: int, steps: int, lr: float, folder: str) -> None:
        torch.manual_seed(seed)
        sizes = {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False))
        self.steps, self.lr, self.folder = steps, lr, folder
        tokens, self._generator = text(), torch.Generator().manual_seed(seed)
        self._known, self._held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
        self.losses: list[float] = []

    def _batches(self) -> Iterator[torch.Tensor]:
        for _ in range(self.steps):
            yield batch(self._known, ROWS, self._generator)

    def _backward(self, ids: torch.Tensor) -> None:
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.losses.append(loss.item())

    def _adamw(self, updates: int) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LambdaLR]:
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.lr, betas=BETAS)
        return optimizer, get_cosine_schedule_with_warmup(optimizer, updates // 20, updates)

    def late(self, lag: int) -> None:
        """Applies each step by itself, `lag` steps late."""
        params = list(self.model.parameters())
        optimizer, schedule = self._adamw(self.steps)
        waiting = []

        def apply() -> None:
            for param, gradient in zip(params, waiting.pop(0), strict=True):
                param.grad = gradient
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()

        for ids in self._batches():
            self._backward(ids)
            clip_grad_norm_(params, 1.0)
            waiting.append([param.grad for param in params])
            optimizer.zero_grad()
            if len(waiting) > lag:
                apply()
        while waiting:
            apply()

    def accumulated(self, count: int) -> None:
        """Makes a step of `count` batches."""
        optimizer, schedule = self._adamw(self.steps // count)
        for number, ids in enumerate(self._batches()):
            self._backward(ids)
            if number % count == count - 1:
                for param in self.model.parameters():
                    param.grad /= count
                clip_grad_norm_(self.model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()

    def lock_free(self, staleness: int) -> None:
        """Trains with `update: lock_free`, always as late as it may be."""
        asked = {"update": "lock_free", "max_staleness": staleness}
        config = PTMConfig(host_memory="12MiB", disk=self.folder, page_size="64KiB", **asked)
        engine = Engine.attach(self.model, config, device=torch.device("cpu"))
        inner, _ = self._adamw(self.steps)
        optimizer = engine.bind_optimizer(inner)
        schedule = get_cosine_schedule_with_warmup(optimizer, self.steps // 20, self.steps)
        with lazily():
            for ids in self._batches():
                self._backward(ids)
                engine.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            engine.detach()

    def result(self) -> float:
        """Returns the loss of held-out text."""
        self.model.eval()
        with torch.no_grad():
            ids = batch(self._held_out, HELD_OUT, torch.Generator().manual_seed(0))
            return float(self.model(input_ids=ids, labels=ids).loss)


def batch(tokens: torch.Tensor, rows: int, generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    starts = torch.randint(0, len(tokens) - length, (rows,), generator=generator)
    return torch.stack([tokens[start : start + length] for start in starts]).long()


def train(way: str, run: Run) -> float:
    """Trains in one of `WAYS`; returns the loss of held-out text."""
    count = int(way.split()[-1]) if " " in way else 0
    kind = run.lock_free if way.startswith("at most") else run.accumulated if way.startswith("batch") else run.late
    kind(count)
    return run.result()


def smooth(losses: list[list[float]]) -> list[tuple[float, float]]:
    """Returns the mean over seeds and over `WINDOW` batches, with the batch at the window's end."""
    each = [statistics.fmean(values) for values in zip(*losses, strict=True)]
    ends = range(WINDOW, len(each) + 1, WINDOW)
    return [(end, statistics.fmean(each[end - WINDOW : end])) for end in ends]


def main() -> None:
    """Prints the table, and draws the curves."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lr", type=float, default=1e-3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(facts(f"python tests/benchmarks/{Path(__file__).name} FOLDER PICTURE --steps {asked.steps}"))
    print(f"\n{asked.steps} batches of {ROWS} x {LENGTH} bytes, AdamW, at most {asked.lr:g}, clipped;", end=" ")
    print("loss of held-out text.\n")
    print("| | mean loss | to exact | each seed |\n| --- | --- | --- | --- |")
    curves, exact = {}, 0.0
    for way in WAYS:
        runs = [Run(seed, asked.steps, asked.lr, asked.folder) for seed in range(asked.seeds)]
        found = [train(way, run) for run in runs]
        exact = exact or statistics.fmean(found)
        each = ", ".join(f"{loss:.3f}" for loss in found)
        mean = statistics.fmean(found)
        print(f"| {way} | {mean:.4f} | {mean / exact - 1:+.2%} | {each} |", flush=True)
        curves[way] = smooth([run.losses for run in runs])
        title = "Loss in training by how late updates are, after the same tokens"
        up = f"loss, mean of {asked.seeds} seeds and {WINDOW} batches"
        asked.picture.write_text(picture(title, curves, "batches", up), encoding="utf-8")


if __name__ == "__main__":
    main()
