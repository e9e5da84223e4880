"""Host memory that is pinned, so that a card copies to and from it at full speed and without the host."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from ptm_accel.units import format_bytes

HostPin = Callable[[int, int], Callable[[], None]]
"""Locks (address, nbytes) of host memory for fast copies and returns what unlocks it; `OSError` if it cannot."""

_PORTABLE = 1
"""`cudaHostRegisterPortable`: pinned for every card, whichever is the current one."""

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, of Linux 5.14; Python has no name for it."""

_LEAST_BYTES = 64 << 20
"""Least memory that is worth the start of a thread of its own."""

_MOST_THREADS = 16
"""Clearing memory is bound by the memory before long."""


def populate(address: int, nbytes: int) -> None:
    """Makes a writable range resident with all cores, without changing what it holds; advice to the kernel only.

    What a driver pins must be resident, and the driver would clear it with one thread, at 1 to 2 GB/s
    (docs/benchmarks/pinning.md).

    Args:
        address: where it begins; a multiple of the page size.
        nbytes: its length.
    """
    count = max(1, min(len(os.sched_getaffinity(0)), nbytes // _LEAST_BYTES, _MOST_THREADS))
    each = -(-nbytes // count // mmap.PAGESIZE) * mmap.PAGESIZE
    # Not `mmap.madvise`, which holds the interpreter's lock.
    libc = ctypes.CDLL(None)

    def part(begin: int) -> None:
        libc.madvise(ctypes.c_void_p(address + begin), ctypes.c_size_t(min(each, nbytes - begin)), _POPULATE_WRITE)

    with ThreadPoolExecutor(count, "ptm_accel populate") as threads:
        list(threads.map(part, range(0, nbytes, each)))


def register_pinned(address: int, nbytes: int) -> Callable[[], None]:
    """Registers host memory with CUDA, so that copies run at full speed and without the host.

    Args:
        address: start of the range, page-aligned.
        nbytes: its length; all of it becomes resident.

    Returns:
        What ends the registration.

    Raises:
        OSError: CUDA refuses; the message has its code.
    """
    populate(address, nbytes)
    cudart = torch.cuda.cudart()
    code = int(cudart.cudaHostRegister(address, nbytes, _PORTABLE))
    if code != 0:
        _forget_cuda_error()
        raise OSError(f"cudaHostRegister of {format_bytes(nbytes)} failed with CUDA error {code}")

    def unregister() -> None:
        cudart.cudaHostUnregister(address)

    return unregister


def host_pin() -> HostPin | None:
    """Finds what pins host memory on this machine; None where there is no CUDA."""
    return register_pinned if torch.cuda.is_available() else None


def _forget_cuda_error() -> None:
    # CUDA keeps the code of a failed call, and torch would raise it at its next, unrelated, kernel.
    try:
        torch.zeros(1, device="cuda")
    except RuntimeError:
        return
