"""Closing up gaps: idle extents move within a card, so that what is free lies in one piece where that is wanted.

Within a card bytes move at the rate of its memory, which is many times that of the link over which evicted ones would
leave and come again. So a run that is broken is mended by moving what is in the way into other gaps, and only where
there are none for it has something to leave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ptm_accel.memory.card_memory import CardMemory
from ptm_accel.memory.paged import Extent, PagedTensor, Place
from ptm_accel.memory.slabs import Run, Slab
from ptm_accel.memory.transfer import Block

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool

_TRIES = 4
"""How many of the windows with the least in the way are tried; what is in that of others finds no place either."""


@dataclass(slots=True)
class _Window:
    """Where a run could be, and what is in the way.

    Attributes:
        slab: in which slab.
        start: where it begins there.
        gaps: the free parts, as (start, length).
        tensors: what would move.
        nbytes: how much that is.
    """

    slab: Slab
    start: int
    gaps: list[tuple[int, int]]
    tensors: list[PagedTensor]
    nbytes: int


class Compaction:
    """Makes runs. Called with the pool's lock held.

    Args:
        pool: whose tensors move.
        memory: in which they lie.

    Attributes:
        moved_bytes: how much has been moved so far.
    """

    def __init__(self, pool: Pool, memory: CardMemory) -> None:
        self._pool = pool
        self._memory = memory
        self.moved_bytes = 0
        # What was looked for in vain: when, and how much.
        self._vain = -1, 0

    def make(self, nbytes: int, *, needed: bool = True) -> Block | None:
        """A block of `nbytes` where idle extents were; None if there is not as much free, or no place for them.

        Args:
            nbytes: how many.
            needed: False for what can come later: it is not looked for again before something has come back.
        """
        if not self._memory.cuts(nbytes):
            return None
        with self._memory.lock:
            given, least = self._vain
            if not needed and self._memory.slabs.given == given and nbytes >= least:
                return None
            run = self._run(nbytes)
            if run is None:
                self._vain = self._memory.slabs.given, nbytes
                return None
            return self._memory.block_of(run)

    def _run(self, nbytes: int) -> Run | None:
        if sum(slab.runs.free for slab in self._memory.slabs.usable()) < nbytes:
            return None
        movable = [
            (run, tensor)
            for tensor in self._pool.shelf.free()
            if (run := _run_of(tensor)) is not None and _may_move(tensor)
        ]
        windows = sorted(self._windows(nbytes, movable), key=lambda window: window.nbytes)
        for window in windows[:_TRIES]:
            places = self._places(window)
            if places is not None:
                return self._clear(window, places, nbytes)
        return None

    def stretch(self, nbytes: int) -> Block:
        """A block out of memory that was kept free for others: nothing can leave any more.

        Raises:
            DeviceBudgetError: the card has not as much in one piece.
        """
        return self._memory.allocate(nbytes, anywhere=True)

    def drain(self) -> bool:
        """Moves idle tensors away that lie in slabs which are to be given back; returns whether there were such slabs.

        Raises:
            BudgetError: the home has no room for one.
            DiskError: a store failed.
        """
        if not self._memory.slabs.draining:
            return False
        pool = self._pool
        for tensor in pool.shelf.free():
            run = _run_of(tensor)
            if run is not None and run.slab.draining and tensor in pool.shelf:
                pool.evict(tensor)
        return True

    def _windows(self, nbytes: int, movable: list[tuple[Run, PagedTensor]]) -> Iterator[_Window]:
        """Every stretch of gaps and movable extents that is long enough, none longer than it must be."""
        for slab in self._memory.slabs.usable():
            parts: list[tuple[int, int, PagedTensor | None]] = [(*gap, None) for gap in slab.runs.gaps()]
            parts += [(run.offset, run.nbytes, tensor) for run, tensor in movable if run.slab is slab]
            parts.sort(key=lambda part: part[0])
            begin = 0
            for at, (start, length, _) in enumerate(parts):
                if at and parts[at - 1][0] + parts[at - 1][1] != start:
                    # Something between them stays.
                    begin = at
                stop = start + length
                while begin <= at and stop - parts[begin][0] >= nbytes:
                    chosen = parts[begin : at + 1]
                    tensors = [tensor for _, _, tensor in chosen if tensor is not None]
                    gaps = [(first, many) for first, many, tensor in chosen if tensor is None]
                    size = sum(many for _, many, tensor in chosen if tensor is not None)
                    yield _Window(slab, parts[begin][0], gaps, tensors, size)
                    begin += 1

    def _places(self, window: _Window) -> list[Run] | None:
        """Where what is in a window can go, the largest first; None if there is not a place for all of it.

        The gaps of the window are taken then, so that nothing goes there.
        """
        slabs, places = self._memory.slabs, list[Run]()
        for start, length in window.gaps:
            window.slab.runs.claim(start, length)
        window.tensors.sort(key=lambda tensor: -tensor.slot_bytes)
        for tensor in window.tensors:
            assert tensor.extent is not None and tensor.extent.block is not None
            place = slabs.cut(tensor.extent.block.nbytes)
            if place is None:
                for earlier in places:
                    slabs.give(earlier)
                for start, length in window.gaps:
                    window.slab.runs.give(start, length)
                return None
            places.append(place)
        return places

    def _clear(self, window: _Window, places: list[Run], nbytes: int) -> Run | None:
        """Moves what is in a window; the run that is free then, or None if somebody has come to look at it."""
        runs, moved = window.slab.runs, 0
        while moved < len(places) and self._move(window.tensors[moved], places[moved]):
            moved += 1
        for place in places[moved:]:
            self._memory.slabs.give(place)
        # What has moved has given its place back.
        for start, length in window.gaps:
            runs.give(start, length)
        if moved < len(places):
            return None
        runs.claim(window.start, nbytes)
        return Run(window.slab, window.start, nbytes)

    def _move(self, tensor: PagedTensor, place: Run) -> bool:
        """Gives an idle tensor another extent, with the same bytes and the same charge; False if somebody views it."""
        extent, occupant = tensor.extent, tensor.occupant
        assert extent is not None and extent.block is not None
        tensor.note_changes()
        if occupant is not None:
            occupant.leaving(extent.tensor)
        if extent.viewed(shown=False):
            if occupant is not None:
                occupant.arrived(extent.tensor)
            return False
        old, reservation = extent.block, extent.reservation
        with torch.inference_mode(False), torch.no_grad():
            block = self._memory.block_of(place)
            octets = block.buffer
            assert octets is not None
            octets.copy_(extent.octets)
            typed = octets[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.extent = Extent(typed, octets, block, reservation)
        del extent
        old.buffer = None
        self._memory.recycle(old)
        self.moved_bytes += block.nbytes
        if occupant is not None:
            occupant.arrived(typed)
        return True


def _run_of(tensor: PagedTensor) -> Run | None:
    extent = tensor.extent
    if extent is None or extent.block is None or not isinstance(extent.block.region, Run):
        return None
    return extent.block.region


def _may_move(tensor: PagedTensor) -> bool:
    """Whether nobody but the pool knows where a tensor is."""
    return tensor.place in (Place.CLEAN, Place.DIRTY) and not tensor.stores and not tensor.viewed
