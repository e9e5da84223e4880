"""Gradients of linear layers are computed where they will lie, and nobody can tell but by the time it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.model import landing
from ptm_accel.outside import gathered
from tests.model.test_saved import Conjugated
from tests.plain_loop import same_bits
from tests.tiers import at_floor, needs, on_pages

WIDTH = 64
SQUARE = torch.Size([WIDTH, WIDTH])


def inputs(seed: int = 0, rows: int = 4) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def net(layers: int = 5, *, bias: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH, bias=bias), nn.Tanh()]
    return nn.Sequential(*parts)


def conv(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Conv1D(WIDTH, WIDTH) for _ in range(layers)))


def backward(model: nn.Module, seed: int = 0, rows: int = 4) -> None:
    model(inputs(seed, rows)).float().square().mean().backward()


def expect(engine: Engine, plain: nn.Module) -> None:
    assert engine.gradients is not None
    present = {grad.slot.name: grad.value for grad in engine.gradients.present()}
    for name, param in plain.named_parameters():
        value = present.pop(name, None)
        assert (value is None) == (param.grad is None), name
        if value is not None:
            assert same_bits(engine.pool.snapshot(value), param.grad), name
    assert not present


def made(engine: Engine) -> int:
    assert engine.gradients is not None
    return engine.gradients.landings.made


def forget(engine: Engine, plain: nn.Module) -> None:
    assert engine.gradients is not None
    engine.gradients.drop()
    plain.zero_grad()


def settled(engine: Engine) -> None:
    """Nothing is held, and every charge has an owner."""
    assert engine.pool.pinned() == []
    engine.pool.check_integrity()


Run = Callable[[nn.Module, int], None]


def twice(model: nn.Module, plain: nn.Module, run: Run, directory: Path) -> int:
    """Two backwards, each beside the plain one; returns how many gradients the second computed on pages."""
    with at_floor(model, directory) as engine:
        for seed in range(2):
            forget(engine, plain)
            before = made(engine)
            run(model, seed)
            run(plain, seed)
            expect(engine, plain)
            settled(engine)
        return made(engine) - before


@pytest.mark.parametrize("bias", [False, True])
def test_the_first_is_watched_and_the_next_are_computed_on_pages(bias: bool, tmp_path: Path) -> None:
    model, plain = net(bias=bias), net(bias=bias)
    with at_floor(model, tmp_path) as engine:
        backward(model)
        assert made(engine) == 0
        forget(engine, plain)
        backward(model, 1)
        backward(plain, 1)
        assert made(engine) == 5
        expect(engine, plain)
        settled(engine)


def test_nothing_is_copied(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        assert engine.gradients is not None
        engine.gradients.drop()
        monkeypatch.setattr(engine.pool, "adopt", lambda tensor, *args, **kwargs: pytest.fail(f"{tensor} is copied"))
        backward(model)


class ThreeDimensions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.view(2, 2, WIDTH)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("make", [conv, ThreeDimensions])
def test_other_products(make: Callable[[], nn.Module], tmp_path: Path) -> None:
    assert twice(make(), make(), backward, tmp_path) == 4


def test_the_gradient_of_the_input_is_of_the_same_shape(tmp_path: Path) -> None:
    def run(model: nn.Module, seed: int) -> None:
        backward(model, seed, rows=WIDTH)

    assert twice(net(), net(), run, tmp_path) == 5


@pytest.mark.parametrize("bias", [False, True])
def test_sums_over_micro_batches(bias: bool, tmp_path: Path) -> None:
    """With biases, others arrive between a gradient's computation and its arrival."""
    model, plain = net(bias=bias), net(bias=bias)
    with at_floor(model, tmp_path) as engine:
        for seed in range(3):
            backward(model, seed)
            backward(plain, seed)
            settled(engine)
        # What is only added to a sum takes no room on pages.
        assert made(engine) == 0
        forget(engine, plain)
        for seed in range(2):
            backward(model, seed)
            backward(plain, seed)
            settled(engine)
        assert made(engine) == 5
        expect(engine, plain)


@pytest.mark.parametrize("masters", ["fp32", None])
def test_narrow_gradients(masters: str | None, tmp_path: Path) -> None:
    model, plain = net().to(torch.bfloat16), net().to(torch.bfloat16)

    def run(model: nn.Module, seed: int) -> None:
        model(inputs(seed).bfloat16()).float().square().mean().backward()

    with at_floor(model, tmp_path, master_weights=masters) as engine:
        for seed in range(2):
            forget(engine, plain)
            run(model, seed)
            run(plain, seed)
            expect(engine, plain)
            settled(engine)
        assert made(engine) == 5


