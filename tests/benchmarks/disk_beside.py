"""The disk tier's rates alone, and beside other work of the same machine's cores.

    OMP_WAIT_POLICY=passive python tests/benchmarks/disk_beside.py DIRECTORY_ON_AN_SSD [--rounds 24] [--area-mib 256]

`ptm_accel` measures a disk once, with nothing beside it. In training the cores compute meanwhile: products of matrices
stay in their caches, updates stream memory, as the disk's own traffic does. Reads, writes and both in turns, in slices
of 64 MiB, beside 0, 1 and 2 processes that do one or the other. Cases are measured in turns; a median of all slices is
given, and its share of that of the disk alone. Prints the result as Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts

from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.mapping import anonymous_run
from ptm_accel.memory.transfer import Transfer

MIB = 1 << 20
BLOCK_BYTES = 4 * MIB
SLICE = 16
"""Blocks that are moved at a time."""
TURNS = 3

BEGIN = "import torch; torch.set_num_threads(1); "
WORK = {
    "products of matrices in a cache": BEGIN + "a = torch.randn(256, 256); print(flush=True)\nwhile True: a @ a",
    "sums that stream memory": BEGIN
    + "a, b = torch.randn(2, 1 << 25); print(flush=True)\nwhile True: torch.add(a, 1, out=b)",
}
CASES = [("nothing", 0), *((name, count) for name in WORK for count in (1, 2))]

Rates = tuple[float, float, float]


class Disk:
    """A slot of a disk tier that is read and written slice by slice.

    Args:
        folder: on the disk.
        blocks: how many there are.
    """

    def __init__(self, folder: Path, blocks: int) -> None:
        self.tier = DiskTier([folder], Budget(Tier.DISK, blocks * BLOCK_BYTES), block_bytes=BLOCK_BYTES)
        self._blocks = blocks
        self._slot = self.tier.new(blocks * BLOCK_BYTES, Tag.STAGING, "a benchmark")
        buffers = anonymous_run(2 * SLICE * BLOCK_BYTES, "a benchmark").tensor().view(2, SLICE, BLOCK_BYTES)
        # Bytes that do not compress.
        buffers.copy_(torch.frombuffer(bytearray(os.urandom(BLOCK_BYTES)), dtype=torch.uint8))
        self._into, self._out = buffers
        for begin in range(0, blocks, SLICE):
            self._seconds([], range(begin, begin + SLICE))

    def rates(self, number: int) -> Rates:
        """GB/s of one slice read, one written, and of two, one read and one written."""
        first, second = (range(at, at + SLICE) for at in self._places(number))
        times = self._seconds(first, []), self._seconds([], first), self._seconds(first, second)
        return tuple(moved * SLICE * BLOCK_BYTES / 1e9 / s for moved, s in zip((1, 1, 2), times, strict=True))  # type: ignore[return-value]

    def _places(self, number: int) -> tuple[int, int]:
        slices = self._blocks // SLICE
        return 2 * number % slices * SLICE, (2 * number + 1) % slices * SLICE

    def _seconds(self, read: range | list[int], written: range | list[int]) -> float:
        begin = time.perf_counter()
        transfers: list[Transfer] = []
        for index in range(SLICE):
            if written:
                transfers.append(self.tier.store(self._slot, written[index] * BLOCK_BYTES, self._out[index]))
            if read:
                transfers.append(self.tier.load(self._slot, read[index] * BLOCK_BYTES, self._into[index]))
        for transfer in transfers:
            transfer.wait()
        return time.perf_counter() - begin


@contextmanager
def beside(name: str, count: int) -> Iterator[None]:
    """So many processes that do that work, once they have begun."""
    workers = [
        subprocess.Popen([sys.executable, "-c", WORK[name]], stdout=subprocess.PIPE, text=True) for _ in range(count)
    ]
    try:
        for worker in workers:
            assert worker.stdout is not None
            if not worker.stdout.readline():
                raise RuntimeError(f"a process for {name} has ended with {worker.wait()}")
        yield
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=24, help="slices of each kind, a case and a turn (24)")
    parser.add_argument("--area-mib", type=int, default=256, help="what is gone over, in MiB (256)")
    options = parser.parse_args()
    disk = Disk(options.directory, options.area_mib * MIB // (2 * SLICE * BLOCK_BYTES) * 2 * SLICE)
    found: dict[tuple[str, int], list[Rates]] = {case: [] for case in CASES}
    for _ in range(TURNS):
        for case, rates in found.items():
            with beside(*case):
                rates += [disk.rates(number) for number in range(options.rounds)]
    direct = disk.tier.direct
    disk.tier.close()
    print("# The disk's rates beside work of the cores\n")
    print(
        facts(
            f"OMP_WAIT_POLICY=passive python tests/benchmarks/disk_beside.py {' '.join(['DIRECTORY', *sys.argv[2:]])}"
        )
    )
    print(
        f"* {TURNS * options.rounds} slices of {SLICE * BLOCK_BYTES // MIB} MiB each, in {TURNS} turns, over "
        f"{options.area_mib} MiB; {'direct transfers' if direct else 'through the page cache'}\n"
    )
    print("| beside | processes | read, GB/s | written | both, together | both, of the disk alone |")
    print("| --- | --- | --- | --- | --- | --- |")
    medians = {
        case: [statistics.median(column) for column in zip(*rates, strict=True)] for case, rates in found.items()
    }
    alone = medians[CASES[0]][2]
    for (name, count), (read, written, both) in medians.items():
        print(f"| {name} | {count} | {read:.2f} | {written:.2f} | {both:.2f} | {both / alone:.2f} |")


if __name__ == "__main__":
    main()
