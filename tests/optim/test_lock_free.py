"""Lock-free updating: exact without staleness, no torn read, nothing lost, and a clean stop wherever somebody looks."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, ConfigError, DiskError, LostStepError, UnsupportedError
from ptm_accel.memory.budget import Tag
from ptm_accel.optim.lock_free import LockFreeUpdates
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.optim.sweeps import Sweeps, WaitingGroup
from ptm_accel.outside import gathered
from ptm_accel.units import format_least
from tests.lazy_updates import delays, lazily
from tests.optim.test_update_queue import assert_same_weights, net, plain
from tests.plain_loop import same_bits
from tests.stacks import adamw, backward, step
from tests.tiers import in_groups, members, needs, on_pages, open_memory

Make = Callable[[nn.Module], torch.optim.Optimizer]


@contextmanager
def lagging(
    directory: Path,
    staleness: int,
    *,
    make: Make = adamw,
    model: nn.Module | None = None,
    spare: int = 0,
    **options: Any,
) -> Iterator[tuple[Any, Engine, PagedOptimizer]]:
    """A model with lock-free updates, at the least budget or `spare` bytes above."""
    options |= {"update": "lock_free", "max_staleness": staleness}
    model = net() if model is None else model
    floor, _ = needs(copy.deepcopy(model), directory, "host+disk", optimizer=make, **options)
    with on_pages(model, "host+disk", floor + spare, directory, **options) as engine:
        yield model, engine, engine.bind_optimizer(make(model))


def sweeps_of(optimizer: PagedOptimizer) -> Sweeps:
    assert isinstance(optimizer.updates, LockFreeUpdates)
    return optimizer.updates._sweeps


def is_behind(optimizer: PagedOptimizer) -> bool:
    sweeps = sweeps_of(optimizer)
    with sweeps.changed:
        return not sweeps.reached(None)


# ---- exact without staleness -----------------------------------------------------------------------------------------

MAKES: dict[str, Make] = {
    "fused": adamw,
    "amsgrad": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True, amsgrad=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "plain sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_without_staleness_numbers_are_those_of_the_plain_loop(make: Make, tmp_path: Path) -> None:
    expected, _ = plain(6, make)
    with delays(1e-3), lagging(tmp_path, 0, make=make) as (model, _, optimizer):
        for number in range(6):
            step(model, optimizer, number)
        assert sweeps_of(optimizer).count >= 5 * 8
        assert_same_weights(model, expected)


@pytest.mark.parametrize("grouped", [False, True], ids=["alone", "in groups"])
def test_clipping_schedules_and_frozen_parameters_are_exact_without_staleness(grouped: bool, tmp_path: Path) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> list[float]:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        losses = []
        for number in range(6):
            losses.append(float(backward(model, number)))
            backward(model, number + 100)
            clip()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        return losses

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    models = [Layered(), Layered()]
    for model in models:
        model.layers[2].requires_grad_(False)
        model.layers[3][1].weight.requires_grad_(False)
    expected = train(models[0], make(models[0]), lambda: nn.utils.clip_grad_norm_(models[0].parameters(), 0.1))
    with (
        in_groups() if grouped else nullcontext(),
        lagging(tmp_path, 0, make=make, model=models[1], spare=400 << 10) as (
            model,
            engine,
            optimizer,
        ),
    ):
        assert (members(engine) > 1) is grouped
        assert train(model, optimizer, lambda: engine.clip_grad_norm_(0.1)) == expected
        assert sweeps_of(optimizer).count
        assert_same_weights(model, models[0])


class Layered(nn.Module):
    """Layers of two linear modules each."""

    def __init__(self, width: int = 47, layers: int = 5) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.Linear(width, width, bias=False)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def test_masters_are_updated_as_in_a_blocking_step(tmp_path: Path) -> None:
    found = []
    for update in ({"update": "blocking"}, {"update": "lock_free", "max_staleness": 0}):
        model = net(torch.bfloat16)
        with on_pages(model, "host+disk", 1 << 20, tmp_path, master_weights="fp32", **update) as engine:
            optimizer = engine.bind_optimizer(adamw(model))
            for number in range(6):
                backward(model, number)
                engine.clip_grad_norm_(0.01)
                optimizer.step()
                optimizer.zero_grad()
            weights = {name: value.clone() for name, value in model.state_dict().items()}
            found.append((weights, copy.deepcopy(optimizer.state_dict()["state"])))
    (weights, state), (ours, our_state) = found
    assert all(same_bits(ours[name], value) for name, value in weights.items())
    for number, entries in state.items():
        assert all(same_bits(our_state[number][key], value) for key, value in entries.items()), number


# ---- beside training -------------------------------------------------------------------------------------------------


class Seen:
    """What was published of each block, and checks that forwards read nothing else."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.versions: dict[str, list[torch.Tensor]] = {}
        self.reads = 0
        begin, publish = WaitingGroup.begin, WaitingGroup.publish

        def begun(group: WaitingGroup, values: torch.Tensor) -> None:
            begin(group, values)
            self.versions.setdefault(group.block.name, []).append(group.published.clone())

        def published(group: WaitingGroup, values: torch.Tensor) -> None:
            self.versions.setdefault(group.block.name, []).append(values.clone())
            publish(group, values)

        patch.setattr(WaitingGroup, "begin", begun)
        patch.setattr(WaitingGroup, "publish", published)

    def watch(self, engine: Engine) -> None:
        for module in engine.model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_pre_hook(lambda m, _: self._look(engine, m))
                module.register_forward_hook(lambda m, _, output: self._look_in_backward(engine, m, output))

    def _look_in_backward(self, engine: Engine, module: nn.Module, output: torch.Tensor) -> None:
        output.register_hook(lambda _: self._look(engine, module))

    def _look(self, engine: Engine, module: nn.Module) -> None:
        for param in module.parameters():
            slot = engine.slots.of(param)
            assert slot is not None
            versions = self.versions.get(slot.own.block.name)
            if versions:
                self.reads += 1
                values = param.clone().detach()
                assert any(same_bits(values, slot.own.of(version)) for version in versions), slot.name


