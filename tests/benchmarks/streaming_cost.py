"""What streaming costs beside arithmetic: a Llama of many parameters, all of them small.

    OMP_WAIT_POLICY=passive python tests/benchmarks/streaming_cost.py DIRECTORY_ON_AN_SSD [--rounds 3] [--hidden 64]

147 parameters in bf16, clipped: plain, on pages with room for everything, and with room for a part of the states, which
are on disk otherwise. Timed are the clock, the processor time of the thread that trains (which another process on the
machine lengthens less), and that of all threads. They take turns in one process. Prints the result as Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.setup import Capacities, build_memory

LAYERS, VOCABULARY = 16, 512
STATE_BYTES = 16
"""Of each parameter: itself and its gradient in bf16, master and two moments in fp32."""
SHARES = {"all in memory": 3.0, "room for 0.3 of the states": 0.3}
WARM_UP, STEPS = 20, 20


class Cost(NamedTuple):
    """Seconds of a step: by the clock, of the thread that trains, and of all threads."""

    clock_s: float
    thread_s: float
    process_s: float

    @classmethod
    def now(cls) -> Cost:
        """Running totals."""
        return cls(time.perf_counter(), time.thread_time(), time.process_time())


def llama(hidden: int) -> LlamaForCausalLM:
    """As many tensors as a model of 222M parameters has."""
    torch.manual_seed(0)
    sizes = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_hidden_layers": LAYERS}
    return LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=VOCABULARY, num_attention_heads=4)).to(torch.bfloat16)


class Trained:
    """One of the contenders, with its optimizer."""

    def __init__(self, model: LlamaForCausalLM, engine: Engine | None) -> None:
        self.model = model
        self.tokens = torch.randint(0, VOCABULARY, (1, 16), generator=torch.Generator().manual_seed(1))
        adamw = torch.optim.AdamW(model.parameters(), fused=True)
        self.optimizer = adamw if engine is None else engine.bind_optimizer(adamw)
        self.clip: Callable[[], object] = (
            partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), 1.0)
            if engine is None
            else partial(engine.clip_grad_norm_, 1.0)
        )

    def steps(self, count: int) -> Cost:
        """The median cost of so many steps, each figure by itself."""
        costs = []
        for _ in range(count):
            begin = Cost.now()
            self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
            self.clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
            costs.append([end - start for start, end in zip(begin, Cost.now(), strict=True)])
        return Cost(*map(statistics.median, zip(*costs, strict=True)))


def moves(engine: Engine) -> tuple[int, int]:
    """How many tensors have been brought in for an access, and moved away, so far."""
    stats = engine.pool.stats
    return stats.hits + stats.faults, stats.evictions


def main() -> None:
    """Trains all of them in turns, and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=64)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory))
        contenders = {"plain": Trained(llama(options.hidden), None)}
        engines = {}
        for title, share in SHARES.items():
            model = llama(options.hidden)
            count = sum(param.numel() for param in model.parameters())
            # Tiers of their own: models of one process share them otherwise.
            page_bytes = 4096 if options.hidden <= 64 else 1 << 20
            host_bytes = int(share * STATE_BYTES * count)
            tiers = Capacities(page_bytes=page_bytes, host_bytes=host_bytes, disk_paths=(Path(folder),))
            ptm_options = PTMConfig(page_size=page_bytes, master_weights="fp32")
            memory = build_memory(tiers, torch.device("cpu"))
            engines[title] = engine = stack.enter_context(closing(Engine.attach(model, ptm_options, memory=memory)))
            contenders[title] = Trained(model, engine)
        costs: dict[str, list[Cost]] = {title: [] for title in contenders}
        for contender in contenders.values():
            contender.steps(WARM_UP)
        before = {title: moves(engine) for title, engine in engines.items()}
        for _ in range(options.rounds):
            for title, contender in contenders.items():
                costs[title].append(contender.steps(STEPS))
        steps = options.rounds * STEPS
        print("# What streaming costs beside arithmetic\n")
        command = f"streaming_cost.py DIRECTORY --rounds {options.rounds} --hidden {options.hidden}"
        print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/{command}"))
        size = f"hidden size {options.hidden}, {count / 1e6:.1f}M parameters"
        print(f"* model: Llama, {LAYERS} layers of {size}; {STEPS} steps a round, after {WARM_UP}\n")
        print("| a step | on the clock | rounds | processor: the thread that trains | all | brought in | moved away |")
        print(f"| --- {'| --- ' * 6}|")
        for title, rounds in costs.items():
            now = moves(engines[title]) if title in engines else (0, 0)
            moved = [f"{(b - a) / steps:.0f}" for a, b in zip(before.get(title, (0, 0)), now, strict=True)]
            middle = Cost(*map(statistics.median, zip(*rounds, strict=True)))
            shown = ", ".join(f"{cost.clock_s:.3f}" for cost in rounds)
            print(
                f"| {title} | {middle.clock_s:.3f} s | {shown} | {middle.thread_s:.3f} s | {middle.process_s:.3f} s "
                f"| {moved[0]} | {moved[1]} |"
            )


if __name__ == "__main__":
    main()
