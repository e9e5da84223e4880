"""Updates on the CPU beside a device: the same bits as on the device, whatever is in the way."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.device import CopyDirection
from ptm_accel.memory.host_store import HeldRun, HostStore
from ptm_accel.memory.own_threads import OwnThread, Worker
from ptm_accel.model.floor import FUSED_ADAMW
from ptm_accel.optim import arithmetic
from ptm_accel.optim.arithmetic import Arithmetic
from ptm_accel.optim.core_threads import CoreThreads
from ptm_accel.optim.host_updates import HostUpdates
from ptm_accel.optim.on_host import OnHost
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.optim.units import Unit
from ptm_accel.optim.worker import UpdateJob
from ptm_accel.runtime.run_ahead import RunAhead
from tests.mock_device import MockCopy, MockDevice
from tests.plain_loop import Recipe, assert_same, same_bits, train_with_masters
from tests.plain_loop import train as train_entry
from tests.stacks import adamw, backward, stack
from tests.test_equality_precision import narrowed
from tests.tiers import AMPLE, budget_bytes, needs, on_pages
from tests.trainer_runs import Job as TrainerJob
from tests.trainer_runs import run_trainer
from tests.zoo import ENTRIES

WIDTH, LAYERS = 128, 6
OPTIONS: dict[str, Any] = {"page_size": 16 << 10}
KINDS = ("mock+host", "mock+host+disk")

Make = Callable[[nn.Module], torch.optim.Optimizer]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return stack(WIDTH, LAYERS, dtype)


def train(
    model: nn.Module, optimizer: Any, steps: range, clip: Callable[[float], Any] | None, micro: int
) -> list[float]:
    losses: list[float] = []
    for number in steps:
        losses.extend(float(backward(model, number * micro + part)) for part in range(micro))
        if clip is not None:
            losses.append(float(clip(0.05)))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@contextmanager
def on_host(
    directory: Path,
    kind: str = "mock+host",
    *,
    make: Make = adamw,
    dtype: torch.dtype = torch.float32,
    chosen: Callable[[str], bool] = lambda name: True,
    **options: Any,
) -> Iterator[tuple[nn.Sequential, Engine, PagedOptimizer]]:
    """A model of whose updates some are done on the CPU."""
    options = {**OPTIONS, **options}
    model = net(dtype)
    floor, need = needs(net(dtype), directory, kind, optimizer=make, **options)
    with on_pages(
        model, kind, floor + (need - floor) // 3, directory, host_bytes=need // 2 if "disk" in kind else None, **options
    ) as engine:
        optimizer = engine.bind_optimizer(make(model))
        optimizer.on_host.chosen = chosen
        yield model, engine, optimizer


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parameters whose updates were taken over."""
    names: list[str] = []
    original = HostUpdates.take

    def take(self: HostUpdates, entry: Any) -> bool:
        took = original(self, entry)
        if took:
            names.append(entry[1].slot.name)
        return took

    monkeypatch.setattr(HostUpdates, "take", take)
    return names


def test_values_of_a_state_dict_stay_what_they_were(taken: list[str], tmp_path: Path) -> None:
    for kind in KINDS:
        with on_host(tmp_path, kind) as (model, engine, optimizer):
            train(model, optimizer, range(2), None, 1)
            values = model.state_dict()
            copies = {name: value.clone() for name, value in values.items()}
            taken.clear()
            train(model, optimizer, range(2, 4), None, 1)
            assert taken
            assert all(torch.equal(values[name], copies[name]) for name in copies)
            assert not any(torch.equal(value, copies[name]) for name, value in model.state_dict().items())
            engine.check_integrity()


