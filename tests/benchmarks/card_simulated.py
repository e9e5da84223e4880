"""What a step on a card that is too small is made of, on a simulated card.

    OMP_WAIT_POLICY=passive python tests/benchmarks/card_simulated.py [--share 0.21] [--calls]

The thread that computes is real: it runs the engine over a model whose tensors are those of 8B, smaller by 1024, and is
timed. The card is not: kernels of linear layers, and copies of both directions, go into rows of their own, each as
long as it would take with the sizes of 8B at the given rates, and begin when the thread has called them and what they
wait for has ended. Nothing is copied, so that values mean nothing. `--calls` also spends what a driver's calls take,
as far as that is known. So a step here takes what the thread or the link makes it take, whichever is longer, and shows
whether the one waits for the other; it is no measurement of a card.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine_facts import facts
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.device import CopyDirection
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.memory.transfer import Buffer
from ptm_accel.micro_batches.by_layer import ByLayer
from ptm_accel.model import attach
from ptm_accel.optim.host_updates import HostUpdates
from ptm_accel.units import GIB

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from integrations.transformers.by_layer import CaughtOutputs
from integrations.transformers.layers import layers_of
from tests.card import Card, CardAllocator, CardTier

SCALE = 1024
LAYERS, HIDDEN = 32, 4096
TOKENS = 2048
"""Of a micro-batch, unless `--tokens` says otherwise."""
FLOPS = 4.4e14
LINK_BYTES_S = 53e9
"""Of an H200: docs/benchmarks/card.md."""
CPU_BYTES_S = 62e9
"""Of memory, by AdamW in bf16 on the 16 cores beside that H200: 4.4 G parameters/s (docs/benchmarks/card.md)."""
PARAMETER_BYTES = 14
"""What AdamW in bf16 reads and writes of memory for each."""
CALL_US = {"copy": 40.0, "view": 20.0, "order": 4.0, "record": 4.0, "wait": 6.0, "query": 1.5, "reserved": 60.0}
"""What calls of torch and the driver are taken to cost: not measured, but what is usual for their kind."""
PAGE_BYTES = 4096
SMALL_SHARE = 8
"""Of a page, what is too small to move. Norms are, of 8B, in pages of 4 MiB; here they are smaller by 32 only."""
WARM_UP = 10

now = time.perf_counter


class Device:
    """Rows of what a card does, by when each has come to its end.

    Attributes:
        call_us: what the thread spends on each kind of call, in microseconds.
    """

    def __init__(self) -> None:
        self.ends = {"kernels": 0.0, "in": 0.0, "out": 0.0, "cpu": 0.0}
        self.busy = dict.fromkeys(self.ends, 0.0)
        self.calls: Counter[str] = Counter()
        self.call_us: dict[str, float] = {}

    def call(self, kind: str) -> None:
        """The thread calls the driver."""
        self.calls[kind] += 1
        until = now() + self.call_us.get(kind, 0.0) / 1e6
        while now() < until:
            pass

    def queue(self, row: str, seconds: float, *after: float) -> float:
        """Something is queued, to begin after what is before it in its row, and the given times; when it ends."""
        self.ends[row] = max(now(), self.ends[row], *after) + seconds
        self.busy[row] += seconds
        return self.ends[row]

    def settle(self) -> None:
        """Waits for the kernels."""
        sleep_until(self.ends["kernels"])


def sleep_until(at: float) -> None:
    while (left := at - now()) > 0:
        time.sleep(left)


DEVICE = Device()


class Event:
    """See `ptm_accel.memory.timeline.TimedEvent`."""

    __slots__ = ("at",)

    def __init__(self) -> None:
        DEVICE.call("record")
        self.at = max(now(), DEVICE.ends["kernels"])

    def query(self) -> bool:
        DEVICE.call("query")
        return now() >= self.at

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event.at - self.at) * 1e3


class Copy:
    """A transfer, which asks no more once it has ended, as those of a CUDA tier."""

    __slots__ = ("_ended", "at")

    def __init__(self, at: float) -> None:
        self.at = at
        self._ended = False

    def done(self) -> bool:
        if not self._ended:
            DEVICE.call("query")
            self._ended = now() >= self.at
        return self._ended

    def wait(self) -> None:
        if not self._ended:
            DEVICE.call("wait")
            sleep_until(self.at)
            self._ended = True

    def order(self) -> None:
        if not self._ended:
            DEVICE.call("order")
            DEVICE.ends["kernels"] = max(DEVICE.ends["kernels"], self.at)


class Allocator(CardAllocator):
    """As a card's, without filling what it hands out."""

    def view(self, memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        DEVICE.call("view")
        part = (ctypes.c_ubyte * nbytes).from_address(memory.data_ptr() + offset)
        part.memory = memory  # type: ignore[attr-defined]
        return torch.frombuffer(part, dtype=torch.uint8)

    def reserved(self) -> int:
        DEVICE.call("reserved")
        return super().reserved()


class SimulatedTier(CardTier):
    """A tier whose copies take time and move nothing."""

    def __init__(self, card: Card) -> None:
        super().__init__(card)
        assert self.memory is not None
        self.memory._allocator = Allocator(card, 64)
        self.memory.slabs._acquire = self.memory._allocator.empty

    def is_own(self, transfer: Any) -> bool:
        return isinstance(transfer, Copy)

    def copy_in(
        self, into: torch.Tensor, source: torch.Tensor, after: Sequence[Any] = (), behind: Sequence[Any] = ()
    ) -> Any:
        return self._copied(CopyDirection.IN, into.numel(), (*after, *behind))

    def copy_out(self, into: torch.Tensor, source: torch.Tensor, after: Sequence[Any] = ()) -> Any:
        return self._copied(CopyDirection.OUT, into.numel(), after)

    def _copied(self, direction: CopyDirection, nbytes: int, after: Sequence[Any]) -> Copy:
        DEVICE.call("copy")
        row = "in" if direction is CopyDirection.IN else "out"
        seconds = nbytes * SCALE / LINK_BYTES_S
        ends = DEVICE.queue(row, seconds, DEVICE.ends["kernels"], *(copy.at for copy in after))
        self._meter.add(direction, nbytes, ends - seconds, ends)
        return Copy(ends)

    def record(self) -> Event:
        return Event()

    def allocate(self, nbytes: int) -> Buffer:
        assert self.memory is not None
        return self.memory.allocate(nbytes)

    def recycle(self, buffer: Buffer) -> None:
        assert self.memory is not None
        self.memory.recycle(buffer)


class Backward(torch.autograd.Function):
    """Has the kernels of a linear layer's backward run where that is."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        DEVICE.queue("kernels", 2 * ctx.seconds)
        return grads[0], None


def model_of(tokens: int) -> LlamaForCausalLM:
    """8B, its matrices smaller by 32 in both dimensions."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": LAYERS}
    config = LlamaConfig(hidden_size=128, intermediate_size=448, vocab_size=4008, use_cache=False, **heads)
    model: LlamaForCausalLM = LlamaForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        seconds = 2 * tokens * self.weight.numel() * SCALE / FLOPS
        output = nn.functional.linear(x, self.weight, self.bias)
        DEVICE.queue("kernels", seconds)
        return Backward.apply(output, seconds)  # type: ignore[no-any-return,no-untyped-call]

    # Not by hooks: where modules have hooks of others, parameters are watched more closely.
    nn.Linear.forward = forward  # type: ignore[method-assign]
    return model.train()


