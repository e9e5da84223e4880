"""Maps slots to bytes of scratch files: plain integers, no files.

All sizes and offsets are in bytes and multiples of the caller's grain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import NamedTuple

from ptm_accel.memory.runs import RunSpace

GROWTH_BYTES = 256 << 20
"""Files grow by at least this, if the limit allows: fewer and longer extents."""

Grow = Callable[[int, int, int], int]
"""Makes file `path` larger: by `wish` bytes, or at least by `least`. Returns by how much, or raises `OSError`."""


class Segment(NamedTuple):
    """A run of bytes of one file."""

    path: int
    offset: int
    nbytes: int


class StripedSlots:
    """Deals slots over files that grow on demand.

    Args:
        weights: one for each file; blocks are dealt in proportion, over all slots together.
        block_bytes: what is dealt to one of several files at a time.
        limit_bytes: the present limit of what all files take together.
        grow: makes a file larger.
    """

    def __init__(self, weights: Sequence[float], block_bytes: int, limit_bytes: Callable[[], int], grow: Grow) -> None:
        self._weights = [weight / sum(weights) for weight in weights]
        self._credits = [0.0] * len(weights)
        self._block_bytes = block_bytes
        self._limit_bytes = limit_bytes
        self._grow_file = grow
        self.files = [RunSpace(0) for _ in weights]

    @property
    def size_bytes(self) -> int:
        """The length of all files."""
        return sum(file.size for file in self.files)

    @property
    def used_bytes(self) -> int:
        """Bytes that slots take of it."""
        return self.size_bytes - sum(file.free for file in self.files)

    def allocate(self, nbytes: int) -> list[Segment]:
        """Takes `nbytes`, in the order of the slot's bytes. The caller has made sure that used + new fits the limit.

        Raises:
            OSError: from `grow`; nothing is taken then.
        """
        segments: list[Segment] = []
        try:
            while nbytes:
                path = self._next_path()
                wanted = nbytes if len(self.files) == 1 else min(nbytes, self._block_bytes)
                segments.append(Segment(path, *self._take(path, wanted)))
                nbytes -= segments[-1].nbytes
        except OSError:
            self.free(segments)
            raise
        return segments

    def free(self, segments: Sequence[Segment]) -> None:
        """Gives a slot back."""
        for path, offset, nbytes in segments:
            self.files[path].give(offset, nbytes)

    def check_integrity(self) -> None:
        """Checks the free runs of each file."""
        for file in self.files:
            file.check_integrity()

    def _allowance_bytes(self) -> int:
        return max(0, self._limit_bytes() - self.size_bytes)

    def _next_path(self) -> int:
        """Returns the file with the greatest credit among those with room; each gains credit by its weight."""
        growth = self._allowance_bytes()
        paths = [path for path, file in enumerate(self.files) if file.free + growth > 0]
        assert paths, "a slot beyond the limit"
        for path in paths:
            self._credits[path] += self._weights[path]
        best = max(paths, key=lambda path: self._credits[path])
        self._credits[best] -= sum(self._weights[path] for path in paths)
        return best

    def _take(self, path: int, nbytes: int) -> tuple[int, int]:
        """A run of a file as (offset, length): of `nbytes`, if need be by growing, else the longest that is free."""
        file = self.files[path]
        start = file.take(nbytes)
        if start is None and nbytes - file.tail <= self._allowance_bytes():
            # A disk that is full may still have free runs in the file.
            with suppress(OSError) if file.free else nullcontext():
                self._grow(path, nbytes - file.tail)
                start = file.take(nbytes)
        elif start is None and not file.free:
            self._grow(path, self._allowance_bytes())
        if start is not None:
            return start, nbytes
        length = min(max(length for _, length in file.gaps()), nbytes)
        offset = file.take(length)
        assert offset is not None, "the longest gap is too short for itself"
        return offset, length

    def _grow(self, path: int, least: int) -> None:
        # No file may take the growth that the others need to hold their part.
        allowance = self._allowance_bytes()
        part = int(allowance * self._weights[path]) // self._block_bytes * self._block_bytes
        self.files[path].extend(self._grow_file(path, least, max(least, min(GROWTH_BYTES, part))))
