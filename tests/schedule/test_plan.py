"""Plans: never over the budget, never a use without its load, as few loads as can be, as early as there is room."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.errors import ScheduleError
from ptm_accel.schedule.actions import Move, Plan
from ptm_accel.schedule.plan import _Headroom, plan_pass
from ptm_accel.schedule.trace import Access, Item, Trace, Use
from tests.schedule.plain_plan import PlainHeadroom, PlainResidents


def layers(count: int, size: int = 10, *, held: int = 0) -> Trace:
    """A model of equal layers, forward and backward, each leaving a gradient."""
    items = [Item(f"w{n}", size) for n in range(count)] + [Item(f"g{n}", size) for n in range(count)]
    forward = [Access(n, Use.READ, 1.0, held) for n in range(count)]
    backward = []
    for n in reversed(range(count)):
        backward += [Access(n, Use.READ, 1.0, held, backward=True)]
        backward += [Access(count + n, Use.CREATE, 1.0, held, backward=True)]
    return Trace("layers", tuple(items), (*forward, *backward))


class Walk:
    """Carries a plan out on paper: one pass, from what the plan expects at its beginning."""

    def __init__(self, trace: Trace, plan: Plan) -> None:
        self.loads = self.late = self.early = 0
        self.least_free = plan.capacity_bytes
        there = set(plan.resident | plan.coming)
        unused: set[int] = set(plan.coming)
        for access, actions in zip(trace.accesses, plan.starts, strict=True):
            for action in actions:
                if action.move is Move.LOAD:
                    assert action.item not in there, "loaded twice"
                    there.add(action.item)
                    unused.add(action.item)
                    self.loads += 1
                    self.early += 1
                else:
                    assert action.item in there, "what is not there cannot leave"
                    assert action.item != access.item, "what is accessed cannot leave"
                    assert action.item not in unused, "what was sent for leaves unused"
                    there.remove(action.item)
            if access.item not in there:
                there.add(access.item)
                if access.use is not Use.CREATE:
                    self.loads += 1
                    self.late += 1
            unused.discard(access.item)
            used = sum(trace.items[item].nbytes for item in there)
            self.least_free = min(self.least_free, plan.capacity_bytes - access.held_bytes - used)
            if access.use is Use.CONSUME:
                there.remove(access.item)
        uses = {access.item: access.use for access in reversed(trace.accesses)}
        created = {item for item, first in uses.items() if first is Use.CREATE}
        self.after = frozenset(there - created)


@st.composite
def traces(draw: st.DrawFn, *, uniform: bool = False) -> tuple[Trace, int, int]:
    """A trace, a budget in which each access fits, and what may be held ahead."""
    count = draw(st.integers(1, 6))
    sizes = [10 if uniform else draw(st.integers(1, 30)) for _ in range(count)]
    created: set[int] = set(draw(st.lists(st.integers(0, count - 1), max_size=2))) if not uniform else set()
    consumed: set[int] = set(draw(st.lists(st.integers(0, count - 1), max_size=2))) if not uniform else set()
    accesses = []
    seen: set[int] = set()
    for item in draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=14)):
        use = Use.CREATE if item in created and item not in seen else Use.READ
        if use is Use.READ and item in consumed:
            # It is used up, and the next use brings it into being again.
            use = Use.CONSUME
            consumed.remove(item)
            created.add(item)
            seen.discard(item)
        else:
            seen.add(item)
        accesses.append(Access(item, use, 1.0, 0 if uniform else draw(st.integers(0, 15))))
    trace = Trace(None, tuple(Item(f"t{n}", size) for n, size in enumerate(sizes)), tuple(accesses))
    least = max(access.held_bytes + sizes[access.item] for access in accesses)
    return trace, least + draw(st.integers(0, 60)), draw(st.integers(0, 40))


@settings(max_examples=300, deadline=None)
@given(traces())
def test_any_plan_can_be_carried_out(given_: tuple[Trace, int, int]) -> None:
    trace, capacity, ahead = given_
    for repeats in (False, True):
        plan = plan_pass(trace, capacity_bytes=capacity, ahead_bytes=ahead, repeats=repeats)
        assert len(plan.starts) == len(trace.accesses)
        assert Walk(trace, plan).least_free >= 0
        assert repeats or not plan.coming


def test_the_end_of_a_pass_sends_for_what_the_next_begins_with() -> None:
    trace = layers(20)
    plan = plan_pass(trace, capacity_bytes=80, ahead_bytes=20, repeats=True)
    walk = Walk(trace, plan)
    # The first weight is used up to the very end, where its own gradient takes its place.
    assert walk.late == 1
    assert {trace.items[item].name for item in plan.coming} == {"w1", "w2"}
    assert plan.resident | plan.coming <= walk.after


@pytest.mark.parametrize(("capacity", "ahead"), [(80, 20), (120, 40), (100, 30)])
def test_what_the_next_pass_begins_with_takes_no_room_from_this_one(capacity: int, ahead: int) -> None:
    trace = layers(20)
    alone, repeated = (
        Walk(trace, plan_pass(trace, capacity_bytes=capacity, ahead_bytes=ahead, repeats=repeats))
        for repeats in (False, True)
    )
    assert repeated.late <= alone.late
    assert repeated.loads <= alone.loads


@settings(max_examples=150, deadline=None)
@given(traces(), st.integers(0, 5))
def test_what_is_kept_never_leaves(given_: tuple[Trace, int, int], number: int) -> None:
    trace, capacity, ahead = given_
    changed = {access.item for access in trace.accesses if access.use is not Use.READ}
    kept = frozenset({number} - changed) & {access.item for access in trace.accesses}
    capacity += sum(trace.items[item].nbytes for item in kept)
    for repeats in (False, True):
        plan = plan_pass(trace, capacity_bytes=capacity, ahead_bytes=ahead, repeats=repeats, kept=kept)
        assert Walk(trace, plan).least_free >= 0
        assert kept <= plan.resident
        assert not any(action.item in kept for actions in plan.starts for action in actions)


def planned_plainly(trace: Trace, **given_: Any) -> Plan:
    """The plan, made in the plain and slow way."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptm_accel.schedule.plan._Residents", PlainResidents)
        patch.setattr("ptm_accel.schedule.plan._Headroom", PlainHeadroom)
        return plan_pass(trace, **given_)