@pytest.mark.parametrize("seed", range(3))
def test_nobody_reads_half_an_update(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, rng = Seen(monkeypatch), random.Random(seed)
    with (
        delays(4e-3, seed),
        in_groups(),
        lagging(tmp_path, 3, model=Layered(), spare=400 << 10) as (model, engine, optimizer),
    ):
        seen.watch(engine)
        for number in range(40):
            step(model, optimizer, number)
            time.sleep(rng.random() * 4e-3)
    assert seen.reads > 300
    assert max(map(len, seen.versions.values())) > 5


def test_a_forward_lacks_no_more_steps_than_it_may(tmp_path: Path) -> None:
    lacked = []
    with lazily(), lagging(tmp_path, 2) as (model, _, optimizer):
        for number in range(12):
            step(model, optimizer, number)
            sweeps, done = sweeps_of(optimizer), optimizer.updates.steps
            with sweeps.changed:
                firsts = [group.first for group in sweeps.groups.values() if group.first is not None]
            lacked.append(done + 1 - min(firsts, default=done + 1))
        assert sweeps.most > 1
    # The first step is exact.
    assert lacked[:3] == [0, 1, 2]
    assert max(lacked) == 2


def test_with_one_step_of_staleness_each_is_applied_by_itself_a_step_late(tmp_path: Path) -> None:
    """To the bit of a plain loop that applies the gradients of a step after the next backward."""
    rates = [1e-2 * 0.8**number for number in range(7)]

    def delayed(model: nn.Module) -> None:
        params, optimizer = list(model.parameters()), adamw(model)

        def apply(gradients: list[torch.Tensor | None], rate: float) -> None:
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            optimizer.param_groups[0]["lr"] = rate
            optimizer.step()

        waiting: list[list[torch.Tensor | None]] = []
        for number in range(len(rates)):
            backward(model, number)
            waiting.append([param.grad for param in params])
            # State is made in the first step, which waits for nothing.
            if number != 1:
                apply(waiting.pop(0), rates[max(number - 1, 0)])
            optimizer.zero_grad()
        apply(waiting.pop(), rates[-1])

    expected = net()
    delayed(expected)
    with lazily(), lagging(tmp_path, 1) as (model, engine, optimizer):
        for number, rate in enumerate(rates):
            optimizer.param_groups[0]["lr"] = rate
            step(model, optimizer, number)
        assert sweeps_of(optimizer).most == 1
        assert_same_weights(model, expected)
        # The first step is exact.
        assert optimizer.updates.staleness.lacking == optimizer.updates.staleness.reads == 16 * 6
        assert engine.metrics.since_last()["ptm_staleness"] == 1
        assert "parameters lacked 1.00 steps in a forward, 1 at most" in engine.metrics.summary()


class Linear(nn.Module):
    """Its gradients are its inputs, whatever the weights are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 32) for _ in range(6))
        for param in self.parameters():
            param.data.round_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([layer(x).sum() for layer in self.layers])


@pytest.mark.parametrize("clip", [None, 0.5], ids=["whole", "clipped"])
def test_what_the_updater_takes_is_what_steps_handed_over(
    clip: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where saves and evaluations come between; and the weights are the updates of the means."""
    taken: dict[str, list[tuple[torch.Tensor, int]]] = {}
    take = WaitingGroup.take

    def recorded(group: WaitingGroup, into: torch.Tensor) -> Any:
        found = take(group, into)
        for state, _, count in found:
            taken.setdefault(state.slot.name, []).append((state.slot.own.of(into).clone(), count))
        return found

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    monkeypatch.setattr(WaitingGroup, "take", recorded)
    model = Linear()
    first = {name: value.clone() for name, value in model.state_dict().items()}
    handed = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in first.items()}
    rng = random.Random(1)
    with delays(1e-3), lazily(), lagging(tmp_path, 4, make=make, model=model) as (model, engine, optimizer):
        small = {slot.name for slot in engine.slots if not slot.group.movable}
        for number in range(120):
            x = torch.randint(-3, 4, (4, 48), generator=torch.Generator().manual_seed(number)).float()
            model(x).sum().backward()
            scale = 1.0
            if clip is not None:
                norm = float(engine.clip_grad_norm_(clip))
                scale = min(1.0, clip / (norm + 1e-6))
            for name in handed:
                handed[name] += scale * (4.0 if name.endswith("bias") else x.sum(0).double())
            optimizer.step()
            optimizer.zero_grad()
            if rng.random() < 0.05:
                with torch.no_grad():
                    model(x)
            if rng.random() < 0.05:
                optimizer.state_dict()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert max(count for found in taken.values() for _, count in found) > 1
    for name, value in first.items():
        if name in small:
            continue
        total = sum(gradient.double() for gradient, _ in taken[name])
        assert sum(count for _, count in taken[name]) == 120
        if clip is None:
            assert torch.equal(total, handed[name]), name
        else:
            torch.testing.assert_close(total, handed[name], rtol=1e-6, atol=1e-6)
        for gradient, count in taken[name]:
            value.sub_(gradient / count)
        assert same_bits(weights[name], value), name


