"""Autograd saves an address, not bytes; whoever else has hooks on saved tensors keeps what is theirs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from ptm_accel import gathered
from ptm_accel.errors import StaleGraphError
from ptm_accel.memory.budget import Tag
from tests.plain_loop import same_bits
from tests.tiers import at_floor, needs, on_pages

WIDTH = 64


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def net(layers: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(*parts)


def backward(model: nn.Module, out: torch.Tensor | None = None) -> None:
    (model(inputs()) if out is None else out).square().mean().backward()


def expect_grads(engine: Any, plain: nn.Module) -> None:
    names = dict(plain.named_parameters())
    assert {g.slot.name for g in engine.gradients.present()} == {n for n, p in names.items() if p.grad is not None}
    for grad in engine.gradients.present():
        assert same_bits(engine.pages.executor.snapshot(grad.value), names[grad.slot.name].grad), grad.slot.name


def test_nothing_is_held_between_forward_and_backward(tmp_path: Path) -> None:
    model, plain = net(), net()
    backward(plain)
    with at_floor(model, tmp_path) as engine:
        out = model(inputs())
        engine.pool.admission.released.collect()
        assert engine.pool.admission.released.nbytes == 0
        for slot in engine.slots:
            if slot.value.block in engine.pool.eviction:
                engine.pool.admission.evict(slot.value.block)
        engine.pool.admission.released.collect()
        assert Tag.PARAM not in engine.pool.budget.used_by_tag()
        backward(model, out)
        expect_grads(engine, plain)


def test_hooks_of_others_see_the_activations_and_no_parameter(tmp_path: Path) -> None:
    model, plain = net(), net()
    seen: dict[str, list[torch.Size]] = {"plain": [], "paged": []}

    def run(model: nn.Module, which: str) -> None:
        def pack(tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
            seen[which].append(tensor.shape)
            return "theirs", tensor.clone()

        def unpack(packed: Any) -> torch.Tensor:
            kind, tensor = packed
            assert kind == "theirs"
            kept: torch.Tensor = tensor
            return kept

        with saved_tensors_hooks(pack, unpack):
            out = model(inputs())
        backward(model, out)

    run(plain, "plain")
    with at_floor(model, tmp_path) as engine:
        run(model, "paged")
        expect_grads(engine, plain)
    weights = torch.Size([WIDTH, WIDTH])
    assert weights in seen["plain"]
    assert seen["paged"] == [shape for shape in seen["plain"] if shape != weights]


def test_activations_that_are_saved_on_the_cpu(tmp_path: Path) -> None:
    model, plain = net(), net()
    with save_on_cpu():
        out = plain(inputs())
    backward(plain, out)
    with at_floor(model, tmp_path) as engine:
        with save_on_cpu():
            out = model(inputs())
        backward(model, out)
        expect_grads(engine, plain)


class OwnHooks(nn.Module):
    """Puts hooks on saved tensors in its forward, around a parameter of its own."""

    def __init__(self, hooks: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(2))
        self.own = nn.Parameter(torch.randn(WIDTH, WIDTH) / 8)
        self.hooks = hooks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.hooks():
            x = torch.tanh(x @ self.own)
            for weight in self.weights:
                x = torch.tanh(x @ weight)
        return x


@pytest.mark.parametrize("hooks", [save_on_cpu, lambda: saved_tensors_hooks(lambda t: t, lambda t: t)])
def test_hooks_that_a_forward_puts_on_itself(hooks: Any, tmp_path: Path) -> None:
    """The weights they would be handed are away when backward comes."""
    model, plain = (nn.Sequential(*(OwnHooks(hooks) for _ in range(3))) for _ in range(2))
    backward(plain)
    with at_floor(model, tmp_path) as engine:
        out = model(inputs())
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        for slot in engine.slots:
            if slot.value.block in engine.pool.eviction:
                engine.pool.admission.evict(slot.value.block)
        backward(model, out)
        expect_grads(engine, plain)


@pytest.mark.parametrize("early_stop", [True, False])
def test_a_checkpoint_holds_no_parameters_of_the_layer_it_recomputes(early_stop: bool, tmp_path: Path) -> None:
    """All of a layer's weights would not fit: the floor has room for little more than one."""

    def run(model: nn.Module) -> None:
        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            out = checkpoint(model, inputs(), use_reentrant=False)
        backward(model, out)

    model, plain = net(12), net(12)
    run(plain)
    floor, _ = needs(model, tmp_path, "host+disk")
    assert floor < 8 * WIDTH * WIDTH * 4
    with on_pages(model, "host+disk", floor, tmp_path) as engine:
        run(model)
        expect_grads(engine, plain)


