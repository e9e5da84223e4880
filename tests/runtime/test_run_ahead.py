"""Running ahead of a pass: fewer faults, the same numbers, and no harm where the model departs from its trace."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.block import Block
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.optim.update_queue import UpdateQueue
from ptm_accel.pages import Pages
from ptm_accel.runtime.following import Following
from ptm_accel.runtime.route import Route
from ptm_accel.runtime.run_ahead import RunAhead
from ptm_accel.schedule.actions import Move
from ptm_accel.schedule.choice import Choice, choose_plan
from ptm_accel.schedule.trace import Trace
from ptm_accel.schedule.updates import UpdateTiming
from tests.queued import LateDevice
from tests.tiers import AMPLE, MEMORIES, PAGE, config, jitter, needs, on_pages, open_memory

WIDTH, LAYERS = 48, 8


class Net(nn.Module):
    """Layers in a row; `turns` reads them in another order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.order = list(range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = torch.tanh(self.layers[number](x))
        return x


@contextmanager
def tight(
    kind: str, directory: Path, monkeypatch: pytest.MonkeyPatch, *, planned: bool = True, share: float = 0.25
) -> Iterator[tuple[Net, Engine, torch.optim.Optimizer]]:
    """The model with room for `share` of its states beyond the least that it needs."""
    model = Net()
    floor, need = needs(Net(), directory, kind)
    monkeypatch.setattr(Pages, "planned", planned)
    with on_pages(model, kind, floor + int((need - floor) * share), directory) as engine:
        yield model, engine, engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))


def batch(number: int, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(number))


