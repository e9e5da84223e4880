"""Of several plans the one that is simulated best is chosen."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from ptm_accel.hardware.profile import LinkRates
from ptm_accel.schedule.actions import Plan
from ptm_accel.schedule.choice import Choice, Way, _Task, choose_plan
from ptm_accel.schedule.plan import plan_pass
from ptm_accel.schedule.simulate import simulate
from ptm_accel.schedule.trace import Access, Item, Trace, Use
from ptm_accel.schedule.updates import with_updates

COUNT = 24
AS_GOOD = 1.01
SLOW, FAST = LinkRates(4.0, 8.0, 5.0), LinkRates(1e6, 1e6, 1e6)
UPDATES = {f"w{n}": [Item(f"w{n}.m", 20), Item(f"w{n}.grad", 10)] for n in range(COUNT)}


def recorded(held: int = 0) -> Trace:
    items = [Item(f"w{n}", 10) for n in range(COUNT)] + [Item(f"w{n}.grad", 10) for n in range(COUNT)]
    accesses = [Access(n, Use.READ, 1.0, held) for n in range(COUNT)]
    for n in reversed(range(COUNT)):
        accesses += [Access(n, Use.READ, 1.0, held, True), Access(COUNT + n, Use.CREATE, 1.0, held, True)]
    return Trace(None, tuple(items), tuple(accesses))


@pytest.mark.parametrize("rates", [SLOW, FAST])
def test_no_share_and_no_way_to_begin_is_better_by_more_than_is_worth_it(rates: LinkRates) -> None:
    capacity = 400
    chosen = choose_plan(recorded(), capacity_bytes=capacity, updates=UPDATES, repeats=True, rates=rates, update_s=0.01)
    assert chosen.plan is not None
    assert chosen.simulated is not None
    for share in (0.4, 0.25, 0.15, 0.1, 0.05):
        ahead = max(int(capacity * share), 20)
        trace = with_updates(recorded(), UPDATES, most_bytes=(capacity - ahead) // 3)
        for repeats in (True, False):
            plan = plan_pass(trace, capacity_bytes=capacity, ahead_bytes=ahead, repeats=repeats)
            other = simulate(trace, plan, rates, lambda gradient: gradient.nbytes * 0.01)
            assert chosen.simulated.seconds <= other.seconds * 1.01 + 1e-9


def test_of_plans_that_are_as_good_the_one_that_moves_least_is_taken() -> None:
    """Where the link is so fast that nothing is waited for, state still need not wear the disk."""
    capacity = 400
    chosen = choose_plan(recorded(), capacity_bytes=capacity, updates=UPDATES, repeats=True, rates=FAST, update_s=0.01)
    assert chosen.simulated is not None
    moved = {}
    for share in (0.4, 0.25, 0.15):
        ahead = int(capacity * share)
        trace = with_updates(recorded(), UPDATES, most_bytes=(capacity - ahead) // 2)
        plan = plan_pass(trace, capacity_bytes=capacity, ahead_bytes=ahead, repeats=True)
        other = simulate(trace, plan, FAST, lambda gradient: gradient.nbytes * 0.01)
        assert chosen.simulated.seconds <= other.seconds * 1.01
        moved[share] = other.read_bytes + other.written_bytes
    least = chosen.simulated.read_bytes + chosen.simulated.written_bytes
    assert least <= min(moved.values())
    assert least < 0.9 * moved[0.4]


@pytest.mark.parametrize(("capacity", "updates_ahead"), [(140, 1.8), (180, 2.0), (300, 2.0), (400, 2.0)])
def test_what_is_held_ahead_holds_two_updates_or_as_much_as_can_be(capacity: int, updates_ahead: float) -> None:
    """Under a small budget a share that is as good by the simulation may hold less than what one update waits for."""
    chosen = choose_plan(recorded(), capacity_bytes=capacity, updates=UPDATES, repeats=True, rates=FAST, update_s=0.01)
    assert chosen.way.ahead_share * (1 - chosen.way.kept_share) * capacity >= updates_ahead * 30


def test_less_is_held_ahead_than_before_only_where_that_is_faster() -> None:
    ways = [Way(kept, ahead) for kept in (0.0, 0.25, 0.4) for ahead in (0.4, 0.25, 0.15)]
    kept = given_up = 0
    for rates in (SLOW, LinkRates(12.0, 12.0, 12.0)):
        dials: dict[str, Any] = {"updates": UPDATES, "repeats": True, "rates": rates, "update_s": 0.01}
        for capacity in (100, 160, 240, 400):
            best = choose_plan(recorded(), capacity_bytes=capacity, **dials)
            for present in (way for way in ways if held(way) > held(best.way)):
                chosen = choose_plan(recorded(), capacity_bytes=capacity, present=present, **dials)
                assert chosen.way in (present, best.way)
                assert chosen.seconds <= best.seconds * 1.03
                kept += chosen.way == present
                given_up += chosen.way == best.way
    assert kept > 0
    assert given_up > 0


def held(way: Way) -> float:
    return way.ahead_share * (1 - way.kept_share)


STATE_BYTES = 20 * COUNT


@pytest.mark.parametrize("between", [400, 900, 5000])
def test_no_state_stays_where_other_passes_leave_it_no_room(between: int) -> None:
    """Of several micro-batches the first alone has updates beside it; those that follow take all that there is."""
    dials: dict[str, Any] = {"updates": UPDATES, "repeats": False, "rates": SLOW, "update_s": 0.01}
    alone = choose_plan(recorded(), capacity_bytes=400, **dials)
    crowded = choose_plan(recorded(), capacity_bytes=400, between_bytes=between, **dials)
    assert alone.simulated is not None
    assert crowded.simulated is not None
    assert state_there(alone)
    assert not state_there(crowded)
    assert crowded.simulated.read_bytes >= STATE_BYTES
    assert crowded.simulated.written_bytes >= STATE_BYTES
    # What seemed to be faster counted on what would not be there.
    assert alone.seconds < crowded.seconds


def test_as_much_state_stays_as_other_passes_leave_room_for() -> None:
    dials: dict[str, Any] = {"updates": UPDATES, "repeats": False, "rates": SLOW, "update_s": 0.01}
    stays = []
    for between in (500, 620, 760):
        chosen = choose_plan(recorded(), capacity_bytes=800, between_bytes=between, **dials)
        stays.append(sum(chosen.trace.items[item].nbytes for item in state_there(chosen)))
        assert 0 < stays[-1] <= 800 - between
    assert stays[0] > stays[2]


def state_there(choice: Choice) -> set[int]:
    """What of the state a plan counts on as the pass begins."""
    assert choice.plan is not None
    return {item for item in choice.plan.resident if choice.trace.items[item].name.endswith(".m")}


def test_where_nothing_was_measured_nothing_is_foretold() -> None:
    chosen = choose_plan(recorded(), capacity_bytes=400, updates={}, repeats=True, rates=None, update_s=0.0)
    assert chosen.plan is not None
    assert chosen.simulated is None
    assert chosen.trace == recorded()


def test_a_pass_that_no_longer_fits_has_no_plan() -> None:
    chosen = choose_plan(recorded(held=395), capacity_bytes=400, updates={}, repeats=True, rates=SLOW, update_s=0.0)
    assert (chosen.plan, chosen.simulated) == (None, None)


def test_only_what_follows_itself_is_sent_for_at_its_end() -> None:
    chosen = choose_plan(recorded(), capacity_bytes=400, updates=UPDATES, repeats=False, rates=SLOW, update_s=0.0)
    assert chosen.plan is not None
    assert not chosen.plan.coming


def test_a_plan_without_a_place_for_some_updates_is_not_taken_to_be_faster() -> None:
    """All of an update's state at once fits only where little of the rest is kept."""
    big = {f"w{n}": [Item(f"w{n}.m", 60), Item(f"w{n}.v", 60), Item(f"w{n}.grad", 10)] for n in range(COUNT)}
    for capacity in (340, 400, 600, 1000):
        chosen = choose_plan(recorded(), capacity_bytes=capacity, updates=big, repeats=True, rates=SLOW, update_s=0.01)
        assert chosen.simulated is not None
        assert chosen.simulated.update_s == pytest.approx(COUNT * 10 * 0.01), "all are counted, planned or not"
        assert chosen.simulated.read_bytes >= COUNT * 120 - capacity
    none = choose_plan(recorded(), capacity_bytes=200, updates=big, repeats=True, rates=SLOW, update_s=0.01)
    assert not any(access.update for access in none.trace.accesses)
    assert none.simulated is not None
    assert none.simulated.seconds > COUNT * 120 / SLOW.read_bytes_s


