"""Traces: what is written down, and when things are next wanted."""

from __future__ import annotations

from ptm_accel.schedule.trace import Access, Item, Recorder, Trace, Use


def test_a_recorder_writes_down_what_happens() -> None:
    recorder = Recorder("train")
    recorder.record("a", 64, Use.READ, held_bytes=7, backward=False)
    recorder.record("b", 32, Use.READ, held_bytes=8, backward=False)
    recorder.record("a", 64, Use.READ, held_bytes=9, backward=True)
    recorder.record("a.grad", 64, Use.CREATE, held_bytes=9, backward=True)
    assert len(recorder) == 4
    trace = recorder.finish([10.0, 10.5, 11.5, 13.5, 14.0, 15.0])
    assert trace == Trace(
        "train",
        (Item("a", 64), Item("b", 32), Item("a.grad", 64)),
        (
            Access(0, Use.READ, 1.0, 7, backward=False),
            Access(1, Use.READ, 2.0, 8, backward=False),
            Access(0, Use.READ, 0.5, 9, backward=True),
            Access(2, Use.CREATE, 1.0, 9, backward=True),
        ),
        lead_s=0.5,
    )
    assert trace.compute_s == 5.0
    assert trace.item_bytes == 160


def test_a_clock_that_goes_back_counts_as_one_that_stands_still() -> None:
    recorder = Recorder(None)
    recorder.record("a", 1, Use.READ, held_bytes=0, backward=False)
    assert recorder.finish([10.0, 9.0, 8.0]).compute_s == 0.0


def test_when_things_are_next_wanted() -> None:
    uses = [(0, Use.READ), (1, Use.READ), (1, Use.READ), (0, Use.READ), (2, Use.CREATE), (2, Use.WRITE)]
    items = (Item("a", 1), Item("b", 1), Item("a.grad", 1))
    trace = Trace(None, items, tuple(Access(item, use) for item, use in uses))
    # Within the pass; by the update right after it (6); by the pass after that (7 and its first access).
    assert trace.next_uses() == [3, 2, 8, 7, 5, 6]


def test_what_more_is_added_to_is_wanted_where_the_next_pass_makes_more() -> None:
    uses = [(1, Use.CONSUME), (0, Use.READ), (0, Use.READ), (1, Use.CREATE), (2, Use.CREATE), (2, Use.WRITE)]
    items = (Item("a", 1), Item("a.grad", 1), Item("b.grad", 1))
    accesses = (Access(item, use, update=use is Use.CONSUME) for item, use in uses)
    trace = Trace(None, items, tuple(accesses))
    assert trace.next_uses() == [3, 2, 8, 7, 5, 6]
    # Behind the parameters that the next forward reads, in the order of its backward.
    assert trace.next_uses(more_follow=True) == [3, 2, 8, 10, 5, 11]