def assert_same_training(model: nn.Module, optimizer: Any, plain: nn.Module, expected: torch.optim.Optimizer) -> None:
    values = model.state_dict()
    for name, value in plain.state_dict().items():
        assert same_bits(values[name].clone(), value), name
    states = optimizer.state_dict()["state"]
    for number, state in expected.state_dict()["state"].items():
        for key, value in state.items():
            assert same_bits(states[number][key].clone(), value), (number, key)


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clipped", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_numbers(kind: str, clipped: bool, micro: int, tmp_path: Path, taken: list[str]) -> None:
    plain = net()
    optimizer = adamw(plain)
    clip = (lambda most: nn.utils.clip_grad_norm_(plain.parameters(), most)) if clipped else None
    expected = train(plain, optimizer, range(6), clip, micro)
    with on_host(tmp_path, kind) as (model, engine, paged):
        assert train(model, paged, range(6), engine.clip_grad_norm_ if clipped else None, micro) == expected
        assert set(taken) == dict(model.named_parameters()).keys()
        assert_same_training(model, paged, plain, optimizer)
        assert engine.run_ahead.tally.host_s > 0


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, amsgrad=True),
        lambda model: torch.optim.Adam(model.parameters(), lr=torch.tensor(1e-2), foreach=False),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True),
        lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
        lambda model: torch.optim.AdamW(
            [
                {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
                {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 1e-3},
            ],
            lr=1e-2,
            fused=True,
        ),
    ],
    ids=["amsgrad", "rate in a tensor", "sgd", "adagrad", "groups"],
)
def test_other_optimizers_under_a_schedule_of_rates(make: Make, tmp_path: Path, taken: list[str]) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[float], Any]) -> None:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for number in range(5):
            train(model, optimizer, range(number, number + 1), clip, 1)
            scheduler.step()

    plain = net()
    optimizer = make(plain)
    run(plain, optimizer, lambda most: nn.utils.clip_grad_norm_(plain.parameters(), most))
    with on_host(tmp_path, make=make) as (model, engine, paged):
        run(model, paged, engine.clip_grad_norm_)
        assert set(taken) == dict(model.named_parameters()).keys()
        assert_same_training(model, paged, plain, optimizer)


@pytest.mark.parametrize("here", [True, False])
def test_what_is_updated_as_a_whole_has_its_shape(
    here: bool, tmp_path: Path, taken: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[torch.Size, ...]] = set()
    original = arithmetic.bare_step

    def looked_at(optimizer: torch.optim.Optimizer) -> None:
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            assert param.grad is not None
            states = optimizer.state.get(param, {})
            seen.add((param.shape, param.grad.shape, *(states[key].shape for key in states if key != "step")))
        original(optimizer)

    monkeypatch.setattr(arithmetic, "bare_step", looked_at)
    with on_host(tmp_path, chosen=lambda name: here, page_size=64 << 10) as (model, _, paged):
        train(model, paged, range(3), None, 1)
        shapes = {param.shape for param in model.parameters()}
    assert bool(taken) == here
    assert {each[0] for each in seen} == shapes
    assert all(set(each) == {each[0]} for each in seen)


def test_some_here_and_some_there(tmp_path: Path, taken: list[str]) -> None:
    plain = net()
    optimizer = adamw(plain)
    expected = train(plain, optimizer, range(8), None, 1)
    turn = iter(range(1000))
    with on_host(tmp_path, chosen=lambda name: next(turn) % 5 < 2) as (model, _, paged):
        assert train(model, paged, range(8), None, 1) == expected
        assert_same_training(model, paged, plain, optimizer)
    # Each parameter has been in both places.
    assert 0 < len(taken) < 6 * 2 * LAYERS
    assert len(set(taken)) > LAYERS


@pytest.mark.parametrize("accumulation", [1, 2])
def test_masters(accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[str]) -> None:
    monkeypatch.setattr(RunAhead, "updates_on_host", lambda self, name: True)
    check_masters("llama", "mock+host", OPTIONS, Recipe(accumulation=accumulation, clip=0.1), tmp_path)
    assert taken


def test_masters_have_more_pages_than_their_parameters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[str]
) -> None:
    """Windows of a bf16 parameter on one page of the least size would begin within that page."""
    monkeypatch.setattr(RunAhead, "updates_on_host", lambda self, name: True)
    options = {"page_size": 4 << 10, "host_bytes": 512 << 10}
    check_masters("qwen3", "mock+host+disk", options, Recipe(), tmp_path)
    assert taken
    assert not any(name.endswith("k_proj.weight") for name in taken)


