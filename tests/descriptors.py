"""Which files this process has open, and which it has mapped: sets, since a count changes with whatever else goes on.

The garbage collector may close what an earlier test left, and the C library maps memory when it likes.
"""

from __future__ import annotations

import os
from contextlib import suppress


def open_files() -> set[tuple[int, str]]:
    """Descriptors, with what each is of."""
    found: set[tuple[int, str]] = set()
    for number in os.listdir("/proc/self/fd"):
        # That of the listing itself is gone.
        with suppress(FileNotFoundError):
            found.add((int(number), os.readlink(f"/proc/self/fd/{number}")))
    return found


def mapped_from(inode: int) -> int:
    """How many mappings there are of files with this number, on whatever device."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as lines:
        return sum(line.split(maxsplit=5)[4] == str(inode) for line in lines)