@settings(max_examples=300, deadline=None)
@given(traces(), st.integers(0, 5))
def test_plans_are_those_of_the_plain_way(given_: tuple[Trace, int, int], number: int) -> None:
    trace, capacity, ahead = given_
    changed = {access.item for access in trace.accesses if access.use is not Use.READ}
    kept = frozenset({number} - changed) & {access.item for access in trace.accesses}
    capacity += sum(trace.items[item].nbytes for item in kept)
    for repeats in (False, True):
        options = {"capacity_bytes": capacity, "ahead_bytes": ahead, "repeats": repeats, "kept": kept}
        assert plan_pass(trace, **options) == planned_plainly(trace, **options)


@settings(max_examples=200, deadline=None)
@given(traces(), st.frozensets(st.integers(0, 5), min_size=1, max_size=3))
def test_what_other_passes_leave_no_room_for_comes_and_goes_within_one(
    given_: tuple[Trace, int, int], numbers: frozenset[int]
) -> None:
    trace, capacity, ahead = given_
    last = {access.item: index for index, access in enumerate(trace.accesses)}
    passing = numbers & last.keys()
    options: dict[str, Any] = {"capacity_bytes": capacity, "ahead_bytes": ahead, "passing": passing}
    plan = plan_pass(trace, **options)
    walk = Walk(trace, plan)
    assert walk.least_free >= 0
    assert not passing & (plan.resident | plan.coming)
    # What is used by the very last access leaves when the next pass needs its room.
    assert walk.after & passing <= {trace.accesses[-1].item}
    for index, actions in enumerate(plan.starts):
        assert not any(action.item in passing and last[action.item] < index - 1 for action in actions)
    assert plan == planned_plainly(trace, **options)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.2, 0.6, 1.2])
