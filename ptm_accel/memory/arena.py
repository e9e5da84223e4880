"""The compute tier of a machine without a device: buffers of host memory, and free runs kept for reuse."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from ptm_accel.memory.budget import Budget, Tier
from ptm_accel.memory.mapping import MappedRun, anonymous_run
from ptm_accel.memory.transfer import ALIGN_BYTES, Buffer


class HostArena:
    """Hands out buffers of anonymous host memory (see `ComputeTier`).

    The first touch of fresh memory costs more than filling it. So freed runs are kept by size for the next buffers, as
    long as charged + kept bytes fit the budget; the size that was freed least recently is unmapped first. Callers
    charge before they `allocate`, and give the charge back just before they `recycle`.

    Args:
        budget: the budget of the host tier. The arena is its reclaimer.
    """

    def __init__(self, budget: Budget) -> None:
        self.tier = Tier.HOST
        self.device = torch.device("cpu")
        self.budget = budget
        self.live_bytes = 0
        self.kept_bytes = 0
        # Free runs by size; the size that was freed least recently comes first.
        self._kept: OrderedDict[int, list[MappedRun]] = OrderedDict()
        self._closed = False
        self._lock = threading.RLock()
        budget.set_reclaimer(lambda: self.kept_bytes, self.reclaim)

    def allocate(self, nbytes: int) -> Buffer:
        """Returns a buffer of `nbytes` (a multiple of `ALIGN_BYTES`), contents undefined. The caller has charged it.

        Raises:
            BudgetError: the machine itself has no more memory.
        """
        assert nbytes > 0 and nbytes % ALIGN_BYTES == 0, f"block of {nbytes} bytes"
        with self._lock:
            assert not self._closed, "allocate on a closed arena"
            if nbytes in self._kept:
                run = self._take(nbytes)
            else:
                # Before it is mapped, since the number of mappings is limited too.
                self.reclaim(self._excess_bytes())
                run = anonymous_run(nbytes, "a tensor in use")
            self.live_bytes += nbytes
            self.reclaim(self._excess_bytes())
        return Buffer(run.tensor(), run)

    def _take(self, size: int) -> MappedRun:
        """Returns the newest kept run of a size."""
        runs = self._kept[size]
        run = runs.pop()
        if not runs:
            del self._kept[size]
        self.kept_bytes -= size
        return run

    def recycle(self, buffer: Buffer) -> None:
        """Takes back a buffer whose storage has died; the run is kept for the next buffers."""
        run = buffer.region
        assert isinstance(run, MappedRun), "block recycled twice, or not of this tier"
        buffer.octets = buffer.region = None
        with self._lock:
            self.live_bytes -= run.nbytes
            self._kept.setdefault(run.nbytes, []).append(run)
            self._kept.move_to_end(run.nbytes)
            self.kept_bytes += run.nbytes
            del run
            # Another thread may have reserved since the release of this buffer's charge.
            self.reclaim(self.kept_bytes if self._closed else self._excess_bytes())

    def again(self, buffer: Buffer) -> Buffer:
        """The run of a buffer that nobody views, as another buffer; transfers that use it hold its first storage."""
        run = buffer.region
        assert isinstance(run, MappedRun), "block recycled, or not of this tier"
        buffer.octets = buffer.region = None
        return Buffer(run.tensor(), run)

    def leave_to_transfers(self, buffer: Buffer) -> None:
        """Lets go of a buffer that nobody views: it is unmapped when the transfers that use it have ended."""
        run = buffer.region
        assert isinstance(run, MappedRun), "block recycled, or not of this tier"
        buffer.octets = buffer.region = None
        with self._lock:
            self.live_bytes -= run.nbytes

    def reclaim(self, nbytes: int) -> int:
        """Unmaps kept runs until at least `nbytes` are free or none is left; returns the bytes."""
        freed = 0
        with self._lock:
            while freed < nbytes and self._kept:
                size = next(iter(self._kept))
                self._take(size)
                freed += size
        return freed

    def close(self) -> None:
        """Gives all kept memory back; that of live buffers follows as they are recycled. Idempotent."""
        with self._lock:
            self._closed = True
            self.reclaim(self.kept_bytes)

    def check_integrity(self) -> None:
        """Raises `AssertionError` with the numbers if live + kept bytes do not add up."""
        with self._lock:
            kept = sum(run.nbytes for runs in self._kept.values() for run in runs)
            capacity = self.budget.capacity_bytes
            whole = kept == self.kept_bytes and self.live_bytes >= 0 and self.live_bytes + kept <= capacity
            if not whole:
                raise AssertionError(
                    f"host arena: live {self.live_bytes}, kept {self.kept_bytes} (runs add up to {kept}), "
                    f"capacity {capacity}"
                )

    def _excess_bytes(self) -> int:
        return self.budget.used_bytes + self.kept_bytes - self.budget.capacity_bytes
