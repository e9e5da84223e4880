"""Checkpoints are opened so that handing out their tensors reads nothing else of them.

safetensors looks at the first byte of every tensor that it hands out, through its mapping, and where that byte is not
in memory the kernel reads megabytes around it: all of the checkpoint, before anybody wants its values. That would be
reading ahead, did it not come so early: where memory is scarce, all of it is gone again and read once more when the
model comes onto pages.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from typing import Any

_LENGTH_BYTES = 8
"""A file begins with the length of its header, as a little-endian integer; the tensors follow the header."""
_LONGEST_HEADER = 100_000_000
"""What safetensors itself reads at most."""


def opening_lightly(safe_open: Any) -> Any:
    """Makes the function that opens a file from `safetensors.safe_open`, or from what stands in its place."""

    def open_lightly(file: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        # Of files that are missing or damaged the original speaks.
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            lay_first_pages(file)
        return safe_open(file, *args, **kwargs)

    return open_lightly


def lay_first_pages(file: str | os.PathLike[str]) -> int:
    """Sends for the page with the first byte of each tensor, and waits for none; returns how many tensors there are.

    Raises:
        OSError, ValueError, KeyError, TypeError, AttributeError: the file is missing or is not one of safetensors.
    """
    with open(file, "rb", buffering=0) as opened:
        descriptor = opened.fileno()
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        length = int.from_bytes(opened.read(_LENGTH_BYTES), "little")
        if length > _LONGEST_HEADER:
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(opened.read(length))
        begins = [about["data_offsets"][0] for name, about in header.items() if name != "__metadata__"]
        for begin in begins:
            os.posix_fadvise(descriptor, _LENGTH_BYTES + length + begin, 1, os.POSIX_FADV_WILLNEED)
    return len(begins)
