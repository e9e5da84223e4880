"""Updates in the backward of micro-batches by layer: the bits of plain accumulation, and never a wrong number.

What is updated may be read by no micro-batch any more, and each of them has added to its gradient.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import LostStepError, UnsupportedError
from ptm_accel.micro_batches.borders import Chunks
from ptm_accel.micro_batches.by_layer import ByLayer
from ptm_accel.optim.optimizer import PagedOptimizer
from tests.micro_batches.test_by_layer import Loss, built, by_layer, own_loss, penalty, same, works_of
from tests.micro_batches.test_by_layer import on_pages as on_disk
from tests.tiers import MEMORIES, needs, on_pages

STEPS = 6
LEAST, HALF = "the least", "half of the way to what it needs"

Make = Callable[[nn.Module], torch.optim.Optimizer]


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trained(model), lr=1e-3, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model), lr=1e-2, momentum=0.9)


@dataclass
class Run:
    """A model on pages whose steps are told to come right after their backward.

    Attributes:
        early: whether that is told.
        begun: the parameters whose updates had begun before the last step was asked for.
    """

    model: nn.Module
    engine: Engine
    optimizer: PagedOptimizer
    layered: ByLayer
    early: bool = True
    more: bool = False
    follows: bool = False
    begun: Sequence[str] = ()

    def backward(self, count: int, loss: Loss = own_loss, *, autocast: bool = False) -> list[torch.Tensor]:
        """All micro-batches of a step."""

        def turn(number: int) -> None:
            self.more = number < count - 1

        self.follows = self.early
        try:
            return self.layered.run(works_of(self.model, count, loss, autocast), turn)
        finally:
            self.follows = self.more = False

    def step(self, count: int, loss: Loss = own_loss, *, autocast: bool = False) -> list[torch.Tensor]:
        """One step; returns its losses."""
        losses = self.backward(count, loss, autocast=autocast)
        queue = self.optimizer.updates.early
        self.begun = [] if queue is None else [state.slot.name for _, state, _ in queue.work]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    @property
    def movable(self) -> set[str]:
        """The trained parameters that are not always there."""
        return {slot.name for slot in self.engine.slots if slot.group.movable and slot.param.requires_grad}


def run_of(model: nn.Module, engine: Engine, make: Make = adamw, *, inexact: bool = False) -> Run:
    run = Run(model, engine, engine.bind_optimizer(make(model)), by_layer(model, engine, inexact=inexact))
    engine.training.more_follow = lambda: run.more
    engine.training.updates_in_backward = lambda: run.follows
    return run


@contextmanager
def paged(
    model: nn.Module,
    folder: Path,
    kind: str = "host+disk",
    budget: str = HALF,
    *,
    make: Make = adamw,
    inexact: bool = False,
    **options: Any,
) -> Iterator[Run]:
    floor, need = needs(model, folder, kind, optimizer=make, **options)
    size = floor if budget == LEAST else (floor + need) // 2
    with on_pages(model, kind, size, folder, **options) as engine:
        yield run_of(model, engine, make, inexact=inexact)
        engine.settle()


def plain_steps(
    model: nn.Module, counts: Sequence[int], loss: Loss = own_loss, make: Make = adamw, *, autocast: bool = False
) -> list[torch.Tensor]:
    """Trains in ordinary memory, one micro-batch after the other."""
    optimizer, found = make(model), []
    for count in counts:
        found += [work() for work in works_of(model, count, loss, autocast)]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.thinned(9)
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("budget", [LEAST, HALF])
@pytest.mark.parametrize("make", [adamw, sgd])
@pytest.mark.parametrize("how", [{}, {"lora": True}, {"autocast": True}, {"frozen": 12}], ids=str)
def test_the_bits_are_those_of_plain_accumulation(
    how: dict[str, Any], make: Make, budget: str, kind: str, tmp_path: Path
) -> None:
    built_so = {name: value for name, value in how.items() if name != "autocast"}
    autocast = "autocast" in how
    plain, model = built("llama", **built_so), built("llama", **built_so)
    expected = plain_steps(plain, [3] * STEPS, make=make, autocast=autocast)
    with paged(model, tmp_path, kind, budget, make=make) as run:
        losses = [loss for _ in range(STEPS) for loss in run.step(3, autocast=autocast)]
        assert set(run.begun) == (set() if budget == LEAST else run.movable)
        assert all(map(torch.equal, losses, expected))
        assert same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", ["host+disk", "mock+host+disk"])
def test_masters_are_updated_as_in_a_blocking_step(kind: str, count: int, tmp_path: Path) -> None:
    """Their sums are in fp32, and made so within the pass."""
    weights = []
    for update in ("exact", "blocking"):
        model = built("llama").to(torch.bfloat16)
        with paged(model, tmp_path, kind, master_weights="fp32", update=update) as run:
            for _ in range(STEPS):
                run.step(count)
            assert set(run.begun) == (run.movable if update == "exact" else set())
            weights.append({name: value.clone() for name, value in model.state_dict().items()})
    assert same(*weights)


def test_steps_of_other_counts(tmp_path: Path) -> None:
    """The last step of an epoch has fewer micro-batches, or one."""
    counts = [3, 3, 2, 1] * 3
    plain, model = built("llama"), built("llama")
    expected = plain_steps(plain, counts)
    with paged(model, tmp_path) as run:
        losses, begun = [], []
        for count in counts:
            losses += run.step(count)
            begun.append(len(run.begun))
        # The first of each kind is recorded.
        assert begun == [0, len(run.movable), 0, 0, *[len(run.movable)] * 8]
        assert all(map(torch.equal, losses, expected))
        assert same(model.state_dict(), plain.state_dict())


def test_the_norm_is_that_of_plain_accumulation(tmp_path: Path) -> None:
    plain, model = built("llama"), built("llama")
    plain_steps(plain, [3] * 3)
    with paged(model, tmp_path) as run:
        for _ in range(3):
            run.step(3)
        run.backward(3)
        assert run.optimizer.updates.early is not None
        found = run.engine.clip_grad_norm_(float("inf"))
        for work in works_of(plain, 3, own_loss, False):
            work()
        assert torch.equal(found, nn.utils.clip_grad_norm_(plain.parameters(), float("inf")))
        run.optimizer.step()


def test_plans_have_the_updates_in_them_and_less_is_moved(tmp_path: Path) -> None:
    """What an update uses up in backward need not be kept, or leave and come back, until the step."""
    loaded, begun = {}, {}
    for early in (False, True):
        model = built("large")
        with on_disk(model, tmp_path, "8MiB") as engine:
            run = run_of(model, engine)
            run.early = early
            for step in range(STEPS):
                if step == 3:
                    engine.settle()
                    before, stats = replace(engine.pool.stats), engine.pool.stats
                run.step(3)
            begun[early] = bool(run.begun)
            engine.settle()
            loaded[early] = stats.loaded_bytes - before.loaded_bytes
            assert engine.run_ahead.departures == 0
            assert stats.faults - before.faults <= 3
    assert begun == {False: False, True: True}
    assert 0 < loaded[True] < 0.95 * loaded[False], loaded


# ---- what is not final -----------------------------------------------------------------------------------------------


class Aside(nn.Module):
    """A model with a layer beside its own, which losses may use."""

    def __init__(self) -> None:
        super().__init__()
        self.model = built("llama")
        self.aside = nn.Linear(32, 32, bias=False)

    def forward(self, **given: Any) -> Any:
        """The model."""
        return self.model(**given)

    def term(self) -> torch.Tensor:
        """For a loss."""
        return self.aside(torch.ones(1, 32)).square().mean()


def number_of(batch: dict[str, Any]) -> int:
    """Of a micro-batch of `batches_of`."""
    return (batch["input_ids"].shape[1] - 9) // 3


def aside_in_all(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return own_loss(model, batch) + model.term()


def aside_in_the_first(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return own_loss(model, batch) + (model.term() if number_of(batch) == 0 else 0)


def layers_but_in_the_last(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return own_loss(model, batch) if number_of(batch) < 2 else model.term()


@pytest.mark.parametrize("others", [aside_in_the_first, layers_but_in_the_last])
@pytest.mark.parametrize("from_step", [0, 3])
def test_what_the_last_micro_batch_has_no_gradient_of_is_updated_too(
    from_step: int, others: Loss, tmp_path: Path
) -> None:
    plain, model = Aside(), Aside()
    plain.load_state_dict(model.state_dict())
    optimizer, expected, found = adamw(plain), [], []
    losses = [aside_in_all] * from_step + [others] * (STEPS - from_step)
    for loss in losses:
        expected += [work() for work in works_of(plain, 3, loss, False)]
        optimizer.step()
        optimizer.zero_grad()
    with paged(model, tmp_path) as run:
        for loss in losses:
            found += run.step(3, loss)
        assert all(map(torch.equal, found, expected))
        assert same(model.state_dict(), plain.state_dict())
        of_model = set() if others is layers_but_in_the_last else run.movable - {"aside.weight"}
        assert set(run.begun) - {"aside.weight"} == of_model


def test_a_step_that_is_cut_into_chunks_is_updated_when_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last chunk adds to the sums of those before it."""
    sizes: list[int] = []
    monkeypatch.setattr(Chunks, "next", lambda self, shapes: min(sizes[-1], len(shapes)))
    plain, model = built("llama"), built("llama")
    expected, losses, begun = plain_steps(plain, [3] * 9), [], []
    with paged(model, tmp_path) as run:
        for size in (1, 3, 2, 3, 2, 1, 2, 1, 3):
            sizes.append(size)
            losses += run.step(3)
            begun.append(len(run.begun))
        assert begun == [len(run.movable) if size == 3 and number > 1 else 0 for number, size in enumerate(sizes)]
        assert all(map(torch.equal, losses, expected))
        assert same(model.state_dict(), plain.state_dict())


