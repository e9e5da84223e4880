"""What streaming costs the thread that trains beside arithmetic: a Llama of many parameters, all of them tiny.

    OMP_WAIT_POLICY=passive python tests/benchmarks/streaming_cost.py DIRECTORY_ON_AN_SSD [--rounds 3]

147 parameters in bf16, 0.9M elements in all, clipped: plain, on pages with room for everything, and with room for a
part of the states, which are on disk otherwise. Timed is the processor time of the thread that trains, which another
process on the machine lengthens less than the time on the clock; threads of the disk and of updates come on top. The
three take turns in one process. Prints the result as Markdown.
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

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine

HIDDEN, LAYERS, VOCABULARY = 64, 16, 512
STATE_BYTES = 16
"""Of each parameter: itself and its gradient in bf16, master and two moments in fp32."""
SHARES = {"all in memory": 3.0, "room for 0.3 of the states": 0.3}
WARM_UP, STEPS = 20, 20


def llama() -> LlamaForCausalLM:
    """As many tensors as a model of 222M parameters has."""
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 176, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)).to(torch.bfloat16)


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

    def steps(self, count: int) -> list[float]:
        """Processor seconds of this thread for each of so many steps."""
        seconds = []
        for _ in range(count):
            begin = time.thread_time()
            self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
            self.clip()
            self.optimizer.step()
            self.optimizer.zero_grad()
            seconds.append(time.thread_time() - begin)
        return seconds


def moves(engine: Engine) -> tuple[int, int]:
    """How many tensors have been brought in for an access, and moved away, so far."""
    stats = engine.pool.stats
    return stats.hits + stats.faults, stats.evictions


def main() -> None:
    """Trains all three in turns, and prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=options.directory))
        contenders = {"plain": Trained(llama(), None)}
        engines = {}
        for title, share in SHARES.items():
            model = llama()
            nbytes = int(share * STATE_BYTES * sum(param.numel() for param in model.parameters()))
            dials = PTMConfig(host_memory=nbytes, page_size=4096, disk=folder, master_weights="fp32")
            engines[title] = engine = stack.enter_context(closing(Engine.attach(model, dials)))
            contenders[title] = Trained(model, engine)
        times: dict[str, list[float]] = {title: [] for title in contenders}
        for contender in contenders.values():
            contender.steps(WARM_UP)
        before = {title: moves(engine) for title, engine in engines.items()}
        for _ in range(options.rounds):
            for title, contender in contenders.items():
                times[title].append(statistics.median(contender.steps(STEPS)))
        count = options.rounds * STEPS
        print("# What streaming costs beside arithmetic\n")
        command = f"streaming_cost.py DIRECTORY --rounds {options.rounds}"
        print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/{command}"))
        print(f"* model: Llama, {LAYERS} layers of hidden size {HIDDEN}; {STEPS} steps a round, after {WARM_UP}\n")
        print("| | processor time of the thread that trains, a step | rounds | brought in | moved away |")
        print("| --- | --- | --- | --- | --- |")
        for title, rounds in times.items():
            now = moves(engines[title]) if title in engines else (0, 0)
            moved = [f"{(b - a) / count:.0f}" for a, b in zip(before.get(title, (0, 0)), now, strict=True)]
            shown = ", ".join(f"{seconds:.3f}" for seconds in rounds)
            print(f"| {title} | {statistics.median(rounds):.3f} s | {shown} | {moved[0]} | {moved[1]} |")


if __name__ == "__main__":
    main()
