"""Makes memory resident by all cores, before it is pinned.

What a driver pins must be resident, and what is not yet is made so by the one thread that asks: cleared page by page,
a gigabyte or two a second (docs/benchmarks/pinning.md). The states of a large model are made within the first step, all
60 GiB of an 8B one.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os

from ptm_accel.memory.own_threads import OwnThread

logger = logging.getLogger(__name__)

_POPULATE_WRITE = 23
"""`MADV_POPULATE_WRITE`, of Linux 5.14; Python has no name for it."""

_LEAST_BYTES = 64 << 20
"""For less a thread of its own is not worth its start."""

_MOST_THREADS = 16
"""Clearing memory is bound by the memory before long; how many threads are best has been measured for two only."""


def populate(address: int, nbytes: int) -> bool:
    """Makes a writable range resident, without changing what it holds.

    Args:
        address: where it begins; a multiple of the page size.
        nbytes: its length.

    Returns:
        whether all of it is resident; not where the kernel cannot do this, or has not the memory.
    """
    count = max(1, min(len(os.sched_getaffinity(0)), nbytes // _LEAST_BYTES, _MOST_THREADS))
    each = -(-nbytes // count // mmap.PAGESIZE) * mmap.PAGESIZE
    done: list[bool] = []
    parts = [(address + begin, min(each, nbytes - begin), done) for begin in range(0, nbytes, each)]
    started: list[OwnThread] = []
    try:
        for part in parts[1:]:
            thread = OwnThread(_populate, part, "ptm_accel populate")
            thread.start()
            started.append(thread)
    except RuntimeError as error:
        # This process may have no more threads: then fewer of them do it.
        logger.info("making host memory resident with %d threads: %s", len(started) + 1, error)
    try:
        for part in (parts[0], *parts[1 + len(started) :]):
            _populate(*part)
    finally:
        for thread in started:
            thread.join()
    return len(done) == len(parts) and all(done)


def _populate(address: int, nbytes: int, done: list[bool]) -> None:
    # By the C library, since `mmap.madvise` would hold up all other threads of Python's meanwhile.
    libc = ctypes.CDLL(None)
    done.append(libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE) == 0)
