"""What the C library keeps of freed memory: activations and temporaries that leave holes, and how long they are kept.

On a CPU, torch takes each tensor from the C library's heap. Freed blocks that are given back to the system at once cost
nothing but time: the first touch of fresh memory in the next step was seen to take a third of a step. Blocks that are
kept for the next ones cost memory: the holes between them count as resident, beside the budget. So the first step gives
back and is watched, to see what live blocks take at their peak. From then on freed blocks are kept, but for large ones,
whose holes cost pages more than they save, and what the heap takes beyond that peak is taken off the budget. Where that
would be too much of it, a fixed part is taken off, and holes are given back, all at once, whenever the heap has come to
take more than that beyond the peak: a few times a step, where the most lives. Only where there is not even so much to
take off does each block go on being given back.

Where everything fits nothing is watched, and all is kept: a gradient lives there until its update, which is short, and
the C library would give the end of its heap back with each of them.

A heap that is dense in one step may be full of holes in the next: it depends on where its first blocks came to lie. So
what it grows by is taken off at once, in the middle of a step, and what is given back to the budget is given late. And
where blocks are not kept, it is not enough to give back what is freed: malloc serves blocks of any size from the holes
that there are, of loading the model perhaps. So those are given back as well, again and again.
"""

from __future__ import annotations

import enum
import logging
import weakref
from typing import ClassVar

from ptm_accel.memory.budget import Budget
from ptm_accel.memory.glibc import Heap, HeapUse
from ptm_accel.memory.transfer import round_up
from ptm_accel.units import format_bytes

logger = logging.getLogger(__name__)

_MOST_OF_BUDGET = 3
"""At most this part of the budget is given up for holes that are kept."""
_TRIMMED_TO = 8
"""This part of it is given up where holes are given back whenever they take more."""
_GUESS = 2
"""Holes are expected to take this part of what live blocks take, until they have been seen."""
_GRAIN = 64
"""What is taken off is rounded up to this part of the budget: less is not worth the new plan that it would ask for."""
_PATIENCE = 4
"""For so many steps in a row a heap must not have grown before the budget gets back what was taken off too much."""
_EVERY = 8
"""How many charges lie between two looks while blocks are kept; a look goes through all holes, so it takes 0.3 ms."""
_EVERY_STEADY = 128
"""The same of a heap that has not grown for some steps: then what grows shows at its end."""
_GROWTH_BYTES = 1 << 20
"""A heap that has grown by so much is looked at with the next charge."""
_GLANCE_BYTES = 4 << 20
"""And by so much when a parameter is read next."""
_TRIM_EVERY = 16
"""How many charges and reads lie between two trims of a heap with holes; one takes some milliseconds."""
_HOLES_BYTES = 16 << 20
"""Holes that are not worth a trim."""


class Freed(enum.Enum):
    """What becomes of blocks that are freed."""

    WATCHED = "given back, while the first step is watched"
    KEPT = "kept; what the holes take is off the budget"
    TRIMMED = "kept; holes beyond what is off the budget are given back now and then"
    GIVEN_BACK = "given back"


