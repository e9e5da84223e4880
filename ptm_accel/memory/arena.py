"""The compute tier of a machine without a device: blocks of host memory, and free runs kept for reuse."""

from __future__ import annotations

import threading
from collections import deque

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Budget, Tier
from ptm_accel.memory.mapping import HUGE_PAGE_BYTES, MappedRun, anonymous_run
from ptm_accel.memory.transfer import ALIGN_BYTES, Block


class HostArena:
    """Hands out blocks of anonymous host memory (see `ComputeTier`).

    The first touch of fresh memory costs more than filling it, many times more where a hypervisor must find it first.
    So runs that come back are kept as long as charged + kept bytes fit the budget. A new block is a kept run of its
    size, or is put together from the huge pages of others, oldest first: the kernel moves them, nothing is copied.
    Only what cannot be had so (ends of less than a huge page) is fresh, and as much of what is kept is unmapped for it.

    Live + kept bytes stay under the capacity if callers charge before they `allocate` (`Budget.reserve`, which has kept
    runs unmapped where the bytes will not come from `allocate`), and give the charge back just before they `recycle`.

    `recycle` takes a lock. A finaliser can run anywhere, so it should only note the block, for its owner to recycle.

    Args:
        budget: the budget of the host tier. The arena is its reclaimer.
    """

    def __init__(self, budget: Budget) -> None:
        self.tier = Tier.HOST
        self.device = torch.device("cpu")
        self.budget = budget
        self.live_bytes = 0
        self.kept_bytes = 0
        self._kept: dict[int, deque[tuple[int, MappedRun]]] = {}
        self._age = 0
        self._closed = False
        self._lock = threading.RLock()
        budget.set_reclaimer(lambda: self.kept_bytes, self.reclaim)

    def allocate(self, nbytes: int) -> Block:
        """A block of `nbytes` (a multiple of `ALIGN_BYTES`), contents undefined. The caller has charged it.

        Raises:
            BudgetError: the machine itself has no more memory.
        """
        assert nbytes > 0 and nbytes % ALIGN_BYTES == 0, f"block of {nbytes} bytes"
        with self._lock:
            assert not self._closed, "allocate on a closed arena"
            run = self._kept_run(nbytes) or self._composed(nbytes)
            self.live_bytes += nbytes
            excess = self._excess_bytes()
            if excess > 0:
                self.reclaim(excess)
        return Block(run.tensor(), run)

    def _kept_run(self, nbytes: int) -> MappedRun | None:
        """A kept run of this size."""
        runs = self._kept.get(nbytes)
        if not runs:
            return None
        # The newest is the likeliest to be in a cache still.
        run = runs.pop()[1]
        if not runs:
            del self._kept[nbytes]
        self.kept_bytes -= nbytes
        return run

    def _composed(self, nbytes: int) -> MappedRun:
        """A new run with the memory of kept ones in it, as far as that goes."""
        try:
            run = anonymous_run(nbytes, "a tensor in use")
        except BudgetError:
            if not self.kept_bytes:
                raise
            # The number of mappings is limited too.
            self.reclaim(self.kept_bytes)
            run = anonymous_run(nbytes, "a tensor in use")
        end = nbytes % HUGE_PAGE_BYTES
        if end in self._kept:
            # An end of just that size, as sizes are few.
            age = self._kept[end][0][0]
            self._give(self._take(end), age, end, run.address + nbytes - end)
        filled, whole = 0, nbytes - end
        while filled < whole and (oldest := self._oldest_huge()) is not None:
            age, size = oldest
            part = min(size // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, whole - filled)
            given = self._give(self._take(size), age, part, run.address + filled)
            filled += given
            if given < part:
                break
        return run

    def _oldest_huge(self) -> tuple[int, int] | None:
        """Age and size of the oldest kept run that has a huge page."""
        return min(((runs[0][0], size) for size, runs in self._kept.items() if size >= HUGE_PAGE_BYTES), default=None)

    def _give(self, source: MappedRun, age: int, nbytes: int, target: int) -> int:
        """Moves the front of a kept run that was taken; what is left of it is kept as before."""
        given = source.give_front(nbytes, target)
        self.kept_bytes -= given
        if source.nbytes:
            self._keep(source, age)
        return given

    def _take(self, size: int) -> MappedRun:
        """Takes the oldest kept run of a size from among them; its bytes are still counted as kept."""
        runs = self._kept[size]
        run = runs.popleft()[1]
        if not runs:
            del self._kept[size]
        return run

    def _keep(self, run: MappedRun, age: int) -> None:
        runs = self._kept.setdefault(run.nbytes, deque())
        runs.append((age, run))
        if len(runs) > 1 and runs[-2][0] > age:
            # What is left of an old run is as old as it was.
            self._kept[run.nbytes] = deque(sorted(runs, key=lambda entry: entry[0]))

    def recycle(self, block: Block) -> None:
        """Takes back a block whose storage has died; the run is kept for the next blocks."""
        run = block.region
        assert isinstance(run, MappedRun), "block recycled twice, or not of this tier"
        block.buffer = block.region = None
        with self._lock:
            self.live_bytes -= run.nbytes
            self._age += 1
            self._keep(run, self._age)
            self.kept_bytes += run.nbytes
            del run
            # Somebody may have reserved between the release of this block's charge and now. A `reserve` from here on
            # sees the run among the kept ones.
            excess = self.kept_bytes if self._closed else self._excess_bytes()
            if excess > 0:
                self.reclaim(excess)

    def reclaim(self, nbytes: int) -> int:
        """Unmaps kept runs, oldest first, until at least `nbytes` are free or none is left; returns the bytes."""
        freed = 0
        with self._lock:
            while freed < nbytes and self.kept_bytes:
                size = min(self._kept, key=lambda size: self._kept[size][0][0])
                self._take(size)
                self.kept_bytes -= size
                freed += size
        return freed

    def close(self) -> None:
        """Gives all kept memory back; that of live blocks follows as they are recycled. Idempotent."""
        with self._lock:
            self._closed = True
            self.reclaim(self.kept_bytes)

    def check_integrity(self) -> None:
        """Raises `AssertionError` with the numbers if live + kept bytes do not add up."""
        with self._lock:
            kept = sum(run.nbytes for runs in self._kept.values() for _, run in runs)
            capacity = self.budget.capacity_bytes
            whole = kept == self.kept_bytes and self.live_bytes >= 0 and self.live_bytes + kept <= capacity
            if not whole:
                raise AssertionError(
                    f"host arena: live {self.live_bytes}, kept {self.kept_bytes} (runs add up to {kept}), "
                    f"capacity {capacity}"
                )

    def _excess_bytes(self) -> int:
        return self.budget.used_bytes + self.kept_bytes - self.budget.capacity_bytes