def test_tied_embeddings_wait_for_the_step(tmp_path: Path) -> None:
    weights = []
    for early in (False, True):
        with paged(built("tied"), tmp_path, inexact=True) as run:
            run.early = early
            for _ in range(STEPS):
                run.step(3)
            tied = {"model.embed_tokens.weight"}
            assert set(run.begun) == (run.movable - tied if early else set())
            assert tied <= run.movable
            weights.append({name: value.clone() for name, value in run.model.state_dict().items()})
    assert same(*weights)


def test_a_weight_that_layers_share_waits_for_the_step(tmp_path: Path) -> None:
    def shared() -> nn.Module:
        model: Any = built("llama")
        model.model.layers[2].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight
        return model

    weights = []
    for early in (False, True):
        with paged(shared(), tmp_path) as run:
            run.early = early
            for _ in range(STEPS):
                run.step(3)
            once = run.movable - {"model.layers.0.mlp.up_proj.weight"}
            assert set(run.begun) == (once if early else set())
            weights.append({name: value.clone() for name, value in run.model.state_dict().items()})
    assert same(*weights)


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_what_is_refused_is_refused_before_anything_is_updated(tmp_path: Path) -> None:
    """Gradients of heads are whole long before a loss is known to be one that cannot be."""
    plain, model = built("llama"), built("llama")
    with paged(model, tmp_path) as run:
        for _ in range(3):
            run.step(3)
        assert "lm_head.weight" in run.begun
        with pytest.raises(UnsupportedError, match="the loss uses parameters of layers outside of their forward"):
            run.backward(3, penalty)
        assert run.optimizer.updates.early is None
        run.engine.abort()
        run.engine.zero_grad()
        run.step(3)
        plain_steps(plain, [3] * 4)
        assert same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("number", [0, 2])
def test_an_error_after_updates_have_begun_loses_the_step(
    number: int, error: type[BaseException], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = built("llama")
    with paged(model, tmp_path) as run:
        for _ in range(3):
            run.step(3)
        run.engine.settle()
        calls = 0

        def fail(*args: Any) -> None:
            # In the forward of all three, and then again in the backward of some.
            nonlocal calls
            calls += 1
            if calls == 4 + number:
                raise error

        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with caplog.at_level(logging.ERROR), pytest.raises(error):
            run.backward(3)
        hook.remove()
        assert "backward was interrupted after updates had begun: the weights are between two steps" in caplog.text
        assert run.optimizer.updates.early is None
        run.engine.abort()
        run.engine.zero_grad()
        with pytest.raises(LostStepError, match=r"the update of step 4 failed, and \d+ parameters were not updated"):
            run.optimizer.state_dict()
        run.step(3)
