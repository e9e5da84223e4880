"""Micro-batches by layer beside one by one, where weights are on a disk: on the clock, and in bytes.

    OMP_WAIT_POLICY=passive chrt -f 5 python tests/benchmarks/micro_batches.py FOLDER [--pairs 10] [--count 4] [--full]

LoRA on one Llama in fp32, clipped AdamW, few tokens a micro-batch, and a budget that holds a part of its weights; the
rest is in FOLDER. With `--full` all of it is trained, without clipping, by layer with updates in backward and without.
Each run is a process of its own, and the two ways take turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts, ratio_line
from peft import LoraConfig, get_peft_model
from ptm_accel.integrations.transformers.by_layer import CaughtOutputs
from ptm_accel.integrations.transformers.layers import layers_of
from slow_disk import slow_down
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.micro_batches.by_layer import ByLayer

VOCABULARY = 2048
ONE_BY_ONE, BY_LAYER, IN_BACKWARD = "one by one", "by layer", "by layer, updates in backward"


def run(asked: argparse.Namespace) -> None:
    """Trains in one way; prints what was measured as JSON."""
    # Where all is trained, plans come to rest later.
    warm_up, steps = (5, 4) if asked.full else (3, 3)
    slow_down(asked.rate)
    torch.manual_seed(0)
    sizes = {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12}
    plain = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, use_cache=False))
    adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
    model = plain if asked.full else get_peft_model(plain, adapters)
    config = PTMConfig(host_memory=asked.memory, disk=asked.folder)
    engine = Engine.attach(model, config, device=torch.device("cpu"))
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = engine.bind_optimizer(torch.optim.AdamW(trained, lr=1e-4))
    layered = ByLayer(model, layers_of(model), engine, CaughtOutputs(), inexact=False)
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(0, VOCABULARY, (1, asked.length), generator=generator) for _ in range(asked.count)]

    def work(ids: torch.Tensor) -> Callable[[], float]:
        def forward_and_backward() -> float:
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            return loss.item()

        return forward_and_backward

    more = False
    engine.training.more_follow = lambda: more
    engine.training.updates_in_backward = lambda: asked.way == IN_BACKWARD

    def turn(number: int) -> None:
        nonlocal more
        more = number < asked.count - 1

    took, losses = [], []
    for step in range(warm_up + steps):
        if step == warm_up:
            engine.settle()
            before = engine.metrics._totals()
        begin = time.perf_counter()
        works = [work(ids) for ids in batches]
        losses += [each() for each in works] if asked.way == ONE_BY_ONE else layered.run(works, turn)
        if not asked.full:
            engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == warm_up + steps - 1:
            engine.settle()
        took.append(time.perf_counter() - begin)
    after = engine.metrics._totals()
    found = {
        "step_s": sum(took[warm_up:]) / steps,
        "stalled_s": (after.stall_s - before.stall_s) / steps,
        "read_mib": (after.disk_read_bytes - before.disk_read_bytes) / steps / 2**20,
        "written_mib": (after.disk_written_bytes - before.disk_written_bytes) / steps / 2**20,
        "threads": len(os.listdir("/proc/self/task")),
        "python_threads": threading.active_count(),
        "losses": losses[-asked.count :],
        "params": sum(param.numel() for param in model.parameters()),
    }
    print(json.dumps(found))


def main() -> None:
    """Starts the runs, or is one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--count", type=int, default=4)
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--memory", default="128MiB")
    parser.add_argument("--rate", type=float, default=500.0)
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--way", choices=[ONE_BY_ONE, BY_LAYER, IN_BACKWARD])
    asked = parser.parse_args()
    if asked.way:
        run(asked)
        return
    ways = (BY_LAYER, IN_BACKWARD) if asked.full else (ONE_BY_ONE, BY_LAYER)
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for pair in range(asked.pairs):
        for way in ways[:: 1 if pair % 2 else -1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found[way].append(json.loads(done.stdout))
    assert all(each["losses"] == found[ways[0]][0]["losses"] for way in ways for each in found[way]), "other numbers"
    print("# Micro-batches by layer\n")
    options = f"--pairs {asked.pairs} --count {asked.count}" + f" --full --memory {asked.memory}" * asked.full
    print(facts(f"python tests/benchmarks/{Path(__file__).name} FOLDER {options}"))
    params = found[ways[0]][0]["params"]
    print(f"\n{params / 1e6:.1f}M parameters in fp32, {params * 4 / 2**20:.0f} MiB, under {asked.memory}. A step has")
    print(f"{asked.count} micro-batches of {asked.length} tokens. The disk is as slow as {asked.rate:.0f} MB/s: its")
    print("threads wait for what is missing to that. Losses are the same to the bit.\n")
    print("| | step | of it waited | read | written | threads of the process |\n| --- | --- | --- | --- | --- | --- |")
    for way in ways:
        names = [name for name in found[way][0] if name != "losses"]
        middle = {name: statistics.median(each[name] for each in found[way]) for name in names}
        waited = middle["stalled_s"] / middle["step_s"]
        moved = f"{middle['read_mib']:.0f} MiB | {middle['written_mib']:.0f} MiB"
        print(f"| {way} | {middle['step_s']:.3f} s | {waited:.0%} | {moved} | {middle['threads']:.0f} |")
    print(f"\n| ratio | first | second | median of pairs | middle half | pairs |\n| --- {'| --- ' * 5}|")
    one, layered = ([each["step_s"] for each in found[way]] for way in ways)
    print(ratio_line(f"step {ways[1]} / {ways[0]}", layered, one))


if __name__ == "__main__":
    main()