class HeapTide:
    """Takes off a host budget what the heap holds beyond what lives in it.

    What lives for long must not lie in the heap, where it would leave holes (`Pool.copies_in`).

    Args:
        budget: the host budget; its capacity is changed.
        least_bytes: the least that pages can work with.
        heap: the allocator.

    Attributes:
        total_bytes: the budget that was given.
        freed: what becomes of freed blocks.
    """

    _watches: ClassVar[weakref.WeakSet[HeapTide]] = weakref.WeakSet()

    @classmethod
    def watching(cls) -> bool:
        """Whether somebody watches the heap already."""
        return len(cls._watches) > 0

    def __init__(self, budget: Budget, least_bytes: int, heap: Heap) -> None:
        self.total_bytes = budget.capacity_bytes
        self.freed = Freed.WATCHED
        self._budget = budget
        self._least_bytes = least_bytes
        self._heap = heap
        self._taken_bytes = self._uses = 0
        HeapTide._watches.add(self)
        self._charges = 0
        heap.give_back()
        self._begin = heap.use()
        self._live_bytes = self._held_bytes = 0
        self._end = heap.end()
        self._grain = max(self.total_bytes // _GRAIN, 1)
        self._steady_bytes = self._steady_steps = 0
        # So much of the process's memory that is not pages' is no reason to look whether holes are to be given back.
        self._unsuspicious_bytes = 0

    def need(self, least_bytes: int) -> None:
        """Pages need more than was known: an optimizer has been chosen."""
        self._least_bytes = least_bytes
        if self._keeps and self._budget.capacity_bytes < least_bytes:
            self._keep_less()

    def resize(self, total_bytes: int) -> None:
        """Another budget is given; what holes take of it stays the same, where they are kept."""
        self.total_bytes = total_bytes
        self._grain = max(total_bytes // _GRAIN, 1)
        if self.freed is Freed.TRIMMED or not self._take_off(self._taken_bytes, may_raise=True):
            self._keep_less()

    def give_way(self) -> bool:
        """Pages have no room left and nothing to move away: holes are given back to them, now and from then on.

        Returns:
            whether there is more room than before.
        """
        before = self._budget.capacity_bytes
        if self._keeps:
            self._give_back()
        return self._budget.capacity_bytes > before

    def sample(self) -> None:
        """Called before every reservation: notes how much lives in the heap, and how much that takes.

        Where this lowers the capacity, the reservation has what is too much moved away.
        """
        self._charges += 1
        if self.freed is Freed.WATCHED:
            # What lives now may be too much already; then the rest of the step cannot change what comes of it.
            too_much = self._is_too_much(self._live_bytes // _GUESS)
            self._trim(None if too_much else self._look())
        elif self.freed is Freed.GIVEN_BACK:
            self._trim()
        elif self.freed is Freed.TRIMMED:
            self._stay_within()
        elif self._charges % self._every == 0 or self._heap.end() > self._end + _GROWTH_BYTES:
            self._look()
            self._take_off_holes()

    def glance(self) -> bool:
        """Called in forwards: where all pages are there already, a pass charges nothing, and the heap still grows.

        Returns:
            whether the capacity is lower than before, and what is too much is to be moved away.
        """
        if self.freed is Freed.TRIMMED:
            self._stay_within()
            return False
        if self.freed is not Freed.KEPT:
            self._trim()
            return False
        if self._heap.end() <= self._end + _GLANCE_BYTES:
            return False
        before = self._budget.capacity_bytes
        self._look()
        self._take_off_holes()
        return self._budget.capacity_bytes < before

    def _trim(self, use: HeapUse | None = None) -> None:
        """Gives holes back now and then: large blocks are served from those that there are, whatever is set."""
        self._uses += 1
        if self._uses % _TRIM_EVERY == 0:
            use = use or self._heap.use()
            if use.held - use.live > _HOLES_BYTES:
                self._heap.give_back()

    def _stay_within(self) -> None:
        """Gives holes back if the heap takes more than what lives in it at its peak, and what is off the budget.

        To ask for what takes memory goes through all of it. So that is done only when the process has come to take
        more beside pages, as the kernel counts it; if that was for something else, it is for nothing.
        """
        self._uses += 1
        if self._uses % _EVERY:
            return
        if self._heap.anonymous() - self._budget.resident_bytes > self._unsuspicious_bytes:
            self._give_holes_back()

    def _give_holes_back(self) -> None:
        use, resident = self._look(), self._heap.resident()
        most = self._begin.live + self._live_bytes + self._taken_bytes
        if resident > most:
            logger.debug("%s of holes are given back", format_bytes(max(resident - use.live, 0)))
            self._heap.trim()
            resident = self._heap.resident()
        # What cannot be given back is not looked for each time.
        more = max(most - resident, self._taken_bytes // 4)
        self._unsuspicious_bytes = self._heap.anonymous() - self._budget.resident_bytes + more

    @property
    def _keeps(self) -> bool:
        return self.freed in (Freed.KEPT, Freed.TRIMMED)

    @property
    def _every(self) -> int:
        return _EVERY if self._steady_steps < _PATIENCE else _EVERY_STEADY

    @property
    def _holes_bytes(self) -> int:
        return max(self._held_bytes - self._live_bytes, 0)

    def _look(self) -> HeapUse:
        self._end = self._heap.end()
        use = self._heap.use()
        self._live_bytes = max(self._live_bytes, use.live - self._begin.live)
        self._held_bytes = max(self._held_bytes, use.held - self._begin.held)
        return use

    def end_step(self) -> None:
        """Called after every optimizer step: decides whether blocks are kept, and what that costs.

        Where this lowers the capacity, the caller has what is too much moved away (`Room.shrink`).
        """
        if self.freed is Freed.WATCHED:
            self._look()
            self._end_watch()
        elif self.freed is Freed.KEPT:
            self._look()
            self._steady_steps += 1
            if self._held_bytes > self._steady_bytes + self._grain:
                self._steady_bytes, self._steady_steps = self._held_bytes, 0
            self._take_off_holes(may_raise=self._steady_steps >= _PATIENCE)

    def _end_watch(self) -> None:
        if not self._take_off(self._live_bytes // _GUESS):
            self._keep_less()
            return
        self.freed = Freed.KEPT
        self._heap.keep(large=False)
        self._end = self._heap.end()

    def _take_off_holes(self, *, may_raise: bool = False) -> None:
        if not self._take_off(self._holes_bytes, may_raise=may_raise):
            self._keep_less()

    def _take_off(self, nbytes: int, *, may_raise: bool = False) -> bool:
        """Lowers the capacity to what `nbytes` of holes leave, or raises it to that; False if that is too little."""
        if self._is_too_much(nbytes):
            logger.debug("%s of holes in the heap are too much for the budget", format_bytes(nbytes))
            return False
        left = max(self.total_bytes - round_up(nbytes, self._grain), self._least_bytes)
        if left < self._budget.capacity_bytes or may_raise:
            self._budget.capacity_bytes = left
            self._taken_bytes = nbytes
        return True

    def _is_too_much(self, nbytes: int) -> bool:
        return nbytes > self.total_bytes // _MOST_OF_BUDGET or self.total_bytes - nbytes < self._least_bytes

    def close(self) -> None:
        """Ends the watch: the allocator goes on as it would have without it."""
        HeapTide._watches.discard(self)
        if self._keeps:
            self._give_back()
        self._heap.let_be()

    def _keep_less(self) -> None:
        """The budget cannot do without what holes take, or would: from now on they are given back when they are many.

        Where it cannot do without that either, each block is given back.
        """
        if self.freed is Freed.GIVEN_BACK:
            self._budget.capacity_bytes = self.total_bytes
            return
        part = min(self.total_bytes // _TRIMMED_TO, self.total_bytes - self._least_bytes)
        if part < _HOLES_BYTES or not self._heap.tells_resident:
            self._give_back()
            return
        self._taken_bytes = part
        self._budget.capacity_bytes = self.total_bytes - part
        if self.freed is not Freed.TRIMMED:
            self.freed = Freed.TRIMMED
            self._heap.keep(large=False)
        self._give_holes_back()

    def _give_back(self) -> None:
        self.freed = Freed.GIVEN_BACK
        self._taken_bytes = 0
        self._heap.give_back()
        self._budget.capacity_bytes = self.total_bytes
