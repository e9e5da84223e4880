"""An allocator of runs on plain integers: which part of a range is free, and where the next run goes."""

from __future__ import annotations

from bisect import bisect_left


class RunSpace:
    """The free gaps of the range `[0, size)`; adjoining gaps are always merged.

    Best fit, lowest first: small runs fill the gaps that large ones cannot use, and runs taken one after another
    tend to adjoin. The unit is the caller's.

    Args:
        size: length of the range, all of it free at first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.free = size
        self._starts = [0] if size else []
        self._lengths = {0: size} if size else {}

    def gaps(self) -> list[tuple[int, int]]:
        """Returns all free gaps as (start, length), in order."""
        return [(start, self._lengths[start]) for start in self._starts]

    @property
    def tail(self) -> int:
        """Length of the gap at the end of the range; 0 if the end is taken."""
        length = self._lengths[self._starts[-1]] if self._starts else 0
        return length if length and self._starts[-1] + length == self.size else 0

    def extend(self, length: int) -> None:
        """Adds a free run at the end of the range."""
        self.size += length
        self.give(self.size - length, length)

    def take(self, length: int, align: int = 1) -> int | None:
        """Takes a run of `length` that starts at a multiple of `align`; None if no gap holds one."""
        assert length > 0 and align > 0
        if length > self.free:
            return None
        best: tuple[int, int, int] | None = None
        for gap in self._starts:
            start = -(-gap // align) * align
            gap_length = self._lengths[gap]
            if start + length <= gap + gap_length and (best is None or gap_length < best[0]):
                best = (gap_length, gap, start)
        if best is None:
            return None
        gap_length, gap, start = best
        self._remove(gap)
        self._insert(gap, start - gap)
        self._insert(start + length, gap + gap_length - start - length)
        self.free -= length
        return start

    def best_gap(self, length: int) -> int | None:
        """Length of the gap that `take` would choose for a run of `length`; None if no gap holds one."""
        if length > self.free:
            return None
        return min((gap for gap in self._lengths.values() if gap >= length), default=None)

    def give(self, start: int, length: int) -> None:
        """Gives back a run that `take` returned."""
        assert length > 0 and start >= 0 and start + length <= self.size, f"run {start}+{length} outside {self.size}"
        at = bisect_left(self._starts, start)
        before = self._starts[at - 1] if at else None
        after = self._starts[at] if at < len(self._starts) else None
        assert before is None or before + self._lengths[before] <= start, f"run {start}+{length} is free already"
        assert after is None or start + length <= after, f"run {start}+{length} is free already"
        self.free += length
        if after == start + length:
            length += self._remove(after)
        if before is not None and before + self._lengths[before] == start:
            length += self._remove(before)
            start = before
        self._insert(start, length)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless the gaps are sorted, apart, inside the range and sum to `free`."""
        end = -1
        for start, length in self.gaps():
            if start <= end or length <= 0 or start + length > self.size:
                raise AssertionError(f"gap {start}+{length} after {end}, of {self.size}")
            end = start + length
        total = sum(self._lengths.values())
        if total != self.free or len(self._starts) != len(self._lengths):
            raise AssertionError(f"gaps sum to {total}, free is {self.free}, of {self.size}")

    def _insert(self, start: int, length: int) -> None:
        if length:
            self._starts.insert(bisect_left(self._starts, start), start)
            self._lengths[start] = length

    def _remove(self, start: int) -> int:
        del self._starts[bisect_left(self._starts, start)]
        return self._lengths.pop(start)