def check_masters(name: str, kind: str, options: dict[str, Any], recipe: Recipe, directory: Path) -> None:
    entry = narrowed(ENTRIES[name])
    oracle = train_with_masters(entry.build(), entry, recipe)
    model = entry.build()
    page = {"page_size": options["page_size"], "master_weights": "fp32"}
    budget = budget_bytes("30%", *needs(model, directory, **page))
    with on_pages(model, kind, budget, directory, **{**options, **page}) as engine:
        paged = train_entry(model, entry, recipe, engine)
    assert_same(paged, oracle)


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("name", "clip"),
    [("llama-tied", 0.1), ("llama-tied", 0.0), ("gpt2", 0.0), ("t5", 0.1), ("lora", 0.0), ("vit", 0.1)],
)
def test_under_the_trainer(
    name: str, clip: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[str]
) -> None:
    """Without clipping, updates begin in backward."""
    monkeypatch.setattr(RunAhead, "updates_on_host", lambda self, parameter: sum(map(ord, parameter)) % 2 == 0)
    entry, job = ENTRIES[name], TrainerJob(clip=clip, checkpointing=ENTRIES[name].checkpointing[-1])
    plain = run_trainer(entry.build(), entry, job, tmp_path, paged=False)
    model = entry.build()
    budget = budget_bytes("30%", *needs(model, tmp_path, "mock+host+disk"))
    with on_pages(model, "mock+host+disk", budget, tmp_path, host_bytes=AMPLE) as engine:
        paged = run_trainer(model, entry, job, tmp_path, paged=True)
        assert engine.pool.budget.peak_bytes <= budget
    assert_same(paged, plain)
    assert taken


def test_a_look_at_one_parameter_waits_for_its_update_alone(tmp_path: Path) -> None:
    gate, steps = threading.Event(), 4
    plain = net()
    expected = adamw(plain)
    train(plain, expected, range(steps), None, 1)
    with on_host(tmp_path) as (model, engine, paged):
        train(model, paged, range(steps - 1), None, 1)
        engine.settle()
        with jobs_wait_for(gate, after=12):
            train(model, paged, range(steps - 1, steps), None, 1)
            assert engine.pages.executor.pending_updates is not None
            first = next(iter(dict(model.named_parameters())))
            assert same_bits(model.get_parameter(first).detach().clone(), plain.get_parameter(first).detach())
            assert engine.pages.executor.pending_updates is not None, "the others are still pending"
            gate.set()
            engine.settle()
        assert engine.pages.executor.pending_updates is None
        assert_same_training(model, paged, plain, expected)


@contextmanager
def jobs_wait_for(gate: threading.Event, *, after: int) -> Iterator[None]:
    """Holds back all jobs but the first few."""
    original, count = UpdateJob.run, iter(range(10_000))

    def run(self: UpdateJob) -> None:
        if next(count) >= after:
            assert gate.wait(30)
        original(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateJob, "run", run)
        try:
            yield
        finally:
            gate.set()


def test_what_is_raised_in_the_thread_is_raised_by_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    main, original = threading.get_ident(), Arithmetic.update

    def update(self: Arithmetic, *args: Any) -> Any:
        if threading.get_ident() != main:
            raise ArithmeticError("no such number")
        return original(self, *args)

    with on_host(tmp_path) as (model, engine, paged):
        train(model, paged, range(2), None, 1)
        engine.settle()
        monkeypatch.setattr(Arithmetic, "update", update)
        with pytest.raises(ArithmeticError, match="no such number"):
            train(model, paged, range(2, 6), None, 1)
        assert engine.pages.executor.pending_updates is None
        assert not holds(engine)
        engine.abort()


def holds(engine: Engine) -> int:
    backing = engine.pool.backing
    assert isinstance(backing, HostStore)
    return sum(page.holds for handle in backing._handles for page in handle.pages)


