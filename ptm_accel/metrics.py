"""What a run has used and moved: peaks per tier, bytes per link, faults, stalls."""

from __future__ import annotations

from dataclasses import dataclass

from ptm_accel.memory.budget import Tier
from ptm_accel.memory.setup import Memory
from ptm_accel.units import format_bytes

_GIB = float(1 << 30)


@dataclass(frozen=True, slots=True)
class Reading:
    """Running totals at one moment; differences of two readings describe what lies between."""

    steps: int
    faults: int
    hits: int
    evictions: int
    loaded_bytes: int
    stored_bytes: int
    disk_read_bytes: int
    disk_written_bytes: int
    stall_s: float


class Metrics:
    """Reads the counters of one engine's memory.

    Args:
        memory: the tiers.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self.steps = 0
        self._last = self.read()

    def read(self) -> Reading:
        """The totals now."""
        stats, disk = self._memory.pool.stats, self._memory.disk
        return Reading(
            steps=getattr(self, "steps", 0),
            faults=stats.faults,
            hits=stats.hits,
            evictions=stats.evictions,
            loaded_bytes=stats.loaded_bytes,
            stored_bytes=stats.stored_bytes,
            disk_read_bytes=disk.bytes_read if disk is not None else 0,
            disk_written_bytes=disk.bytes_written if disk is not None else 0,
            stall_s=stats.stall_s,
        )

    def peaks(self) -> dict[Tier, int]:
        """The most bytes that were charged to each tier, so far."""
        return {tier: budget.peak_bytes for tier, budget in self._memory.budgets.items()}

    def since_last(self) -> dict[str, float]:
        """Keys for the training log: peaks so far, and what moved per step since the last call."""
        now, before = self.read(), self._last
        self._last = now
        steps = max(now.steps - before.steps, 1)
        keys: dict[str, float] = {f"ptm_peak_{t.value}_gib": round(n / _GIB, 4) for t, n in self.peaks().items()}
        keys["ptm_faults"] = round((now.faults - before.faults) / steps, 2)
        keys["ptm_hits"] = round((now.hits - before.hits) / steps, 2)
        keys["ptm_loaded_gib"] = round((now.loaded_bytes - before.loaded_bytes) / steps / _GIB, 4)
        keys["ptm_stored_gib"] = round((now.stored_bytes - before.stored_bytes) / steps / _GIB, 4)
        if self._memory.disk is not None:
            keys["ptm_disk_read_gib"] = round((now.disk_read_bytes - before.disk_read_bytes) / steps / _GIB, 4)
            keys["ptm_disk_written_gib"] = round((now.disk_written_bytes - before.disk_written_bytes) / steps / _GIB, 4)
        keys["ptm_stall_s"] = round((now.stall_s - before.stall_s) / steps, 4)
        return keys

    def summary(self) -> str:
        """One line for the end of training."""
        now = self.read()
        steps = max(now.steps, 1)
        peaks = ", ".join(
            f"{tier.value} {format_bytes(n)} of {format_bytes(self._memory.budgets[tier].capacity_bytes)}"
            for tier, n in self.peaks().items()
        )
        disk = ""
        if self._memory.disk is not None:
            disk = (
                f"; disk read {format_bytes(now.disk_read_bytes // steps)} and written "
                f"{format_bytes(now.disk_written_bytes // steps)} a step"
            )
        return (
            f"{now.steps} steps; peak {peaks}; {now.faults / steps:.1f} faults and {now.hits / steps:.1f} hits a "
            f"step, stalled {now.stall_s / steps:.3f} s a step{disk}"
        )
