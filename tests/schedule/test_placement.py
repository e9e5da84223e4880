"""Updates dealt out to the device and to the CPU beside it: never slower than either alone, and both end together."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.hardware.profile import LinkRates
from ptm_accel.schedule.actions import Move
from ptm_accel.schedule.choice import Choice, choose_plan
from ptm_accel.schedule.placement import Placement, behind, placed
from ptm_accel.schedule.plan import plan_pass
from ptm_accel.schedule.simulate import simulate
from ptm_accel.schedule.trace import Access, Item, Trace, Use
from ptm_accel.schedule.updates import with_updates, with_updates_in_backward

COUNT = 24
DUPLEX = LinkRates(10.0, 10.0, 20.0)
UPDATES = {f"w{n}": [Item(f"w{n}.m", 20), Item(f"w{n}.v", 20), Item(f"w{n}.grad", 10)] for n in range(COUNT)}
NAMES = frozenset(UPDATES)


def recorded(seconds: float = 0.5) -> Trace:
    items = [Item(f"w{n}", 10) for n in range(COUNT)] + [Item(f"w{n}.grad", 10) for n in range(COUNT)]
    accesses = [Access(n, Use.READ, seconds) for n in range(COUNT)]
    for n in reversed(range(COUNT)):
        accesses += [Access(n, Use.READ, seconds, backward=True), Access(COUNT + n, Use.CREATE, seconds, backward=True)]
    return Trace(None, tuple(items), tuple(accesses))


def choose(host_s: float | None, *, in_backward: bool = False) -> Choice:
    return choose_plan(
        recorded(),
        capacity_bytes=300,
        updates=UPDATES,
        in_backward=in_backward,
        repeats=True,
        rates=DUPLEX,
        update_s=0.0,
        host_s=host_s,
    )


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_what_is_read_first_is_left_to_the_device(share: float) -> None:
    chosen = behind(recorded(), UPDATES, share)
    assert chosen == {f"w{n}" for n in range(COUNT - int(share * COUNT), COUNT)}


def test_a_slow_cpu_is_given_what_is_read_last() -> None:
    """The device has the gradients last of what the next forward reads first; the CPU would be waited for there."""
    chosen = choose(0.5).on_host
    assert 0 < len(chosen) < COUNT
    assert chosen == {f"w{n}" for n in range(COUNT - len(chosen), COUNT)}


def test_updates_that_are_no_part_of_a_plan_move_their_gradients_too() -> None:
    """With no room for them beside the pass they are carried out in parts: all that they use comes in."""
    simulated = choose_plan(
        recorded(),
        capacity_bytes=60,
        updates=UPDATES,
        repeats=True,
        rates=DUPLEX,
        update_s=0.0,
    )
    assert simulated.simulated is not None
    assert not any(access.update for access in simulated.trace.accesses)
    alone = choose_plan(recorded(), capacity_bytes=60, updates={}, repeats=True, rates=DUPLEX, update_s=0.0)
    assert alone.simulated is not None
    assert simulated.simulated.read_bytes - alone.simulated.read_bytes >= 50 * COUNT
    assert simulated.simulated.written_bytes - alone.simulated.written_bytes >= 40 * COUNT


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.floats(0, 1))
def test_any_share_of_unequal_parameters_is_met_to_within_the_largest(sizes: list[int], share: float) -> None:
    items = tuple(Item(f"w{n}", 1) for n in range(len(sizes)))
    trace = Trace(None, items, tuple(Access(n, Use.READ, 1.0) for n in range(len(sizes))))
    updates = {f"w{n}": [Item(f"w{n}.grad", size)] for n, size in enumerate(sizes)}
    taken = sum(updates[name][-1].nbytes for name in behind(trace, updates, share))
    assert abs(taken - share * sum(sizes)) <= max(sizes)


def test_a_cpu_that_takes_no_time_does_it_all_and_one_that_takes_for_ever_nothing() -> None:
    assert choose(None).on_host == frozenset()
    assert choose(1000.0).on_host == frozenset()
    everything = choose(0.0)
    assert everything.on_host == NAMES
    # Nothing of the state is moved any more: only parameters come, and gradients go.
    assert everything.simulated is not None
    assert everything.simulated.written_bytes <= 10 * COUNT
    assert not any(access.update for access in everything.trace.accesses)


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("host_s", [0.05, 0.2, 0.5, 1.0])
def test_no_other_share_would_have_been_faster(host_s: float, in_backward: bool) -> None:
    chosen = choose(host_s, in_backward=in_backward)
    assert chosen.simulated is not None
    place = with_updates_in_backward if in_backward else with_updates
    for share in (number / 8 for number in range(9)):
        names = behind(recorded(), UPDATES, share)
        here = {name: used for name, used in UPDATES.items() if name not in names}
        trace = place(recorded(), here, most_bytes=(300 - 75) // 2)
        host = placed(trace, UPDATES, names, host_s, in_backward=in_backward)
        plan = plan_pass(trace, capacity_bytes=300, ahead_bytes=75, repeats=True, on_host=host)
        assert chosen.simulated.seconds <= simulate(trace, plan, DUPLEX, on_host=host).seconds * 1.03


def test_both_together_are_faster_than_either() -> None:
    host_s = 0.4
    together = choose(host_s)
    assert 0 < len(together.on_host) < COUNT
    assert together.simulated is not None
    for names in (frozenset[str](), NAMES):
        here = {name: used for name, used in UPDATES.items() if name not in names}
        trace = with_updates(recorded(), here, most_bytes=(300 - 75) // 2)
        on_host = placed(trace, UPDATES, names, host_s, in_backward=False)
        plan = plan_pass(trace, capacity_bytes=300, ahead_bytes=75, repeats=True, on_host=on_host)
        assert together.simulated.seconds < 0.9 * simulate(trace, plan, DUPLEX, on_host=on_host).seconds


def host(trace: Trace, *, in_backward: bool, seconds: float = 1.0) -> Placement:
    return placed(trace, UPDATES, NAMES, seconds / 10, in_backward=in_backward)


@pytest.mark.parametrize("in_backward", [False, True])
def test_gradients_go_as_they_arrive_and_parameters_come_anew(in_backward: bool) -> None:
    trace = recorded()
    plan = plan_pass(
        trace, capacity_bytes=300, ahead_bytes=75, repeats=True, on_host=host(trace, in_backward=in_backward)
    )
    assert not plan.resident & set(range(COUNT)), "each is another one now"
    for index, access in enumerate(trace.accesses[:-1]):
        if access.use is Use.CREATE:
            leaving = {action.item for action in plan.starts[index + 1] if action.move is Move.EVICT}
            assert access.item in leaving
    # What is needed first is updated last.
    assert not plan.coming


def test_a_gradient_that_arrives_in_parts_stays_until_the_last() -> None:
    items = (Item("w", 10), Item("w.grad", 10), Item("v", 10))
    accesses = (
        Access(0, Use.READ),
        Access(1, Use.CREATE, backward=True),
        Access(1, Use.WRITE, backward=True),
        Access(2, Use.READ, backward=True),
    )
    trace = Trace(None, items, accesses)
    on_host = Placement({0: 1.0}, {1: 0})
    plan = plan_pass(trace, capacity_bytes=100, on_host=on_host)
    leaving = [[action.item for action in actions if action.move is Move.EVICT] for actions in plan.starts]
    assert leaving == [[], [], [], [1]]


def test_the_cpu_is_waited_for_where_it_is_slower_than_the_pass() -> None:
    trace = recorded(0.01)
    on_host = host(trace, in_backward=False, seconds=5.0)
    plan = plan_pass(trace, capacity_bytes=1000, ahead_bytes=300, repeats=True, on_host=on_host)
    done = simulate(trace, plan, DUPLEX, on_host=on_host)
    # The first that is needed has the last gradient; one parameter after the other is updated, and the last comes in.
    assert done.seconds == pytest.approx(1.0 * COUNT + 5.0 * COUNT + 1.0, rel=0.01)


def test_in_backward_the_cpu_begins_with_the_first_gradient() -> None:
    trace = recorded(1.0)
    times = []
    for in_backward in (False, True):
        on_host = host(trace, in_backward=in_backward, seconds=2.0)
        plan = plan_pass(trace, capacity_bytes=1000, ahead_bytes=300, repeats=True, on_host=on_host)
        times.append(simulate(trace, plan, DUPLEX, on_host=on_host).seconds)
    assert times[1] < times[0]
