"""Clocks of the tier that computes: of the calling thread, or of the device."""

from __future__ import annotations

import time
from collections.abc import Sequence

from ptm_accel.memory.pool import Pool
from ptm_accel.memory.timeline import Mark, Moment, Span, Timeline
from ptm_accel.memory.traffic import PoolStats
from ptm_accel.schedule.tally import Tally


class HostClock:
    """Times passes by the clock of the calling thread, for compute that is carried out as it is called.

    `Moment.compute_s` stands still while memory is waited for, while updates are carried out, and between passes.

    Args:
        stats: counts seconds of waiting for memory, and of our own work.
        tally: counts seconds of updates.
    """

    def __init__(self, stats: PoolStats, tally: Tally) -> None:
        self._stats = stats
        self._tally = tally

    def mark(self) -> Mark:
        """Marks this moment of the running pass."""
        now_s = time.perf_counter()
        stats = self._stats
        return Mark(Moment(now_s, now_s - stats.stall_s - self._tally.update_s, stats.own_s))

    def begin(self) -> Mark:
        """Begins a pass."""
        return self.mark()

    def end(self) -> Mark:
        """Ends the running pass."""
        return self.mark()

    def give_up(self) -> None:
        """The running pass, if there is one, was aborted."""

    def begin_update(self) -> None:
        """An update begins after the pass that it belongs to."""

    def exclude(self, seconds: float, *, beside: bool) -> None:
        """Counts updates that were carried out.

        Args:
            seconds: time of the calling thread, without waiting.
            beside: they ran beside a pass.
        """
        self._tally.update_s += seconds
        self._stats.elsewhere_s += seconds
        if beside:
            self._tally.beside_s += seconds

    def read(self, marks: Sequence[Mark]) -> list[Moment] | None:
        """Returns the times of `marks`, in order of their making; None until all are known. Never waits."""
        return _moments(marks)


class DeviceClock:
    """The same by the clock of the device, for compute that is queued: times are known once the device has got there.

    Args:
        timeline: of the device.
        tally: counts seconds of updates.
    """

    def __init__(self, timeline: Timeline, tally: Tally) -> None:
        self._timeline = timeline
        self._tally = tally

    def mark(self) -> Mark:
        """Marks this moment of the running pass."""
        return self._timeline.mark()

    def begin(self) -> Mark:
        """Begins a pass."""
        return self._timeline.switch(Span.PASS)

    def end(self) -> Mark:
        """Ends the running pass."""
        return self._timeline.switch(Span.OTHER)

    def give_up(self) -> None:
        """The running pass was aborted; the device may have failed and is not synchronised with."""
        self._timeline.leave()

    def begin_update(self) -> None:
        """An update begins after the pass that it belongs to."""
        self._timeline.switch(Span.UPDATE)

    def exclude(self, seconds: float, *, beside: bool) -> None:
        """Ends an update after a pass; the thread has only queued it. Updates beside a pass mark themselves."""
        if self._timeline.span is Span.UPDATE:
            self._timeline.switch(Span.OTHER)

    def read(self, marks: Sequence[Mark]) -> list[Moment] | None:
        """See `HostClock.read`."""
        self._timeline.look()
        self._tally.beside_s = self._timeline.spent_s(Span.BESIDE)
        self._tally.update_s = self._tally.beside_s + self._timeline.spent_s(Span.UPDATE)
        return _moments(marks)


Clock = HostClock | DeviceClock
"""Tells the times of passes."""


def clock_of(pool: Pool, tally: Tally) -> Clock:
    """Returns the clock of the tier that computes.

    Args:
        pool: over that tier.
        tally: counts seconds of updates.
    """
    return HostClock(pool.stats, tally) if pool.timeline is None else DeviceClock(pool.timeline, tally)


def _moments(marks: Sequence[Mark]) -> list[Moment] | None:
    moments = [mark.moment for mark in marks if mark.moment is not None]
    return moments if len(moments) == len(marks) else None
