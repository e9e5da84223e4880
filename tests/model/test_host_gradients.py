"""Gradients of further micro-batches are added on the CPU, below a device: the numbers are those of adding on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.host_sums import HostSum
from ptm_accel.pages import Pages
from tests.model.test_group_members import WIDTH, blocks
from tests.plain_loop import adamw, assert_same, same_bits
from tests.test_equality import plain_run, sizes
from tests.tiers import in_groups, members, needs, on_pages
from tests.trainer_runs import Job, run_trainer
from tests.zoo import ENTRIES

pytestmark = pytest.mark.usefixtures("all_cores")
MICRO, STEPS = 4, 4


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each block that was sent to be added in host memory was."""
    found: list[bool] = []
    add = HostStore.add

    def told(self: HostStore, *args: Any) -> Any:
        sums = add(self, *args)
        found.append(sums is not None)
        return sums

    monkeypatch.setattr(HostStore, "add", told)
    return found


@pytest.mark.thinned(5)
@pytest.mark.parametrize("clip", [0.1, 0.0])
@pytest.mark.parametrize("memory", ["mock+host", "mock+host+disk"])
@pytest.mark.parametrize("model", ["llama-tied", "gpt2", "t5", "mixtral", "lora"])
def test_the_trainer_s_numbers(
    model: str,
    memory: str,
    clip: float,
    scratch: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    added: list[bool],
) -> None:
    entry = ENTRIES[model]
    job = Job(accumulation=3, clip=clip, checkpointing=entry.checkpointing[-1])
    plain = plain_run(model, job, scratch)
    floor, need = sizes(model, memory, scratch)
    ours = entry.build()
    # What is trained of an adapter is small, and stays where it is in a group of several.
    monkeypatch.setattr(Pages, "grouped", model != "lora")
    host = None if memory == "mock+host" else 2 * need
    with in_groups(), on_pages(ours, memory, max(need // 2, floor), tmp_path, host_bytes=host) as engine:
        paged = run_trainer(ours, entry, job, tmp_path, paged=True)
        assert (members(engine) > 1) == (model != "lora")
    assert_same(paged, plain)
    assert any(added)


Loss = Callable[[nn.ModuleList, int, int], torch.Tensor]


def loss_of(model: nn.ModuleList, step: int, part: int, used: Iterable[str] = "abc") -> torch.Tensor:
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).mul(1 + step + part).sin()
    for block in model:
        x = block(x, used)
    return x.square().mean()


def train(model: nn.ModuleList, engine: Engine | None, loss: Loss) -> dict[str, torch.Tensor]:
    optimizer = adamw(model)
    if engine is not None:
        optimizer = engine.bind_optimizer(optimizer)
    for step in range(STEPS):
        for part in range(MICRO):
            if engine is None:
                loss(model, step, part).backward()
                continue
            engine.training.more_follow = partial(bool, MICRO - 1 - part)
            value = loss(model, step, part)
            with engine.training.backward():
                value.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def check(loss: Loss, directory: Path, *, host_bytes: int | None = None, **options: Any) -> int:
    """Trains with half of the room, and returns the bytes that came in."""
    expected = train(blocks(), None, loss)
    model = blocks()
    _, need = needs(blocks(), directory, "mock+host", **options)
    with in_groups(), on_pages(model, "mock+host", need // 2, directory, host_bytes=host_bytes, **options) as engine:
        found = train(model, engine, loss)
        assert members(engine) > 1
        loaded = engine.pool.stats.loaded_bytes
    for name, value in expected.items():
        assert same_bits(found[name], value), name
    return loaded


def test_sums_that_are_not_brought_in_are_right(tmp_path: Path, added: list[bool], monkeypatch: Any) -> None:
    loaded = check(loss_of, tmp_path)
    assert added.count(True) > STEPS
    monkeypatch.setattr(HostStore, "is_framed", lambda self, handle: False)
    assert check(loss_of, tmp_path) > loaded


def test_members_that_get_none_in_some_micro_batches(tmp_path: Path, added: list[bool]) -> None:
    """Their sums may begin after those of their neighbours, and what comes to a block may be less than all of it."""
    check(lambda model, step, part: loss_of(model, step, part, ("ab", "abc", "c", "b")[part]), tmp_path)
    assert any(added)


def test_a_second_gradient_of_one_backward_is_added_after_the_first(tmp_path: Path, added: list[bool]) -> None:
    """Re-entrant checkpoints of one layer make a gradient each."""

    def twice(model: nn.ModuleList, step: int, part: int) -> torch.Tensor:
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).mul(1 + step + part).sin().requires_grad_()
        for block in model:
            x = checkpoint(block, checkpoint(block, x, "ab", use_reentrant=True), "ab", use_reentrant=True)
        return x.square().mean()

    check(twice, tmp_path)


def test_a_backing_store_without_room_has_them_added_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    new = HostStore.new
    refused: list[str] = []

    def full(self: HostStore, nbytes: int, tag: Any, name: str) -> Any:
        if name.endswith(".more"):
            refused.append(name)
            raise BudgetError("host frames: no room for it in this test")
        return new(self, nbytes, tag, name)

    monkeypatch.setattr(HostStore, "new", full)
    check(loss_of, tmp_path)
    assert refused


def test_a_backward_that_is_broken_off_leaves_what_had_arrived(tmp_path: Path, added: list[bool]) -> None:
    def gradients(engine: Engine | None, model: nn.ModuleList) -> dict[str, torch.Tensor]:
        for part in range(3):
            value = loss_of(model, 0, part)
            if part == 2:
                hook = model[2].register_full_backward_hook(broken)
            try:
                if engine is None:
                    value.backward()
                else:
                    engine.training.more_follow = lambda: True
                    with engine.training.backward():
                        value.backward()
            except KeyError:
                hook.remove()
        found = ((name, param.grad) for name, param in model.named_parameters())
        return {name: gradient.clone() for name, gradient in found if gradient is not None}

    def broken(*args: Any) -> None:
        raise KeyError("a hook of the user's")

    expected = gradients(None, blocks())
    model = blocks()
    _, need = needs(blocks(), tmp_path, "mock+host")
    with in_groups(), on_pages(model, "mock+host", need // 2, tmp_path) as engine:
        engine.bind_optimizer(adamw(model))
        found = gradients(engine, model)
    assert any(added)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert same_bits(found[name], value), name


def test_an_addition_that_fails_is_raised_to_whoever_waits() -> None:
    class Failed:
        def done(self) -> bool:
            return True

        def wait(self) -> None:
            raise OSError("the link is down")

        order = wait

    total = torch.zeros(4)
    job = HostSum([(total, torch.ones(4))], [Failed()], [])
    job.run()
    assert job.done()
    for _ in range(2):
        with pytest.raises(OSError, match="the link is down"):
            job.wait()
    assert not total.any(), "what should be added had not arrived"
    read = HostSum([(total, torch.ones(4))], [], [Failed()])
    read.run()
    read.order()
    assert total.eq(1).all(), "an error of those that read the sum is raised elsewhere"
