"""What the C library keeps of freed memory: activations and temporaries that leave holes, and how long they are kept.

On a CPU, torch takes each tensor from the C library's heap. Freed blocks that are given back to the system at once cost
nothing but time: the first touch of fresh memory in the next step was seen to take a third of a step. Blocks that are
kept for the next ones cost memory: the holes between them count as resident, beside the budget. So the first step gives
back and is watched, to see what live blocks take at their peak. From then on freed blocks are kept, and what the heap
takes beyond that peak is taken off the budget; where that would be too much of it, freed blocks go on being given back.

A heap that is dense in one step may be full of holes in the next: it depends on where its first blocks came to lie. So
what it grows by is taken off at once, in the middle of a step, and what is given back to the budget is given late. And
where blocks are not kept, it is not enough to give back what is freed: malloc serves blocks of any size from the holes
that there are, of loading the model perhaps. So those are given back as well, again and again.
"""

from __future__ import annotations

import ctypes
import logging
import weakref
from typing import ClassVar, NamedTuple, Protocol

from ptm_accel.memory.budget import Budget
from ptm_accel.memory.transfer import round_up
from ptm_accel.units import format_bytes

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GIVE_BACK_BYTES = 128 << 10
"""What glibc itself begins with, before it raises it to the size of freed blocks, up to 32 MiB."""
_KEEP_BYTES = 4 << 20
"""Larger blocks leave larger holes, and are few."""
_NEVER_BYTES = (1 << 31) - 1
_MOST_OF_BUDGET = 3
"""At most this part of the budget is given up for holes."""
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


class HeapUse(NamedTuple):
    """What the C library has of the system, in bytes.

    Attributes:
        held: in its heaps, holes included, or mapped each by itself.
        live: of that, what is handed out.
    """

    held: int
    live: int


class Heap(Protocol):
    """The C library's allocator."""

    def use(self) -> HeapUse:
        """What it has now."""
        ...

    def end(self) -> int:
        """The address at which its main heap ends; takes no time to tell."""
        ...

    def give_back(self) -> None:
        """Has blocks given back to the system as they are freed, and those that are kept at once."""
        ...

    def keep(self) -> None:
        """Has blocks kept as they are freed."""
        ...


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


