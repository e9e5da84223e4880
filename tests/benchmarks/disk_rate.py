"""The disk tier's rate beside that of the plainest loop that can be written for the same file system.

Run by hand: `python tests/benchmarks/disk_rate.py [DIR]`; the result is Markdown. Tier and loop are measured in turns,
so that what the machine does to one it does to the other; the target is 85% of the loop's rate, read and write.
`DISK_RATE_THREADS` sets the tier's threads (2).
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from ptm_accel.memory.arena import HostArena
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.diskio import DiskSlot
from ptm_accel.memory.mapping import anonymous_run, view_at
from ptm_accel.memory.scratch import file_system_of

GIB = 1 << 30
TOTAL_BYTES = GIB
BLOCK_BYTES = 4 << 20
LARGE_BYTES = 128 << 20
PAIRS = 7
TARGET = 0.85


class Case(NamedTuple):
    """A way of moving `TOTAL_BYTES` to the disk and back."""

    name: str
    write: Callable[[], None]
    read: Callable[[], None]


class PlainLoop:
    """`pwritev` and `preadv` of one huge-page buffer after the other, on one thread."""

    def __init__(self, folder: Path) -> None:
        self.fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT, 0o600)
        os.posix_fallocate(self.fd, 0, TOTAL_BYTES)
        self.run = anonymous_run(TOTAL_BYTES, "the plain loop")
        self.run.tensor().random_(0, 256)
        self.views = [view_at(self.run.address + offset, BLOCK_BYTES) for offset in range(0, TOTAL_BYTES, BLOCK_BYTES)]

    def write(self) -> None:
        for index, view in enumerate(self.views):
            assert os.pwritev(self.fd, [view], index * BLOCK_BYTES) == BLOCK_BYTES

    def read(self) -> None:
        for index, view in enumerate(self.views):
            assert os.preadv(self.fd, [view], index * BLOCK_BYTES) == BLOCK_BYTES

    def close(self) -> None:
        os.close(self.fd)


class Tensors:
    """Arena blocks of one size with a slot each; all transfers are started before any is waited for."""

    def __init__(self, tier: DiskTier, blocks: list[torch.Tensor]) -> None:
        self.tier = tier
        self.pairs: list[tuple[DiskSlot, torch.Tensor]] = [
            (tier.new(block.numel(), Tag.PARAM, f"tensor {index}"), block) for index, block in enumerate(blocks)
        ]

    def write(self) -> None:
        for transfer in [self.tier.store(slot, 0, block) for slot, block in self.pairs]:
            transfer.wait()

    def read(self) -> None:
        for transfer in [self.tier.load(slot, 0, block) for slot, block in self.pairs]:
            transfer.wait()


class OneSlot(Tensors):
    """One slot of the whole size, of which each block is a part."""

    def __init__(self, tier: DiskTier, blocks: list[torch.Tensor]) -> None:
        self.tier = tier
        self.slot = tier.new(TOTAL_BYTES, Tag.PARAM, "one slot")
        self.blocks = blocks

    def write(self) -> None:
        starts = range(0, TOTAL_BYTES, LARGE_BYTES)
        for transfer in [self.tier.store(self.slot, at, block) for at, block in zip(starts, self.blocks, strict=True)]:
            transfer.wait()

    def read(self) -> None:
        starts = range(0, TOTAL_BYTES, LARGE_BYTES)
        for transfer in [self.tier.load(self.slot, at, block) for at, block in zip(starts, self.blocks, strict=True)]:
            transfer.wait()


def rate(move: Callable[[], None]) -> float:
    """GiB/s of one pass."""
    begin = time.perf_counter()
    move()
    return TOTAL_BYTES / GIB / (time.perf_counter() - begin)


def measure(plain: PlainLoop, case: Case) -> list[str]:
    """One row of the table for each direction."""
    case.write()  # the first write of reserved blocks is slower, here as in the plain loop
    rows = []
    for direction in ("write", "read"):
        pairs = []
        for index in range(PAIRS):
            first, second = getattr(plain, direction), getattr(case, direction)
            # Whoever goes second may find the drive busy with what the first left behind.
            if index % 2:
                mine = rate(second)
                pairs.append((rate(first), mine))
            else:
                theirs = rate(first)
                pairs.append((theirs, rate(second)))
        ratios = [mine / theirs for theirs, mine in pairs]
        median = statistics.median(ratios)
        rows.append(
            f"| {case.name} | {direction} | {statistics.median(p[1] for p in pairs):.2f} | "
            f"{statistics.median(p[0] for p in pairs):.2f} | {median:.2f} | "
            f"{' '.join(f'{ratio:.2f}' for ratio in ratios)} | {'met' if median >= TARGET else 'missed'} |"
        )
    return rows


def machine(folder: Path) -> str:
    """What the numbers depend on."""
    memory = psutil.virtual_memory().total / GIB
    return (
        f"{os.cpu_count()} cores ({platform.machine()}), {memory:.0f} GiB of memory, Linux {platform.release()}, "
        f"{file_system_of(folder)}; Python {platform.python_version()}, torch {torch.__version__}"
    )


def main() -> None:
    """Measures and prints."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir())
    threads = int(os.environ.get("DISK_RATE_THREADS", "2"))
    host, disk = Budget(Tier.HOST, 2 * TOTAL_BYTES), Budget(Tier.DISK, 3 * TOTAL_BYTES)
    arena = HostArena(host)
    tier = DiskTier([folder], disk, io_threads_per_path=threads, block_bytes=BLOCK_BYTES, staging=host)
    if not tier.direct:
        sys.exit(f"{folder}: this file system has no direct transfers; name a folder on a disk.")
    plain = PlainLoop(folder)
    plain.write()
    rows = []
    for name, kind, size in (
        (f"one slot of 1 GiB in tensors of {LARGE_BYTES >> 20} MiB", OneSlot, LARGE_BYTES),
        ("256 slots of 4 MiB", Tensors, 4 << 20),
    ):
        charge = host.reserve(TOTAL_BYTES, Tag.PARAM, name)
        blocks = [arena.allocate(size) for _ in range(TOTAL_BYTES // size)]
        buffers = [buffer.octets.random_(0, 256) for buffer in blocks if buffer.octets is not None]
        case = kind(tier, buffers)
        rows += measure(plain, Case(name, case.write, case.read))
        del case, buffers
        charge.release()
        for buffer in blocks:
            buffer.octets = None
            arena.recycle(buffer)
    print(
        "# Rate of the disk tier\n\n"
        "The tier's `store` and `load` against a plain loop of `pwritev` and `preadv` on huge-page buffers: one\n"
        "thread, `O_DIRECT`, blocks of the same size, a file in the same folder. Rates are medians of "
        f"{PAIRS} passes over\n1 GiB, measured in turns; the ratio is the median over the pairs. They include whatever "
        "cache is below the\nfile system.\n\n"
        "```\npython tests/benchmarks/disk_rate.py [DIR]\n```\n\n"
        f"* {datetime.now(timezone.utc):%Y-%m-%d}, {machine(folder)}\n"
        f"* {threads} I/O threads, blocks of {BLOCK_BYTES >> 20} MiB\n"
        f"* target: {TARGET:.0%} of the plain loop\n\n"
        "| case | direction | tier, GiB/s | plain loop, GiB/s | ratio | ratio of each pair | target |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows)
    )
    plain.close()
    tier.close()
    arena.close()


if __name__ == "__main__":
    main()
