"""What an update of bf16 parameters with fp32 masters costs, beside torch's fused fp32 AdamW on as many parameters.

    OMP_WAIT_POLICY=passive python tests/benchmarks/update.py [--rounds 30] [--threads 1 2] [--pieces 512 1024]

67M parameters, all of them in memory. Timed are `step()` of the paged optimizer (gradients in bf16, masters and moments
in fp32, parameters in bf16), the same three operations in a bare loop over pieces of the same size (widen the gradient,
`torch._fused_adamw_`, round the master), and `torch.optim.AdamW(fused=True)` over fp32 parameters. They take turns,
so that each ratio is of updates within a second of each other. Making and freeing gradients is outside of all three.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts
from torch import nn

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.optim import arithmetic

SHAPE, LAYERS = (2048, 4096), 8
NUMEL = LAYERS * SHAPE[0] * SHAPE[1]
WARM_UP = 2
RATE = {"lr": 1e-3, "weight_decay": 0.01}


def layers(dtype: torch.dtype) -> nn.Sequential:
    """As many parameters in either precision; biases too, since a model has small parameters as well."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(SHAPE[1], SHAPE[0], dtype=dtype) for _ in range(LAYERS)))


class Plain:
    """torch's fused AdamW over fp32 parameters."""

    def __init__(self) -> None:
        model = layers(torch.float32)
        self.optimizer = torch.optim.AdamW(model.parameters(), fused=True, **RATE)
        for param in model.parameters():
            param.grad = torch.randn_like(param) * 1e-3

    def seconds(self) -> float:
        """One update."""
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin


class Bare:
    """The three operations alone, over pieces of tensors: what they take without anything around them.

    Attributes:
        parts: the seconds of each operation, a list of (widen, kernel, round) per update.
    """

    def __init__(self) -> None:
        self.values = [torch.randn(SHAPE[0] * SHAPE[1]).bfloat16() for _ in range(LAYERS)]
        self.masters = [value.float() for value in self.values]
        self.grads = [torch.randn(SHAPE[0] * SHAPE[1]).mul_(1e-3).bfloat16() for _ in range(LAYERS)]
        self.moments = [(torch.zeros_like(master), torch.zeros_like(master)) for master in self.masters]
        self.step = torch.zeros(())
        self.parts: list[tuple[float, float, float]] = []

    def seconds(self, piece: int) -> float:
        """One update in pieces of `piece` elements."""
        scratch = torch.empty(piece)
        spent = [0.0, 0.0, 0.0]
        self.step += 1
        begin = time.perf_counter()
        for value, master, grad, (first, second) in zip(
            self.values, self.masters, self.grads, self.moments, strict=True
        ):
            for start in range(0, value.numel(), piece):
                stop = min(start + piece, value.numel())
                marks = [time.perf_counter()]
                wide = scratch[: stop - start].copy_(grad[start:stop])
                marks.append(time.perf_counter())
                target = master[start:stop]
                self._kernel(target, wide, first[start:stop], second[start:stop])
                marks.append(time.perf_counter())
                value[start:stop].copy_(target)
                marks.append(time.perf_counter())
                spent = [total + b - a for total, a, b in zip(spent, marks, marks[1:], strict=False)]
        took = time.perf_counter() - begin
        self.parts.append((spent[0], spent[1], spent[2]))
        return took

    def _kernel(self, target: torch.Tensor, grad: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        torch._fused_adamw_(
            [target],
            [grad],
            [first],
            [second],
            [],
            [self.step],
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
            maximize=False,
            grad_scale=None,
            found_inf=None,
            **RATE,
        )


class Paged:
    """The paged optimizer, with room for everything."""

    def __init__(self, scaled: bool) -> None:
        model = layers(torch.bfloat16)
        self.scaled = scaled
        self.engine = Engine.attach(model, PTMConfig(host_memory="4GiB", master_weights="fp32"))
        self.optimizer = self.engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True, **RATE))
        self.params = [slot.param for slot in self.engine.slots]
        self.grads = [torch.randn(p.shape).mul_(1e-3).bfloat16() for p in self.params]

    def seconds(self, piece: int) -> float:
        """One update in pieces of `piece` elements."""
        arithmetic.PIECE_ELEMENTS = piece
        held = [grad.clone() for grad in self.grads]
        assert self.engine.gradients is not None
        for param, grad in zip(self.params, held, strict=True):
            param.grad = grad
            self.engine.gradients.take(param)
        if self.scaled:
            self.optimizer.gradients.multiply(torch.tensor(0.5))
        # `held` keeps the gradients' memory from being freed while the clock runs.
        begin = time.perf_counter()
        self.optimizer.step()
        return time.perf_counter() - begin


def show(threads: int, piece: int, ours: list[float], bare: Bare, bares: list[float], plains: list[float]) -> None:
    """One row of the table: nanoseconds per parameter, and ratios pair by pair."""
    nano = [1e9 * statistics.median(values) / NUMEL for values in (plains, bares, ours)]
    parts = [1e9 * statistics.median(part) / NUMEL for part in zip(*bare.parts[WARM_UP:], strict=True)]
    ratios = [a / b for a, b in zip(ours, plains, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4)
    print(
        f"| {threads} | {piece >> 10} Ki | {nano[0]:.3f} | {parts[0]:.3f} + {parts[1]:.3f} + {parts[2]:.3f} "
        f"| {statistics.median(a / b for a, b in zip(bares, plains, strict=True)):.2f} | {nano[2]:.3f} "
        f"| **{statistics.median(ratios):.2f}** | {low:.2f} to {high:.2f} | {len(ratios)} |",
        flush=True,
    )


def main() -> None:
    """Measures every number of threads with every size of pieces and prints the result as Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument(
        "--pieces", type=int, nargs="+", default=[128, 256, 512, 1024, 2048, 4096, 16384], help="Ki elements"
    )
    parser.add_argument("--scaled", action="store_true", help="gradients are clipped, so multiplied by a number")
    options = parser.parse_args()
    print("# The update: bf16 parameters with fp32 masters\n")
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/update.py --rounds {options.rounds}"))
    print(f"* {LAYERS} linear layers of {SHAPE[1]} x {SHAPE[0]}, {NUMEL / 1e6:.1f}M parameters; ns are per parameter")
    print(f"* pieces used when nothing else is said: {arithmetic.PIECE_ELEMENTS >> 10} Ki elements\n")
    print(
        "| threads | piece | torch fp32, ns | bare: widen + kernel + round, ns | bare / torch | ours, ns "
        "| ours / torch | middle half | pairs |\n| " + "--- | " * 9
    )
    plain, paged = Plain(), Paged(options.scaled)
    for threads in options.threads:
        torch.set_num_threads(threads)
        for piece in (size << 10 for size in options.pieces):
            bare = Bare()
            turns: dict[str, Callable[[], float]] = {
                "plain": plain.seconds,
                "bare": lambda piece=piece, bare=bare: bare.seconds(piece),
                "paged": lambda piece=piece: paged.seconds(piece),
            }
            times: dict[str, list[float]] = {name: [] for name in turns}
            for _ in range(options.rounds + WARM_UP):
                for name in random.sample(list(turns), len(turns)):
                    times[name].append(turns[name]())
            kept = {name: values[WARM_UP:] for name, values in times.items()}
            show(threads, piece, kept["paged"], bare, kept["bare"], kept["plain"])
    paged.engine.check_integrity()
    paged.engine.close()


if __name__ == "__main__":
    main()
