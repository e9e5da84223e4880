"""What the kernel tells of the pages behind addresses: which are a file's, and which somebody has written to."""

from __future__ import annotations

import mmap
from typing import NamedTuple

import torch

_ENTRY_BYTES = 8
_SWAPPED, _OF_FILE = 1 << 62, 1 << 61
"""Bits of an entry of `/proc/self/pagemap`; see the kernel's documentation of it. The highest, of a page that is there,
is the sign."""


class PageMap(NamedTuple):
    """The pages of a range of addresses.

    Attributes:
        of_file: of each page, whether it is there and is one of the file that is mapped. Where none is, this may be a
            system that tells nothing.
        written: whether any may have been written to: then it is no page of the file any more. Memory that is mapped
            from no file counts as written.
    """

    of_file: torch.Tensor
    written: bool


def page_map(begin: int, end: int) -> PageMap | None:
    """The pages with the bytes from address `begin` to `end`; None where the system does not show them."""
    first, last = begin // mmap.PAGESIZE, (end - 1) // mmap.PAGESIZE
    octets = bytearray((last - first + 1) * _ENTRY_BYTES)
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            pagemap.seek(first * _ENTRY_BYTES)
            if pagemap.readinto(octets) != len(octets):
                return None
    except OSError:
        return None
    entries = torch.frombuffer(octets, dtype=torch.int64)
    present, of_file = entries < 0, (entries & _OF_FILE) != 0
    written = (present & ~of_file) | ((entries & _SWAPPED) != 0)
    return PageMap(present & of_file, bool(written.any()))