def test_checkpoints_within_checkpoints(tmp_path: Path) -> None:
    def run(model: nn.Sequential) -> None:
        def inner(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(model[2:6], x, use_reentrant=False)
            return y

        def outer(x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = model[6:](inner(model[:2](x)))
            return y

        backward(model, checkpoint(outer, inputs(), use_reentrant=False))

    model, plain = net(), net()
    run(plain)
    with at_floor(model, tmp_path) as engine:
        run(model)
        expect_grads(engine, plain)


def test_where_hooks_are_forbidden_tensors_are_saved_as_ever(tmp_path: Path) -> None:
    model, plain = net(2), net(2)
    with disable_saved_tensors_hooks("not here"):
        backward(plain)
    _, need = needs(model, tmp_path, "host+disk")
    with on_pages(model, "host+disk", need, tmp_path) as engine:
        with disable_saved_tensors_hooks("not here"):
            backward(model)
        expect_grads(engine, plain)


def test_two_paged_models_in_one_graph(tmp_path: Path) -> None:
    """A student and its teacher: each knows its own parameters."""
    models, plain = [net(), net(3)], [net(), net(3)]
    backward(plain[1], plain[1](plain[0](inputs())))
    floors = [needs(m, tmp_path, "host+disk")[0] for m in models]
    with (
        on_pages(models[0], "host+disk", floors[0], tmp_path) as first,
        on_pages(models[1], "host+disk", floors[1], tmp_path) as second,
    ):
        backward(models[1], models[1](models[0](inputs())))
        expect_grads(first, plain[0])
        expect_grads(second, plain[1])


def test_a_model_inside_a_forward_of_another(tmp_path: Path) -> None:
    class Teacher(nn.Module):
        def __init__(self, other: nn.Module) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)
            self.others = (other,)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.others[0](self.own(x)))

    def build() -> tuple[nn.Module, Teacher]:
        other = net(3)
        return other, Teacher(other)

    plain_other, plain = build()
    backward(plain)
    other, model = build()
    floors = [needs(m, tmp_path, "host+disk")[0] for m in (other, model)]
    with (
        on_pages(other, "host+disk", floors[0], tmp_path) as inside,
        on_pages(model, "host+disk", floors[1], tmp_path) as outside,
    ):
        backward(model)
        expect_grads(inside, plain_other)
        expect_grads(outside, plain)


@pytest.mark.parametrize("autocast", [False, True])
def test_a_backward_through_older_values_is_an_error(autocast: bool, tmp_path: Path) -> None:
    model = net(2)
    with at_floor(model, tmp_path) as engine:
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True))
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            older = model(inputs())
            for _ in range(2):
                backward(model, model(inputs()).float())
                optimizer.step()
                optimizer.zero_grad()
        with pytest.raises(StaleGraphError) as caught:
            backward(model, older.float())
        assert str(caught.value) == (
            "parameter 2.weight was updated 2 time(s) between a forward and its backward, so the gradient would be "
            "wrong. Call backward before optimizer.step()."
        )
        assert not engine.pool.tenants.pinned()
        engine.zero_grad()


@pytest.mark.parametrize("part", ["all of it on pages", "a layer that is not"])
def test_a_forward_without_a_backward_leaves_nothing(part: str, tmp_path: Path) -> None:
    """Of what a node saves, some are its own outputs: they must not keep each other."""
    model = net()
    with at_floor(model, tmp_path):
        if part != "all of it on pages":
            model[4] = nn.Linear(WIDTH, WIDTH)
        kept: list[StorageWeakRef] = []
        for layer in model:
            layer.register_forward_hook(lambda module, args, out: kept.append(StorageWeakRef(out.untyped_storage())))
        out = model(inputs())
        assert not any(storage.expired() for storage in kept[1::2])
        del out
        assert all(storage.expired() for storage in kept)
        assert len(kept) == len(model)


class Conjugated(nn.Module):
    """Weights that torch has yet to conjugate, or to negate, as backward needs them."""

    def __init__(self, *, imaginary: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 8)
        self.second = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / 8)
        self.imaginary = imaginary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x.to(torch.complex64) @ self.first
        if self.imaginary:
            return torch.view_as_real(hidden).sum(-1) @ self.second.conj().imag
        return torch.view_as_real(hidden @ self.second.conj())


@pytest.mark.parametrize("imaginary", [False, True])
def test_what_is_yet_to_be_conjugated_is_so_in_backward(imaginary: bool, tmp_path: Path) -> None:
    model, plain = Conjugated(imaginary=imaginary), Conjugated(imaginary=imaginary)
    backward(plain)
    for param in plain.parameters():
        param.grad = param.grad.resolve_conj().resolve_neg()  # type: ignore[union-attr]
    with at_floor(model, tmp_path) as engine:
        backward(model)
        expect_grads(engine, plain)