def step(model: Net, optimizer: torch.optim.Optimizer, number: int, micro: int = 1) -> None:
    for part in range(micro):
        model(batch(number * 7 + part)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def beside_updates(engine: Engine) -> Route:
    """What is known of the pass that runs beside the updates of the step before it."""
    (route,) = (route for route in engine.run_ahead.routes.values() if route.updates is UpdateTiming.FORWARD)
    return route


@pytest.mark.parametrize("kind", MEMORIES)
def test_planned_passes_find_their_parameters_there(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    faults, weights = {}, {}
    for planned in (False, True):
        with tight(kind, tmp_path, monkeypatch, planned=planned) as (model, engine, optimizer):
            step(model, optimizer, 0)
            step(model, optimizer, 1)
            before = engine.pool.stats.faults
            for number in range(2, 8):
                step(model, optimizer, number)
            engine.settle()
            faults[planned] = engine.pool.stats.faults - before
            weights[planned] = {name: value.clone() for name, value in model.state_dict().items()}
            assert bool(engine.run_ahead.routes) == planned
            assert engine.run_ahead.departures == 0
    assert faults[True] < faults[False] // 2, faults
    assert all(torch.equal(value, weights[True][name]) for name, value in weights[False].items())


def test_kinds_of_passes_have_routes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        routes = engine.run_ahead.routes
        step(model, optimizer, 0)
        assert len(routes) == 1
        step(model, optimizer, 1, micro=2)
        assert len(routes) == 2, "the second micro-batch adds to gradients that are there"
        model.eval()
        with torch.no_grad():
            model(batch(3))
            model(batch(3, rows=2))
        engine.run_ahead.end()
        assert len(routes) == 4, "evaluation, beside updates and after them"
        model.train()
        step(model, optimizer, 4)
        assert len(routes) == 4
        assert engine.run_ahead.departures == 0


@pytest.mark.thinned(1)
@pytest.mark.parametrize("kind", MEMORIES)
def test_what_a_pass_of_another_kind_has_not_left_there_is_sent_for(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of three micro-batches is of a kind of its own; the one before has left what it would need itself."""
    faults, weights = {}, {}
    for way in ("plans alone", "sent for"):
        with tight(kind, tmp_path, monkeypatch) as (model, engine, optimizer), monkeypatch.context() as patch:
            if way == "plans alone":
                patch.setattr(Following, "_ask_for_absent", lambda *args: None)
                patch.setattr(Following, "awaited", lambda *args: None)
            for number in range(2):
                step(model, optimizer, number, micro=3)
            before = engine.pool.stats.faults
            for number in range(2, 10):
                step(model, optimizer, number, micro=3)
            engine.settle()
            faults[way] = engine.pool.stats.faults - before
            weights[way] = {name: value.clone() for name, value in model.state_dict().items()}
    assert faults["sent for"] < 0.75 * faults["plans alone"], faults
    assert all(torch.equal(value, weights["sent for"][name]) for name, value in weights["plans alone"].items())


@pytest.mark.parametrize("micro", [1, 3])
def test_beside_one_of_several_micro_batches_state_is_left_what_the_others_leave(
    micro: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    between: list[int] = []

    def noted(recorded: Trace, **options: Any) -> Choice:
        if options["updates"] and not options["in_backward"]:
            between.append(options["between_bytes"])
        return choose_plan(recorded, **options)

    monkeypatch.setattr("ptm_accel.runtime.run_ahead.choose_plan", noted)
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        for number in range(4):
            step(model, optimizer, number, micro=micro)
        route = beside_updates(engine)
        assert route.choice is not None
        assert route.choice.plan is not None
        assert between
        if micro == 1:
            assert set(between) == {0}, "such a pass follows itself"
            return
        # Parameters and gradients, of which each micro-batch uses all.
        assert min(between) >= 2 * sum(slot.value.slot_bytes for slot in engine.slots)
        items = route.choice.trace.items
        stays = sum(items[item].nbytes for item in route.choice.plan.resident if ".exp_avg" in items[item].name)
        assert stays <= max(route.capacity_bytes - between[-1], 0)


def test_what_is_read_first_is_sent_for_as_a_pass_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that a forward reads is away when it begins: nothing is waited for from its beginning."""
    with tight("host+disk", tmp_path, monkeypatch, share=0.9) as (model, engine, _):
        model.eval()
        with torch.no_grad():
            model(batch(0))
            model(batch(0))
        engine.run_ahead.end()
        before = engine.pool.stats.faults
        for slot in engine.slots:
            if slot.value.block in engine.pool.eviction:
                engine.pool.admission.evict(slot.value.block)
        with torch.no_grad():
            model(batch(0))
        assert engine.pool.stats.faults == before


def test_what_is_to_come_is_sent_for_in_the_order_of_its_uses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tight("host+disk", tmp_path, monkeypatch) as (_, engine, _):
        ahead, values = engine.run_ahead, [slot.value.block for slot in engine.slots]
        for due in (5, 1, 9, 5, 3):
            ahead._ask_for(values[len(ahead._coming)], due)
        assert [due for due, _ in ahead._coming] == [1, 3, 5, 5, 9]
        assert [values.index(tensor) for _, tensor in ahead._coming] == [1, 4, 0, 3, 2]


def test_a_model_that_departs_is_followed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        for number in range(3):
            step(model, optimizer, number)
        before = beside_updates(engine)
        model.order = [0, 1, 2, 4, 3, 5, 6, 7, 7]
        for number in range(3, 6):
            step(model, optimizer, number)
        assert engine.run_ahead.departures > 0
        after = beside_updates(engine)
        assert after is not before, "it was written down anew"
        departures = engine.run_ahead.departures
        step(model, optimizer, 6)
        assert engine.run_ahead.departures == departures


def test_a_pass_that_is_expected_is_not_written_down_and_one_that_strays_is_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing departs for the time that it takes.
    monkeypatch.setattr("ptm_accel.runtime.run_ahead._TOLERANCE", 1e9)
    kept: list[bool] = []
    forward_ended = RunAhead.forward_ended

    def noted(ahead: RunAhead) -> None:
        assert ahead._recorder is not None
        kept.append(ahead._recorder.writes)
        assert bool(ahead._recorder._accesses) == kept[-1]
        assert len(ahead._recorder) >= LAYERS
        forward_ended(ahead)

    monkeypatch.setattr(RunAhead, "forward_ended", noted)
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        engine.run_ahead.rates = LinkRates(1e9, 1e9, 1e9)
        for number in range(8):
            step(model, optimizer, number)
        assert kept == [True] * 6 + [False] * 2, "until the second plan has been made"
        settled = beside_updates(engine)
        model.order = [3, 2, 1, 0, 7, 6, 5, 4]
        for number in range(8, 10):
            step(model, optimizer, number)
        assert beside_updates(engine) is settled
        assert engine.run_ahead.departures > 0
        step(model, optimizer, 10)
        after = beside_updates(engine)
        assert after is not settled
        departures = engine.run_ahead.departures
        for number in range(11, 14):
            step(model, optimizer, number)
        assert engine.run_ahead.departures == departures
        assert kept[8:] == [False, True, True, False, False, False], "once one has strayed, until there is a new plan"
        assert beside_updates(engine) is after


def test_a_layer_that_is_left_out_is_skipped_in_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        for number in range(3):
            step(model, optimizer, number)
        model.order.remove(4)
        hits = engine.pool.stats.hits
        step(model, optimizer, 3)
        engine.settle()
        assert engine.run_ahead.departures > 0
        assert engine.pool.stats.hits > hits, "the layers after it were still sent for"


def test_a_pass_that_is_torn_down_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        model.order = [0, 1, 99]
        with pytest.raises(IndexError):
            model(batch(0))
        engine.abort()
        assert not engine.run_ahead.routes
        assert engine.pages.executor.plan is None
        model.order = list(range(LAYERS))
        step(model, optimizer, 1)
        assert len(engine.run_ahead.routes) == 1


def test_part_of_the_state_is_never_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """State is gone through in a circle: kept by recency, none of it would be there when it is wanted."""
    with tight("host+disk", tmp_path, monkeypatch, share=0.5) as (model, engine, optimizer):
        sent_for: list[bool] = []
        names = ("layers.7.weight", "nothing.like.it")
        # From the first step on: a module with a hook of somebody's is gone through in another way.
        model.layers[3].register_forward_hook(lambda *_: sent_for.extend(map(engine.run_ahead.sends_for, names)))
        for number in range(5):
            step(model, optimizer, number)
        route = beside_updates(engine)
        assert route.choice is not None
        assert route.choice.plan is not None
        items = route.choice.trace.items
        moved = {items[action.item].name for actions in route.choice.plan.starts for action in actions}
        state = {item.name for item in items if item.name.endswith((".exp_avg", ".exp_avg_sq"))}
        assert state & moved
        assert state - moved
        sent_for.clear()
        assert not engine.run_ahead.sends_for("layers.7.weight"), "there is no pass"
        before, faults = engine.pool.stats.loaded_bytes, engine.pool.stats.faults
        step(model, optimizer, 5)
        assert sent_for == [True, False]
        kept = sum(item.nbytes for item in items if item.name in state - moved)
        everything = sum(item.nbytes for item in items)
        assert engine.pool.stats.loaded_bytes - before <= 2 * everything - kept
        assert engine.pool.stats.faults - faults <= 2


@pytest.mark.parametrize("kind", MEMORIES)
def test_what_an_open_update_pins_is_not_held_beside_the_plan(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has accesses of its own there; counted twice it would take room from what is kept and sent for."""
    pinned: list[int] = []
    open_bytes = UpdateQueue.open_bytes.fget
    assert open_bytes is not None

    def seen(queue: UpdateQueue) -> int:
        pinned.append(open_bytes(queue))
        return pinned[-1]

    monkeypatch.setattr(UpdateQueue, "open_bytes", property(seen))
    with tight(kind, tmp_path, monkeypatch, share=0.5) as (model, engine, optimizer):
        for number in range(3):
            step(model, optimizer, number)
        routes = {route.updates: route.recorded for route in engine.run_ahead.routes.values()}
    assert max(pinned) > 0
    assert beside_weights(routes[UpdateTiming.FORWARD]) == beside_weights(routes[UpdateTiming.APART])


def beside_weights(trace: Trace) -> dict[str, int]:
    """What is held beside each weight as the forward comes to it; beside its bias the weight itself would be, too."""
    forward = [access for access in trace.accesses if not access.backward]
    names = {trace.items[access.item].name: access.held_bytes for access in forward}
    return {name: held for name, held in names.items() if name.endswith(".weight")}


def test_nothing_is_planned_where_all_fits(tmp_path: Path) -> None:
    model = Net()
    _, need = needs(Net(), tmp_path, "host+disk")
    with on_pages(model, "host+disk", 2 * need + (4 << 20), tmp_path) as engine:
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        assert not engine.run_ahead.routes
        assert engine.pages.executor.plan is None
        assert engine.training.plain.active


def test_another_budget_is_another_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        for number in range(4):
            step(model, optimizer, number)
        before = beside_updates(engine)
        engine.pool.budget.capacity_bytes += 4096
        for number in range(4, 12):
            step(model, optimizer, number)
        engine.settle()
        after = beside_updates(engine)
        assert after.watch is before.watch, "how often it was planned anew is not forgotten"
        assert after.capacity_bytes == before.capacity_bytes + 4096


def note_plans(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The kinds of the passes that are planned from here on, in order."""
    planned: list[object] = []
    original = RunAhead._planned

    def noted(self: RunAhead, known: Route, *how: Any) -> Route:
        planned.append(known.recorded.key)
        return original(self, known, *how)

    monkeypatch.setattr(RunAhead, "_planned", noted)
    return planned


def test_a_model_that_never_goes_the_same_way_is_planned_ever_rarer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Nothing is planned for another time than was foretold.
    monkeypatch.setattr("ptm_accel.runtime.run_ahead._TOLERANCE", 1e9)
    planned = note_plans(monkeypatch)
    weights = {}
    for kind in (False, True):
        with tight("host+disk", tmp_path, monkeypatch, planned=kind) as (model, engine, optimizer):
            for number in range(24):
                model.order = torch.randperm(LAYERS, generator=torch.Generator().manual_seed(number)).tolist()
                step(model, optimizer, number)
            engine.settle()
            assert bool(engine.run_ahead.departures) == kind
            weights[kind] = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(value, weights[True][name]) for name, value in weights[False].items())
    # The first passes of two kinds, then after 3, 6 and 12 that depart.
    assert len(planned) <= 5, planned


def test_a_budget_that_goes_up_and_down_is_planned_for_ever_rarer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ptm_accel.runtime.run_ahead._TOLERANCE", 1e9)
    planned = note_plans(monkeypatch)
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        for number in range(24):
            step(model, optimizer, number)
            engine.settle()
            engine.pool.budget.capacity_bytes += 4096 if number % 2 else -4096
    assert len(planned) <= 5, planned


def test_a_budget_that_is_given_is_planned_for_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However often one has changed before, as holes in the heap come and go."""
    monkeypatch.setattr("ptm_accel.runtime.run_ahead._TOLERANCE", 1e9)
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        for number in range(12):
            step(model, optimizer, number)
            engine.pool.budget.capacity_bytes += 4096 if number % 2 else -4096
        before = engine.pool.budget.capacity_bytes
        engine.pool.budget.capacity_bytes += 65536
        engine.adapt()
        step(model, optimizer, 12)
        engine.settle()
        # But for holes in the heap, which are taken off.
        assert before < beside_updates(engine).capacity_bytes <= before + 65536


def test_a_pass_is_planned_when_its_kind_comes_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = note_plans(monkeypatch)
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        step(model, optimizer, 0)
        for training in (True, False):
            model.train(training)
            with torch.no_grad():
                model(batch(0))
        model.train()
        assert not planned, "none of them has come again"
        for number in range(2):
            step(model, optimizer, number)
        assert len(set(planned)) == 1
        assert engine.run_ahead.routes[planned[0]].has_plan


def test_the_kinds_that_were_seen_last_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptm_accel.runtime.run_ahead._MOST_KINDS", 3)
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, _), torch.no_grad():
        for frozen in (1, 2, 3, 1, 4):
            for number, layer in enumerate(model.layers):
                layer.requires_grad_(number >= frozen)
            model(batch(0))
        engine.run_ahead.end()
        assert [key[0].trained.count(0) for key in engine.run_ahead.routes] == [6, 2, 8], "two parameters a layer"


@pytest.mark.parametrize("end", ["in a pass", "with an update pending"])
def test_a_model_that_is_dropped_takes_its_pages_with_it(end: str, tmp_path: Path) -> None:
    floor, need = needs(Net(), tmp_path, "host+disk")
    memory = open_memory("host+disk", floor + (need - floor) // 4, tmp_path)
    model = Net()
    engine = Engine.attach(model, config(), memory=memory)
    optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
    for number in range(3):
        step(model, optimizer, number)
    if end == "in a pass":
        model(batch(0))
        assert engine.pages.executor.plan is not None
    else:
        assert engine.pages.executor.pending_updates is not None
    del model, engine, optimizer
    gc.collect()
    assert memory.closed


def test_passes_that_take_another_time_than_foretold_are_planned_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        ahead = engine.run_ahead
        # So slow that no busy machine's passes take that long.
        ahead.rates = wrong = LinkRates(1e3, 1e3, 1e3)
        for number in range(4):
            step(model, optimizer, number)
        before = beside_updates(engine)
        assert before.foretold_s is not None
        for number in range(4, 10):
            step(model, optimizer, number)
        after = beside_updates(engine)
        assert after is not before
        assert after.foretold_s is not None
        assert ahead.rates.read_bytes_s > 2 * wrong.read_bytes_s, "this disk moves more than two kilobytes a second"
        assert after.foretold_s < before.foretold_s
        assert ahead.departures == 0


def test_the_pass_that_widens_sums_is_of_a_kind_of_its_own(tmp_path: Path) -> None:
    model = Net().bfloat16()
    floor, need = needs(Net().bfloat16(), tmp_path, "host+disk", master_weights="fp32")
    with on_pages(model, "host+disk", floor + (need - floor) // 3, tmp_path, master_weights="fp32") as engine:
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        for number in range(4):
            for part in range(4):
                model(batch(number * 7 + part).bfloat16()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        # The first is recorded twice: with updates beside it and without.
        assert sorted(key[1].value for key in engine.run_ahead.routes) == ["added to", "none", "none", "widened"]
        assert engine.run_ahead.departures == 0


def test_what_is_sent_for_too_late_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tight("host+disk", tmp_path, monkeypatch) as (model, engine, optimizer):
        for number in range(4):
            step(model, optimizer, number)
        engine.settle()
        model.eval()
        with torch.no_grad():
            model(batch(0))
            model(batch(0))
        ahead = engine.run_ahead
        ahead.end()
        # What the end of that pass has not come to send for is not sent for by the next one.
        ahead.give_up()
        (key,) = (key for key in ahead.routes if not key[0][0])
        route = ahead.routes[key]
        names = list(route.places)
        # The first leaves and is asked for again after its only use, and the last before it.
        wanted = {names[0]: 0, names[-1]: route.count - 1}
        route.starts = [[] for _ in range(route.count)]
        route.starts[2] = [(Move.EVICT, names[0], 0)]
        route.starts[3] = [(Move.LOAD, name, due) for name, due in wanted.items()]
        # It counts on nothing, so nothing is asked for but by these.
        route.expected = route.first = {}
        seen: list[str] = []
        prefetch = Pool.prefetch

        def noted(self: Pool, tensor: Block) -> bool:
            seen.append(tensor.name)
            return prefetch(self, tensor)

        monkeypatch.setattr(Pool, "prefetch", noted)
        for slot in engine.slots:
            if slot.value.block.name in wanted and slot.value.block in engine.pool.eviction:
                engine.pool.admission.evict(slot.value.block)
        with torch.no_grad():
            model(batch(0))
        # As often as it takes until there is room.
        assert set(seen) == {names[-1]}


@contextmanager
def queued(directory: Path) -> Iterator[tuple[Net, Engine, torch.optim.Optimizer, LateDevice]]:
    """The model on a device that tells times when it is asked, and not while it is silent; numbers are those of it."""
    model = Net()
    floor, need = needs(Net(), directory)
    device = LateDevice(delay=jitter())
    capacities = Capacities(page_bytes=PAGE, host_bytes=AMPLE, device_bytes=floor + (need - floor) // 4)
    memory = build_memory(capacities, device)
    engine = Engine.attach(model, config(), memory=memory)
    yield model, engine, engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True)), device
    engine.check_integrity()
    engine.close()


def test_on_a_device_passes_are_planned_when_their_times_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tight("mock+host", tmp_path, monkeypatch) as (model, engine, optimizer):
        for number in range(8):
            step(model, optimizer, number)
        engine.settle()
        expected = {name: value.clone() for name, value in model.state_dict().items()}
    with queued(tmp_path) as (model, engine, optimizer, device):
        ahead, tally = engine.run_ahead, engine.run_ahead.tally
        ahead.rates = LinkRates(1e8, 1e8, 1e8)
        device.silent = True
        step(model, optimizer, 0)
        step(model, optimizer, 1)
        assert not ahead.routes
        assert tally.passes == 0
        device.silent = False
        step(model, optimizer, 2)
        assert tally.passes == 3
        (route,) = ahead.routes.values()
        for number in range(3, 8):
            step(model, optimizer, number)
        engine.settle()
        ahead.end()
        assert tally.passes == 8
        assert tally.foretold > 0
        assert 0 < tally.compute_s < tally.passes_s
        assert 0 < tally.beside_s < tally.update_s
        assert 0 < route.recorded.compute_s < tally.compute_s
        assert sum(access.compute_s > 0 for access in route.recorded.accesses) > LAYERS
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(value, weights[name]) for name, value in expected.items())


def test_on_a_device_a_pass_that_was_planned_meanwhile_is_only_counted(tmp_path: Path) -> None:
    with queued(tmp_path) as (model, engine, _, device):
        ahead = engine.run_ahead
        device.silent = True
        with torch.no_grad():
            for number in range(3):
                model(batch(number))
        device.silent = False
        ahead.end()
        assert ahead.tally.passes == 3
        (route,) = ahead.routes.values()
        ahead.end()
        assert list(ahead.routes.values()) == [route]
        device.silent = True
        with torch.no_grad():
            model(batch(3))
        ahead.end()
        ahead.forget()
        device.silent = False
        ahead.end()
        assert ahead.tally.passes == 3, "nothing is kept of a model that has become another"
        assert not ahead.routes


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_pass_after_which_only_parts_are_called_comes_to_an_end(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Net()
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)
    with tight(kind, tmp_path, monkeypatch) as (model, engine, optimizer):
        longest = 0
        for number in range(4):
            for net, updates in ((model, optimizer), (plain, theirs)):
                step(net, updates, number)
                with torch.no_grad():
                    net(batch(number))
            for call in range(3000 if number == 2 else 0):
                layer = call % LAYERS
                with torch.no_grad():
                    assert torch.equal(model.layers[layer](batch(call)), plain.layers[layer](batch(call)))
                recorder = engine.run_ahead._recorder
                longest = max(longest, 0 if recorder is None else len(recorder))
            if number == 2:
                assert engine.run_ahead._recorder is None
                assert not engine.run_ahead._marks
        assert 1000 < longest < 1000 + 40 * 2 * LAYERS
        # The next is followed again.
        assert engine.run_ahead._recorder is not None
        engine.settle()
        values = plain.state_dict()
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
