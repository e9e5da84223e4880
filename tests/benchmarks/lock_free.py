"""Lock-free updating beside exact, where optimizer state is on a slow disk: on the clock, and the loss.

    OMP_WAIT_POLICY=passive python tests/benchmarks/lock_free.py FOLDER [--pairs 10] [--rate 100] [--staleness 16]

A small Llama in bf16 with fp32 masters and AdamW over text: Python's own sources, in bytes. The budget holds weights,
gradients, and what lock-free updating buffers; exact keeps a part of masters and moments in that room. The rest is in
FOLDER. Each run is a process of its own, and the ways take turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts, ratio_line
from slow_disk import slow_down
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.optim.lock_free import LockFreeUpdates

WARM_UP = 3


def text() -> torch.Tensor:
    """Bytes of the standard library, in the order of names."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def run(asked: argparse.Namespace) -> None:
    """Trains in one way; prints what was measured as JSON."""
    if asked.rate:
        slow_down(asked.rate)
    torch.manual_seed(asked.seed)
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 6}
    model = LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=256, use_cache=False)).to(torch.bfloat16)
    config = PTMConfig(
        host_memory=asked.memory,
        disk=asked.folder,
        page_size="1MiB",
        master_weights="fp32",
        update="exact" if asked.way == "exact" else "lock_free",
        max_staleness=None if asked.way == "exact" else asked.staleness,
    )
    engine = Engine.attach(model, config, device=torch.device("cpu"))
    optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=asked.lr))
    tokens, generator = text(), torch.Generator().manual_seed(asked.seed)
    took, losses, begun = [], [], time.perf_counter()
    for step in range(asked.steps + WARM_UP):
        if step == WARM_UP:
            before, begun = engine.metrics._totals(), time.perf_counter()
            waited = optimizer.updates.staleness.waited_s if isinstance(optimizer.updates, LockFreeUpdates) else 0.0
        starts = torch.randint(0, len(tokens) - asked.length, (asked.rows,), generator=generator)
        ids = torch.stack([tokens[start : start + asked.length] for start in starts]).long()
        begin = time.perf_counter()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        took.append(time.perf_counter() - begin)
        losses.append(loss.item())
    training_s = time.perf_counter() - begun
    after = engine.metrics._totals()
    updates = optimizer.updates
    if isinstance(updates, LockFreeUpdates):
        waited = updates.staleness.waited_s - waited
        most, count = updates._sweeps.most, updates._sweeps.count
    else:
        waited, most, count = after.stall_s - before.stall_s, 1, 0
    engine.settle()
    found = {
        "step_s": statistics.fmean(took[WARM_UP:]),
        "training_s": training_s,
        "drained_s": time.perf_counter() - begun,
        "waited_s": waited / asked.steps,
        "most": most,
        "updates": count,
        "read_mib": (after.disk_read_bytes - before.disk_read_bytes) / asked.steps / 2**20,
        "written_mib": (after.disk_written_bytes - before.disk_written_bytes) / asked.steps / 2**20,
        "params": sum(param.numel() for param in model.parameters()),
        "losses": losses,
    }
    print(json.dumps(found))


def main() -> None:
    """Starts the runs, or is one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--memory", default="224MiB")
    parser.add_argument("--rate", type=float, default=100.0, help="MB/s; 0 for the disk as it is")
    parser.add_argument("--staleness", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=["exact", "lock-free"])
    asked = parser.parse_args()
    if asked.way:
        run(asked)
        return
    ways = ("exact", "lock-free")
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for pair in range(asked.pairs):
        for way in ways[:: 1 if pair % 2 else -1]:
            command = [sys.executable, __file__, *sys.argv[1:], "--way", way]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
            found[way].append(json.loads(done.stdout))
    print("# Lock-free updating\n")
    print(facts(f"python tests/benchmarks/{Path(__file__).name} {' '.join(['FOLDER', *sys.argv[2:]])}"))
    params = found["exact"][0]["params"] / 1e6
    print(f"\n{params:.1f}M parameters in bf16 with fp32 masters under {asked.memory}, AdamW, clipped;", end=" ")
    print(f"{asked.rows} x {asked.length} tokens a step, {asked.steps} steps.", end=" ")
    print(f"The disk moves at most {asked.rate:.0f} MB/s.\n" if asked.rate else "The disk is as fast as it is.\n")
    print("| | step | of it waited | read | written | steps in one update |\n| --- | --- | --- | --- | --- | --- |")
    for way in ways:
        names = [name for name in found[way][0] if name != "losses"]
        middle = {name: statistics.median(each[name] for each in found[way]) for name in names}
        waited = f"{middle['waited_s'] / middle['step_s']:.1%}"
        moved = f"{middle['read_mib']:.0f} MiB | {middle['written_mib']:.0f} MiB"
        print(f"| {way} | {middle['step_s']:.3f} s | {waited} | {moved} | up to {middle['most']:.0f} |")
    print(f"\n| ratio | first | second | median of pairs | middle half | pairs |\n| --- {'| --- ' * 5}|")
    exact, ours = ([each["step_s"] for each in found[way]] for way in ways)
    print(ratio_line("step lock-free / exact", ours, exact))


if __name__ == "__main__":
    main()
