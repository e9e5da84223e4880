"""Plans carried out on paper, against times that can be worked out by hand; and the bound they cannot beat."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.hardware.profile import LinkRates, side_by_side
from ptm_accel.schedule.bound import Resource, StepCost, lower_bound
from ptm_accel.schedule.plan import plan_pass
from ptm_accel.schedule.simulate import Simulation, simulate
from ptm_accel.schedule.trace import Access, Item, Trace, Use
from ptm_accel.schedule.updates import with_updates, with_updates_in_backward

TURNS = LinkRates(10.0, 20.0, 2 / (1 / 10 + 1 / 20))
DUPLEX = LinkRates(10.0, 20.0, 20.0)


def layers(count: int, seconds: float, *, gradients: bool = True) -> Trace:
    """Layers of ten bytes, forward and backward."""
    items = [Item(f"w{n}", 10) for n in range(count)]
    accesses = [Access(n, Use.READ, seconds) for n in range(count)]
    for n in reversed(range(count)):
        accesses.append(Access(n, Use.READ, seconds, backward=True))
        if gradients:
            items.append(Item(f"w{n}.grad", 10))
            accesses.append(Access(len(items) - 1, Use.CREATE, 0.0, backward=True))
    return Trace(None, tuple(items), tuple(accesses))


def run(trace: Trace, rates: LinkRates, *, capacity: int, ahead: int = 0, update_s: float = 0.0) -> Simulation:
    plan = plan_pass(trace, capacity_bytes=capacity, ahead_bytes=ahead, repeats=True)
    return simulate(trace, plan, rates, lambda item: update_s)


def test_links_are_known_for_what_they_are() -> None:
    assert (TURNS.shared, DUPLEX.shared) == (pytest.approx(1.0), 0.0)


def test_what_fits_takes_its_arithmetic() -> None:
    trace = layers(5, 1.0)
    done = run(trace, TURNS, capacity=trace.item_bytes)
    assert (done.seconds, done.compute_s) == (10.0, 10.0)
    assert (done.read_bytes, done.written_bytes) == (0, 0)
    assert (done.load_stall_s, done.room_stall_s) == (0.0, 0.0)
    assert done.peak_bytes == trace.item_bytes


def test_loads_at_the_last_moment_are_waited_for() -> None:
    trace = layers(6, 0.5, gradients=False)
    done = run(trace, TURNS, capacity=10)
    # The last layer of the forward is the first of the backward; and the first layer is, from pass to pass.
    assert done.read_bytes == 100
    assert done.load_stall_s == pytest.approx(10.0)
    assert done.seconds == pytest.approx(6.0 + 10.0)


def test_loads_in_time_cost_nothing() -> None:
    trace = layers(6, 2.0, gradients=False)
    done = run(trace, TURNS, capacity=30, ahead=20)
    assert done.read_bytes > 0
    assert done.seconds == pytest.approx(done.compute_s)
    assert done.load_stall_s == 0.0


def test_a_duplex_link_stores_beside_its_loads() -> None:
    trace = with_updates(
        layers(6, 0.5), {f"w{n}": [Item(f"w{n}.m", 10), Item(f"w{n}.grad", 10)] for n in range(6)}, most_bytes=1000
    )
    turns = run(trace, TURNS, capacity=70, ahead=20, update_s=0.5)
    duplex = run(trace, DUPLEX, capacity=70, ahead=20, update_s=0.5)
    assert turns.update_s == duplex.update_s == pytest.approx(3.0)
    assert turns.written_bytes == duplex.written_bytes > 0
    assert duplex.seconds < turns.seconds
    assert turns.peak_bytes <= 70


@pytest.mark.parametrize("shared", [0.0, 0.25, 0.5, 0.75, 1.0])
@pytest.mark.parametrize(("capacity", "ahead"), [(200, 60), (100, 50)])
def test_a_link_that_is_the_limit_takes_what_was_measured_of_both_directions(
    shared: float, capacity: int, ahead: int
) -> None:
    rates = LinkRates(10.0, 20.0, 2 / (1 / 10 + shared / 20))
    assert rates.shared == pytest.approx(shared)
    items = tuple(Item(f"w{n}", 10) for n in range(40))
    trace = Trace(None, items, tuple(Access(n, Use.WRITE) for n in range(40)))
    done = run(trace, rates, capacity=capacity, ahead=ahead)
    assert done.read_bytes == done.written_bytes >= 260
    # The last store of a pass may run on into the next one.
    assert done.seconds == pytest.approx(rates.seconds(done.read_bytes, done.written_bytes), abs=1 / 2 + 1e-6)


def test_a_parameter_that_was_updated_is_stored_before_it_leaves() -> None:
    trace = with_updates(layers(6, 0.5), {f"w{n}": [Item(f"w{n}.grad", 10)] for n in range(6)}, most_bytes=1000)
    # All gradients stay; what leaves are parameters, each once for its update and once as it was.
    done = run(trace, TURNS, capacity=80)
    assert done.written_bytes >= 40
    without = run(layers(6, 0.5, gradients=False), TURNS, capacity=20)
    assert without.written_bytes == 0


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 10),
    st.floats(0.0, 3.0),
    st.integers(20, 200),
    st.integers(0, 80),
    st.floats(0.0, 2.0),
    st.booleans(),
    st.booleans(),
)
def test_nothing_beats_the_bound(
    count: int, seconds: float, capacity: int, ahead: int, update_s: float, turns: bool, updates: bool
) -> None:
    trace, rates = layers(count, seconds), TURNS if turns else DUPLEX
    if updates:
        used = {f"w{n}": [Item(f"w{n}.m", 10), Item(f"w{n}.grad", 10)] for n in range(count)}
        trace = with_updates(trace, used, most_bytes=capacity)
    done = run(trace, rates, capacity=capacity, ahead=ahead, update_s=update_s)
    cost = StepCost(
        forward_s=done.compute_s,
        backward_s=0.0,
        update_s=done.update_s,
        read_bytes=done.read_bytes,
        written_bytes=done.written_bytes,
    )
    # Transfers may run on into the next pass, and from the one before: once through the queue is their slack.
    slack = rates.seconds(trace.item_bytes, trace.item_bytes)
    assert done.seconds >= lower_bound(cost)[0] - 1e-6
    assert done.seconds >= lower_bound(cost, disk=rates)[0] - slack - 1e-6
    assert done.peak_bytes <= capacity
    total = done.compute_s + done.update_s + done.load_stall_s + done.room_stall_s
    assert done.seconds == pytest.approx(total)


def cost(*, read_bytes: float = 30, update_s: float = 4.0, host_s: float = 0.0, clipped: bool = True) -> StepCost:
    return StepCost(
        forward_s=1.0,
        backward_s=2.0,
        update_s=update_s,
        read_bytes=read_bytes,
        written_bytes=40,
        host_s=host_s,
        clipped=clipped,
    )


def test_on_the_same_cores_everything_adds_up() -> None:
    assert lower_bound(cost()) == (7.0, Resource.COMPUTE)
    assert lower_bound(cost(), disk=TURNS) == (7.0, Resource.COMPUTE)
    assert lower_bound(replace(cost(), network_s=6.0)) == (7.0, Resource.COMPUTE)
    assert lower_bound(replace(cost(), network_s=8.0), disk=TURNS) == (8.0, Resource.NETWORK)
    assert lower_bound(cost(read_bytes=80), disk=TURNS) == (pytest.approx(10.0), Resource.DISK_READ)
    assert lower_bound(cost(read_bytes=80), disk=DUPLEX) == (8.0, Resource.DISK_READ)
    assert lower_bound(cost(read_bytes=0), disk=LinkRates(10.0, 1.0, 10.0)) == (40.0, Resource.DISK_WRITE)


def test_the_link_to_a_device_and_the_disk_below_it_are_looked_at_apart() -> None:
    both = replace(cost(), in_bytes=90, out_bytes=0)
    assert lower_bound(both, DUPLEX, DUPLEX) == (9.0, Resource.LINK_IN)
    assert lower_bound(both, DUPLEX, LinkRates(10.0, 1.0, 10.0))[1] is Resource.DISK_WRITE
    assert lower_bound(replace(both, in_bytes=0, out_bytes=900), DUPLEX, DUPLEX)[1] is Resource.LINK_OUT


def test_clipping_is_a_barrier_for_updates_on_cores_of_their_own() -> None:
    assert lower_bound(cost(update_s=0.0, host_s=4.0)) == (2.0 + 4.0, Resource.CPU)
    assert lower_bound(cost(update_s=0.0, host_s=4.0, clipped=False)) == (4.0, Resource.CPU)
    assert lower_bound(cost(update_s=0.0, host_s=0.5, clipped=False)) == (3.0, Resource.COMPUTE)
    assert lower_bound(cost(update_s=0.0, host_s=0.5)) == (3.0, Resource.COMPUTE)
    assert lower_bound(cost(update_s=1.0, host_s=2.5)) == (2.0 + 2.5, Resource.CPU)
    assert lower_bound(cost(update_s=2.5, host_s=2.5)) == (5.5, Resource.COMPUTE)


def test_several_disks_add_up_if_all_are_known() -> None:
    assert side_by_side([TURNS, DUPLEX]) == LinkRates(20.0, 40.0, TURNS.both_bytes_s + 20.0)
    assert side_by_side([TURNS, None]) is None
    assert side_by_side([]) is None


def with_backward_updates(**options: float) -> Simulation:
    """Layers whose updates follow their gradients; each moves 8 times its gradient, as far as there is no room."""
    count, size = 6, 10
    items = [Item(f"w{n}", size) for n in range(count)] + [Item(f"w{n}.grad", size) for n in range(count)]
    forward = [Access(n, Use.READ, 1.0) for n in range(count)]
    backward = []
    for n in reversed(range(count)):
        backward += [Access(n, Use.READ, 1.0, backward=True), Access(count + n, Use.CREATE, backward=True)]
    recorded = Trace(None, tuple(items), (*forward, *backward))
    updates = {f"w{n}": [Item(f"w{n}.m", 4 * size), Item(f"w{n}.grad", size)] for n in range(count)}
    trace = with_updates_in_backward(recorded, updates, most_bytes=10**6, overwritten=[f"w{n}" for n in range(count)])
    capacity = int(options.get("capacity", 200))
    plan = plan_pass(trace, capacity_bytes=capacity, ahead_bytes=40)
    rate = options.get("rate", 1e9)
    return simulate(trace, plan, LinkRates(rate, rate, rate), lambda gradient: options.get("update_s", 0.0))


def test_updates_in_backward_are_waited_for_only_where_gradients_pile_up() -> None:
    fast = with_backward_updates(update_s=0.5)
    assert fast.seconds == pytest.approx(12.0 + 6 * 0.5), "on the cores that compute"
    assert fast.load_stall_s == pytest.approx(0.0, abs=1e-5)
    roomy = with_backward_updates(capacity=2000, rate=1.0)
    assert (roomy.read_bytes, roomy.seconds) == (0, pytest.approx(12.0)), "nothing moves"
    slow = with_backward_updates(rate=10.0)
    assert slow.load_stall_s + slow.room_stall_s > 0
    moved_s = (slow.read_bytes + slow.written_bytes) / 10.0
    assert slow.seconds >= moved_s, "the link is busy all the time"
    for outcome in (fast, roomy, slow):
        assert outcome.update_s == pytest.approx(6 * 0.5 if outcome is fast else 0.0)
    assert max(fast.peak_bytes, slow.peak_bytes) <= 200
