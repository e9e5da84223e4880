"""An engine follows what becomes of its model: wrapped, given layers or another head, resized, unwrapped."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import BudgetError, ConfigError, UnsupportedError
from ptm_accel.memory.budget import Tag
from ptm_accel.model.away import AwayParameter
from ptm_accel.pages import Pages
from ptm_accel.units import format_least
from tests.plain_loop import MakeOptimizer, adamw, same_bits, sgd
from tests.tiers import config, needs, on_pages, open_memory

WIDTH = 64


class Net(nn.Module):
    """Two layers, and a head over the first one's weight."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) + self.mean
        return self.head(x)


class Adapter(nn.Module):
    """Wraps a linear layer, as adapters do."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(self.down(x))


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.full((WIDTH, WIDTH), 0.01))
        self.register_buffer("shift", torch.ones(8 * WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) @ self.scale


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))


def with_adapters(model: Net) -> nn.Module:
    torch.manual_seed(7)
    for number, layer in enumerate(model.layers):
        model.layers[number] = Adapter(layer)  # type: ignore[arg-type]
    return model


def with_another_head(model: Net) -> nn.Module:
    torch.manual_seed(7)
    model.head = nn.Linear(WIDTH, 2 * WIDTH)
    return model


def with_a_larger_head(model: Net) -> nn.Module:
    model.head.weight.data = torch.cat([model.head.weight.data, model.head.weight.data + 1.0])
    model.head.out_features *= 2
    return model


def with_tied_layers(model: Net) -> nn.Module:
    model.layers[1].weight = model.layers[0].weight  # type: ignore[union-attr]
    return model


def with_other_modules(model: Net) -> nn.Module:
    """The same parameters in other modules."""
    for number, old in enumerate(model.layers):
        new = nn.Linear(WIDTH, WIDTH, device="meta")
        new.weight, new.bias = old.weight, old.bias  # type: ignore[union-attr,assignment]
        model.layers[number] = new
    return model


def with_fewer_layers(model: Net) -> nn.Module:
    del model.layers[1]
    return model


def in_wrappers(model: Net) -> nn.Module:
    return Wrapper(Wrapper(with_adapters(model)))


CHANGES = [
    with_adapters,
    with_another_head,
    with_a_larger_head,
    with_tied_layers,
    with_other_modules,
    with_fewer_layers,
    in_wrappers,
]


def train(model: nn.Module, engine: Engine | None, steps: int = 3) -> list[float]:
    parameters = [param for param in model.parameters() if param.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(parameters, lr=1e-2, fused=True)
    clip: Callable[[float], torch.Tensor] = lambda norm: nn.utils.clip_grad_norm_(parameters, norm)  # noqa: E731
    if engine is not None:
        optimizer, clip = engine.bind_optimizer(optimizer), engine.clip_grad_norm_
    losses = []
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        loss.backward()
        losses += [loss.item(), clip(0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses


def assert_same_state(ours: nn.Module, plain: nn.Module) -> None:
    mine, other = ours.state_dict(), plain.state_dict()
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert same_bits(mine[name], value), name


def budget(change: Callable[[Net], nn.Module], tmp_path: Path, kind: str) -> int:
    """The least that the model can train under, before and after."""
    return max(needs(model, tmp_path, kind)[0] for model in (net(), change(net())))


@pytest.mark.parametrize("kind", ["host+disk", "mock+host"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_model_trains_as_ever(change: Callable[[Net], nn.Module], kind: str, tmp_path: Path) -> None:
    plain = net()
    first = train(plain, None, steps=2)
    plain_after = change(plain)
    expected = train(plain_after, None)
    model = net()
    with on_pages(model, kind, budget(change, tmp_path, kind), tmp_path) as engine:
        assert train(model, engine, steps=2) == first
        changed = change(model)
        with torch.no_grad():
            assert not changed(batch(9)).isnan().any()
        assert Engine.attach(changed, engine.asked) is engine
        assert engine_of(changed) is engine is not None
        assert engine.needs.floor.total_bytes == needs(change(net()), tmp_path, kind)[0]
        assert engine.model is changed
        assert train(changed, engine) == expected
        assert_same_state(changed, plain_after)
        assert [slot.name for slot in engine.slots] == [name for name, _ in plain_after.named_parameters()]
        assert engine.slots.by_name.keys() == dict(plain_after.named_parameters(remove_duplicate=False)).keys()
        assert {slot.value.block for slot in engine.slots} <= set(engine.pool.tensors())
        held = engine.pool.budget.used_by_tag().get(Tag.BUFFER, 0)
        assert held == sum(buffer.nbytes for buffer in plain_after.buffers())
        assert engine.pool.stats.evictions > 0
        assert all(type(param) is AwayParameter for param in changed.parameters())


def test_nothing_is_done_where_nothing_has_changed(tmp_path: Path) -> None:
    model = net()
    with on_pages(model, "host+disk", 4 << 20, tmp_path) as engine:
        optimizer = engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
        hooks, gradients = engine.residency.hooks, engine.gradients
        engine.follow()
        Engine.attach(model)
        assert engine.residency.hooks == hooks
        assert engine.gradients is gradients
        assert engine.optimizer is optimizer


def test_an_optimizer_goes_on_around_a_wrapped_model(tmp_path: Path) -> None:
    """Its parameters are the same ones, so its state stays."""

    def run(model: Net, engine: Engine | None) -> tuple[list[float], nn.Module]:
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if engine is not None:
            optimizer = engine.bind_optimizer(optimizer)
        losses = []
        around: nn.Module = model
        for step in range(4):
            if step == 2:
                around = Wrapper(model).requires_grad_(False)
                model.requires_grad_(True)
                if engine is not None:
                    engine.follow(around)
                    assert engine.optimizer is optimizer
            loss = around(batch(step)).square().mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        return losses, around

    expected, plain = run(net(), None)
    model = net()
    with on_pages(model, "host+disk", 300 << 10, tmp_path) as engine:
        losses, around = run(model, engine)
        assert losses == expected
        assert_same_state(around, plain)


class Late:
    """A transfer that ends when somebody waits for it."""

    def __init__(self) -> None:
        self.ended = False

    def done(self) -> bool:
        return self.ended

    def wait(self) -> None:
        self.ended = True

    def order(self) -> None:
        self.wait()


def test_what_is_held_for_a_moment_does_not_count_as_needed(tmp_path: Path) -> None:
    model = net()
    with on_pages(model, "host+disk", 4 << 20, tmp_path) as engine:
        floor, admission = engine.needs.floor, engine.pool.admission
        reservation, buffer = admission.take_buffer(1 << 20, Tag.STAGING, "a window that was written")
        assert buffer.octets is not None
        admission.released.add(buffer.octets, buffer, reservation, Late())
        del buffer
        assert engine.pool.budget.used_by_tag()[Tag.STAGING] > 1 << 20
        engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        assert engine.needs.floor == floor


def test_an_optimizer_of_other_parameters_is_given_up(tmp_path: Path) -> None:
    for change in (with_another_head, with_a_larger_head):
        model = net()
        with on_pages(model, "host+disk", 4 << 20, tmp_path) as engine:
            train(model, engine)
            assert engine.optimizer is not None
            change(model)
            engine.follow()
            assert engine.optimizer is None
            assert not [tensor for tensor in engine.pool.tensors() if tensor.tag is Tag.STATE]


def test_what_left_the_model_keeps_its_values(tmp_path: Path) -> None:
    model, plain = net(), net()
    with on_pages(model, "host+disk", 300 << 10, tmp_path) as engine:
        head = model.head
        engine.pool.admission.evict(engine.slots.by_name["head.weight"].value.block)
        with_another_head(model)
        engine.follow()
        assert same_bits(next(head.parameters()).detach(), plain.head.weight.detach())
        assert engine.slots.of(next(head.parameters())) is None
        assert type(head._parameters) is dict
        assert not head._forward_hooks


def test_a_model_that_does_not_fit_any_more_stays_as_it_was(tmp_path: Path) -> None:
    model, plain = net(), net()
    with on_pages(model, "host+disk", needs(net(), tmp_path, "host+disk")[0], tmp_path) as engine:
        names, floor = list(engine.slots.by_name), engine.needs.floor
        expected = train(plain, None)
        small, model.head = model.head, nn.Linear(WIDTH, 64 * WIDTH)
        with pytest.raises(BudgetError, match=r"cannot train under less than .* head\.weight"):
            Engine.attach(model)
        assert (list(engine.slots.by_name), engine.needs.floor) == (names, floor)
        model.head = small
        assert train(model, engine) == expected
        assert_same_state(model, plain)


@pytest.mark.parametrize("make", [adamw, sgd])
def test_a_model_that_grows_is_measured_by_the_optimizer_that_it_keeps(
    make: MakeOptimizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # There are groups where there is room for them, and they need a little more.
    monkeypatch.setattr(Pages, "grouped", False)

    def after(nbytes: int) -> int:
        model = net()
        with on_pages(model, "host+disk", nbytes, tmp_path) as engine:
            optimizer = engine.bind_optimizer(make(model))
            engine.follow(Wrapper(model))
            assert engine.optimizer is optimizer
            return engine.needs.floor.total_bytes

    before, grown = needs(net(), tmp_path, "host+disk", optimizer=make)[0], after(4 << 20)
    assert before < grown
    assert after(grown) == grown
    with pytest.raises(BudgetError, match=f"cannot train under less than .* to at least {format_least(grown)}[.]$"):
        after(grown - 1)


class Quantised(nn.Parameter):
    """As the parameters of quantisation libraries."""


def test_what_cannot_be_paged_is_refused(tmp_path: Path) -> None:
    model = net()
    with on_pages(model, "host+disk", 4 << 20, tmp_path) as engine:
        model.head.weight = Quantised(torch.zeros(WIDTH, WIDTH))
        with pytest.raises(UnsupportedError, match=r"parameter head\.weight is a Quantised, not a plain nn\.Parameter"):
            engine.follow()


def test_a_part_of_a_model_on_pages_is_refused(tmp_path: Path) -> None:
    model = net()
    with on_pages(model, "host+disk", 4 << 20, tmp_path) as engine:
        with pytest.raises(UnsupportedError) as caught:
            Engine.attach(model.layers)
        assert str(caught.value) == (
            "this ModuleList is a part of a Net that is on pages and has 1 more parameters, such as head.weight. Pass "
            "that model, or call `engine_of(...).detach()` first."
        )
        assert engine.model is model
        assert engine_of(model.layers) is None


def test_parts_of_two_models_on_pages_are_refused(tmp_path: Path) -> None:
    model, other = net(), nn.Sequential(nn.Linear(WIDTH, WIDTH))
    with on_pages(model, "host+disk", 4 << 20, tmp_path), on_pages(other, "host+disk", 4 << 20, tmp_path):
        with pytest.raises(UnsupportedError) as caught:
            Engine.attach(nn.Sequential(model, other))
        assert str(caught.value) == (
            "parts of this Sequential are on pages of two models (Net and Sequential). Call `engine_of(...).detach()` "
            "for one of them first."
        )


def test_other_options_are_refused_for_what_wraps_a_model(tmp_path: Path) -> None:
    model = net()
    text = "this model is already on pages with"
    with on_pages(model, "host+disk", 4 << 20, tmp_path), pytest.raises(ConfigError, match=text):
        Engine.attach(Wrapper(model), config(host_memory="1GB"))


def test_a_wrapper_takes_its_pages_with_it_and_an_unwrapped_model_keeps_them(tmp_path: Path) -> None:
    def paged(model: nn.Module) -> Any:
        memory = open_memory("host+disk", 4 << 20, tmp_path)
        engine = Engine.attach(model, config(), memory=memory)
        for slot in engine.slots:
            if slot.value.block in engine.pool.eviction:
                engine.pool.admission.evict(slot.value.block)
        return memory

    inner, plain = net(), net()
    memory = paged(inner)
    outer = Wrapper(inner)
    Engine.attach(outer)
    known = weakref.ref(outer)
    del inner, outer
    gc.collect()
    assert known() is None
    assert memory.closed
    # Unwrapped: the wrapper goes, the model stays.
    inner = net()
    outer = Wrapper(inner)
    memory = paged(outer)
    del outer
    gc.collect()
    assert not memory.closed
    assert same_bits(inner(batch(0)), plain(batch(0)))
    assert_same_state(inner, plain)
    memory.close()


def test_a_model_that_was_changed_can_be_taken_off_its_pages(tmp_path: Path) -> None:
    model, plain = net(), net()
    around, expected = in_wrappers(model), in_wrappers(plain)
    engine = Engine.attach(model.requires_grad_(True), config(), memory=open_memory("host+disk", 4 << 20, tmp_path))
    engine.follow(around)
    assert engine.detach() is around
    assert_same_state(around, expected)
    assert all(type(module._parameters) is dict for module in around.modules())
    assert engine_of(around) is None