def step(
    model: LlamaForCausalLM,
    optimizer: torch.optim.Optimizer,
    engine: Engine | None = None,
    accum: int = 1,
    layered: ByLayer | None = None,
) -> dict[str, float]:
    """One step of some micro-batches; seconds of what it was about."""
    ids, began, busy = torch.zeros(1, 8, dtype=torch.long), (now(), time.process_time()), dict(DEVICE.busy)
    forward = backward = 0.0

    def micro_batch(number: int) -> None:
        nonlocal forward, backward
        if engine is not None:
            left = accum - number - 1 if layered is None else 0
            engine.training.more_follow = partial(bool, left)
        at = now()
        loss = model(input_ids=ids, labels=ids).loss
        between = now()
        with nullcontext() if engine is None else engine.training.backward():
            loss.backward()
        forward, backward = forward + between - at, backward + now() - between

    works = [partial(micro_batch, number) for number in range(accum)]
    if layered is None:
        for work in works:
            work()
    else:
        layered.run(works)
    if engine is None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    else:
        # As the Trainer does.
        engine.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    DEVICE.settle()
    found = {"step": now() - began[0], "the CPU's own": time.process_time() - began[1]}
    found |= {"forward": forward, "backward": backward}
    return found | {row: DEVICE.busy[row] - busy[row] for row in busy}


def updates_on_cpu(engine: Engine, bytes_s: float) -> None:
    """Has updates on the CPU take what AdamW in bf16 takes at such a rate of the host's memory."""
    seconds = PARAMETER_BYTES * SCALE / bytes_s
    engine.run_ahead.host_s = seconds / 2
    update = HostUpdates._update

    def timed(self: HostUpdates, unit: Any) -> dict[str, Any]:
        begun = now()
        after = update(self, unit)
        elements = (
            sum(state.slot.value.numel for _, state, _ in unit.entries) if unit.together else unit.stop - unit.start
        )
        sleep_until(DEVICE.queue("cpu", elements * seconds))
        self._spent_s += max(elements * seconds - (now() - begun), 0.0)
        return after

    HostUpdates._update = timed  # type: ignore[method-assign]


