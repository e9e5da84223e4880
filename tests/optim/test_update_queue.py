"""Updates that run beside the next forward: nobody ever sees what a blocking step would not have left."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, DiskError, StaleGraphError
from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.scratch import Io
from ptm_accel.memory.traffic import Traffic
from ptm_accel.memory.windows import window_elements
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.arithmetic import Arithmetic
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.optim.units import Unit
from ptm_accel.outside import gathered
from ptm_accel.pages import Pages
from ptm_accel.schedule.updates import GRAD_SUFFIX
from tests.plain_loop import same_bits
from tests.stacks import adamw, backward, stack, step
from tests.tiers import MEMORIES, needs, on_pages

WIDTH, LAYERS = 48, 8

Make = Callable[[nn.Module], torch.optim.Optimizer]


def is_pending(engine: Engine, slot: ParamSlot) -> bool:
    """Whether the update of a parameter is still to be done."""
    return engine.pages.executor.pending_updates is not None and engine.pages.executor.pending_updates.awaits(
        slot.value.block
    )


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    return stack(WIDTH, LAYERS, dtype)


@contextmanager
def owing(
    directory: Path, kind: str = "host+disk", *, make: Make = adamw, warm: int = 3, spare: int = 2, **options: Any
) -> Iterator[tuple[nn.Sequential, Engine, PagedOptimizer]]:
    """A model whose last step is still pending, and most of whose states are away."""
    dtype = torch.bfloat16 if options else torch.float32
    model = net(dtype)
    floor, need = needs(net(dtype), directory, kind, optimizer=make, **options)
    with on_pages(model, kind, floor + (need - floor) // spare, directory, **options) as engine:
        optimizer = engine.bind_optimizer(make(model))
        for number in range(warm):
            step(model, optimizer, number)
        yield model, engine, optimizer


def plain(steps: int, make: Make = adamw) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    model = net()
    optimizer = make(model)
    for number in range(steps):
        step(model, optimizer, number)
    return model, optimizer


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    values = model.state_dict()
    for name, value in other.state_dict().items():
        assert same_bits(values[name].clone(), value), name


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_look_at_one_parameter_waits_for_its_update_alone(kind: str, tmp_path: Path) -> None:
    with owing(tmp_path, kind) as (model, engine, _):
        expected, _ = plain(3)
        queue = engine.pages.executor.pending_updates
        assert queue is not None
        assert same_bits(model[1].weight.detach().clone(), expected[1].weight.detach())
        assert engine.pages.executor.pending_updates is queue, "the others are still pending"
        assert same_bits(model[7].weight.detach().clone(), expected[7].weight.detach())
        engine.settle()
        assert engine.pages.executor.pending_updates is None
        assert_same_weights(model, expected)


@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, amsgrad=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    ],
    ids=["fused", "amsgrad", "sgd", "adagrad"],
)
def test_many_steps_are_those_of_the_plain_loop(make: Make, tmp_path: Path) -> None:
    with owing(tmp_path, make=make, warm=8) as (model, engine, _):
        assert engine.pages.executor.pending_updates is not None
        assert_same_weights(model, plain(8, make)[0])


def test_clipping_and_the_learning_rate_are_those_of_the_step(tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], Any]) -> list[float]:
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        losses = []
        for number in range(6):
            losses.append(float(backward(model, number)))
            clip()
            optimizer.step()
            scheduler.step()
            assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5 ** (number + 1)
            optimizer.zero_grad()
        return losses

    with owing(tmp_path, warm=0) as (model, engine, optimizer):
        losses = run(model, optimizer, lambda: engine.clip_grad_norm_(0.01))
        assert engine.pages.executor.pending_updates is not None
        assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5**6
        expected = net()
        assert losses == run(expected, adamw(expected), lambda: nn.utils.clip_grad_norm_(expected.parameters(), 0.01))
        assert_same_weights(model, expected)


def test_a_learning_rate_that_is_a_tensor(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False)

    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        rate = optimizer.param_groups[0]["lr"]
        for number in range(5):
            backward(model, number)
            optimizer.step()
            rate.mul_(0.5)
            optimizer.zero_grad()
            assert optimizer.param_groups[0]["lr"] is rate

    with owing(tmp_path, make=make, warm=0) as (model, engine, optimizer):
        run(model, optimizer)
        assert engine.pages.executor.pending_updates is not None
        engine.settle()
        expected = net()
        run(expected, make(expected))
        assert_same_weights(model, expected)


def test_state_and_checkpoints_are_whole(tmp_path: Path) -> None:
    expected, other = plain(3)
    with owing(tmp_path) as (model, engine, optimizer):
        assert engine.pages.executor.pending_updates is not None
        saved = optimizer.state_dict()
        assert engine.pages.executor.pending_updates is None
        truth = other.state_dict()["state"]
        for number, entry in saved["state"].items():
            for key, value in entry.items():
                assert same_bits(value.clone(), truth[number][key]), (number, key)
        del saved, value, entry
    with owing(tmp_path) as (model, engine, optimizer):
        assert {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {3.0}
        assert engine.pages.executor.pending_updates is None
        assert_same_weights(model, expected)


def test_gradients_that_are_forgotten_are_the_next_ones(tmp_path: Path) -> None:
    """`zero_grad` after a step takes nothing from the updates that are pending."""
    with owing(tmp_path) as (model, engine, optimizer):
        engine.zero_grad()
        optimizer.zero_grad()
        assert engine.pages.executor.pending_updates is not None
        assert_same_weights(model, plain(3)[0])


def test_a_parameter_that_is_read_has_been_updated(tmp_path: Path) -> None:
    expected, _ = plain(3)
    with owing(tmp_path) as (model, engine, _):
        assert any(is_pending(engine, slot) for slot in engine.slots)
        for param, theirs in zip(model.parameters(), expected.parameters(), strict=True):
            assert same_bits(param.detach().clone(), theirs.detach())
        assert not any(is_pending(engine, slot) for slot in engine.slots)


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_write_comes_after_the_update_that_is_pending(kind: str, tmp_path: Path) -> None:
    expected, other = plain(3)
    with owing(tmp_path, kind) as (model, engine, optimizer):
        assert any(is_pending(engine, slot) for slot in engine.slots)
        for either in (model, expected):
            with torch.no_grad():
                for param in either.parameters():
                    param.mul_(0.5)
        for number in range(3, 6):
            assert step(model, optimizer, number) == step(expected, other, number)
        assert_same_weights(model, expected)


def test_giving_up_ends_a_queue_although_something_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dropped: list[GradSlot] = []
    drop = GradSlot.drop

    def fails(grad: GradSlot) -> None:
        drop(grad)
        dropped.append(grad)
        if len(dropped) == 1:
            raise RuntimeError("the book")

    with owing(tmp_path) as (_, engine, optimizer):
        queue = optimizer.updates.queue
        assert queue is not None
        with monkeypatch.context() as patch:
            patch.setattr(GradSlot, "drop", fails)
            with pytest.raises(RuntimeError, match="the book"):
                queue.give_up()
        assert len(dropped) > 1
        assert engine.pages.executor.pending_updates is None
        assert optimizer.updates.queue is None
        assert not engine.pool.tenants.pinned()
        assert not any(is_pending(engine, slot) for slot in engine.slots)
        assert not any(t.name.endswith(GRAD_SUFFIX) for t in engine.pool.tensors())


def test_writing_waits_for_the_update(tmp_path: Path) -> None:
    with owing(tmp_path) as (model, engine, _):
        with gathered(model, write=True):
            model[3].weight.data.zero_()
        assert engine.pages.executor.pending_updates is None
        assert (model[3].weight == 0).all()
        assert same_bits(model[4].weight.detach().clone(), plain(3)[0][4].weight.detach())


def test_a_forward_under_autocast_changes_no_update(tmp_path: Path) -> None:
    losses = []
    expected = net()
    with owing(tmp_path, warm=0) as (model, engine, optimizer):
        for each, opt in ((model, optimizer), (expected, adamw(expected))):
            losses.append([])
            for number in range(6):
                with torch.autocast("cpu", torch.bfloat16):
                    loss = each(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
                losses[-1].append(float(loss.detach()))
        assert engine.pages.executor.pending_updates is not None
        assert losses[0] == losses[1]
        assert_same_weights(model, expected)


def test_fp32_masters(tmp_path: Path) -> None:
    values = []
    for spare in (2, 0.9):
        with owing(tmp_path, warm=5, spare=spare, master_weights="fp32") as (model, engine, _):
            assert (engine.pages.executor.pending_updates is not None) == (spare == 2)
            values.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(same_bits(value, values[1][name]) for name, value in values[0].items())


def test_a_parameter_with_a_master_is_not_loaded_to_be_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with owing(tmp_path, master_weights="fp32", warm=4, spare=3) as (_, engine, _):
        queue = engine.pages.executor.pending_updates
        assert queue is not None
        away = [slot.value.block for slot in engine.slots if slot.value.place is Place.AWAY]
        assert away
        loaded: list[Block] = []
        start_load = Traffic.start_load

        def start(traffic: Traffic, tensor: Block, *rest: Any) -> Any:
            loaded.append(tensor)
            return start_load(traffic, tensor, *rest)

        monkeypatch.setattr(Traffic, "start_load", start)
        engine.settle()
        assert any(tensor.tag is Tag.MASTER for tensor in loaded)
        assert not [tensor for tensor in loaded if tensor in away]


def test_a_parameter_whose_update_fails_is_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pages, "grouped", False)
    with owing(tmp_path, master_weights="fp32", warm=4, spare=3) as (model, engine, optimizer):
        engine.settle()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        occupied: list[Block] = []
        occupy, update = Pool.occupy, Arithmetic.update

        def noted(pool: Pool, tensor: Block) -> None:
            occupied.append(tensor)
            occupy(pool, tensor)

        def fails(arithmetic: Arithmetic, units: list[Unit], *rest: Any) -> Any:
            if any(unit.occupied for unit in units):
                raise RuntimeError("the kernel")
            return update(arithmetic, units, *rest)

        monkeypatch.setattr(Pool, "occupy", noted)
        with monkeypatch.context() as patch:
            patch.setattr(Arithmetic, "update", fails)
            backward(model, 4)
            optimizer.step()
            with pytest.raises(RuntimeError, match="the kernel"):
                engine.settle()
        assert occupied
        assert engine.pages.executor.pending_updates is None
        after = model.state_dict()
        for tensor in occupied:
            assert tensor.place is Place.AWAY
            assert same_bits(after[tensor.name].clone(), before[tensor.name])


def test_room_that_does_not_come_free_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[str] = []
    take_room = ComputeUpdates._take_room

    def parts_alone(sweep: ComputeUpdates, unit: Unit) -> None:
        # Memory that is on its way out may be in somebody's use for long.
        if unit.whole and unit.stays and unit.stop > window_elements(sweep.window_bytes, 4):
            refused.append(unit.state.slot.name)
            raise BudgetError("no room")
        take_room(sweep, unit)

    monkeypatch.setattr(ComputeUpdates, "_take_room", parts_alone)
    # Large enough to be cut.
    monkeypatch.setattr(sys.modules[__name__], "WIDTH", 128)
    with owing(tmp_path, warm=5) as (model, engine, _):
        engine.settle()
        assert refused
        assert_same_weights(model, plain(5)[0])


def test_no_overlap_without_room_for_it(tmp_path: Path) -> None:
    floor, _ = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    model = net()
    with on_pages(model, "host+disk", floor, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        for number in range(3):
            step(model, optimizer, number)
            assert engine.pages.executor.pending_updates is None
        assert_same_weights(model, plain(3)[0])


class Parent(nn.Module):
    """Reads all of its children's weights at once, by their names."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.cat([layer.weight for layer in self.layers])
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x + weights.sum() * 1e-3