def test_what_was_done_before_a_failure_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows have ended when somebody looks, the last of them badly: nobody's placeholder stays."""
    original, count = UpdateJob.run, iter(range(10_000))
    ended = threading.Event()

    def run(self: UpdateJob) -> None:
        number = next(count)
        if number == 10:
            self._update = broken
        original(self)
        if number == 10:
            ended.set()

    def broken(unit: Unit) -> dict[str, Any]:
        raise ArithmeticError("no such number")

    with on_host(tmp_path) as (model, engine, paged):
        train(model, paged, range(3), None, 1)
        engine.settle()
        monkeypatch.setattr(UpdateJob, "run", run)
        train(model, paged, range(3, 4), None, 1)
        assert ended.wait(30)
        with pytest.raises(ArithmeticError, match="no such number"):
            engine.settle()
        monkeypatch.undo()
        engine.abort()
        assert engine.pages.executor.pending_updates is None
        assert bool(model(torch.ones(1, WIDTH)).isfinite().all())


@pytest.mark.parametrize("touched", [True, False])
def test_a_page_that_was_changed_is_not_taken_for_what_is_on_disk(touched: bool, tmp_path: Path) -> None:
    gate, began = threading.Event(), threading.Event()
    original = UpdateJob.run

    def run(self: UpdateJob) -> None:
        if touched:
            original(self)
            began.set()
            assert gate.wait(30)
        else:
            began.set()
            assert gate.wait(30)
            original(self)

    with on_host(tmp_path, "mock+host+disk") as (model, engine, paged):
        train(model, paged, range(3), None, 1)
        engine.settle()
        wrote: list[bool] = []
        backing = engine.pool.backing
        assert isinstance(backing, HostStore)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(UpdateJob, "run", run)
            patch.setattr(backing, "let_go", lambda run, *, wrote: seen(backing, run, wrote))
            seen_of = wrote

            def seen(backing: HostStore, run: HeldRun, wrote: bool) -> None:
                seen_of.append(wrote)
                HostStore.let_go(backing, run, wrote=wrote)

            train(model, paged, range(3, 4), None, 1)
            assert began.wait(30)
            assert engine.pages.executor.pending_updates is not None
            wait = UpdateJob.wait
            # Whoever gives up has called off all that has not begun before it waits for anything.
            patch.setattr(UpdateJob, "wait", lambda self: (gate.set(), wait(self)))
            engine.pages.executor.pending_updates.give_up()
        assert any(wrote) is touched
        assert not holds(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_in_inference_mode(kind: str, tmp_path: Path) -> None:
    """What is brought in, and what is updated, for somebody who remembers nothing is used by others later."""
    plain = net()
    optimizer = adamw(plain)
    expected = train(plain, optimizer, range(6), None, 1)
    with on_host(tmp_path, kind) as (model, engine, paged):
        losses: list[float] = []
        for number in range(6):
            losses += train(model, paged, range(number, number + 1), None, 1)
            with torch.inference_mode():
                if number % 2:
                    engine.settle()
                model(torch.ones(1, WIDTH))
        assert losses == expected
        assert_same_training(model, paged, plain, optimizer)


def test_a_view_that_is_kept_follows_its_parameter(tmp_path: Path, taken: list[str]) -> None:
    plain = net()
    optimizer = adamw(plain)
    with on_host(tmp_path) as (model, engine, paged):
        for each, other in ((plain, optimizer), (model, paged)):
            train(each, other, range(3), None, 1)
        engine.settle()
        backward(model, 3)
        backward(plain, 3)
        taken.clear()
        view, expected = model[0].weight.detach(), plain[0].weight.detach()
        optimizer.step()
        paged.step()
        engine.settle()
        assert "0.weight" not in taken
        assert taken
        assert same_bits(view, expected)


def test_a_host_that_has_no_room_any_more_gives_updates_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[str]
) -> None:
    plain = net()
    optimizer = adamw(plain)
    expected = train(plain, optimizer, range(6), None, 1)
    original, count = HostStore.hold, iter(range(100_000))

    def hold(self: HostStore, *args: Any) -> HeldRun:
        if next(count) % 40 < 20:
            raise BudgetError("no frame can be freed")
        return original(self, *args)

    refused: list[str] = []
    refuse = HostUpdates._refuse

    def noted(self: HostUpdates, unit: Unit) -> None:
        refused.append(unit.state.slot.name)
        refuse(self, unit)

    with on_host(tmp_path, "mock+host+disk") as (model, _, paged):
        monkeypatch.setattr(HostStore, "hold", hold)
        monkeypatch.setattr(HostUpdates, "_refuse", noted)
        # The first window of a parameter may be refused, and no other.
        monkeypatch.setattr(HostUpdates, "_can_be_held", lambda self, tensor, step: tensor.numel <= 4096)
        assert train(model, paged, range(6), None, 1) == expected
        assert_same_training(model, paged, plain, optimizer)
    assert 0 < len(refused) < len(taken)


