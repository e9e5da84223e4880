"""Where time goes on a device: by events that happen later, and are never waited for."""

from __future__ import annotations

import pytest

from ptm_accel.memory.arena import HostArena
from ptm_accel.memory.budget import Budget, Tier
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.timeline import EventScale, Moment, Span, Timeline, during
from ptm_accel.memory.traffic import PoolStats, Traffic
from tests.queued import FakeEvent, FakeQueue, LateDevice


@pytest.fixture
def queue() -> FakeQueue:
    return FakeQueue()


@pytest.fixture
def timeline(queue: FakeQueue) -> Timeline:
    return Timeline(queue.record)


class FakeTransfer:
    """A copy that compute waits for, unless it has ended."""

    def __init__(self, *, ended: bool = False) -> None:
        self.ended = ended
        self.ordered = 0

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        raise AssertionError("waited for")

    def order(self) -> None:
        self.ordered += 1


def test_a_time_is_known_once_the_device_has_got_there(queue: FakeQueue, timeline: Timeline) -> None:
    began, access, ended = timeline.switch(Span.PASS), timeline.mark(), timeline.switch(Span.OTHER)
    timeline.look()
    assert began.moment is None
    queue.happen(100.0, 101.5)
    assert began.moment is None, "nobody has looked"
    timeline.look()
    assert began.moment == Moment(0.0, 0.0)
    assert access.moment == Moment(1.5, 1.5)
    assert ended.moment is None
    queue.happen(103.5)
    timeline.look()
    assert ended.moment == Moment(3.5, 3.5)
    assert timeline.spent_s(Span.PASS) == 3.5


def test_a_later_event_tells_nothing_of_an_earlier_one(queue: FakeQueue, timeline: Timeline) -> None:
    first, second = timeline.mark(), timeline.mark()
    queue.events[1].at_s = 7.0
    timeline.look()
    assert first.moment is None
    assert second.moment is None


def test_waits_and_updates_are_no_compute_of_the_pass(queue: FakeQueue, timeline: Timeline) -> None:
    began = timeline.switch(Span.PASS)
    with timeline.during(Span.BESIDE):
        with timeline.during(Span.WAIT):
            assert timeline.span is Span.WAIT
        assert timeline.span is Span.BESIDE
    with timeline.during(Span.WAIT):
        pass
    ended = timeline.switch(Span.OTHER)
    # Begin; update; its wait, and the end of that; its end; a wait, and the end of that; end.
    queue.happen(0.0, 1.0, 3.0, 7.0, 15.0, 16.0, 48.0, 48.5)
    timeline.look()
    assert began.moment == Moment(0.0, 0.0)
    assert ended.moment == Moment(48.5, 1.0 + 1.0 + 0.5)
    assert timeline.spent_s(Span.BESIDE) == 2.0 + 8.0
    assert timeline.spent_s(Span.WAIT) == 4.0 + 32.0


def test_a_wait_that_fails_has_ended(queue: FakeQueue, timeline: Timeline) -> None:
    timeline.switch(Span.PASS)
    with pytest.raises(OSError, match="gone"), timeline.during(Span.WAIT):
        raise OSError("gone")
    assert timeline.span is Span.PASS
    timeline.leave()
    assert timeline.span is Span.OTHER
    assert len(queue.events) == 3


def test_nothing_is_recorded_where_nobody_asks(queue: FakeQueue, timeline: Timeline) -> None:
    with timeline.during(Span.WAIT):
        assert timeline.span is Span.OTHER
    with during(None, Span.WAIT):
        pass
    assert not queue.events


def test_events_out_of_order_take_no_time(queue: FakeQueue, timeline: Timeline) -> None:
    timeline.switch(Span.PASS)
    for _ in range(3):
        ended = timeline.mark()
    queue.happen(10.0, 12.0, 11.0, 13.0)
    timeline.look()
    assert ended.moment == Moment(3.0, 3.0)


def test_marks_that_nobody_looks_at_do_not_pile_up() -> None:
    device = LateDevice()
    timeline = Timeline(device.record)
    for _ in range(2000):
        timeline.mark()
    assert len(timeline._ahead) < 300
    device.close()


def test_a_scale_is_good_for_hours() -> None:
    asked: list[float] = []

    class Event(FakeEvent):
        def elapsed_time(self, end_event: FakeEvent) -> float:
            asked.append(super().elapsed_time(end_event))
            return asked[-1]

    scale = EventScale()
    assert [scale.seconds(Event(5.0 + at)) for at in (0.0, 0.5, 2.0, 2.5, 7200.0, 7199.0)] == [
        0.0,
        0.5,
        2.0,
        2.5,
        7200.0,
        7199.0,
    ]
    assert asked == [0.0, 500.0, 2000.0, 500.0, 7198000.0, -1000.0]


def test_what_is_awaited_is_between_two_marks(queue: FakeQueue, timeline: Timeline) -> None:
    traffic = Traffic(None, PoolStats(), timeline)
    timeline.switch(Span.PASS)
    late, there = FakeTransfer(), FakeTransfer(ended=True)
    traffic.order(late)
    assert len(queue.events) == 3
    traffic.order(there)
    assert len(queue.events) == 3, "nothing waits for that"
    assert (late.ordered, there.ordered) == (1, 1)
    queue.happen(0.0, 1.0, 5.0)
    timeline.look()
    assert timeline.spent_s(Span.WAIT) == 4.0


def test_only_a_tier_that_queues_has_a_timeline() -> None:
    device, budget = LateDevice(), Budget(Tier.HOST, 1 << 20)
    assert Pool(HostArena(budget), budget, None).timeline is None
    timeline = Pool(device, Budget(Tier.DEVICE, 1 << 20), None).timeline
    assert timeline is not None
    timeline.mark()
    assert device.recorded == 1
    device.close()