# ---- a clean stop ----------------------------------------------------------------------------------------------------

STOPS: dict[str, Callable[[Any, Engine, PagedOptimizer], object]] = {
    "evaluation": lambda model, engine, optimizer: _evaluated(model),
    "a part alone": lambda model, engine, optimizer: _evaluated(model[0]),
    "eval mode": lambda model, engine, optimizer: model.eval()(torch.zeros(1, 48)),
    "a parameter": lambda model, engine, optimizer: model[3].weight.sum(),
    "data": lambda model, engine, optimizer: model[3].weight.data,
    "state_dict": lambda model, engine, optimizer: model.state_dict(),
    "optimizer": lambda model, engine, optimizer: optimizer.state_dict(),
    "settle": lambda model, engine, optimizer: engine.settle(),
    "check": lambda model, engine, optimizer: engine.check_integrity(),
}


def _evaluated(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(torch.zeros(1, 48))
        return result


@pytest.mark.parametrize("stop", STOPS.values(), ids=STOPS)
def test_whoever_looks_sees_all_steps(stop: Callable[[Any, Engine, PagedOptimizer], object], tmp_path: Path) -> None:
    with lazily(), lagging(tmp_path, 4, spare=32 << 10) as (model, engine, optimizer):
        for number in range(4):
            step(model, optimizer, number)
        assert is_behind(optimizer)
        kept = stop(model, engine, optimizer)
        assert not is_behind(optimizer)
        assert engine.pages.executor.pending_updates is None
        model.train()
        step(model, optimizer, 5)
        del kept


def test_what_is_looked_at_is_what_was_published_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen(monkeypatch)
    with lazily(), lagging(tmp_path, 4, spare=400 << 10) as (model, engine, optimizer):
        for number in range(5):
            step(model, optimizer, number)
        with gathered(model):
            for slot in engine.slots:
                if versions := seen.versions.get(slot.own.block.name):
                    assert same_bits(slot.param.detach().clone(), slot.own.of(versions[-1]))


def test_state_is_drained_and_what_was_given_stays(tmp_path: Path) -> None:
    """A state dict that is kept is not changed by later updates, and a run that loads it goes on."""
    with delays(2e-3), lagging(tmp_path, 3) as (model, _, optimizer):
        for number in range(5):
            step(model, optimizer, number)
        given = optimizer.state_dict()
        before = copy.deepcopy(given)
        weights = copy.deepcopy(model.state_dict())
        for number in range(5, 9):
            step(model, optimizer, number)
        for key, entries in before["state"].items():
            for name in ("exp_avg", "exp_avg_sq"):
                # Those of biases never leave: they are live, as in torch.
                assert entries[name].dim() == 1 or same_bits(given["state"][key][name], entries[name])
        del given
    expected = net()
    expected.load_state_dict(weights)
    there = adamw(expected)
    there.load_state_dict(before)
    resumed = net()
    resumed.load_state_dict(weights)
    with on_pages(resumed, "host+disk", 1 << 20, tmp_path) as engine:
        ours = engine.bind_optimizer(adamw(resumed))
        ours.load_state_dict(before)
        for number in range(3):
            step(resumed, ours, number)
            step(expected, there, number)
        assert_same_weights(resumed, expected)


def test_a_write_between_two_steps_counts(tmp_path: Path) -> None:
    """Without staleness as in the plain loop; the step after it is an exact one."""

    def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
        for number in range(6):
            step(model, optimizer, number)
            if number == 3:
                with torch.no_grad():
                    model[2].weight.mul_(0.5)
                    model[4].weight.data.add_(0.25)

    expected = net()
    train(expected, adamw(expected))
    with lagging(tmp_path, 0) as (model, _, optimizer):
        train(model, optimizer)
        assert_same_weights(model, expected)


@pytest.mark.parametrize("looks", [False, True], ids=["the step", "a look"])
def test_a_write_in_a_forward_is_refused(looks: bool, tmp_path: Path) -> None:
    def write(module: nn.Module, *_: object) -> None:
        module.weight.data.mul_(0.5)  # type: ignore[union-attr, operator]

    with lazily(), lagging(tmp_path, 2) as (model, engine, optimizer):
        for number in range(3):
            step(model, optimizer, number)
        handle = model[2].register_forward_hook(write)
        backward(model, 3)
        handle.remove()
        with pytest.raises(UnsupportedError, match=r"parameter 2.weight was changed in place.*set update to exact"):
            engine.settle() if looks else optimizer.step()
        optimizer.close()


# ---- errors and ends -------------------------------------------------------------------------------------------------


@contextmanager
def one_failure(after: int) -> Iterator[None]:
    """One of the updater's transfers fails."""
    move, left = Sweeps._move, [after]

    def failing(self: Sweeps, transfers: list[Any]) -> None:
        left[0] -= 1
        move(self, transfers)
        if not left[0]:
            raise DiskError("the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sweeps, "_move", failing)
        yield


@pytest.mark.parametrize("looks", [False, True], ids=["the next step", "a look"])
def test_an_error_of_the_updater_reaches_training_and_nothing_is_saved(looks: bool, tmp_path: Path) -> None:
    def train(model: Any, engine: Engine, optimizer: PagedOptimizer, steps: range, *, settles: bool) -> None:
        for number in steps:
            step(model, optimizer, number)
            if settles:
                engine.settle()

    with lagging(tmp_path, 2) as (model, engine, optimizer):
        train(model, engine, optimizer, range(3), settles=True)
        weights, saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        with one_failure(after=5), pytest.raises(DiskError, match="the disk is gone"):
            train(model, engine, optimizer, range(3, 6), settles=looks)
        said = r"the update of step \d failed, and \d+ parameters were not updated"
        with pytest.raises(LostStepError, match=said):
            optimizer.state_dict()
        optimizer.zero_grad()
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        train(model, engine, optimizer, range(3, 6), settles=True)
        assert_same_weights(model, plain(6)[0])


def test_a_step_that_is_interrupted_is_lost_and_nothing_hangs(tmp_path: Path) -> None:
    with lazily(), lagging(tmp_path, 1) as (model, engine, optimizer):
        for number in range(3):
            step(model, optimizer, number)
        backward(model, 3)
        with pytest.MonkeyPatch.context() as patch:

            def interrupted(*_: object) -> bool:
                raise KeyboardInterrupt

            patch.setattr(Sweeps, "reached", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.step()
        engine.abort()
        with pytest.raises(LostStepError, match="the update of step 4 failed"):
            optimizer.state_dict()
        assert not is_behind(optimizer)


def test_an_error_that_nobody_was_told_of_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with lagging(tmp_path, 4) as (model, engine, optimizer):
        step(model, optimizer, 0)
        with one_failure(after=1):
            step(model, optimizer, 1)
            sweeps = sweeps_of(optimizer)
            with sweeps.changed:
                assert sweeps.changed.wait_for(lambda: sweeps.error is not None, 30)
        engine.close()
        engine.check_integrity = lambda: None  # type: ignore[method-assign]
    assert "a lock-free update failed (the disk is gone); pending gradients are lost" in caplog.text


def test_an_engine_closes_while_much_waits(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with lazily(), lagging(tmp_path, 8) as (model, engine, optimizer):
        for number in range(4):
            step(model, optimizer, number)
        assert is_behind(optimizer)
        begin = time.monotonic()
        engine.close()
        assert time.monotonic() - begin < 2
        engine.check_integrity = lambda: None  # type: ignore[method-assign]
    assert not [thread for thread in set(threading.enumerate()) - before if "updates" in thread.name]


def test_a_model_that_nobody_uses_any_more_goes_while_much_waits(tmp_path: Path) -> None:
    import gc

    model = net()
    memory = open_memory("host+disk", 1 << 20, tmp_path)
    config = PTMConfig(page_size=4096, update="lock_free", max_staleness=8)
    with lazily():
        engine = Engine.attach(model, config, memory=memory)
        optimizer = engine.bind_optimizer(adamw(model))
        for number in range(4):
            step(model, optimizer, number)
        assert is_behind(optimizer)
        del model, engine, optimizer
        gc.collect()
        until = time.monotonic() + 10
        while not memory.closed and time.monotonic() < until:
            time.sleep(0.01)
            gc.collect()
    assert memory.closed
    assert memory.pool.budget.used_bytes == 0


def test_another_optimizer_takes_the_place_of_one_with_waiting_steps(tmp_path: Path) -> None:
    with lazily(), lagging(tmp_path, 4) as (model, engine, optimizer):
        for number in range(3):
            step(model, optimizer, number)
        other = engine.bind_optimizer(adamw(model))
        for number in range(3):
            step(model, other, number)
        assert engine.pool.budget.used_by_tag()[Tag.UPDATES] > 0


# ---- refusals --------------------------------------------------------------------------------------------------------


def test_the_figure_that_is_named_suffices(tmp_path: Path) -> None:
    options = {"update": "lock_free", "max_staleness": 1}
    floor, _ = needs(net(), tmp_path, "host+disk", optimizer=adamw, **options)
    least, _ = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    model = net()
    said = f"Set host_memory to at least {format_least(floor)}[.]"
    with on_pages(model, "host+disk", floor - 4096, tmp_path, **options) as engine:  # noqa: SIM117
        with pytest.raises(BudgetError, match=said):
            engine.bind_optimizer(adamw(model))
    with lagging(tmp_path, 1) as (_, engine, _):
        assert engine.pool.budget.capacity_bytes == floor > least
        assert 0 < engine.pool.budget.used_by_tag()[Tag.UPDATES] <= floor - least


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"update": "exact", "max_staleness": 2}, "max_staleness: it is for update: lock_free; set that, or leave"),
        ({"max_staleness": -1}, "max_staleness: got -1; write how many steps a parameter may lag, 0 or more."),
        ({"max_staleness": "some"}, "max_staleness: got 'some'; write how many"),
        ({"pipeline": 2}, "update: lock_free cannot be combined with pipeline; leave one out."),
        ({"pseudo_to_real": "auto"}, "update: lock_free cannot be combined with pseudo_to_real; leave one out."),
        (
            {"micro_batches": "by_layer"},
            "update: lock_free cannot be combined with micro_batches: by_layer; leave one out.",
        ),
        ({"shard": "full"}, "update: lock_free cannot be combined with shard: full; leave one out."),
        ({}, "max_staleness: with update: lock_free, set how many steps a parameter may lag, such as 1; 0 gives"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        PTMConfig(**{"update": "lock_free", **options})
    assert message in str(refused.value)


def test_what_is_refused_with_an_optimizer(tmp_path: Path) -> None:
    def bound(kind: str, make: Make, dtype: torch.dtype = torch.float32) -> None:
        model = net(dtype)
        with on_pages(model, kind, 64 << 20, tmp_path, update="lock_free", max_staleness=1) as engine:
            try:
                engine.bind_optimizer(make(model))
            finally:
                engine.close()
                engine.check_integrity = lambda: None  # type: ignore[method-assign]

    class LOMO(torch.optim.SGD):
        pass

    with pytest.raises(UnsupportedError, match="with the optimizer Adafactor, which is not known to be element-wise"):
        bound("host+disk", lambda model: torch.optim.Adafactor(model.parameters()))
    with pytest.raises(UnsupportedError, match="LOMO cannot run on pages: it updates inside backward"):
        bound("host+disk", lambda model: LOMO(model.parameters(), lr=0.1))
    with pytest.raises(UnsupportedError, match=r"cannot train fp16 parameters \(0.weight and 15 more\)"):
        bound("host+disk", adamw, torch.float16)
    with pytest.raises(UnsupportedError, match="lock_free is for training on a CPU so far"):
        bound("mock+host+disk", adamw)


def test_without_a_disk_or_in_several_processes_it_is_refused(tmp_path: Path) -> None:
    model = net()
    engine = Engine.attach(model, PTMConfig(page_size=4096, host_memory="64MiB", update="lock_free", max_staleness=1))
    with pytest.raises(ConfigError, match="update: lock_free keeps optimizer state on a disk, and there is none"):
        engine.bind_optimizer(adamw(model))
    with pytest.raises(UnsupportedError, match="update: lock_free cannot keep several processes alike"):
        engine.training.replicate()
    engine.close()
