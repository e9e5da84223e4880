"""The times of passes and updates, by the clock of the thread and by that of a device."""

from __future__ import annotations

import pytest

from ptm_accel.memory.timeline import Moment, Span, Timeline
from ptm_accel.memory.traffic import PoolStats
from ptm_accel.runtime.clock import DeviceClock, HostClock
from ptm_accel.schedule.tally import Tally
from tests.queued import FakeQueue


def test_the_host_knows_at_once_and_leaves_out_waits_and_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 11.0, 14.0, 20.0])
    monkeypatch.setattr("ptm_accel.runtime.clock.time.perf_counter", lambda: next(now))
    stats, tally = PoolStats(), Tally()
    clock = HostClock(stats, tally)
    marks = [clock.begin(), clock.mark()]
    stats.stall_s += 2.0
    stats.own_s += 0.25
    marks.append(clock.mark())
    clock.begin_update()
    clock.exclude(3.0, beside=False)
    clock.exclude(1.5, beside=True)
    clock.give_up()
    marks.append(clock.end())
    assert clock.read(marks) == [
        Moment(10.0, 10.0),
        Moment(11.0, 11.0),
        Moment(14.0, 12.0, 0.25),
        Moment(20.0, 13.5, 0.25),
    ]
    assert stats.elsewhere_s == 4.5, "what it passed in is no work of ours"
    assert tally == Tally(update_s=4.5, beside_s=1.5)


def test_a_device_knows_later() -> None:
    queue, tally = FakeQueue(), Tally()
    timeline = Timeline(queue.record)
    clock = DeviceClock(timeline, tally)
    marks = [clock.begin(), clock.mark()]
    with timeline.during(Span.BESIDE):
        pass
    clock.exclude(1e-6, beside=True)
    assert timeline.span is Span.PASS
    marks += [clock.mark(), clock.end()]
    assert clock.read(marks) is None
    queue.happen(0.0, 1.0, 2.0, 5.0, 6.0)
    assert clock.read(marks) is None
    assert clock.read(marks[:3]) == [Moment(0.0, 0.0), Moment(1.0, 1.0), Moment(6.0, 3.0)]
    assert tally == Tally(update_s=3.0, beside_s=3.0)
    queue.happen(8.0)
    assert clock.read(marks) == [Moment(0.0, 0.0), Moment(1.0, 1.0), Moment(6.0, 3.0), Moment(8.0, 5.0)]


def test_an_update_after_a_pass_is_counted_as_far_as_somebody_says_that_it_was_one() -> None:
    queue, tally = FakeQueue(), Tally()
    timeline = Timeline(queue.record)
    clock = DeviceClock(timeline, tally)
    clock.begin()
    clock.end()
    clock.begin_update()
    with timeline.during(Span.WAIT):
        pass
    clock.exclude(1e-6, beside=False)
    mark = clock.begin()
    # Begin and end; the update; its wait, and the end of that; its end; the next pass.
    queue.happen(0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    assert clock.read([mark]) == [Moment(32.0, 1.0)]
    assert tally == Tally(update_s=2.0 + 8.0)


def test_a_pass_that_is_torn_down_asks_nothing_of_a_device() -> None:
    queue = FakeQueue()
    timeline = Timeline(queue.record)
    clock = DeviceClock(timeline, Tally())
    clock.begin()
    clock.give_up()
    assert timeline.span is Span.OTHER
    assert len(queue.events) == 1
