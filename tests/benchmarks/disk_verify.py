"""What `disk.verify` costs: the tier's rates and a training step, with and without, in turns with a control without.

    OMP_WAIT_POLICY=passive python tests/benchmarks/disk_verify.py DIRECTORY_ON_AN_SSD [--rounds 10]

Rates are of 256 MiB tensors in pages of 4 MiB. The step is that of a Llama of 45M parameters in fp32 with AdamW, for a
third of whose states there is room. Each round takes another order. Prints the result as Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.mapping import anonymous_run
from ptm_accel.memory.setup import Capacities, build_memory

WAYS = ("without", "with", "control")
MIB = 1 << 20
TENSOR_BYTES, PAGE_BYTES = 256 * MIB, 4 * MIB


class Rate:
    """A tier with one tensor on the disk."""

    def __init__(self, folder: Path, *, verifies: bool) -> None:
        self.tier = DiskTier([folder], Budget(Tier.DISK, TENSOR_BYTES), block_bytes=PAGE_BYTES, verifies=verifies)
        self.slot = self.tier.new(TENSOR_BYTES, Tag.PARAM, "w")
        self.data = anonymous_run(TENSOR_BYTES, "a benchmark").tensor().random_(0, 256)

    def write(self) -> None:
        """Stores the tensor."""
        self.tier.store(self.slot, 0, self.data).wait()

    def read(self) -> None:
        """Loads it."""
        self.tier.load(self.slot, 0, self.data).wait()


class Trained:
    """A model on pages whose states overflow to the disk."""

    def __init__(self, folder: Path, *, verifies: bool) -> None:
        torch.manual_seed(0)
        shape = LlamaConfig(
            hidden_size=512, intermediate_size=1408, num_hidden_layers=12, num_attention_heads=8, vocab_size=4096
        )
        model = LlamaForCausalLM(shape)
        states = 16 * sum(param.numel() for param in model.parameters())
        capacities = Capacities(page_bytes=MIB, host_bytes=states // 3, disk_paths=(folder,), disk_verifies=verifies)
        memory = build_memory(capacities, torch.device("cpu"))
        self.engine = Engine.attach(model, PTMConfig(), memory=memory)
        self.optimizer = self.engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        self.model, self.tokens = model, torch.randint(0, 4096, (1, 128))

    def step(self) -> None:
        """One step, whose update is waited for."""
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.engine.settle()

    def close(self) -> None:
        """Gives the memory back."""
        self.engine.close()


def seconds(act: Callable[[], None]) -> tuple[float, float]:
    """Seconds of the clock and of the processor, all threads."""
    clock, processor = time.perf_counter(), time.process_time()
    act()
    return time.perf_counter() - clock, time.process_time() - processor


def compare(name: str, acts: dict[str, Callable[[], None]], rounds: int) -> None:
    """Prints the medians of all ways, and the ratios of pairs."""
    for act in acts.values():
        act()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for index in range(rounds):
        for way in WAYS[index % 3 :] + WAYS[: index % 3]:
            found[way].append(seconds(acts[way]))
    cells = []
    for way in WAYS:
        ratios = [a[0] / b[0] for a, b in zip(found[way], found["without"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        clock, processor = (statistics.median(each) for each in zip(*found[way], strict=True))
        of = "" if way == "without" else f", x {middle:.3f} ({low:.3f} to {high:.3f})"
        cells.append(f"{clock * 1e3:.0f} ms{of}; processor {processor * 1e3:.0f} ms")
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Prints the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    asked = parser.parse_args()
    print("# What verified scratch files cost\n")
    command = f"OMP_WAIT_POLICY=passive python tests/benchmarks/disk_verify.py DIRECTORY --rounds {asked.rounds}"
    print(facts(command))
    print("\n| | " + " | ".join(WAYS) + " |\n| --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(dir=asked.directory) as folder, ExitStack() as stack:
        tiers = {way: Rate(Path(folder), verifies=way == "with") for way in WAYS}
        for rate in tiers.values():
            stack.callback(rate.tier.close)
        compare("write 256 MiB", {way: rate.write for way, rate in tiers.items()}, asked.rounds)
        compare("read 256 MiB", {way: rate.read for way, rate in tiers.items()}, asked.rounds)
        trained = {way: stack.enter_context(closing(Trained(Path(folder), verifies=way == "with"))) for way in WAYS}
        compare("a step", {way: each.step for way, each in trained.items()}, asked.rounds)


if __name__ == "__main__":
    main()