@pytest.mark.parametrize("rates", [SLOW, FAST])
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_plan_that_is_looked_for_near_another_is_found_with_less_work(
    in_backward: bool, rates: LinkRates, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned: list[int] = []

    def counted(trace: Trace, **dials: Any) -> Plan:
        planned.append(dials["ahead_bytes"])
        return plan_pass(trace, **dials)

    monkeypatch.setattr("ptm_accel.schedule.choice.plan_pass", counted)

    def chosen(near: Way | None) -> tuple[Choice, int]:
        planned.clear()
        found = choose_plan(
            recorded(),
            capacity_bytes=400,
            updates=UPDATES,
            in_backward=in_backward,
            repeats=True,
            rates=rates,
            update_s=0.01,
            near=near,
        )
        assert found.plan is not None
        return found, len(planned)

    best, all_ways = chosen(None)
    again, some = chosen(best.way)
    assert again.seconds <= best.seconds * 1.01
    assert some <= all_ways // 2
    # From wherever it begins, it ends no worse.
    for start in (Way(0.0, 0.4), Way(0.7, 0.4), Way(0.0, 0.05), Way(0.7, 0.05)):
        monkeypatch.setattr(Way, "neighbours", lambda way: [])
        alone, _ = chosen(start)
        monkeypatch.undo()
        assert chosen(start)[0].seconds <= alone.seconds * 1.01


def test_where_nothing_fits_near_another_all_ways_are_looked_at() -> None:
    """As much kept as there was when more could be: single accesses need all that there is now."""
    tight: dict[str, Any] = {"capacity_bytes": 60, "updates": UPDATES, "repeats": True, "rates": SLOW, "update_s": 0.0}
    everywhere = choose_plan(recorded(held=40), **tight)
    assert everywhere.plan is not None
    near = choose_plan(recorded(held=40), **tight, near=Way(0.7, 0.05))
    assert near.seconds <= everywhere.seconds * 1.01


def any_pass(rng: random.Random) -> tuple[Trace, dict[str, Any], int, int]:
    """A pass of layers of several sizes, what it is planned with, and two budgets."""
    sizes = [rng.choice([4, 8, 16, 36]) for _ in range(rng.randint(3, 10))]
    count = len(sizes)
    items = [Item(f"w{n}{end}", size) for end in ("", ".grad") for n, size in enumerate(sizes)]
    accesses = [Access(n, Use.READ, 2 * rng.random(), rng.randrange(8)) for n in range(count)]
    for n in reversed(range(count)):
        accesses.append(Access(n, Use.READ, 2 * rng.random(), rng.randrange(8), backward=True))
        accesses.append(Access(count + n, Use.CREATE, rng.random(), rng.randrange(8), backward=True))
    least = 2 * (max(sizes) + 8)
    smaller = rng.randint(least, max(least, 7 * sum(sizes)))
    rate = rng.choice([2.0, 8.0, 30.0, 200.0])
    dials = {
        "updates": {f"w{n}": [Item(f"w{n}.m", 4 * size), Item(f"w{n}.grad", size)] for n, size in enumerate(sizes)},
        "overwritten": {f"w{n}" for n in range(count)} if rng.random() < 0.5 else set(),
        "in_backward": rng.random() < 0.4,
        "repeats": rng.random() < 0.8,
        "rates": LinkRates(rate, rate * rng.choice([0.5, 1.0, 2.0]), rate),
        "update_s": rng.choice([0.0, 0.01, 0.05]),
    }
    return Trace(None, tuple(items), tuple(accesses)), dials, smaller, int(smaller * rng.choice([1.02, 1.1, 1.5])) + 1


# Of the last one the plan that is looked for anew is slower with more.
@pytest.mark.parametrize("seed", [*range(14), 52])
def test_more_room_is_no_slower_than_what_was_chosen_with_less(seed: int) -> None:
    trace, dials, smaller, larger = any_pass(random.Random(seed))
    less = choose_plan(trace, capacity_bytes=smaller, **dials)
    more = choose_plan(trace, capacity_bytes=larger, **dials, less=less)
    assert less.simulated is not None
    assert more.plan is not None
    assert more.seconds <= less.seconds * AS_GOOD
    assert more.plan.capacity_bytes <= larger
    # Whatever lies between them, and where it is none.
    assert choose_plan(trace, capacity_bytes=2 * larger, **dials, less=more).seconds <= less.seconds * AS_GOOD
    assert choose_plan(trace, capacity_bytes=smaller, **dials, less=more).seconds == less.seconds


@pytest.mark.parametrize("seed", range(20))
def test_more_room_beside_other_passes_is_no_slower_either(seed: int) -> None:
    """What was chosen with less is planned again as it was: with what stayed then, and not with what can stay now."""
    rng = random.Random(seed)
    trace, dials, smaller, larger = any_pass(rng)
    between = int(smaller * rng.choice([0.05, 0.5, 0.9, 2.0]))
    dials |= {"repeats": False, "in_backward": False, "between_bytes": between}
    less = choose_plan(trace, capacity_bytes=smaller, **dials)
    more = choose_plan(trace, capacity_bytes=larger, **dials, less=less)
    assert more.seconds <= less.seconds * AS_GOOD
    again: list[Choice] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptm_accel.schedule.choice._Task.again", noted(_Task.again, again))
        choose_plan(trace, capacity_bytes=larger, **dials, less=less)
    assert less.plan in [each.plan for each in again]


def noted(method: Callable[..., list[Choice]], found: list[Choice]) -> Callable[..., list[Choice]]:
    """The method, with what it returns added to `found`."""

    def called(*args: Any) -> list[Choice]:
        found.extend(method(*args))
        return list(found)

    return called


@pytest.mark.parametrize("seed", [3, 8, 17, 52])
def test_what_counts_as_equal_does_not_add_up_over_many_budgets(seed: int) -> None:
    trace, dials, capacity, _ = any_pass(random.Random(seed))
    chosen = choose_plan(trace, capacity_bytes=capacity, **dials)
    least = chosen.seconds
    for _ in range(12):
        capacity += max(capacity // 50, 1)
        chosen = choose_plan(trace, capacity_bytes=capacity, **dials, less=chosen)
        assert chosen.least_s <= least
        assert chosen.seconds <= chosen.least_s * AS_GOOD
        least = min(least, chosen.seconds)


def test_with_more_room_as_good_a_plan_that_moves_less_is_taken() -> None:
    """Where arithmetic is all that takes time, the plan for less room is as good, and wears the disk more."""
    rates = LinkRates(90.0, 90.0, 90.0)
    dials: dict[str, Any] = {"updates": UPDATES, "repeats": True, "rates": rates, "update_s": 0.01}
    less = choose_plan(recorded(), capacity_bytes=400, **dials)
    more = choose_plan(recorded(), capacity_bytes=640, **dials, less=less)
    alone = choose_plan(recorded(), capacity_bytes=640, **dials)
    assert less.simulated is not None
    assert more.simulated is not None
    assert alone.simulated is not None
    assert more.simulated.seconds <= min(less.seconds, alone.seconds) * AS_GOOD
    assert moved(more) <= moved(alone)
    assert moved(more) < 0.8 * moved(less)


def moved(choice: Choice) -> int:
    assert choice.simulated is not None
    return choice.simulated.read_bytes + choice.simulated.written_bytes
