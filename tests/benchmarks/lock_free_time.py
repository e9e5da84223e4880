"""The loss of a small language model after the same time, where optimizer state is on a slow disk.

    OMP_WAIT_POLICY=passive python tests/benchmarks/lock_free_time.py FOLDER PICTURE [--seconds 100] [--seeds 5]

A Llama in bf16 with fp32 masters and AdamW over bytes of Python's own sources. The budget holds weights, gradients and
what lock-free updating buffers; exact keeps a part of masters and moments in that room. Exact, exact with four batches
accumulated in each step, and `update: lock_free` by `max_staleness`. The learning rate follows the time. Each run is a
process of its own, with one thread, and the ways take turns. Prints Markdown, and draws the loss of training.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from curves import picture
from lock_free import text
from lock_free_loss import batch
from machine_facts import facts
from slow_disk import slow_down
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine

LENGTH, HELD_OUT, PIECES = 256, 32, 20
WAYS = {"exact": (None, 1), "exact, 4 batches a step": (None, 4)}
WAYS |= {f"max_staleness: {most}": (most, 1) for most in (1, 16)}


def run(asked: argparse.Namespace) -> None:
    """Trains in one way; prints what was measured as JSON."""
    torch.set_num_threads(1)
    if asked.rate:
        slow_down(asked.rate)
    torch.manual_seed(asked.seed)
    staleness, count = WAYS[asked.way]
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False)).to(torch.bfloat16)
    lagging = {} if staleness is None else {"update": "lock_free", "max_staleness": staleness}
    config = PTMConfig(host_memory=asked.memory, disk=asked.folder, page_size="1MiB", master_weights="fp32", **lagging)
    engine = Engine.attach(model, config, device=torch.device("cpu"))
    optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=asked.lr, betas=(0.9, 0.95)))
    tokens, generator = text(), torch.Generator().manual_seed(asked.seed)
    known, held_out = tokens[: len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10 :]
    curve: list[tuple[float, float]] = []
    pieces, begin = range(PIECES), time.perf_counter()
    while (spent := time.perf_counter() - begin) < asked.seconds:
        done = spent / asked.seconds
        rate = min(1.0, done / 0.05) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = asked.lr * rate
        for _ in range(count):
            ids = batch(known, 1, generator, LENGTH)
            loss = model(input_ids=ids, labels=ids).loss
            (loss / count).backward()
            curve.append((time.perf_counter() - begin, loss.item()))
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine.settle()
    drained = time.perf_counter() - begin
    lagged = optimizer.updates.staleness
    model.eval()
    with torch.no_grad():
        ids = batch(held_out, HELD_OUT, torch.Generator().manual_seed(0), LENGTH)
        loss = model(input_ids=ids, labels=ids).loss.item()
    found = {
        "loss": loss,
        "batches": len(curve),
        "drained_s": drained,
        "lacked": 0.0 if lagged is None else lagged.mean_since(0, 0),
        "most": 0 if lagged is None else lagged.most,
        "curve": [
            _mean([loss for at, loss in curve if piece <= at * PIECES / asked.seconds < piece + 1]) for piece in pieces
        ],
    }
    print(json.dumps(found))


def _mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None


def main() -> None:
    """Starts the runs, or is one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=float, default=100.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--memory", default="180MiB")
    parser.add_argument("--rate", type=float, default=250.0, help="MB/s; 0 for the disk as it is")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=[*WAYS])
    asked = parser.parse_args()
    if asked.way:
        run(asked)
        return
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for seed in range(asked.seeds):
        for way in [*WAYS][:: 1 if seed % 2 else -1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--seed", str(seed)]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found[way].append(json.loads(done.stdout))
    print(facts(f"python tests/benchmarks/{Path(__file__).name} {' '.join(['FOLDER', 'PICTURE', *sys.argv[3:]])}"))
    print(
        f"\n14.4M parameters under {asked.memory}, {LENGTH} bytes a batch, {asked.seconds:g} s of training;",
        end=" ",
    )
    print(f"the disk moves at most {asked.rate:g} MB/s. Means of {asked.seeds} seeds.\n")
    print("| | held-out loss | each seed | batches | steps lacked, mean and most |\n| --- | --- | --- | --- | --- |")
    for way, runs in found.items():
        mean = {name: statistics.fmean(each[name] for each in runs) for name in ("loss", "batches", "lacked")}
        each = ", ".join(f"{one['loss']:.3f}" for one in runs)
        lacked = f"{mean['lacked']:.2f}, {max(one['most'] for one in runs)}"
        print(f"| {way} | {mean['loss']:.4f} | {each} | {mean['batches']:.0f} | {lacked} |")
    curves = {}
    for way, runs in found.items():
        columns = zip(*(one["curve"] for one in runs), strict=True)
        values = [_mean([loss for loss in column if loss is not None]) for column in columns]
        # The first pieces would flatten all others.
        curves[way] = [((at + 1) * asked.seconds / PIECES, value) for at, value in enumerate(values) if value][
            PIECES // 10 :
        ]
    title = "Loss in training on a slow disk, by time"
    asked.picture.write_text(
        picture(title, curves, "seconds of training", f"loss, mean of {asked.seeds} seeds"), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
