"""Which bytes of which scratch file belong to whom: plain integers, no files.

`FreeRuns` books one file, `StripedSlots` several, over which the blocks of each slot are dealt in proportion to
weights. All sizes and offsets are in bytes and multiples of the caller's grain.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import NamedTuple

GROWTH_BYTES = 256 << 20
"""Files grow by at least this, if the limit allows: fewer and longer extents."""

Punch = Callable[[int, int, int], None]
"""Has the file system take a run of file `path` back, given as its offset and length, or raises `OSError`."""

Grow = Callable[[int, int, int], int]
"""Makes file `path` larger: by `wish` bytes, or at least by `least`. Returns by how much, or raises `OSError`."""


class Segment(NamedTuple):
    """A run of bytes of one file."""

    path: int
    offset: int
    nbytes: int


class FreeRuns:
    """Free and used bytes of one file: free runs sorted, never adjacent to each other, taken first-fit.

    Attributes:
        size_bytes: the length of the file.
        free_bytes: the sum of its free runs.
        lost_bytes: what the file system has taken back of it, never to be used again.
    """

    def __init__(self) -> None:
        self.size_bytes = 0
        self.free_bytes = 0
        self.lost_bytes = 0
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def tail_bytes(self) -> int:
        """The length of the free run at the end of the file."""
        if self._ends and self._ends[-1] == self.size_bytes:
            return self._ends[-1] - self._starts[-1]
        return 0

    def runs(self) -> list[tuple[int, int]]:
        """The free runs as (start, end), in order."""
        return list(zip(self._starts, self._ends, strict=True))

    def grow(self, nbytes: int) -> None:
        """Adds free bytes at the end."""
        start = self.size_bytes
        self.size_bytes += nbytes
        self.give(start, nbytes)

    def take(self, nbytes: int) -> int | None:
        """The offset of the first free run that holds `nbytes`, now used; None where there is none."""
        for index, start in enumerate(self._starts):
            if self._ends[index] - start >= nbytes:
                self._cut(index, nbytes)
                return start
        return None

    def take_pieces(self, nbytes: int) -> list[tuple[int, int]]:
        """`nbytes` from the first free runs, as (offset, length). The caller knows that so many are free."""
        assert nbytes <= self.free_bytes, f"{nbytes} bytes asked, {self.free_bytes} free"
        pieces = []
        while nbytes:
            start = self._starts[0]
            length = min(nbytes, self._ends[0] - start)
            self._cut(0, length)
            pieces.append((start, length))
            nbytes -= length
        return pieces

    def give(self, offset: int, nbytes: int) -> None:
        """Makes a used run free and joins it with its neighbours."""
        end = offset + nbytes
        index = bisect_right(self._starts, offset)
        fits = nbytes > 0 and offset >= 0 and end <= self.size_bytes
        apart = (index == 0 or self._ends[index - 1] <= offset) and (
            index == len(self._starts) or end <= self._starts[index]
        )
        assert fits and apart, f"[{offset}, {end}) of {self.size_bytes} is not in use"
        self.free_bytes += nbytes
        joins_left = index > 0 and self._ends[index - 1] == offset
        joins_right = index < len(self._starts) and self._starts[index] == end
        if joins_left and joins_right:
            del self._ends[index - 1], self._starts[index]
        elif joins_left:
            self._ends[index - 1] = end
        elif joins_right:
            self._starts[index] = offset
        else:
            self._starts.insert(index, offset)
            self._ends.insert(index, end)

    def last(self, nbytes: int) -> tuple[int, int] | None:
        """The end of the last free run as (offset, length), at most `nbytes` of it; None where nothing is free."""
        if not self._ends:
            return None
        length = min(nbytes, self._ends[-1] - self._starts[-1])
        return self._ends[-1] - length, length

    def lose_last(self, nbytes: int) -> None:
        """Counts the end of the last free run as taken back by the file system."""
        self._ends[-1] -= nbytes
        self.free_bytes -= nbytes
        self.lost_bytes += nbytes
        if self._starts[-1] == self._ends[-1]:
            del self._starts[-1], self._ends[-1]

    def is_used(self, offset: int, nbytes: int) -> bool:
        """Whether no byte of a run is free."""
        index = bisect_left(self._ends, offset + 1)
        return offset + nbytes <= self.size_bytes and (
            index == len(self._starts) or self._starts[index] >= offset + nbytes
        )

    def check_integrity(self) -> None:
        """Raises `AssertionError` if runs touch, overlap, leave the file or do not add up."""
        edges = [edge for run in self.runs() for edge in run]
        strictly_rising = all(a < b for a, b in pairwise(edges))
        inside = not edges or (edges[0] >= 0 and edges[-1] <= self.size_bytes)
        total = sum(end - start for start, end in self.runs())
        if not (strictly_rising and inside and total == self.free_bytes):
            raise AssertionError(f"free runs {self.runs()} of {self.size_bytes}, free {self.free_bytes}")

    def _cut(self, index: int, nbytes: int) -> None:
        self.free_bytes -= nbytes
        self._starts[index] += nbytes
        if self._starts[index] == self._ends[index]:
            del self._starts[index], self._ends[index]


class StripedSlots:
    """Deals slots over files that grow on demand.

    Args:
        weights: one for each file; blocks are dealt in proportion, over all slots together, so that small slots
            spread as well.
        block_bytes: what is dealt to one file at a time.
        limit_bytes: the present limit of what all files take together.
        grow: makes a file larger.
    """

    def __init__(self, weights: Sequence[float], block_bytes: int, limit_bytes: Callable[[], int], grow: Grow) -> None:
        self._weights = [weight / sum(weights) for weight in weights]
        self._credits = [0.0] * len(weights)
        self._block_bytes = block_bytes
        self._limit_bytes = limit_bytes
        self._grow_file = grow
        self.files = [FreeRuns() for _ in weights]

    @property
    def size_bytes(self) -> int:
        """What all files take on their disks."""
        return sum(file.size_bytes - file.lost_bytes for file in self.files)

    @property
    def used_bytes(self) -> int:
        """What is taken of it."""
        return self.size_bytes - sum(file.free_bytes for file in self.files)

    def allocate(self, nbytes: int) -> list[Segment]:
        """Takes `nbytes`, in the order of the slot's bytes. The caller has made sure that used + new fits the limit.

        Raises:
            OSError: from `grow`; nothing is taken then.
        """
        deal = self._deal(nbytes)
        shares = [sum(length for path, length in deal if path == wanted) for wanted in range(len(self.files))]
        taken: list[list[tuple[int, int]]] = [[] for _ in self.files]
        try:
            for path, share in enumerate(shares):
                if share:
                    # What the files after this one must still grow by is not this one's to grow into.
                    owed = sum(max(0, shares[i] - self.files[i].free_bytes) for i in range(path + 1, len(shares)))
                    taken[path] = self._take(path, share, self._allowance_bytes() - owed)
        except OSError:
            for path, pieces in enumerate(taken):
                for offset, length in pieces:
                    self.files[path].give(offset, length)
            raise
        return _in_order(deal, taken)

    def free(self, segments: Sequence[Segment]) -> None:
        """Gives a slot back."""
        for path, offset, nbytes in segments:
            self.files[path].give(offset, nbytes)

    def preallocate(self, nbytes: int, grain_bytes: int) -> None:
        """Grows the files, in proportion, until they are at least `nbytes` long together or at the limit.

        Raises:
            OSError: from `grow`.
        """
        for path, weight in enumerate(self._weights):
            wanted = -(-int(nbytes * weight) // grain_bytes) * grain_bytes
            missing = min(wanted - self.files[path].size_bytes, self._allowance_bytes())
            if missing > 0:
                self.files[path].grow(self._grow_file(path, missing, missing))

    def give_up(self, nbytes: int, punch: Punch) -> int:
        """Gives up to `nbytes` that no slot uses back to the file system; returns how many."""
        given = 0
        with suppress(OSError):
            for path, file in enumerate(self.files):
                while given < nbytes and (run := file.last(nbytes - given)) is not None:
                    punch(path, *run)
                    file.lose_last(run[1])
                    given += run[1]
        return given

    def check_integrity(self) -> None:
        """Checks the runs of each file."""
        for file in self.files:
            file.check_integrity()

    def _allowance_bytes(self) -> int:
        return max(0, self._limit_bytes() - self.size_bytes)

    def _deal(self, nbytes: int) -> list[tuple[int, int]]:
        """Which file gets the next bytes of a slot, as (path, length), by the greatest credit among those with room."""
        if len(self.files) == 1:
            return [(0, nbytes)]
        room = [file.free_bytes for file in self.files]
        growth = self._allowance_bytes()
        deal = []
        while nbytes:
            open_paths = [path for path, free in enumerate(room) if free + growth > 0]
            assert open_paths, f"{nbytes} bytes beyond the limit"
            for path in open_paths:
                self._credits[path] += self._weights[path]
            path = max(open_paths, key=lambda path: self._credits[path])
            self._credits[path] -= sum(self._weights[path] for path in open_paths)
            length = min(nbytes, self._block_bytes, room[path] + growth)
            growth -= max(0, length - room[path])
            room[path] = max(0, room[path] - length)
            deal.append((path, length))
            nbytes -= length
        return deal

    def _take(self, path: int, nbytes: int, allowance_bytes: int) -> list[tuple[int, int]]:
        """`nbytes` of one file: in one run if need be by growing, else in pieces."""
        file = self.files[path]
        start = file.take(nbytes)
        missing = nbytes - file.tail_bytes
        if start is None and missing <= allowance_bytes:
            # A disk without that much may still have what the holes lack; if not, the next attempt says so.
            with suppress(OSError):
                self._grow(path, missing, allowance_bytes)
                start = file.take(nbytes)
        if start is not None:
            return [(start, nbytes)]
        if file.free_bytes < nbytes:
            self._grow(path, nbytes - file.free_bytes, allowance_bytes)
        return file.take_pieces(nbytes)

    def _grow(self, path: int, least: int, allowance_bytes: int) -> None:
        # No file may take the growth that the others will need to hold their part.
        part = int(allowance_bytes * self._weights[path]) // self._block_bytes * self._block_bytes
        wish = max(least, min(GROWTH_BYTES, part, allowance_bytes))
        self.files[path].grow(self._grow_file(path, least, wish))


def _in_order(deal: Sequence[tuple[int, int]], taken: Sequence[Sequence[tuple[int, int]]]) -> list[Segment]:
    """Walks the deal through the runs taken of each file, and joins what follows itself on disk."""
    queues = [list(reversed(pieces)) for pieces in taken]
    segments: list[Segment] = []
    for path, length in deal:
        while length:
            offset, available = queues[path].pop()
            step = min(length, available)
            if step < available:
                queues[path].append((offset + step, available - step))
            last = segments[-1] if segments else None
            if last and last.path == path and last.offset + last.nbytes == offset:
                segments[-1] = Segment(path, last.offset, last.nbytes + step)
            else:
                segments.append(Segment(path, offset, step))
            length -= step
    return segments
