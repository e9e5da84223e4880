"""The compute tier of a machine without a device: blocks of host memory, and free runs kept for reuse."""

from __future__ import annotations

import threading
from collections import deque

import torch

from ptm_accel.memory.budget import Budget, Tier
from ptm_accel.memory.mapping import MappedRun, anonymous_run
from ptm_accel.memory.transfer import ALIGN_BYTES, Block


class HostArena:
    """Hands out blocks of anonymous host memory (see `ComputeTier`).

    The first touch of fresh memory costs about as much as filling it, so runs that come back are kept, by exact size,
    as long as charged + kept bytes fit the budget; `Budget.reserve` has the oldest unmapped when it needs the room.
    Live + kept bytes stay under the capacity if callers charge before they `allocate`, and give the charge back just
    before they `recycle`: the other way round a full budget would have each run unmapped at once.

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
            runs = self._kept.get(nbytes)
            if runs:
                # The newest is the likeliest to be in a cache still.
                run = runs.pop()[1]
                self.kept_bytes -= nbytes
            else:
                run = anonymous_run(nbytes, "a tensor in use")
            self.live_bytes += nbytes
        return Block(run.tensor(), run)

    def recycle(self, block: Block) -> None:
        """Takes back a block whose storage has died; the run is kept for the next block of its size."""
        run = block.region
        assert isinstance(run, MappedRun), "block recycled twice, or not of this tier"
        block.buffer = block.region = None
        with self._lock:
            self.live_bytes -= run.nbytes
            self._age += 1
            self._kept.setdefault(run.nbytes, deque()).append((self._age, run))
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
                size, runs = min(
                    ((size, runs) for size, runs in self._kept.items() if runs), key=lambda item: item[1][0][0]
                )
                runs.popleft()
                if not runs:
                    del self._kept[size]
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
