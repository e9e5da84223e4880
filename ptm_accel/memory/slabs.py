"""Slabs: large pieces of a device's memory that buffers are cut from, so that pages leave no holes between activations.

torch's caching allocator gives no segment back while a part of it is used. Were pages, which stay for long, allocated
among activations, which come and go, its free memory would soon lie in small pieces: a card is then full with a tenth
of it free (PatrickStar's chunks, arXiv 2108.05818, and Angel-PTM's pages, arXiv 2303.02868, have the same reason).

A new slab is as large as all before it together, or as the run that it is for, if the limit leaves as much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ptm_accel.memory.copies import order_behind
from ptm_accel.memory.runs import RunSpace
from ptm_accel.memory.transfer import Transfer, round_up

GRANULE_BYTES = 2 << 20
"""Slabs are multiples of this, as torch's segments of more than 10 MiB are."""

_FIRST_BYTES = 64 << 20
"""Size of the first slab, if as much may be held."""


@dataclass(eq=False)
class Slab:
    """A piece of device memory; one that is `draining` takes no more runs, and is given back when it is empty.

    Attributes:
        behind: transfers that may still use runs that were given back, each with the run's first byte and its end.
    """

    memory: Any
    nbytes: int
    draining: bool = False
    runs: RunSpace = field(init=False)
    behind: list[tuple[int, int, Transfer]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.runs = RunSpace(self.nbytes)

    @property
    def used_bytes(self) -> int:
        """Bytes in buffers."""
        return self.nbytes - self.runs.free


@dataclass(frozen=True, slots=True)
class Run:
    """A part of a slab, in bytes."""

    slab: Slab
    offset: int
    nbytes: int

    def users(self) -> tuple[Transfer, ...]:
        """Returns the transfers that still use the memory, of buffers that it was before."""
        if not self.slab.behind:
            return ()
        self.slab.behind = [each for each in self.slab.behind if not each[2].done()]
        stop = self.offset + self.nbytes
        found = (transfer for start, end, transfer in self.slab.behind if start < stop and end > self.offset)
        return tuple(dict.fromkeys(found))


class Slabs:
    """Cuts runs out of slabs, and gets slabs as long as a limit allows it.

    Args:
        acquire: allocates so many bytes; None if there are not so many.
        give_up: called with memory that is dropped next.
        released: called after slabs have been given back, when nobody has their memory any more.
        granule_bytes: slabs are multiples of this, but for one that a single run needs.

    Attributes:
        limit_bytes: what slabs may take together.
        held_bytes: what they take.
    """

    def __init__(
        self,
        acquire: Callable[[int], Any | None],
        give_up: Callable[[Any], object],
        released: Callable[[], object],
        granule_bytes: int = GRANULE_BYTES,
    ) -> None:
        self.limit_bytes = 1 << 62
        self.held_bytes = 0
        self._acquire = acquire
        self._give_up = give_up
        self._released = released
        self._granule_bytes = granule_bytes
        self._first_bytes = _FIRST_BYTES // GRANULE_BYTES * granule_bytes
        self._slabs: list[Slab] = []

    @property
    def used_bytes(self) -> int:
        """Bytes in runs."""
        return sum(slab.used_bytes for slab in self._slabs)

    @property
    def draining(self) -> bool:
        """Whether slabs that are too many still have runs in them."""
        return any(slab.draining for slab in self._slabs)

    def take(self, nbytes: int) -> Run | None:
        """A run of `nbytes`; None if none is free in one piece and the limit leaves no room for another slab."""
        run = self._cut(nbytes, self.usable())
        return run if run is not None or not self._grow(nbytes) else self._cut(nbytes, self._slabs[-1:])

    def usable(self) -> list[Slab]:
        """Returns the slabs that runs are cut from."""
        return [slab for slab in self._slabs if not slab.draining]

    def cheapest_range(self, nbytes: int, movable: Sequence[Run]) -> list[Run] | None:
        """The runs of the range of gaps and `movable` runs of `nbytes` with the fewest used bytes; None if none is."""
        best: tuple[int, list[Run]] | None = None
        for slab in self.usable():
            parts: list[tuple[int, int, Run | None]] = [(*gap, None) for gap in slab.runs.gaps()]
            parts += [(run.offset, run.nbytes, run) for run in movable if run.slab is slab]
            parts.sort(key=lambda part: part[0])
            begin = used = 0
            for at, (start, length, run) in enumerate(parts):
                if at and parts[at - 1][0] + parts[at - 1][1] != start:
                    # A run between the two stays.
                    begin, used = at, 0
                used += 0 if run is None else length
                while begin <= at and start + length - parts[begin][0] >= nbytes:
                    if best is None or used < best[0]:
                        best = used, [run for *_, run in parts[begin : at + 1] if run is not None]
                    _, first, dropped = parts[begin]
                    used -= 0 if dropped is None else first
                    begin += 1
        return None if best is None else best[1]

    def stretch(self, nbytes: int) -> Run | None:
        """Takes a run as `take` does, beyond the limit too."""
        run = self._cut(nbytes, self._slabs)
        return run if run is not None or not self._add(self._rounded(nbytes)) else self._cut(nbytes, self._slabs[-1:])

    def give(self, run: Run, behind: Iterable[Transfer] = ()) -> None:
        """Takes a run back, which some transfers may still use."""
        slab = run.slab
        slab.behind += [(run.offset, run.offset + run.nbytes, transfer) for transfer in behind]
        slab.runs.give(run.offset, run.nbytes)
        if not slab.used_bytes and slab.draining:
            self._release([slab])

    def confine(self, nbytes: int) -> None:
        """Limits what slabs take together: those beyond are given back, empty ones at once."""
        self.limit_bytes = nbytes
        for slab in self._slabs:
            slab.draining = False
        excess = self.held_bytes - nbytes
        leaving: list[Slab] = []
        # Those with the least in them, and of these the small ones, until what stays is within the limit.
        for slab in sorted(self._slabs, key=lambda slab: (slab.used_bytes, slab.nbytes)):
            if excess <= 0:
                break
            slab.draining = True
            excess -= slab.nbytes
            if not slab.used_bytes:
                leaving.append(slab)
        if leaving:
            self._release(leaving)

    def close(self) -> None:
        """Gives empty slabs back; the others follow as they become so."""
        self.confine(0)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless gaps and sizes add up."""
        for slab in self._slabs:
            slab.runs.check_integrity()
        held = sum(slab.nbytes for slab in self._slabs)
        if held != self.held_bytes:
            raise AssertionError(f"slabs are {held} B, counted {self.held_bytes} B")

    def _cut(self, nbytes: int, slabs: list[Slab]) -> Run | None:
        """Returns a run out of the smallest gap that holds it."""
        gaps = [(gap, slab) for slab in slabs if (gap := slab.runs.best_gap(nbytes)) is not None]
        if not gaps:
            return None
        _, slab = min(gaps, key=lambda entry: entry[0])
        offset = slab.runs.take(nbytes)
        assert offset is not None
        return Run(slab, offset, nbytes)

    def _grow(self, nbytes: int) -> bool:
        """Adds a slab that holds a run, if the limit allows it or would without the slabs that are empty."""
        if self.held_bytes + nbytes > self.limit_bytes:
            empty = [slab for slab in self._slabs if not slab.used_bytes]
            if self.held_bytes - sum(slab.nbytes for slab in empty) + nbytes > self.limit_bytes:
                return False
            self._release(empty)
        left = self.limit_bytes - self.held_bytes
        least = min(self._rounded(nbytes), left)
        wanted = min(left, max(self.held_bytes, self._first_bytes)) // self._granule_bytes * self._granule_bytes
        return (wanted > least and self._add(wanted)) or self._add(least)

    def _rounded(self, nbytes: int) -> int:
        return round_up(nbytes, self._granule_bytes)

    def _add(self, nbytes: int) -> bool:
        memory = self._acquire(nbytes)
        if memory is None:
            return False
        self._slabs.append(Slab(memory, nbytes))
        self.held_bytes += nbytes
        return True

    def _release(self, slabs: list[Slab]) -> None:
        for slab in slabs:
            self._slabs.remove(slab)
            self.held_bytes -= slab.nbytes
            # What torch gives the memory to next comes after compute, and so after these.
            order_behind(transfer for *_, transfer in slab.behind)
            self._give_up(slab.memory)
            slab.memory = None
        self._released()
