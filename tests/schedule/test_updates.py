"""Updates as part of a pass: where they stand in it, and what a plan makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ptm_accel.schedule.actions import Move
from ptm_accel.schedule.plan import plan_pass
from ptm_accel.schedule.trace import Access, Item, Trace, Use
from ptm_accel.schedule.updates import final_gradients, spread_state, with_updates, with_updates_in_backward

LAYERS = 6


def recorded() -> Trace:
    """Layers in a row, forward and backward, with a gradient of each."""
    items = [Item(f"w{n}", 10) for n in range(LAYERS)] + [Item(f"w{n}.grad", 10) for n in range(LAYERS)]
    forward = [Access(n, Use.READ, 1.0, 3) for n in range(LAYERS)]
    backward = []
    for n in reversed(range(LAYERS)):
        backward += [Access(n, Use.READ, 1.0, 3, backward=True), Access(LAYERS + n, Use.CREATE, 1.0, 3, backward=True)]
    return Trace("key", tuple(items), (*forward, *backward), 0.5)


def updates() -> dict[str, list[Item]]:
    return {f"w{n}": [Item(f"w{n}.m", 20), Item(f"w{n}.v", 20), Item(f"w{n}.grad", 10)] for n in range(LAYERS)}


def text(trace: Trace) -> list[str]:
    return [f"{access.use.value} {trace.items[access.item].name}" for access in trace.accesses]


def test_an_update_stands_before_the_first_read_of_its_parameter() -> None:
    trace = with_updates(recorded(), updates(), most_bytes=60)
    assert text(trace)[:8] == [
        "read w0.m",
        "read w0.v",
        "read w0.grad",
        "read w0.m",
        "read w0.v",
        "consume w0.grad",
        "read w0",
        "read w1.m",
    ]
    assert [access for access in trace.accesses if not access.update] == list(recorded().accesses)
    assert all(access.held_bytes == 3 and access.compute_s == 0 for access in trace.accesses if access.update)
    assert trace.compute_s == recorded().compute_s
    assert trace.key == "key"
    # Gradients that the backward makes are the ones that the updates of the next pass use.
    assert len(trace.items) == len(recorded().items) + 2 * LAYERS


def test_an_update_that_uses_up_a_wider_sum_than_the_pass_makes_counts_with_that() -> None:
    """Gradients of several micro-batches have been added up in fp32, and this pass makes the first bf16 one anew."""
    wide = {name: [*used[:-1], Item(used[-1].name, 20)] for name, used in updates().items()}
    trace = with_updates(recorded(), wide, most_bytes=70)
    assert [item.nbytes for item in trace.items if item.name.endswith(".grad")] == [20] * LAYERS
    assert [item.nbytes for item in recorded().items] == [
        item.nbytes for item in with_updates(recorded(), {}, most_bytes=70).items
    ]
    narrow = {name: [*used[:-1], Item(used[-1].name, 5)] for name, used in updates().items()}
    assert with_updates(recorded(), narrow, most_bytes=70) == with_updates(recorded(), updates(), most_bytes=70)


def test_updates_that_need_too_much_or_that_nobody_asked_for_are_left_out() -> None:
    assert with_updates(recorded(), updates(), most_bytes=59) == recorded()
    assert with_updates(recorded(), {}, most_bytes=60) == recorded()
    only = with_updates(recorded(), {"w3": updates()["w3"]}, most_bytes=60)
    assert sum(access.update for access in only.accesses) == 6


def test_a_parameter_that_only_the_backward_reads_has_no_update_there() -> None:
    trace = Trace(None, (Item("w0", 10),), (Access(0, Use.READ, backward=True),))
    assert with_updates(trace, updates(), most_bytes=60) == trace


def test_a_share_of_the_state_stays_and_the_rest_streams() -> None:
    trace = with_updates(recorded(), updates(), most_bytes=60)
    plan = plan_pass(trace, capacity_bytes=200, ahead_bytes=60)
    loads = [trace.items[a.item].name for starts in plan.starts for a in starts if a.move is Move.LOAD]
    assert len(loads) == len(set(loads)), "nothing is sent for twice"
    state = {item.name for item in trace.items if item.name.endswith((".m", ".v"))}
    stays = state - set(loads)
    assert stays
    assert stays < state
    gradients = {number for number, item in enumerate(trace.items) if item.name.endswith(".grad")}
    assert plan.resident & gradients, "the backward left some for the updates"


def test_where_all_fits_nothing_moves() -> None:
    trace = with_updates(recorded(), updates(), most_bytes=60)
    plan = plan_pass(trace, capacity_bytes=trace.item_bytes + 3)
    assert not any(plan.starts)
    assert len(plan.resident) == len(trace.items)


def test_state_that_is_kept_is_spread_over_the_pass_whole_updates_at_a_time() -> None:
    trace = with_updates(recorded(), updates(), most_bytes=60)
    assert spread_state(trace, 0) == []
    for share, kept in (
        (40, ["w5"]),
        (80, ["w2", "w5"]),
        (120, ["w1", "w3", "w5"]),
        (240, [f"w{n}" for n in range(6)]),
    ):
        names = [trace.items[item].name for item in spread_state(trace, share)]
        assert names == [name for owner in kept for name in (f"{owner}.m", f"{owner}.v")], share
    assert spread_state(recorded(), 1000) == [], "no updates, no state"


def test_a_parameter_that_is_overwritten_is_not_loaded_for_its_update() -> None:
    every = [f"w{n}" for n in range(LAYERS)]
    trace = with_updates(recorded(), updates(), most_bytes=60, overwritten=every[1:])
    assert text(trace)[5:15] == [
        "consume w0.grad",
        "read w0",
        "read w1.m",
        "read w1.v",
        "read w1.grad",
        "read w1.m",
        "read w1.v",
        "consume w1.grad",
        "create w1",
        "read w1",
    ]
    for repeats in (False, True):
        plan = plan_pass(trace, capacity_bytes=130, ahead_bytes=30, repeats=repeats)
        begin = next(index for index, access in enumerate(trace.accesses) if access.backward)
        sent_for = {
            trace.items[action.item].name
            for actions in plan.starts
            for action in actions
            if action.move is Move.LOAD and action.due < begin
        }
        assert not sent_for & set(every[1:])
        assert sent_for & {f"{name}.m" for name in every}
        there = {trace.items[item].name for item in plan.resident | plan.coming}
        assert not there & set(every[1:]), "the pass before is done with them"


def test_what_the_next_update_makes_anew_leaves_after_its_last_use() -> None:
    every = [f"w{n}" for n in range(LAYERS)]
    trace = with_updates(recorded(), updates(), most_bytes=60, overwritten=every)
    plan = plan_pass(trace, capacity_bytes=130, ahead_bytes=30)
    last = {access.item: index for index, access in enumerate(trace.accesses)}
    for name in every[1:]:
        item = next(number for number, found in enumerate(trace.items) if found.name == name)
        assert plan.starts[last[item] + 1][0].item == item
        assert plan.starts[last[item] + 1][0].move is Move.EVICT


def test_an_update_in_backward_stands_behind_the_arrival_of_its_gradient() -> None:
    trace = with_updates_in_backward(recorded(), updates(), most_bytes=60, overwritten=["w5"])
    begin = next(index for index, access in enumerate(trace.accesses) if access.backward)
    assert text(trace)[begin : begin + 12] == [
        "read w5",
        "create w5.grad",
        "read w5.m",
        "read w5.v",
        "read w5.grad",
        "read w5.m",
        "read w5.v",
        "consume w5.grad",
        "create w5",
        "read w4",
        "create w4.grad",
        "write w4",
    ], "what is not overwritten must be there as well"
    assert text(trace)[begin + 12 : begin + 19] == [
        *("read w4.m", "read w4.v", "read w4.grad", "write w4", "read w4.m", "read w4.v"),
        "consume w4.grad",
    ]
    assert [access for access in trace.accesses if not access.update] == list(recorded().accesses)
    assert trace.compute_s == recorded().compute_s
    assert with_updates_in_backward(recorded(), updates(), most_bytes=59) == recorded()
    assert with_updates_in_backward(recorded(), {}, most_bytes=60) == recorded()


def test_a_gradient_is_final_if_it_arrives_once_and_backward_is_done_with_its_parameter() -> None:
    trace = recorded()
    assert sorted(final_gradients(trace).values()) == [f"w{n}" for n in range(LAYERS)]
    grad, again = LAYERS + 3, Access(3, Use.READ, backward=True)
    for late, left in (
        (again, {"w3"}),
        (Access(grad, Use.WRITE, backward=True), {"w3"}),
        (Access(grad, Use.READ), set()),
        (Access(3, Use.READ), set()),
    ):
        changed = Trace(None, trace.items, (*trace.accesses, late))
        assert {f"w{n}" for n in range(LAYERS)} - set(final_gradients(changed).values()) == left
    normed = replace(trace, accesses=(*trace.accesses, Access(grad, Use.READ)))
    planned = with_updates_in_backward(normed, updates(), most_bytes=60)
    assert planned == with_updates_in_backward(trace, updates(), most_bytes=60), "its norm is taken as it arrives"
    added = Trace(None, trace.items, tuple(Access(a.item, Use.WRITE) if a.item == grad else a for a in trace.accesses))
    assert "w3" not in final_gradients(added).values(), "a sum of several"


def by_layer(count: int, *, widened: bool = False) -> Trace:
    """The micro-batches of a step, layer by layer; layers are read outside of the backward, which runs them again."""
    first = recorded()
    accesses = [access for access in first.accesses if not access.backward]
    for n in reversed(range(LAYERS)):
        for micro_batch in range(count):
            last, grad = micro_batch == count - 1, LAYERS + n
            uses = [Use.WRITE] if micro_batch else [Use.CREATE]
            if widened and micro_batch == 1:
                uses = [Use.READ, Use.CREATE, Use.WRITE]
            accesses += [Access(n, Use.READ, 1.0, 3, last=last)]
            accesses += [Access(grad, use, 1.0, 3, backward=True, last=last) for use in uses]
    return replace(first, accesses=tuple(accesses))


@pytest.mark.parametrize(("count", "widened"), [(2, False), (4, False), (2, True), (3, True)])
def test_the_gradient_of_the_last_micro_batch_is_final(count: int, widened: bool) -> None:
    trace = by_layer(count, widened=widened)
    every = [f"w{n}" for n in range(LAYERS)]
    final = final_gradients(trace)
    assert sorted(final.values()) == every
    for index, name in final.items():
        uses = [at for at, access in enumerate(trace.accesses) if trace.items[access.item].name == f"{name}.grad"]
        assert index == uses[-1]
    planned = with_updates_in_backward(trace, updates(), most_bytes=60)
    assert [access for access in planned.accesses if not access.update] == list(trace.accesses)
    for name in every:
        uses_up = text(planned).index(f"consume {name}.grad")
        assert f"read {name}" not in text(planned)[uses_up:]
    grad = LAYERS + 3
    for late in (
        # A lower layer uses it, with a gradient or without.
        Access(3, Use.READ),
        Access(grad, Use.WRITE, backward=True),
        # Only in a micro-batch before the last.
        Access(grad, Use.WRITE, backward=True, last=False),
    ):
        changed = replace(trace, accesses=(*trace.accesses[:-1], late, trace.accesses[-1]))
        assert set(every) - set(final_gradients(changed).values()) == {"w3"}
    unfinished = replace(trace, accesses=tuple(replace(access, last=False) for access in trace.accesses))
    assert not final_gradients(unfinished)


def test_gradients_that_are_used_up_at_once_leave_their_room_to_state() -> None:
    after = with_updates(recorded(), updates(), most_bytes=60)
    during = with_updates_in_backward(recorded(), updates(), most_bytes=60)
    plans = [plan_pass(trace, capacity_bytes=160, ahead_bytes=20) for trace in (after, during)]
    moved = [sum(action.move is Move.LOAD for actions in plan.starts for action in actions) for plan in plans]
    assert moved[1] < moved[0]
    gradients = {number for number, item in enumerate(during.items) if item.name.endswith(".grad")}
    assert not plans[1].resident & gradients
