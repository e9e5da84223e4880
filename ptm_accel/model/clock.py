"""When things happen where compute happens: by the clock of the calling thread, or by that of the device."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from ptm_accel.memory.pool import Pool
from ptm_accel.memory.timeline import Mark, Moment, Span, Timeline
from ptm_accel.memory.traffic import PoolStats
from ptm_accel.schedule.tally import Tally


class Clock(Protocol):
    """Tells the times of passes, and counts those of updates in a tally.

    `Moment.compute_s` stands still while memory is waited for, while updates are carried out, and between passes.
    """

    def begin(self) -> Mark:
        """A pass begins."""
        ...

    def mark(self) -> Mark:
        """A moment of the pass that is under way."""
        ...

    def end(self) -> Mark:
        """The pass that is under way ends."""
        ...

    def give_up(self) -> None:
        """The pass was torn down, if there is one."""
        ...

    def begin_update(self) -> None:
        """An update begins, after the pass that it belongs to."""
        ...

    def exclude(self, seconds: float, *, beside: bool) -> None:
        """Some updates have been carried out.

        Args:
            seconds: what that took of the calling thread, waiting left out.
            beside: they follow the reading order.
        """
        ...

    def read(self, marks: Sequence[Mark]) -> list[Moment] | None:
        """When that was; None as long as it is not known of all of them. Never waits.

        Args:
            marks: in the order in which they were made.
        """
        ...


class HostClock:
    """Where compute is carried out as it is called: the time is known at once.

    Args:
        stats: how long memory was waited for.
        tally: where updates are counted.
    """

    def __init__(self, stats: PoolStats, tally: Tally) -> None:
        self._stats = stats
        self._tally = tally

    def mark(self) -> Mark:
        """See `Clock`."""
        now_s = time.perf_counter()
        return Mark(Moment(now_s, now_s - self._stats.stall_s - self._tally.update_s))

    begin = end = mark

    def give_up(self) -> None:
        """See `Clock`."""

    def begin_update(self) -> None:
        """See `Clock`: whoever carries it out says what it took."""

    def exclude(self, seconds: float, *, beside: bool) -> None:
        """See `Clock`."""
        self._tally.update_s += seconds
        if beside:
            self._tally.beside_s += seconds

    def read(self, marks: Sequence[Mark]) -> list[Moment] | None:
        """See `Clock`."""
        return _moments(marks)


class DeviceClock:
    """Where compute is queued: the time is known once the device has got there.

    Args:
        timeline: of the device.
        tally: where updates are counted.
    """

    def __init__(self, timeline: Timeline, tally: Tally) -> None:
        self._timeline = timeline
        self._tally = tally

    def begin(self) -> Mark:
        """See `Clock`."""
        return self._timeline.switch(Span.PASS)

    def mark(self) -> Mark:
        """See `Clock`."""
        return self._timeline.mark()

    def end(self) -> Mark:
        """See `Clock`."""
        return self._timeline.switch(Span.OTHER)

    def give_up(self) -> None:
        """See `Clock`: the device may have failed, and is asked for nothing."""
        self._timeline.leave()

    def begin_update(self) -> None:
        """See `Clock`."""
        self._timeline.switch(Span.UPDATE)

    def exclude(self, seconds: float, *, beside: bool) -> None:
        """See `Clock`: the calling thread has only queued them. Those between operations of a pass mark themselves."""
        if self._timeline.span is Span.UPDATE:
            self._timeline.switch(Span.OTHER)

    def read(self, marks: Sequence[Mark]) -> list[Moment] | None:
        """See `Clock`."""
        self._timeline.look()
        self._tally.beside_s = self._timeline.spent_s(Span.BESIDE)
        self._tally.update_s = self._tally.beside_s + self._timeline.spent_s(Span.UPDATE)
        return _moments(marks)


def clock_of(pool: Pool, tally: Tally) -> Clock:
    """The clock of the tier that computes.

    Args:
        pool: over that tier.
        tally: where updates are counted.
    """
    return HostClock(pool.stats, tally) if pool.timeline is None else DeviceClock(pool.timeline, tally)


def _moments(marks: Sequence[Mark]) -> list[Moment] | None:
    moments = [mark.moment for mark in marks if mark.moment is not None]
    return moments if len(moments) == len(marks) else None
