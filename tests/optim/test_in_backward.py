"""Updates that begin during backward: where they may, with the numbers of a blocking step; where they may not, none."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, DiskError, LostStepError, StaleGraphError, UnsupportedError
from ptm_accel.optim.batches import Batches
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.optim.update_queue import UpdateQueue
from ptm_accel.outside import gathered
from tests.plain_loop import same_bits
from tests.tiers import MEMORIES, config, needs, on_pages, open_memory

WIDTH, LAYERS, STEPS = 48, 8, 7

Make = Callable[[nn.Module], torch.optim.Optimizer]
Before = Callable[[Engine, PagedOptimizer], object]


class Net(nn.Module):
    """Layers in a row, and ways to use them otherwise than a row does.

    Attributes:
        twice: uses the last layer in the middle as well, both times recomputed: its gradient arrives twice.
        aside: reads the last layer in the middle without asking for a gradient there, recomputed in backward.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)).to(dtype)
        self.twice = self.aside = False

    def _aside(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.linear(x.tanh(), self.layers[-1].weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all layers."""
        for number, layer in enumerate(self.layers):
            if number == 2 and self.twice:
                x = checkpoint(self.layers[-1], x, use_reentrant=True)
            if number == 2 and self.aside:
                x = checkpoint(self._aside, x, use_reentrant=False)
            again = self.twice and number == LAYERS - 1
            x = checkpoint(layer, x, use_reentrant=True) if again else layer(x).tanh()
        return x


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def plain(
    steps: int = STEPS, make: Make = adamw, model: nn.Module | None = None, **uses: bool
) -> tuple[Any, torch.optim.Optimizer, list[float]]:
    model = Net() if model is None else model
    vars(model).update(uses)
    optimizer, norms = make(model), []
    for number in range(steps):
        loss_of(model, number).backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), float("inf"))))
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer, norms


@contextmanager
def paged(
    directory: Path, kind: str = "host+disk", *, make: Make = adamw, dtype: torch.dtype = torch.float32, **options: Any
) -> Iterator[tuple[Net, Engine, PagedOptimizer]]:
    model = Net(dtype)
    floor, need = needs(Net(dtype), directory, kind, optimizer=make, **options)
    with on_pages(model, kind, floor + (need - floor) // 2, directory, **options) as engine:
        engine.training.updates_in_backward = lambda: True
        yield model, engine, engine.bind_optimizer(make(model))


def backward(model: nn.Module, engine: Engine, number: int) -> None:
    with engine.training.backward():
        loss_of(model, number).backward()


def step(model: nn.Module, engine: Engine, optimizer: PagedOptimizer, number: int) -> tuple[int, float]:
    """One step; returns how many updates had begun before it was asked for, and the norm."""
    backward(model, engine, number)
    queue = optimizer.updates.early
    begun = 0 if queue is None else len(queue.work)
    norm = engine.clip_grad_norm_(float("inf"))
    optimizer.step()
    optimizer.zero_grad()
    return begun, float(norm)


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    values = model.state_dict()
    for name, value in other.state_dict().items():
        assert same_bits(values[name].clone(), value), name


@pytest.mark.thinned(7)
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize(
    "make",
    [
        adamw,
        lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), foreach=False, amsgrad=True),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
        lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
        lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    ],
    ids=["fused", "amsgrad", "momentum", "sgd", "adagrad"],
)
def test_the_numbers_are_those_of_the_plain_loop(make: Make, kind: str, tmp_path: Path) -> None:
    model, other, norms = plain(make=make)
    with paged(tmp_path, kind, make=make) as (on, engine, optimizer):
        found = [step(on, engine, optimizer, number) for number in range(STEPS)]
        assert [norm for _, norm in found] == norms
        # Without any state it is never known that a parameter has been met before.
        expected = 2 * LAYERS if other.state[model.layers[0].weight] else 0
        assert [begun for begun, _ in found][2:] == [expected] * (STEPS - 2)
        assert_same_weights(on, model)
        states = optimizer.state_dict()["state"]
        for number, entry in other.state_dict()["state"].items():
            for key, value in entry.items():
                if isinstance(value, torch.Tensor):
                    assert same_bits(states[number][key].clone(), value), (number, key)
        del states


def test_masters_are_updated_as_in_a_blocking_step(tmp_path: Path) -> None:
    weights = []
    for update in ("exact", "blocking"):
        options = {"master_weights": "fp32", "update": update}
        with paged(tmp_path, dtype=torch.bfloat16, **options) as (model, engine, optimizer):
            begun = [step(model, engine, optimizer, number)[0] for number in range(STEPS)]
            assert begun[-1] == (2 * LAYERS if update == "exact" else 0)
            weights.append({name: value.clone() for name, value in model.state_dict().items()})
    for name, value in weights[0].items():
        assert same_bits(value, weights[1][name]), name


def test_gradients_are_used_up_as_they_arrive(tmp_path: Path) -> None:
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        backward(model, engine, 4)
        assert engine.gradients is not None
        assert not engine.gradients.present()
        assert len(engine.gradients.arrived()) == 2 * LAYERS
        optimizer.step()
        assert not engine.gradients.arrived()
        assert_same_weights(model, plain(5)[0])


def test_a_step_is_saved_whole_and_looked_at_whole(tmp_path: Path) -> None:
    expected, other, _ = plain(5)
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(5):
            step(model, engine, optimizer, number)
        assert same_bits(model.layers[3].weight.detach().clone(), expected.layers[3].weight.detach())
        assert {float(entry["step"]) for entry in optimizer.state_dict()["state"].values()} == {5.0}
        moments = optimizer.state_dict()["state"][6]["exp_avg"]
        assert same_bits(moments.clone(), other.state_dict()["state"][6]["exp_avg"])
        del moments


@pytest.mark.parametrize("use", ["twice", "aside"])
def test_a_parameter_that_backward_comes_back_to_waits_for_the_step(use: str, tmp_path: Path) -> None:
    with paged(tmp_path) as (model, engine, optimizer):
        vars(model)[use] = True
        begun = [step(model, engine, optimizer, number)[0] for number in range(STEPS)]
        # Two arrivals of both, or a late use of the weight alone.
        assert begun[-1] == 2 * LAYERS - {"twice": 2, "aside": 1}[use]
        assert_same_weights(model, plain(**{use: True})[0])


@pytest.mark.parametrize("use", ["twice", "aside"])
def test_a_pass_unlike_those_before_is_an_error_and_never_a_wrong_number(
    use: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        vars(model)[use] = True
        message = "layers.7.weight was read in backward after its gradient was complete.*Set update='blocking'"
        with caplog.at_level(logging.ERROR), pytest.raises(StaleGraphError, match=message):
            backward(model, engine, 4)
        assert "Resume from the last checkpoint" in caplog.text
        engine.abort()
        engine.zero_grad()
        vars(model)[use] = False
        step(model, engine, optimizer, 5)


def test_a_second_backward_is_an_error_and_never_a_wrong_number(tmp_path: Path) -> None:
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        message = "a second gradient of layers.7.bias has arrived.*Set update='blocking'"
        late = model.layers[7].bias.sum()
        with engine.training.backward():
            loss_of(model, 4).backward()
            with pytest.raises(UnsupportedError, match=message):
                late.backward()
        engine.abort()


def test_where_updates_may_not_begin(tmp_path: Path) -> None:
    def begun(
        make: Make = adamw, before: Callable[[Engine, PagedOptimizer], object] | None = None, **options: Any
    ) -> int:
        with paged(tmp_path, make=make, **options) as (model, engine, optimizer):
            if before is not None:
                before(engine, optimizer)
            return [step(model, engine, optimizer, number)[0] for number in range(4)][-1]

    assert begun() == 2 * LAYERS
    assert begun(update="blocking") == 0
    assert begun(lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2)) == 0
    assert begun(before=lambda engine, _: setattr(engine.training, "updates_in_backward", lambda: False)) == 0
    assert begun(before=lambda _, optimizer: optimizer.register_step_pre_hook(lambda *_: None)) == 0
    assert begun(before=lambda engine, _: setattr(engine.run_ahead, "enabled", False)) == 0


def test_a_backward_that_nobody_announced_begins_nothing(tmp_path: Path) -> None:
    with paged(tmp_path) as (model, _, optimizer):
        for number in range(STEPS):
            loss_of(model, number).backward()
            assert optimizer.updates.early is None
            optimizer.step()
            optimizer.zero_grad()
        assert_same_weights(model, plain()[0])


def test_gradients_without_a_finite_norm_are_an_error(tmp_path: Path) -> None:
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        model.layers[0].weight.register_hook(lambda gradient: gradient * float("inf"))
        with pytest.raises(UnsupportedError, match="no finite norm, and updates have begun"):
            step(model, engine, optimizer, 4)
        engine.abort()


def test_what_comes_between_a_gradient_and_its_update_is_refused(tmp_path: Path) -> None:
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(3):
            step(model, engine, optimizer, number)
        backward(model, engine, 3)
        with pytest.raises(UnsupportedError, match=r"multiplied by .*code other than the Trainer clips"):
            engine.clip_grad_norm_(1e-6)
        with pytest.raises(UnsupportedError, match="the 1-norm of the gradient of layers.* was asked for after"):
            engine.clip_grad_norm_(1.0, norm_type=1.0)
        last = dict(model.named_parameters())["layers.7.weight"]
        for value in (torch.zeros(WIDTH, WIDTH), None):
            with pytest.raises(UnsupportedError, match="a gradient was looked at or set between backward and"):
                last.grad = value
        optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(UnsupportedError, match="hyperparameters were changed between backward and"):
            optimizer.step()
        assert optimizer.updates.early is None
        engine.settle()


def test_an_update_that_fails_ends_backward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise DiskError("the disk is gone")

    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        # What is left of the step before would fail in the forward, before any update of the next has begun.
        optimizer.settle()
        with monkeypatch.context() as broken:
            broken.setattr(ComputeUpdates, "carry_out", fail)
            with caplog.at_level(logging.ERROR), pytest.raises(DiskError, match="the disk is gone"):
                backward(model, engine, 4)
        assert "between two steps" in caplog.text
        engine.abort()
        engine.zero_grad()
        step(model, engine, optimizer, 5)


def test_an_update_that_cannot_be_taken_on_leaves_no_gradient_spent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        with monkeypatch.context() as broken:
            broken.setattr(UpdateQueue, "add", fail_on_disk)
            with pytest.raises(DiskError, match="the disk is gone"):
                backward(model, engine, 4)
        assert engine.gradients is not None
        assert not any(grad.spent for grad in engine.gradients.slots())
        assert engine.pages.executor.pending_updates is None
        engine.abort()
        engine.zero_grad()
        step(model, engine, optimizer, 5)


def test_a_step_whose_updates_have_failed_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        # On a slow disk the last of these steps may still be pending, if it was not made in backward.
        engine.settle()
        counted = engine.run_ahead.tally.updated_bytes
        pump, catch_up = UpdateQueue.pump, UpdateQueue.catch_up
        with monkeypatch.context() as slow:
            slow.setattr(UpdateQueue, "pump", lambda queue: pump(queue) if len(queue.work) < 6 else None)
            slow.setattr(
                UpdateQueue, "catch_up", lambda queue, most: catch_up(queue, 0) if len(queue.work) < 6 else None
            )
            backward(model, engine, 4)
        queue = optimizer.updates.early
        assert queue is not None
        begun, done = len(queue.work), len(queue.updated)
        assert 0 < done < begun
        with monkeypatch.context() as broken:
            broken.setattr(ComputeUpdates, "carry_out", fail_on_disk)
            broken.setattr(Batches, "open", fail_on_disk)
            with pytest.raises(DiskError, match="the disk is gone"):
                queue.pump()
        assert engine.pages.executor.pending_updates is None
        values = {slot.name: slot.value.slot_bytes for slot in engine.slots}
        assert engine.run_ahead.tally.updated_bytes - counted == sum(values[name] for name in queue.updated)
        said = rf"of {begun} that had begun during backward {done} were carried out, .* Resume from the last checkpoint"
        with caplog.at_level(logging.ERROR), pytest.raises(UnsupportedError, match=said):
            optimizer.step()
        assert "between two steps" in caplog.text
        assert optimizer.updates.early is None
        assert engine.run_ahead.tally.updated_bytes - counted == sum(values[name] for name in queue.updated)
        engine.zero_grad()
        step(model, engine, optimizer, 5)


def fail_on_disk(*args: Any, **kwargs: Any) -> None:
    raise DiskError("the disk is gone")


def test_what_fails_after_a_step_says_nothing_of_the_weights(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Ebb:
        def end_step(self) -> None:
            raise BudgetError("the activation reserve is full")

    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        backward(model, engine, 4)
        assert optimizer.updates.early is not None
        reserve, engine.pool.admission.activation_reserve = engine.pool.admission.activation_reserve, Ebb()  # type: ignore[assignment]
        with caplog.at_level(logging.ERROR), pytest.raises(BudgetError, match="the activation reserve is full"):
            optimizer.step()
        engine.pool.admission.activation_reserve = reserve
        assert not caplog.text
        assert optimizer.updates.early is None
        optimizer.zero_grad()
        assert_same_weights(model, plain(5)[0])


def test_a_backward_that_fails_before_any_update_leaves_the_step_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("not today")

    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        loss = loss_of(model, 4)
        loss.register_hook(fail)
        with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="not today"), engine.training.backward():
            loss.backward()
        assert not caplog.text
        engine.abort()
        assert_same_weights(model, plain(4)[0])


def test_values_that_somebody_else_has_a_view_of_wait_for_the_step(tmp_path: Path) -> None:
    """A use outside of all forwards is saved by autograd as it is: nobody here is asked for it again."""

    def run(model: Net, number: int) -> torch.Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()
        mixed = nn.functional.linear(model.layers[0](x), model.layers[-1].weight.detach())
        return model(mixed).square().mean()

    expected = Net()
    other = adamw(expected)
    with paged(tmp_path) as (model, engine, optimizer):
        begun = []
        for number in range(STEPS):
            run(expected, number).backward()
            other.step()
            other.zero_grad()
            loss = run(model, number)
            with engine.training.backward():
                loss.backward()
            queue = optimizer.updates.early
            begun.append([] if queue is None else [state.slot.name for _, state, _ in queue.work])
            optimizer.step()
            optimizer.zero_grad()
        assert "layers.6.weight" in begun[-1]
        assert "layers.7.weight" not in begun[-1]
        assert_same_weights(model, expected)


class Uneven(nn.Module):
    """Layers of random widths, recomputed or not, the last of them used once or twice."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        rng = random.Random(seed)
        self.recomputed, self.twice = rng.random() < 0.5, rng.random() < 0.3
        widths = [WIDTH, *(rng.choice([32, 48, 64, 96, 130]) for _ in range(rng.randint(3, 7))), 64]
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in itertools.pairwise(widths))
        self.last = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through all layers."""
        for layer in self.layers:
            x = (checkpoint(layer, x, use_reentrant=False) if self.recomputed else layer(x)).tanh()
        x = self.last(x)
        return self.last(x.tanh()) if self.twice else x


@pytest.mark.thinned(6)
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("seed", range(14))
def test_windows_that_are_open_give_way_to_backward(kind: str, seed: int, tmp_path: Path) -> None:
    """Models of uneven layers under the least budgets at which updates may begin."""
    expected, _, _ = plain(STEPS, model=Uneven(seed))
    memory = open_memory(kind, 64 << 20, tmp_path)
    engine = Engine.attach(Uneven(seed), config(), memory=memory)
    engine.bind_optimizer(adamw(engine.model))
    least = engine.needs.floor.total_bytes + engine.needs.floor.moving_bytes
    engine.detach()
    model = Uneven(seed)
    with on_pages(model, kind, least + 4096 * (seed % 3), tmp_path) as engine:
        engine.training.updates_in_backward = lambda: True
        optimizer = engine.bind_optimizer(adamw(model))
        begun = [step(model, engine, optimizer, number)[0] for number in range(STEPS)]
        # Beside pages in host memory, holes of the C library's heap may have taken what there was room to spare.
        assert begun[-1] > 0 or kind == "host+disk"
        assert_same_weights(model, expected)


def test_nobody_sees_half_a_step(tmp_path: Path) -> None:
    """Between a backward in which updates have begun, and their step."""
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        backward(model, engine, 4)
        assert optimizer.updates.early is not None
        for look in (
            model.state_dict,
            optimizer.state_dict,
            optimizer.zero_grad,
            lambda: optimizer.gradients.change(lambda gradient: None),
            lambda: backward(model, engine, 5),
            lambda: gathered(engine.model, grads=True).__enter__(),
        ):
            with pytest.raises((UnsupportedError, StaleGraphError), match="between backward and"):
                look()
        with pytest.raises(StaleGraphError, match="was read between backward and its step"):
            model.layers[0].weight.detach()
        optimizer.step()
        assert_same_weights(model, plain(5)[0])


def test_while_updates_are_forbidden_none_begins(tmp_path: Path) -> None:
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(STEPS):
            with engine.training.no_updates():
                assert step(model, engine, optimizer, number)[0] == 0
        assert_same_weights(model, plain()[0])


def test_what_is_broken_off_is_lost_even_if_all_that_had_begun_was_done(tmp_path: Path) -> None:
    """Half of the parameters are of the next step then: that is not to be saved as if it were whole."""
    with paged(tmp_path) as (model, engine, optimizer):
        for number in range(4):
            step(model, engine, optimizer, number)
        engine.settle()
        before = {name: value.clone() for name, value in model.state_dict().items()}

        def broken(gradient: torch.Tensor) -> None:
            queue = optimizer.updates.early
            assert queue is not None
            queue.catch_up(0)
            raise RuntimeError("of somebody's own")

        hook = model.layers[1].weight.register_hook(broken)
        with pytest.raises(RuntimeError, match="of somebody's own"):
            backward(model, engine, 4)
        hook.remove()
        engine.abort()
        engine.zero_grad()
        values = model.state_dict()
        same = sum(same_bits(values[name].clone(), value) for name, value in before.items())
        assert 0 < same < len(before)
        with pytest.raises(LostStepError, match=rf"of step 5 failed, and {same} parameters were not updated"):
            optimizer.state_dict()
        del values