def test_what_the_host_gives_back_is_done_before_anybody_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = net()
    optimizer = adamw(plain)
    train(plain, optimizer, range(4), None, 1)
    refused: list[str] = []
    refuse = HostUpdates._refuse

    def noted(self: HostUpdates, unit: Unit) -> None:
        refused.append(unit.state.slot.name)
        refuse(self, unit)

    def full(self: HostStore, *args: Any) -> HeldRun:
        raise BudgetError("no frame can be freed")

    monkeypatch.setattr(HostUpdates, "_refuse", noted)
    # The first window of a parameter may be refused, and no other.
    monkeypatch.setattr(HostUpdates, "_can_be_held", lambda self, tensor, step: tensor.numel <= 4096)
    # Few windows at a time, so that most of them are still to be opened when the step returns.
    monkeypatch.setattr(OnHost, "most_bytes", 5 * OPTIONS["page_size"])
    monkeypatch.setattr("ptm_accel.optim.host_updates._held_bytes", lambda unit: 4 * OPTIONS["page_size"])
    with on_host(tmp_path) as (model, engine, paged):
        train(model, paged, range(3), None, 1)
        engine.settle()
        backward(model, 3)
        paged.step()
        assert engine.pages.executor.pending_updates is not None
        with monkeypatch.context() as patch:
            patch.setattr(HostStore, "hold", full)
            engine.settle()
        assert refused
        assert engine.pages.executor.pending_updates is None
        assert_same_training(model, paged, plain, optimizer)


def test_replicas_choose_nothing_by_their_own_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with on_host(tmp_path) as (_, engine, _):
        assert engine.run_ahead.on_host_possible()
        monkeypatch.setattr(engine.training, "replicas", object())
        assert not engine.run_ahead.on_host_possible()
        monkeypatch.setattr(engine.training, "replicas", None)