def adamw(model: LlamaForCausalLM) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def row(label: str, steps: list[dict[str, float]]) -> None:
    medians = {key: statistics.median(each[key] for each in steps) for key in steps[0]}
    lengths = sorted(each["step"] for each in steps)
    print(f"| {label} | {medians.pop('step'):.3f} s ({lengths[0]:.3f} to {lengths[-1]:.3f}) |", end="")
    print(" | ".join([""] + [f"{value:.3f} s" for value in medians.values()])[2:], "|", flush=True)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--share", type=float, default=0.21, help="of the model's states, what pages have of the card")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a micro-batch")
    parser.add_argument("--accum", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--by-layer", action="store_true", help="micro-batches by layer; what is kept has its room")
    parser.add_argument(
        "--cpu", type=float, default=CPU_BYTES_S / 1e9, help="GB/s of memory that updates on the CPU have; 0: none"
    )
    parser.add_argument("--calls", action="store_true", help="the driver's calls cost the thread what is usual")
    options = parser.parse_args()
    torch.set_num_threads(1)
    DEVICE.call_us = CALL_US if options.calls else {}
    print("# A simulated card\n")
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/card_simulated.py {' '.join(sys.argv[1:])}".rstrip()))
    print(f"* kernels at {FLOPS / 1e12:.0f} TFLOP/s, each direction of the link at {LINK_BYTES_S / 1e9:.0f} GB/s")
    print(f"* updates on the CPU: {options.cpu / PARAMETER_BYTES:.1f} G parameters/s ({options.cpu:.0f} GB/s)")
    print(f"* the driver's calls, in us: {CALL_US if options.calls else 'nothing'}\n")
    print("| | step, median (range) | the thread's own | forward | backward | kernels | copies in | copies out | cpu |")
    print("|" + " --- |" * 9)
    model = model_of(options.tokens)
    optimizer = adamw(model)
    row("plain", [step(model, optimizer, accum=options.accum) for _ in range(WARM_UP)][2:])
    del optimizer, model
    model = model_of(options.tokens)
    states = 4 * sum(p.nbytes for p in model.parameters())
    borders = (LAYERS + 1) * options.accum * options.tokens * HIDDEN * 2 if options.by_layer else 0
    pages = int(states * options.share) - borders // SCALE
    tier = SimulatedTier(Card(2 * pages, 64))
    memory = build_memory(Capacities(page_bytes=PAGE_BYTES, host_bytes=GIB, device_bytes=pages), tier)
    attach._SMALL_SHARE = SMALL_SHARE
    engine = Engine.attach(model, PTMConfig(page_size=PAGE_BYTES), memory=memory)
    rate = LINK_BYTES_S / SCALE
    engine.run_ahead.rates = LinkRates(rate, rate, 2 * rate)
    if options.cpu:
        updates_on_cpu(engine, options.cpu * 1e9)
    optimizer = engine.bind_optimizer(adamw(model))
    layered = ByLayer(model, layers_of(model), engine, CaughtOutputs(), inexact=False) if options.by_layer else None
    warm = [step(model, optimizer, engine, options.accum, layered)["step"] for _ in range(WARM_UP)]
    stats, calls, collected = engine.pool.stats, DEVICE.calls.copy(), [g["collections"] for g in gc.get_stats()]
    before = stats.faults, stats.hits, stats.loaded_bytes
    row("paged", [step(model, optimizer, engine, options.accum, layered) for _ in range(options.steps)])
    count = options.steps
    print(f"\nPages have {pages * SCALE / GIB:.1f} of {states * SCALE / GIB:.1f} GiB. Warm-up:", end=" ")
    print(", ".join(f"{seconds:.2f}" for seconds in warm), "s. A step of these:", end=" ")
    print(f"{(stats.loaded_bytes - before[2]) * SCALE / GIB / count:.1f} GiB loaded,", end=" ")
    print(f"{(stats.faults - before[0]) / count:.1f} faults, {(stats.hits - before[1]) / count:.0f} sent for ahead;")
    print("calls:", ", ".join(f"{kind} {(DEVICE.calls[kind] - calls[kind]) / count:.0f}" for kind in CALL_US), end="; ")
    passes = (g["collections"] - c for g, c in zip(gc.get_stats(), collected, strict=True))
    print("garbage collections:", " / ".join(f"{each / count:.2f}" for each in passes))
    engine.close()
    memory.close()


if __name__ == "__main__":
    main()