@pytest.mark.parametrize("kind", ["host+disk", "mock+host"])
def test_without_room_beside_a_forward_the_step_is_still_pending(kind: str, tmp_path: Path) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(4):
            model(torch.ones(2, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    expected = Parent()
    run(expected, adamw(expected))
    floor, _ = needs(Parent(), tmp_path, kind, optimizer=adamw)
    budget = floor + 60_000
    model = Parent()
    with on_pages(model, kind, budget, tmp_path, update="blocking") as engine:
        run(model, engine.bind_optimizer(adamw(model)))
        assert_same_weights(model, expected)
    model = Parent()
    with on_pages(model, kind, budget, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        with pytest.raises(BudgetError, match="nothing of it is lost: .* set update='blocking'") as refused:
            run(model, optimizer)
        # Accelerate tries smaller batches after it.
        assert isinstance(refused.value, RuntimeError) is (kind == "mock+host")
        assert engine.pages.executor.pending_updates is not None
        engine.abort()
        assert optimizer.updates.lost is None
        done = optimizer.updates.steps
        once = Parent()
        inner = adamw(once)
        for _ in range(done):
            once(torch.ones(2, WIDTH)).sum().backward()
            inner.step()
            inner.zero_grad()
        assert_same_weights(model, once)


def test_what_is_pending_ends_with_the_engine(tmp_path: Path) -> None:
    with owing(tmp_path) as (_, engine, optimizer):
        assert engine.pages.executor.pending_updates is not None
        optimizer.close()
        assert engine.pages.executor.pending_updates is None
        assert not engine.pool.tenants.pinned()
    model = net()
    floor, need = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", floor + (need - floor) // 2, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        for number in range(3):
            step(model, optimizer, number)
        engine.settle()
        step(model, optimizer, 3)
        assert engine.pages.executor.pending_updates is not None
        engine.close()
        assert engine.pages.executor.pending_updates is None
        assert not list(engine.pool.tensors())


def test_detaching_ends_the_step_first(tmp_path: Path) -> None:
    with owing(tmp_path) as (model, engine, _):
        expected, _ = plain(3)
        engine.detach()
        for name, param in model.named_parameters():
            assert same_bits(param.detach(), expected.get_parameter(name).detach()), name


def test_an_update_that_fails_is_told_by_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = threading.Event()

    def pwritev(*args: Any) -> int:
        if failing.is_set():
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return os.pwritev(*args)

    monkeypatch.setattr("ptm_accel.memory.disk.Io", lambda: Io(pwritev=pwritev))
    with owing(tmp_path, warm=3) as (model, engine, optimizer):
        failing.set()
        with pytest.raises(DiskError, match="Input/output error"):
            go_on(model, engine, optimizer)
        failing.clear()
        # Where a pass has met the failed disk first, that was no look at what the update was to change.
        with suppress(DiskError):
            engine.settle()
        # Whoever has looked may have gone on.
        (said,) = (record.getMessage() for record in caplog.records if record.levelno == logging.ERROR)
        told = re.match(r"an optimizer step was interrupted \(DiskError: .*\) when (\d+) of its (\d+) parameters", said)
        assert told is not None, said
        count = len(list(model.parameters()))
        assert int(told[1]) < count
        assert int(told[2]) <= count
        engine.close()
        assert engine.pages.executor.pending_updates is None


def go_on(model: nn.Module, engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    for number in range(3, 6):
        step(model, optimizer, number)
    engine.settle()


def test_a_graph_of_values_before_a_pending_update_is_refused(tmp_path: Path) -> None:
    """Whoever unpacks the first weight carries its update out, and would be given the new values."""

    def head(model: nn.Sequential) -> torch.Tensor:
        # In backward it needs one weight, that of the last layer.
        last = [module for module in model if isinstance(module, nn.Linear)][-2:]
        loss: torch.Tensor = last[1](last[0](torch.ones(4, WIDTH)).tanh()).square().mean()
        return loss

    with owing(tmp_path, warm=3) as (model, engine, optimizer):
        backward(model, 3)
        second = head(model)
        optimizer.step()
        optimizer.zero_grad()
        assert engine.pages.executor.pending_updates is not None
        with pytest.raises(StaleGraphError, match=r"was updated 1 time\(s\) between a forward and its backward"):
            second.backward()
        engine.abort()
        engine.zero_grad()