def test_what_cannot_be_is_not_planned(tmp_path: Path, taken: list[str]) -> None:
    floor, need = needs(net(), tmp_path, "mock+host", optimizer=adamw, **OPTIONS)
    model = net()
    with on_pages(model, "mock+host", floor + (need - floor) // 3, tmp_path, **OPTIONS) as engine:
        paged = engine.bind_optimizer(adamw(model))
        engine.run_ahead.rates, engine.run_ahead.host_s = LinkRates(1e6, 1e6, 2e6), 0.0
        paged.param_groups[0]["capturable"] = True
        assert not engine.run_ahead.on_host_possible()
        paged.param_groups[0]["capturable"] = False
        train(model, paged, range(3), None, 1)
        paged.on_host.possible = lambda: False  # type: ignore[method-assign]
        engine.run_ahead.routes.clear()
        engine.settle()
        taken.clear()
        before = engine.run_ahead.tally.updated_bytes
        train(model, paged, range(3, 7), None, 1)
        engine.settle()
        assert not taken
        assert not any(route.choice and route.choice.on_host for route in engine.run_ahead.routes.values())
        assert engine.run_ahead.tally.updated_bytes - before == 4 * sum(s.value.slot_bytes for s in engine.slots)


def test_a_gradient_that_cannot_be_stored_is_told(tmp_path: Path) -> None:
    with on_host(tmp_path) as (model, engine, paged):
        train(model, paged, range(3), None, 1)
        engine.settle()
        device = engine.pool.compute
        assert isinstance(device, MockDevice)

        def fail(copy: MockCopy) -> None:
            if copy.direction is CopyDirection.OUT:
                raise OSError("the link is down")

        device.delay = fail
        with pytest.raises(OSError, match="the link is down"):
            train(model, paged, range(3, 6), None, 1)
        device.delay = None
        assert not holds(engine)
        engine.abort()
        engine.pool.admission.released.settle()


@pytest.mark.parametrize("clipped", [True, False])
def test_a_step_that_cannot_begin_leaves_nothing_behind(
    clipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An earlier store of something has failed, which comes out as an update is taken over."""
    original, count = HostUpdates.take, iter(range(1000))

    def take(self: HostUpdates, entry: Any) -> bool:
        if next(count) == 5:
            raise DiskError(5, "an earlier store has failed")
        return original(self, entry)

    with on_host(tmp_path) as (model, engine, paged):
        train(model, paged, range(3), None, 1)
        engine.settle()
        monkeypatch.setattr(HostUpdates, "take", take)
        with pytest.raises(DiskError, match="an earlier store has failed"):
            train(model, paged, range(3, 4), engine.clip_grad_norm_ if clipped else None, 1)
        assert engine.pages.executor.pending_updates is None
        assert not holds(engine)
        assert engine.pages.executor.pending_updates is None
        assert not [tensor for tensor in engine.pool.tensors() if tensor.tag is Tag.GRAD]
        engine.abort()
        monkeypatch.undo()
        # The weights are between two steps; they can be saved, and trained on.
        train(model, paged, range(4, 6), None, 1)
        assert all(value.isfinite().all() for value in model.state_dict().values())


def test_what_is_pending_ends_with_the_engine(tmp_path: Path) -> None:
    gate = threading.Event()
    before = _updaters()
    with on_host(tmp_path) as (model, engine, paged):
        train(model, paged, range(3), None, 1)
        engine.settle()
        assert len(_updaters() - before) == 1
        threading.Timer(0.2, gate.set).start()
        with jobs_wait_for(gate, after=1):
            train(model, paged, range(3, 4), None, 1)
            assert engine.pages.executor.pending_updates is not None
            engine.close()
        assert engine.pages.executor.pending_updates is None
        assert not holds(engine)
        assert not _updaters() - before


def test_a_thread_ends_with_its_owner() -> None:
    worker, before = Worker("ptm_accel updates"), _updaters()
    done = threading.Event()
    job = UpdateJob(cast("Unit", None), lambda unit: None, lambda unit: {"done": done.set()})
    worker.submit(job)
    assert done.wait(30)
    (thread,) = _updaters() - before
    del worker
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
    assert job.result() == {"done": None}


def _updaters() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "ptm_accel updates"}


def test_a_backing_store_without_room_leaves_updates_to_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = net()
    optimizer = adamw(plain)
    expected = train(plain, optimizer, range(5), None, 1)
    with on_host(tmp_path) as (model, engine, paged):
        losses = train(model, paged, range(3), None, 1)
        engine.settle()
        backing = engine.pool.backing
        assert isinstance(backing, HostStore)
        # Not even the arithmetic has room, of an optimizer that allocates for it.
        monkeypatch.setattr("ptm_accel.optim.host_updates.update_extra_bytes", lambda *args, **kwargs: 4096)
        held = backing.budget.reserve(backing.make_room(0), Tag.STAGING, "somebody else")
        took: list[bool] = []
        original = HostUpdates.take
        monkeypatch.setattr(HostUpdates, "take", lambda self, entry: took.append(original(self, entry)) or took[-1])
        losses += train(model, paged, range(3, 4), None, 1)
        engine.settle()
        held.release()
        losses += train(model, paged, range(4, 5), None, 1)
        assert losses == expected
        assert_same_training(model, paged, plain, optimizer)
    assert took[0] is False
    assert took[-1] is True


def test_a_host_that_holds_few_pages_leaves_updates_to_the_device(
    tmp_path: Path, taken: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    plain = net()
    expected = train(plain, adamw(plain), range(4), None, 1)
    floor, need = needs(net(), tmp_path, "mock+host+disk", optimizer=adamw, **OPTIONS)
    for pages, some in ((8, False), (16, True)):
        model = net()
        host = pages * int(OPTIONS["page_size"])
        with on_pages(
            model, "mock+host+disk", floor + (need - floor) // 3, tmp_path, host_bytes=host, **OPTIONS
        ) as engine:
            paged = engine.bind_optimizer(adamw(model))
            paged.on_host.chosen = lambda name: True
            with caplog.at_level(logging.INFO, "ptm_accel.optim.on_host"):
                assert train(model, paged, range(4), None, 1) == expected
        assert bool(taken) is some
        assert caplog.text.count("with host_memory=256.00 KiB there would be room") == 1


@pytest.mark.parametrize("clipped", [True, False])
def test_a_plan_chooses_who_is_updated_where(clipped: bool, tmp_path: Path, taken: list[str]) -> None:
    """A slow link beside a CPU that takes no time: most of it is left to the CPU; the other way round nothing."""
    plain = net()
    optimizer = adamw(plain)
    clip = (lambda most: nn.utils.clip_grad_norm_(plain.parameters(), most)) if clipped else None
    expected = train(plain, optimizer, range(9), clip, 1)
    floor, need = needs(net(), tmp_path, "mock+host", optimizer=adamw, **OPTIONS)
    model = net()
    with on_pages(model, "mock+host", floor + (need - floor) // 3, tmp_path, **OPTIONS) as engine:
        paged = engine.bind_optimizer(adamw(model))
        engine.run_ahead.rates = LinkRates(1e6, 1e6, 2e6)
        engine.run_ahead.host_s = 0.0
        losses = train(model, paged, range(6), engine.clip_grad_norm_ if clipped else None, 1)
        # Whether the last quarter is worth it there depends on how long compute takes.
        sizes = {name: param.numel() for name, param in model.named_parameters()}
        assert sum(sizes[name] for name in set(taken)) > sum(sizes.values()) * 0.6
        engine.run_ahead.host_s = 1.0
        engine.run_ahead.routes.clear()
        losses += train(model, paged, range(6, 8), engine.clip_grad_norm_ if clipped else None, 1)
        model.eval()
        with torch.no_grad():
            model(torch.zeros(4, WIDTH))
        model.train()
        taken.clear()
        losses += train(model, paged, range(8, 9), engine.clip_grad_norm_ if clipped else None, 1)
        assert losses == expected
        assert not taken
        assert_same_training(model, paged, plain, optimizer)


@pytest.mark.parametrize("options", [{"capturable": True}, {}], ids=["captured", "deterministic"])
def test_some_are_left_to_the_device(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: list[str]
) -> None:
    if not options:
        monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with on_host(tmp_path) as (model, _, paged):
        train(model, paged, range(3), None, 1)
        paged.param_groups[0].update(options)
        assert not paged.on_host.possible()
        paged.param_groups[0].pop("capturable", None)
    assert bool(taken) is bool(options)


def test_a_step_count_is_kept_where_its_optimizer_wants_it() -> None:
    count = torch.tensor(3.0)
    for options, moves in (({"fused": True}, True), ({"foreach": True}, False)):
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(2))], **options)  # type: ignore[arg-type]
        cores = CoreThreads("cores")
        there = Arithmetic(optimizer, FUSED_ADAMW, torch.device("meta"), lambda window: count, cores)
        assert (there._beside(count, optimizer.param_groups[0]).device.type == "meta") is moves
        assert there._beside("not a tensor", optimizer.param_groups[0]) == "not a tensor"


def test_a_thread_that_cannot_be_started_is_waited_for_by_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = OwnThread.start

    def refused(self: OwnThread) -> None:
        if self.name == "ptm_accel updates":
            raise RuntimeError("can't start new thread")
        start(self)

    with on_host(tmp_path) as (model, engine, paged):
        monkeypatch.setattr(OwnThread, "start", refused)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            train(model, paged, range(4), engine.clip_grad_norm_, 1)
        engine.abort()
        engine.zero_grad()