class Tied(nn.Module):
    """Uses one weight twice, and another in a way that is no product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.emb = nn.Embedding(WIDTH, WIDTH)
        self.mid = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x.detach().abs() * 10).long() % WIDTH
        out: torch.Tensor = self.head(self.mid(self.mid(self.emb(ids[:, 0]))))
        return out


def test_what_is_added_up_on_its_way_is_not_computed_on_pages(tmp_path: Path) -> None:
    assert twice(Tied(), Tied(), backward, tmp_path) == 0


def test_weights_that_are_used_more_often_than_before(tmp_path: Path) -> None:
    """Products wait to be added up, of all layers at once: that costs no more room than one."""

    def run(model: nn.Module, seed: int) -> None:
        (model(inputs(seed)).square().mean() + model(inputs(seed + 7)).mean()).backward()

    model, plain = net(16), net(16)
    with on_pages(model, "host+disk", SQUARE.numel() * 4 * 8, tmp_path) as engine:
        backward(model)
        for seed in range(2):
            forget(engine, plain)
            before = made(engine)
            run(model, seed)
            run(plain, seed)
            expect(engine, plain)
            settled(engine)
        assert made(engine) - before <= 1


def test_products_of_hooks_on_a_node(tmp_path: Path) -> None:
    model, plain = net(), net()
    theirs: list[torch.Tensor] = []
    with at_floor(model, tmp_path) as engine:
        backward(model)
        forget(engine, plain)
        out = model(inputs(1))
        node = out.grad_fn.next_functions[0][0]
        assert node.name() == "MmBackward0"
        eye = torch.eye(WIDTH)
        node.register_hook(lambda *args: theirs.append(eye.mm(eye)))
        out.square().mean().backward()
        backward(plain, 1)
        assert made(engine) == 5
        expect(engine, plain)
        assert same_bits(theirs[0], eye)
        settled(engine)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(net(3) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_what_is_computed_anew_within_a_node_is_not_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[str] = []
    dispatch = landing._Landing.__torch_dispatch__

    def spy(self: landing._Landing, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        seen.append(str(func))
        return dispatch(self, func, types, args, kwargs)

    monkeypatch.setattr(landing._Landing, "__torch_dispatch__", spy)
    assert twice(Checkpointed(), Checkpointed(), backward, tmp_path) == 9
    # Each of nine weights has two products in backward, of each of two steps; and tanh is the forward's alone.
    assert seen.count("aten.mm.default") == 36, seen
    assert not any("tanh" in name for name in seen)


@pytest.mark.parametrize("keep", [torch.clone, torch.Tensor.view_as, torch.detach, torch.Tensor.numpy, torch.t])
@pytest.mark.parametrize("make", [net, conv])
def test_a_gradient_that_somebody_keeps_is_theirs(make: Any, keep: Any, tmp_path: Path) -> None:
    """Any alias of it counts: no sum of ours is written there, and from the first one on none is computed on pages."""
    model, plain = make(4), make(4)
    kept: list[Any] = []

    def hook(gradient: torch.Tensor) -> None:
        kept.append(keep(gradient, gradient) if keep is torch.Tensor.view_as else keep(gradient))

    with at_floor(model, tmp_path) as engine:
        backward(model)
        forget(engine, plain)
        for layer in model.modules():
            if hasattr(layer, "weight"):
                layer.weight.register_hook(hook)
        backward(model, 1)
        backward(plain, 1)
        expect(engine, plain)
        values = [torch.as_tensor(each).clone() for each in kept]
        assert made(engine) == (4 if keep is torch.clone else 1)
        backward(model, 2)
        backward(plain, 2)
        expect(engine, plain)
        assert len(kept) == 8
        assert all(same_bits(torch.as_tensor(a), b) for a, b in zip(kept, values, strict=False))
        kept.clear()
        settled(engine)


def test_gradients_that_are_asked_for(tmp_path: Path) -> None:
    """They are the caller's, who may keep them, and no budget's."""
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        forget(engine, plain)
        mine = torch.autograd.grad(model(inputs(1)).square().mean(), list(model.parameters()))
        theirs = torch.autograd.grad(plain(inputs(1)).square().mean(), list(plain.parameters()))
        assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))
        assert made(engine) == 0
        backward(model, 2)
        backward(plain, 2)
        expect(engine, plain)
        assert made(engine) > 0
        assert all(same_bits(a, b) for a, b in zip(mine, theirs, strict=True))
        del mine
        settled(engine)
        forget(engine, plain)
        engine.pool.room.collect()
        # Room for the next one to arrive is held again.
        assert engine.pool.budget.used_by_tag()[Tag.GRAD] == SQUARE.numel() * 4


class StumbleError(RuntimeError):
    pass


def test_a_backward_that_fails(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        forget(engine, plain)

        def stumble(gradient: torch.Tensor) -> None:
            raise StumbleError

        handle = model[4].weight.register_hook(stumble)
        with pytest.raises(StumbleError):
            backward(model, 1)
        handle.remove()
        forget(engine, plain)
        settled(engine)
        backward(model, 2)
        backward(plain, 2)
        expect(engine, plain)
        settled(engine)


def test_a_backward_that_fails_is_the_last(tmp_path: Path) -> None:
    """Nobody forgets gradients, and all memory comes back with the engine."""
    model = net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        assert engine.gradients is not None
        engine.gradients.drop()
        model[4].weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            backward(model, 1)
        settled(engine)


def test_what_is_on_its_way_does_not_leave(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        forget(engine, plain)

        def evict(gradient: torch.Tensor) -> None:
            while engine.pool.evict_one():
                pass

        for layer in (model[2], model[6]):
            layer.weight.register_hook(evict)
        backward(model, 1)
        backward(plain, 1)
        assert made(engine) == 5
        expect(engine, plain)
        settled(engine)


def test_no_room_for_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is made of it is forgotten."""
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        forget(engine, plain)
        make = engine.pool.make

        def refuse(*args: Any, **kwargs: Any) -> Any:
            raise StumbleError

        monkeypatch.setattr(engine.pool, "make", refuse)
        with pytest.raises(StumbleError):
            backward(model, 1)
        monkeypatch.setattr(engine.pool, "make", make)
        forget(engine, plain)
        settled(engine)
        assert not [t for t in engine.pool.tensors() if t.name.endswith(".grad")]