class Glibc:
    """The GNU C library's `malloc`.

    Attributes:
        tells: whether it says what it holds (2.33 and later).
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.sbrk.restype = ctypes.c_size_t
        self._libc.sbrk.argtypes = [ctypes.c_ssize_t]
        self.tells = hasattr(self._libc, "mallinfo2")
        if self.tells:
            self._libc.mallinfo2.restype = _MallInfo

    @staticmethod
    def found() -> bool:
        """Whether this process has it."""
        return all(hasattr(ctypes.CDLL(None), name) for name in ("mallopt", "malloc_trim"))

    def use(self) -> HeapUse:
        """See `Heap`."""
        info = self._libc.mallinfo2()
        return HeapUse(held=info.arena + info.hblkhd, live=info.uordblks + info.hblkhd)

    def end(self) -> int:
        """See `Heap`."""
        address: int = self._libc.sbrk(0)
        return address

    def give_back(self) -> None:
        """See `Heap`."""
        self._set(_GIVE_BACK_BYTES, _GIVE_BACK_BYTES)
        self._libc.malloc_trim(0)

    def keep(self) -> None:
        """See `Heap`."""
        self._set(_KEEP_BYTES, _NEVER_BYTES)

    def trim(self) -> None:
        """Gives back what is free now, once; what is freed later is kept or given back as before."""
        self._libc.malloc_trim(0)

    def _set(self, mapped_from: int, trimmed_from: int) -> None:
        self._libc.mallopt(_M_MMAP_THRESHOLD, mapped_from)
        self._libc.mallopt(_M_TRIM_THRESHOLD, trimmed_from)


class Trimmer:
    """Gives back what tensors that were made only to be copied elsewhere leave free, now and then.

    The C library keeps such blocks beside every budget: of a checkpoint that is cast or fused as it is read, up to all.

    Args:
        heap: the allocator; where it is another than glibc's, nothing is done.
        every_bytes: of such tensors, after which it is done.
    """

    def __init__(self, heap: Glibc | None = None, every_bytes: int = _HOLES_BYTES) -> None:
        self._heap = heap or (Glibc() if Glibc.found() else None)
        self._every_bytes = every_bytes
        self._passed_bytes = 0

    def passed(self, nbytes: int) -> None:
        """So many bytes were copied, and are free or will be before the next are."""
        self._passed_bytes += nbytes
        if self._passed_bytes > self._every_bytes and self._heap is not None:
            self._passed_bytes = 0
            self._heap.trim()


class HeapTide:
    """Takes off a host budget what the heap holds beyond what lives in it.

    What lives for long must not lie in the heap, where it would leave holes (`Pool.copies_in`).

    Args:
        budget: the host budget; its capacity is changed.
        least_bytes: the least that pages can work with.
        heap: the allocator.

    Attributes:
        total_bytes: the budget that was given.
        keeping: whether freed blocks are kept.
    """

    _watches: ClassVar[weakref.WeakSet[HeapTide]] = weakref.WeakSet()

    @classmethod
    def watching(cls) -> bool:
        """Whether somebody watches the heap already."""
        return len(cls._watches) > 0

    def __init__(self, budget: Budget, least_bytes: int, heap: Heap) -> None:
        self.total_bytes = budget.capacity_bytes
        self.keeping = False
        self._budget = budget
        self._least_bytes = least_bytes
        self._heap = heap
        self._taken_bytes = self._uses = 0
        HeapTide._watches.add(self)
        self._learning = True
        self._charges = 0
        heap.give_back()
        self._begin = heap.use()
        self._live_bytes = self._held_bytes = 0
        self._end = heap.end()
        self._grain = max(self.total_bytes // _GRAIN, 1)
        self._steady_bytes = self._steady_steps = 0

    def need(self, least_bytes: int) -> None:
        """Pages need more than was known: an optimizer has been chosen."""
        self._least_bytes = least_bytes
        if self.keeping and self._budget.capacity_bytes < least_bytes:
            self._stop()

    def resize(self, total_bytes: int) -> None:
        """Another budget is given; what holes take of it stays the same."""
        self.total_bytes = total_bytes
        self._grain = max(total_bytes // _GRAIN, 1)
        if not self._take_off(self._taken_bytes, may_raise=True):
            self._stop()

    def give_way(self) -> bool:
        """Pages have no room left and nothing to move away: holes are given back to them, now and from then on.

        Returns:
            whether there is more room than before.
        """
        before = self._budget.capacity_bytes
        if self.keeping:
            self._stop()
        return self._budget.capacity_bytes > before

    def sample(self) -> None:
        """Called before every reservation: notes how much lives in the heap, and how much that takes.

        Where this lowers the capacity, the reservation has what is too much moved away.
        """
        self._charges += 1
        if not self.keeping:
            # What lives now may be too much already; then the rest of the step cannot change what comes of it.
            learns = self._learning and not self._is_too_much(self._live_bytes // _GUESS)
            self._trim(self._look() if learns else None)
        elif self._charges % self._every == 0 or self._heap.end() > self._end + _GROWTH_BYTES:
            self._look()
            if not self._take_off(self._holes_bytes):
                self._stop()

    def glance(self) -> bool:
        """Called in forwards: where all pages are there already, a pass charges nothing, and the heap still grows.

        Returns:
            whether the capacity is lower than before, and what is too much is to be moved away.
        """
        if not self.keeping:
            self._trim()
            return False
        if self._heap.end() <= self._end + _GLANCE_BYTES:
            return False
        before = self._budget.capacity_bytes
        self._look()
        if not self._take_off(self._holes_bytes):
            self._stop()
        return self._budget.capacity_bytes < before

    def _trim(self, use: HeapUse | None = None) -> None:
        """Gives holes back now and then: large blocks are served from those that there are, whatever is set."""
        self._uses += 1
        if self._uses % _TRIM_EVERY == 0:
            use = use or self._heap.use()
            if use.held - use.live > _HOLES_BYTES:
                self._heap.give_back()

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
        if self._learning or self.keeping:
            self._look()
        if self._learning:
            self._learning = False
            if self._take_off(self._live_bytes // _GUESS):
                self.keeping = True
                self._heap.keep()
                self._end = self._heap.end()
        elif self.keeping:
            self._steady_steps += 1
            if self._held_bytes > self._steady_bytes + self._grain:
                self._steady_bytes, self._steady_steps = self._held_bytes, 0
            if not self._take_off(self._holes_bytes, may_raise=self._steady_steps >= _PATIENCE):
                self._stop()

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
        """Ends the watch: blocks are given back as they are freed, as before it began."""
        HeapTide._watches.discard(self)
        if self.keeping:
            self._stop()

    def _stop(self) -> None:
        self.keeping = False
        self._taken_bytes = 0
        self._heap.give_back()
        self._budget.capacity_bytes = self.total_bytes
