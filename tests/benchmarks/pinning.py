"""Making host memory resident for a card: by the one thread that pins it, and by all cores before.

    OMP_WAIT_POLICY=passive python tests/benchmarks/pinning.py [--gib 2] [--pairs 5]

Without a card what pins is `mlock`, which makes pages resident and keeps them there as a driver does; with one it is
`cudaHostRegister`. The memory is as a slab of host frames: a memory file, mapped as shared. Each way has a new one.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import sys
import time
from collections.abc import Callable

import torch
from machine_facts import facts

from ptm_accel.memory.pinned import populate


def lock(address: int, nbytes: int) -> None:
    """Makes memory resident, by one thread, and keeps it so until it is unmapped."""
    if torch.cuda.is_available():
        code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 1))
    else:
        code = ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
    assert code == 0, f"refused: {code}, {os.strerror(ctypes.get_errno())}; raise the limit of locked memory"


def unlock(address: int, nbytes: int) -> None:
    if torch.cuda.is_available():
        torch.cuda.cudart().cudaHostUnregister(address)
    else:
        ctypes.CDLL(None).munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))


def seconds(nbytes: int, *ways: Callable[[int, int], object]) -> list[float]:
    """What each takes, one after the other, over a new slab."""
    fd = os.memfd_create("pinning")
    os.ftruncate(fd, nbytes)
    memory = mmap.mmap(fd, nbytes)
    memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    taken = []
    for way in ways:
        begin = time.perf_counter()
        way(address, nbytes)
        taken.append(time.perf_counter() - begin)
    unlock(address, nbytes)
    os.close(fd)
    return taken


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--pairs", type=int, default=6)
    options = parser.parse_args()
    nbytes = int(options.gib * (1 << 30)) // mmap.PAGESIZE * mmap.PAGESIZE
    print("# Making host memory resident for a card\n")
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/pinning.py {' '.join(sys.argv[1:])}".rstrip()))
    what = "cudaHostRegister" if torch.cuda.is_available() else "mlock"
    print(f"* {options.gib:g} GiB, {len(os.sched_getaffinity(0))} cores; pinned by {what}\n")
    print("| pair | pinned at once | made resident by all cores, then pinned | ratio |\n| --- | --- | --- | --- |")
    # Neither a card's context nor memory that the machine has not been given yet is to be part of the first pair.
    seconds(nbytes, lock)
    ratios = []
    for pair in range(1, options.pairs + 1):
        if pair % 2:
            (alone,), (before, after) = seconds(nbytes, lock), seconds(nbytes, populate, lock)
        else:
            (before, after), (alone,) = seconds(nbytes, populate, lock), seconds(nbytes, lock)
        ratios.append((before + after) / alone)
        print(f"| {pair} | {alone:.2f} s | {before:.2f} + {after:.2f} s | {ratios[-1]:.2f} |")
    print(f"\nRatio, median: {statistics.median(ratios):.2f}.")


if __name__ == "__main__":
    main()