class Graph(nn.Module):
    """Its neighbours are a sparse matrix, which backward needs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.neighbours = (torch.rand(4, 4) > 0.5).float().to_sparse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed: torch.Tensor = self.second(torch.sparse.mm(self.neighbours, self.first(x).relu()))
        return mixed


def test_what_has_no_storage_is_saved_as_it_is(tmp_path: Path) -> None:
    model, plain = Graph(), Graph()
    backward(plain)
    with at_floor(model, tmp_path) as engine:
        backward(model)
        expect_grads(engine, plain)


def _penalty(model: nn.Module, how: str) -> torch.Tensor:
    """Made of weights that are read by their names, outside of all forwards."""
    linear = [layer for layer in model if isinstance(layer, nn.Linear)]
    if how == "squares":
        return sum((layer.weight.pow(2).sum() for layer in linear), torch.zeros(()))
    if how == "absolute values":
        return sum((layer.weight.abs().sum() for layer in linear), torch.zeros(()))
    if how == "norms":
        return torch.stack([layer.weight.norm() for layer in linear]).sum()
    x = inputs(1)
    for layer in linear:
        x = torch.tanh(layer.forward(x) if how == "forwards" else F.linear(x, layer.weight))
    return x.square().sum()


@pytest.mark.parametrize("how", ["squares", "absolute values", "norms", "products", "forwards"])
@pytest.mark.parametrize("first", [False, True], ids=["after the forward", "before it"])
def test_weights_that_are_read_outside_of_all_forwards(how: str, first: bool, tmp_path: Path) -> None:
    """They are away again when backward needs them."""

    def run(model: nn.Module) -> torch.Tensor:
        before = _penalty(model, how) if first else None
        out = model(inputs()).square().mean()
        total = out + 1e-2 * (_penalty(model, how) if before is None else before)
        total.backward()
        return total.detach()

    model, plain = net(12), net(12)
    with at_floor(model, tmp_path) as engine:
        assert same_bits(run(model), run(plain))
        expect_grads(engine, plain)
        assert same_bits(run(model), run(plain)), "added to"
        expect_grads(engine, plain)


def test_weights_that_are_read_long_before_they_are_used(tmp_path: Path) -> None:
    """With a forward in between, of this model or another one, or without gradients."""

    def run(model: nn.Module, other: nn.Module) -> None:
        total = torch.zeros(())
        linear = [layer for layer in model if isinstance(layer, nn.Linear)]
        weight = linear[0].weight
        total = total + model[2:4](inputs(1)).sum() * (weight * weight).sum()
        weight = linear[1].weight
        total = total + other(inputs(2)).detach().sum() * (weight * weight).sum()
        with torch.no_grad():
            weight = linear[2].weight
        total = total + (weight * weight).sum()
        for layer in linear[3:]:
            total = total + layer.weight.pow(2).sum()
        total.backward()

    (tmp_path / "other").mkdir()
    model, other, plain, plain_other = net(12), net(2), net(12), net(2)
    run(plain, plain_other)
    with at_floor(model, tmp_path) as engine, at_floor(other, tmp_path / "other"):
        run(model, other)
        expect_grads(engine, plain)


def test_a_gradient_of_gradients(tmp_path: Path) -> None:
    """Its graph keeps the weights that it uses."""

    def run(model: nn.Module) -> torch.Tensor:
        x = inputs()
        out = model(x).sum() + 1e-3 * _penalty(model, "squares")
        (grad,) = torch.autograd.grad(out, [x], create_graph=True)
        loss = grad.square().sum()
        loss.backward()
        return loss.detach()

    model, plain = net(12), net(12)
    _, need = needs(net(12), tmp_path, "host+disk")
    with on_pages(model, "host+disk", need, tmp_path) as engine:
        assert same_bits(run(model), run(plain))
        expect_grads(engine, plain)


class Selective(nn.Module):
    """Keeps products of its layers, and computes all else again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        for first in range(0, 16, 4):
            x = x + checkpoint(self.layers[first : first + 4], x, use_reentrant=False, context_fn=kept)
        return x


def test_selective_checkpointing_does_not_see_what_pages_do(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, plain = Selective(), Selective()
    with at_floor(model, tmp_path) as engine:
        for _ in range(2):
            backward(plain)
            backward(model)
            expect_grads(engine, plain)


def test_what_was_computed_where_all_is_gathered_has_its_backward_elsewhere(tmp_path: Path) -> None:
    def run(model: nn.Module) -> None:
        part = model[2:4]
        with gathered(part):
            loss = sum((p.pow(2).sum() for p in part.parameters()), torch.zeros(()))
        (loss + model(inputs()).square().mean()).backward()

    model, plain = net(12), net(12)
    run(plain)
    with at_floor(model, tmp_path) as engine:
        run(model)
        expect_grads(engine, plain)