def test_plans_of_layers_of_many_sizes_are_those_of_the_plain_way(seed: int, share: float) -> None:
    rng = random.Random(seed)
    trace = layers(60)
    items = tuple(replace(item, nbytes=rng.choice([1, 4, 9, 25])) for item in trace.items)
    accesses = tuple(replace(access, held_bytes=rng.randrange(20)) for access in trace.accesses)
    trace = replace(trace, items=items, accesses=accesses)
    capacity = 50 + int(trace.item_bytes * share)
    options = {"capacity_bytes": capacity, "ahead_bytes": capacity // 3, "repeats": True}
    plan = plan_pass(trace, **options)
    assert plan == planned_plainly(trace, **options)
    assert any(plan.starts)


def test_sums_that_more_is_added_to_leave_before_parameters() -> None:
    """All parameters and two gradients fit: of those that are wanted after the next forward, the last leave."""
    trace, options = layers(4), {"capacity_bytes": 60, "repeats": True}
    ended = Walk(trace, plan_pass(trace, **options))
    more = plan_pass(trace, more_follow=True, **options)
    assert (Walk(trace, more).loads, ended.loads) == (0, 2)
    assert more.resident == frozenset(range(4))
    evicted = [action.item for actions in more.starts for action in actions]
    assert evicted == [6, 5]
    assert more == planned_plainly(trace, more_follow=True, **options)


def test_more_kept_than_leaves_room_is_refused() -> None:
    trace = layers(4)
    plan_pass(trace, capacity_bytes=40, kept=frozenset({0, 1, 2}))
    with pytest.raises(ScheduleError, match="needs 40 B with the other bytes in use"):
        plan_pass(trace, capacity_bytes=39, kept=frozenset({0, 1, 2}))


def fewest_loads(trace: Trace, capacity: int, there: frozenset[int]) -> int:
    """The least number of loads of any policy, by trying all of them (items of one size)."""
    places = capacity // 10

    @functools.cache
    def best(index: int, there: frozenset[int]) -> int:
        if index == len(trace.accesses):
            return 0
        item = trace.accesses[index].item
        if item in there:
            return best(index + 1, there)
        if len(there) < places:
            return 1 + best(index + 1, there | {item})
        return 1 + min(best(index + 1, there - {victim} | {item}) for victim in there)

    return best(0, there)


@settings(max_examples=150, deadline=None)
@given(traces(uniform=True))
def test_no_policy_loads_less(given_: tuple[Trace, int, int]) -> None:
    trace, capacity, _ = given_
    plan = plan_pass(trace, capacity_bytes=capacity)
    assert Walk(trace, plan).loads == fewest_loads(trace, capacity, plan.resident)


def swept(count: int, sweeps: int, *, alternating: bool) -> Trace:
    """State that is gone through again and again, in one direction or back and forth."""
    there = list(range(count))
    order = [item for number in range(sweeps) for item in (there[::-1] if alternating and number % 2 else there)]
    return Trace(None, tuple(Item(f"m{n}", 10) for n in there), tuple(Access(item, Use.READ) for item in order))


@pytest.mark.parametrize("count", [2, 3, 5, 8, 20])
def test_sweeps_back_and_forth_load_one_item_less_than_where_a_share_is_kept(count: int) -> None:
    """What the last sweep used last is used first, and still only one more of the items is met than of those kept."""
    for places in range(1, count):
        share = plan_pass(
            swept(count, 1, alternating=False), capacity_bytes=10 * places, kept=frozenset(range(places - 1))
        )
        kept = Walk(swept(count, 1, alternating=False), share).loads
        assert kept == count - (places - 1)
        # The fewest loads of any policy (`test_no_policy_loads_less`), over so many sweeps that the ends do not count.
        sweeps = 2 * count
        least = {}
        for alternating in (False, True):
            trace = swept(count, sweeps, alternating=alternating)
            least[alternating] = Walk(trace, plan_pass(trace, capacity_bytes=10 * places)).loads / sweeps
        assert kept - 1 <= least[True] <= least[False] <= kept


def test_what_fits_is_never_moved() -> None:
    trace = layers(6)
    plan = plan_pass(trace, capacity_bytes=trace.item_bytes)
    assert plan.resident == frozenset(range(6))
    assert not any(plan.starts)


def test_a_pass_that_is_repeated_begins_as_it_ends() -> None:
    trace = layers(12, held=5)
    plan = plan_pass(trace, capacity_bytes=75, ahead_bytes=20)
    assert Walk(trace, plan).after == plan.resident


def test_loads_start_before_they_are_needed() -> None:
    walk = Walk(layers(20), plan_pass(layers(20), capacity_bytes=80, ahead_bytes=20))
    # Nothing comes before the first access.
    assert walk.late == 1
    assert walk.early > 10
    walk = Walk(layers(20), plan_pass(layers(20), capacity_bytes=80, ahead_bytes=0))
    assert walk.early == 0
    assert walk.late > 10


def test_no_more_is_held_ahead_than_may_be() -> None:
    trace = layers(20)
    plan = plan_pass(trace, capacity_bytes=100, ahead_bytes=30)
    unused: set[int] = set()
    most = 0
    for access, actions in zip(trace.accesses, plan.starts, strict=True):
        unused |= {action.item for action in actions if action.move is Move.LOAD}
        unused.discard(access.item)
        most = max(most, len(unused))
    assert most == 3


def test_parameters_that_are_done_leave_before_gradients() -> None:
    """A parameter that leaves costs one load; a gradient a store and a load."""
    trace = layers(8)
    plan = plan_pass(trace, capacity_bytes=90)
    gone = [action.item for actions in plan.starts for action in actions if action.move is Move.EVICT]
    assert gone
    assert max(gone) < 8


def test_an_access_that_cannot_fit_is_named() -> None:
    trace = layers(3, size=2000, held=1000)
    with pytest.raises(
        ScheduleError, match=r"access 0 \(w0\) needs 3000 B .*, and the budget is 2999 B\. Raise it, or page on demand"
    ):
        plan_pass(trace, capacity_bytes=2999)


def test_the_text_of_a_plan() -> None:
    trace = Trace(None, (Item("a", 10), Item("b", 10), Item("c", 10)), tuple(Access(n, Use.READ) for n in range(3)))
    plan = plan_pass(trace, capacity_bytes=20, ahead_bytes=10)
    assert plan.text(trace).splitlines() == ["0 evict c", "0 load b", "1 evict a", "1 load c", "2 evict b"]


def test_a_large_pass_is_planned() -> None:
    """Twelve thousand accesses; something quadratic would run into the time limit of a test."""
    trace = layers(4000)
    plan = plan_pass(trace, capacity_bytes=8000, ahead_bytes=400)
    assert Walk(trace, plan).least_free >= 0


def test_room_for_what_comes_early_is_found_without_a_look_at_every_access() -> None:
    """Each of a hundred thousand begins tens of thousands of accesses early: not done in a test's time otherwise."""
    count, early = 100_000, 40_000
    trace = Trace(None, (Item("w", 1),), (Access(0, Use.READ),) * count)
    headroom = _Headroom(trace, [0] * count, 2 * count, early)
    assert [headroom.put(0, end, 0 if end < early else end - early) for end in range(count)][-1] == count - 1 - early
