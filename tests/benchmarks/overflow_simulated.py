"""A step of 8B on a small card with too little RAM for what is away, on a simulated card over a simulated SSD.

    OMP_WAIT_POLICY=passive python tests/benchmarks/overflow_simulated.py [--ram 60 51.2 40] [--ssd 5]

The thread that computes is real, the card is that of `card_simulated.py` with the rates of a 4090, and the SSD is a row
like its others: one transfer after the other, each as long as it takes with the sizes of 8B. Pages leave RAM by the
next use (`memory/frame_order.py`), and in a second run least recently used first, as they do before a step is known.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import card_simulated as card
import torch
from card_simulated import DEVICE, SCALE, SimulatedTier, adamw, model_of, now, sleep_until, step
from machine_facts import facts

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.budget import Budget, Reservation, Tag, Tier
from ptm_accel.memory.frame_order import FrameOrder
from ptm_accel.memory.frames import FramePool
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.mapping import FilePiece
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.setup import Capacities, Memory, frame_bytes
from ptm_accel.model import attach
from ptm_accel.pages import _use_of_link

from tests.card import Card  # isort: skip

FLOPS, LINK_BYTES_S = 165e12 * 0.45, 25e9
"""Of a 4090, as `ptm-accel estimate` takes them."""
WARM_UP = 14


class Move:
    """A transfer of the SSD."""

    __slots__ = ("at",)

    def __init__(self, at: float) -> None:
        self.at = at

    def done(self) -> bool:
        return now() >= self.at

    def wait(self) -> None:
        sleep_until(self.at)

    def order(self) -> None:
        self.wait()


class SimulatedSsd:
    """An SSD whose transfers take time and move nothing.

    Attributes:
        read_bytes: so far.
        written_bytes: so far.
    """

    def __init__(self, bytes_s: float) -> None:
        self.budget = Budget(Tier.DISK, 1 << 40)
        self.read_bytes = self.written_bytes = 0
        self._bytes_s = bytes_s

    @property
    def busy_s(self) -> float:
        """How long it has moved bytes."""
        return DEVICE.busy["ssd"]

    def new(self, nbytes: int, tag: Tag, name: str) -> Reservation:
        return self.budget.reserve(nbytes, tag, name)

    def free(self, handle: Reservation) -> None:
        handle.release()

    def store(self, handle: Reservation, offset: int, source: torch.Tensor) -> Move:
        self.written_bytes += source.numel()
        return self._move(source.numel())

    def load(self, handle: Reservation, offset: int, into: torch.Tensor, behind: Sequence[Any] = ()) -> Move:
        self.read_bytes += into.numel()
        return self._move(into.numel())

    def _move(self, nbytes: int) -> Move:
        return Move(DEVICE.queue("ssd", nbytes * SCALE / self._bytes_s))

    def pieces(self, handle: Reservation) -> Sequence[FilePiece]:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def check_integrity(self) -> None:
        pass


def memory_of(pages_bytes: int, ram_bytes: int, ssd: SimulatedSsd) -> Memory:
    """Tiers of the given sizes."""
    tier = SimulatedTier(Card(2 * pages_bytes, 64))
    capacities = Capacities(page_bytes=card.PAGE_BYTES, host_bytes=ram_bytes, device_bytes=pages_bytes)
    host, device = Budget(Tier.HOST, ram_bytes), Budget(Tier.DEVICE, pages_bytes)
    frames = FramePool(host, frame_bytes(capacities), page_bytes=card.PAGE_BYTES)
    backing = HostStore(tier, frames, ssd)  # type: ignore[arg-type]
    pool = Pool(tier, device, backing, card=tier.memory)
    budgets = {Tier.HOST: host, Tier.DEVICE: device, Tier.DISK: ssd.budget}
    return Memory(pool, budgets, None, [backing, tier, frames], device=tier)


def run(options: argparse.Namespace, ram: float, label: str) -> float:
    """Prints a row; returns the median of a step's seconds."""
    model = model_of(options.tokens)
    ssd = SimulatedSsd(options.ssd * 1e9)
    memory = memory_of(int(options.gpu * 1e9) // SCALE, int(ram * 1e9) // SCALE, ssd)
    engine = Engine.attach(model, PTMConfig(page_size=card.PAGE_BYTES), memory=memory)
    link, below = LINK_BYTES_S / SCALE, options.ssd * 1e9 / SCALE
    # As a run does with a disk below (`Pages._learn_rates`): the planner corrects the rates by the use that it sees.
    engine.run_ahead.rates = LinkRates(min(link, below), min(link, below), min(2 * link, below))
    engine.run_ahead.link_use = partial(_use_of_link, memory.device, ssd)
    optimizer = engine.bind_optimizer(adamw(model))
    for _ in range(WARM_UP):
        step(model, optimizer, engine)
    stats = memory.pool.stats
    before = ssd.read_bytes, ssd.written_bytes, stats.loaded_bytes, stats.stored_bytes
    steps = [step(model, optimizer, engine) for _ in range(options.steps)]
    after = ssd.read_bytes, ssd.written_bytes, stats.loaded_bytes, stats.stored_bytes
    moved = [f"{(b - a) * SCALE / 1e9 / options.steps:.1f}" for a, b in zip(before, after, strict=True)]
    lengths = sorted(each["step"] for each in steps)
    away = sum(each.slot_bytes for each in memory.pool.tensors() if each.handle is not None)
    busy = {key: statistics.median(each[key] for each in steps) for key in ("kernels", "in", "ssd")}
    print(
        f"| {ram:g} GB of {away * SCALE / 1e9:.1f} | {label} "
        f"| {statistics.median(lengths):.2f} s ({lengths[0]:.2f} to {lengths[-1]:.2f}) | {moved[0]} | {moved[1]} "
        f"| {moved[2]} | {moved[3]} | {busy['kernels']:.2f} s | {busy['in']:.2f} s | {busy['ssd']:.2f} s |",
        flush=True,
    )
    engine.close()
    memory.close()
    return statistics.median(lengths)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", type=float, default=19.0, help="GB that pages have of the card")
    parser.add_argument("--ram", type=float, nargs="+", default=[60.0, 51.2, 40.0], help="GB that pages have of it")
    parser.add_argument("--ssd", type=float, default=5.0, help="GB/s, for reading and writing together")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    card.FLOPS, card.LINK_BYTES_S = FLOPS, LINK_BYTES_S
    DEVICE.ends["ssd"] = DEVICE.busy["ssd"] = 0.0
    attach._SMALL_SHARE = card.SMALL_SHARE
    print("# RAM that overflows to an SSD, simulated\n")
    print(
        facts(
            f"OMP_WAIT_POLICY=passive python tests/benchmarks/overflow_simulated.py {' '.join(sys.argv[1:])}".rstrip()
        )
    )
    print(f"* 8B in bf16, {options.tokens} tokens; pages have {options.gpu} GB of the card")
    rates = f"kernels at {FLOPS / 1e12:.0f} TFLOP/s, the link at {LINK_BYTES_S / 1e9:.0f} GB/s"
    print(f"* {rates}, the SSD at {options.ssd} GB/s for both directions together\n")
    titles = [
        "RAM, of what leaves the card",
        "pages leave RAM",
        "step, median (range)",
        "GB read from the SSD",
        "written",
    ]
    titles += ["loaded over the link", "stored", "kernels", "link in", "SSD busy"]
    print(f"| {' | '.join(titles)} |\n|" + " --- |" * len(titles))
    end_step, ratios = FrameOrder.end_step, []
    for ram in options.ram:
        FrameOrder.end_step = end_step  # type: ignore[method-assign]
        took = run(options, ram, "by next use")
        FrameOrder.end_step = lambda self, model: None  # type: ignore[method-assign,assignment]
        ratios.append(f"{ram:g} GB: {run(options, ram, 'least recently used first') / took:.2f}")
    print("\nTime of a step, least recently used to next use:", ", ".join(ratios))


if __name__ == "__main__":
    main()