def test_where_there_is_no_room_it_is_computed_as_ever(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        forget(engine, plain)
        tried: list[str] = []

        def refuse(tensor: PagedTensor) -> torch.Tensor:
            tried.append(tensor.name)
            raise BudgetError("no room")

        with monkeypatch.context() as patched:
            patched.setattr(engine.pool, "make", refuse)
            backward(model, 1)
        backward(plain, 1)
        assert len(tried) == 5
        assert made(engine) == 0
        expect(engine, plain)
        settled(engine)


def test_modes_of_others_see_what_they_would_see(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        forget(engine, plain)
        counts = []
        for each in (model, plain):
            with FlopCounterMode(display=False) as counter:
                backward(each, 1)
            counts.append(counter.get_flop_counts())
        assert counts[0]["Global"] == counts[1]["Global"]
        assert made(engine) == 0
        expect(engine, plain)


def test_graphs_of_gradients(tmp_path: Path) -> None:
    def run(model: nn.Module, seed: int) -> None:
        x = inputs(seed)
        (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        slope.square().sum().backward()

    model, plain = net(), net()
    with on_pages(model, "host+disk", SQUARE.numel() * 4 * 8, tmp_path) as engine:
        backward(model)
        forget(engine, plain)
        run(model, 1)
        run(plain, 1)
        expect(engine, plain)
        settled(engine)


def test_gradients_that_are_shown_are_added_to(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        for seed in range(2):
            forget(engine, plain)
            backward(model, seed)
            backward(plain, seed)
        expected = made(engine)
        with gathered(model[4], grads=True, write=True):
            backward(model, 2)
        backward(plain, 2)
        assert made(engine) == expected
        expect(engine, plain)
        settled(engine)


def test_frozen_parameters_have_none(tmp_path: Path) -> None:
    model, plain = net(), net()
    for each in (model, plain):
        each[2].weight.requires_grad_(False)
    assert twice(model, plain, backward, tmp_path) == 4


class Functional(nn.Module):
    """Multiplies by a part of a weight, whose gradient is another tensor than the product."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = WIDTH // 2
        return F.linear(x[:, :half], self.weight[:, :half]) + F.linear(x, self.other.t().reshape(SQUARE))


def test_parts_and_transposes(tmp_path: Path) -> None:
    twice(Functional(), Functional(), backward, tmp_path)


def test_small_ones_are_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(landing, "_LEAST_BYTES", SQUARE.numel() * 4 + 1)
    assert twice(net(), net(), backward, tmp_path) == 0


def test_where_all_fits_nothing_is_copied_either(tmp_path: Path) -> None:
    model, plain = net(), net()
    with on_pages(model, "host+disk", 1 << 30, tmp_path) as engine:
        assert not engine.pool.copies_in
        for seed in range(2):
            forget(engine, plain)
            backward(model, seed)
            backward(plain, seed)
            expect(engine, plain)
        assert made(engine) == 0


def test_none_is_expected_when_pages_are_gone(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        backward(model)
        slots = list(engine.slots)
        assert all(slot.unpacked is not None for slot in slots)
        engine.detach()
    assert all(slot.unpacked is None for slot in slots)


def test_at_the_floor_nothing_more_is_charged(tmp_path: Path) -> None:
    """The room that is held for the next gradient to arrive is what one is computed in."""
    model = net(bias=True)
    floor, _ = needs(model, tmp_path, "host+disk")
    with on_pages(model, "host+disk", floor, tmp_path) as engine:
        for seed in range(3):
            assert engine.gradients is not None
            engine.gradients.drop()
            backward(model, seed)
        # Where there is no room for one it is computed as ever, and not counted.
        assert made(engine) == 10


def test_a_product_that_is_yet_to_be_conjugated_is_no_gradient(tmp_path: Path) -> None:
    """The gradient of the second is the conjugate of a product of matrices, which torch has yet to conjugate."""
    model, plain = Conjugated(imaginary=False), Conjugated(imaginary=False)
    with at_floor(model, tmp_path) as engine:
        for seed in range(3):
            backward(plain, seed)
            backward(model, seed)
            assert plain.second.grad is not None
            assert plain.second.grad.is_conj()
            for param in plain.parameters():
                param.grad = param.grad.resolve_conj()  # type: ignore[union-attr]
            expect(engine, plain)
            forget(engine, plain)
        assert made(engine), "that of the first is computed on pages"
        settled(engine)
