"""Keeping of freed memory in the C library. torch takes each tensor on a CPU from it, beside the budget of pages."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGE_BYTES, _END_BYTES = 512 << 10, 128 << 10
_MOST_BYTES = 32 << 20
"""The largest `M_MMAP_THRESHOLD` that glibc takes."""
_NEVER_BYTES = (1 << 31) - 1

_LIBC = ctypes.CDLL(None)


def set_kept_blocks(*, large: bool) -> None:
    """Sets which freed blocks malloc keeps in its heap; does nothing with another C library than glibc.

    Args:
        large: up to 32 MiB, and the end of the heap: the next gradients need not have memory cleared for them, which
            takes a fifth of a short step (docs/benchmarks/heap.md). Otherwise blocks from 512 KiB on are given back
            to the system as they are freed, so that no holes of theirs stay resident beside the budget of pages.
    """
    if hasattr(_LIBC, "mallopt"):
        _LIBC.mallopt(_M_MMAP_THRESHOLD, _MOST_BYTES if large else _LARGE_BYTES)
        _LIBC.mallopt(_M_TRIM_THRESHOLD, _NEVER_BYTES if large else _END_BYTES)


def give_back_freed() -> None:
    """Gives the free memory of the heap back to the system."""
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
