"""What somebody writes to weights in a backward is kept, whether they leave in it or stay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel.errors import StaleGraphError
from tests.plain_loop import same_bits
from tests.stacks import adamw, tanh_stack
from tests.tiers import needs, on_pages

WIDTH, LAYERS, STEPS = 64, 6, 5


def net() -> nn.Sequential:
    return tanh_stack(WIDTH, LAYERS)


def layers_of(model: nn.Sequential) -> list[nn.Linear]:
    return [layer for layer in model if isinstance(layer, nn.Linear)]


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()
    loss: torch.Tensor = model(x).square().mean()
    return loss


@torch.no_grad()
def shrink(weight: torch.Tensor) -> None:
    weight.mul_(0.9)


def in_a_backward_hook(model: nn.Sequential) -> None:
    for layer in layers_of(model):
        layer.register_full_backward_hook(lambda module, *_: shrink(module.weight))


def in_a_backward_pre_hook(model: nn.Sequential) -> None:
    """Not to the weight, which has still to be used in that backward."""
    for layer in layers_of(model):
        layer.register_full_backward_pre_hook(lambda module, *_: shrink(module.bias))


def by_its_data(model: nn.Sequential) -> None:
    def scale(module: nn.Module, *_: object) -> None:
        assert isinstance(module, nn.Linear)
        module.weight.data.mul_(0.9)

    for layer in layers_of(model):
        layer.register_full_backward_hook(scale)


def in_another_layers_hook(model: nn.Sequential) -> None:
    model[2].register_full_backward_hook(lambda *_: shrink(layers_of(model)[-1].weight))


def in_a_hook_of_an_activation(model: nn.Sequential) -> None:
    def watch(module: nn.Module, args: object, out: torch.Tensor) -> None:
        assert isinstance(module, nn.Linear)
        out.register_hook(lambda gradient: shrink(module.bias))

    for layer in layers_of(model):
        layer.register_forward_hook(watch)


def when_the_gradient_is_there(model: nn.Sequential) -> None:
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(shrink)


WRITES = [
    in_a_backward_hook,
    in_a_backward_pre_hook,
    by_its_data,
    in_another_layers_hook,
    in_a_hook_of_an_activation,
    when_the_gradient_is_there,
]


def train(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[torch.Tensor]:
    losses = []
    for number in range(STEPS):
        loss = loss_of(model, number)
        losses.append(loss.detach().clone())
        loss.backward()
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def expect_same(model: nn.Module, losses: list[torch.Tensor], plain: nn.Module, expected: list[torch.Tensor]) -> None:
    assert all(same_bits(ours, theirs) for ours, theirs in zip(losses, expected, strict=True))
    values = plain.state_dict()
    for name, value in model.state_dict().items():
        assert same_bits(value, values[name]), name


@pytest.mark.thinned(12)
@pytest.mark.parametrize("budget", ["floor", "fits"])
@pytest.mark.parametrize("kind", ["host+disk", "mock+host+disk"])
@pytest.mark.parametrize("write", WRITES, ids=lambda write: write.__name__)
def test_what_a_backward_writes_is_kept(
    write: Callable[[nn.Sequential], None], kind: str, budget: str, tmp_path: Path
) -> None:
    plain, model = net(), net()
    write(plain)
    write(model)
    expected = train(plain, adamw(plain))
    floor, need = needs(net(), tmp_path, kind, optimizer=adamw)
    with on_pages(model, kind, floor if budget == "floor" else 2 * need, tmp_path) as engine:
        losses = train(model, engine.bind_optimizer(adamw(model)))
        expect_same(model, losses, plain, expected)
        assert (engine.pool.stats.evictions > 0) == (budget == "floor")


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["host+disk", "mock+host+disk"])
def test_updates_of_ones_own_in_hooks_of_the_gradients(kind: str, fused: bool, tmp_path: Path) -> None:
    """Torch does not count what a fused optimizer writes, which would write to a placeholder as if it were a weight."""

    def update_in_hooks(model: nn.Module) -> None:
        def update(param: torch.Tensor) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        optimizers = {p: torch.optim.AdamW([p], lr=1e-2, fused=fused) for p in model.parameters()}
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(update)

    plain, model = net(), net()
    update_in_hooks(plain)
    expected = train(plain, None)
    floor, _ = needs(net(), tmp_path, kind)
    update_in_hooks(model)
    with on_pages(model, kind, floor, tmp_path) as engine:
        expect_same(model, train(model, None), plain, expected)
        assert engine.pool.stats.evictions > 0


def test_a_master_follows_what_a_backward_has_written(tmp_path: Path) -> None:
    """Where a weight is not what its master rounds to any more, the master is taken from it."""
    plain, model = net().bfloat16(), net().bfloat16()
    for each in (plain, model):
        in_a_backward_hook(each)

    def half_loss(net: nn.Module, number: int) -> torch.Tensor:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).bfloat16().requires_grad_()
        loss: torch.Tensor = net(x).float().square().mean()
        return loss

    masters = {p: nn.Parameter(p.detach().float()) for p in plain.parameters()}
    inner = torch.optim.AdamW(masters.values(), lr=1e-2, fused=True)
    for number in range(STEPS):
        half_loss(plain, number).backward()
        with torch.no_grad():
            for p, master in masters.items():
                assert p.grad is not None
                master.copy_(torch.where(master.bfloat16() == p, master, p.float()))
                master.grad, p.grad = p.grad.float(), None
            inner.step()
            for p, master in masters.items():
                p.copy_(master)
    options = {"master_weights": "fp32"}
    floor, _ = needs(net().bfloat16(), tmp_path, "host+disk", optimizer=adamw, **options)
    with on_pages(model, "host+disk", floor, tmp_path, **options) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        for number in range(STEPS):
            half_loss(model, number).backward()
            optimizer.step()
            optimizer.zero_grad()
        expect_same(model, [], plain, [])


@pytest.mark.parametrize("always", [True, False])
def test_beside_updates_that_begin_in_backward(always: bool, tmp_path: Path) -> None:
    """What is written in each pass has its update after that; what comes too late for it is an error."""
    plain, model = net(), net()
    for each in (plain, model):
        called = iter(range(LAYERS * STEPS))

        def scale(module: nn.Linear, *_: object, called: object = called) -> None:
            if next(called) >= LAYERS * (STEPS - 1) or always:  # type: ignore[call-overload]
                shrink(module.weight)

        for layer in layers_of(each):
            layer.register_full_backward_hook(scale)
    expected = train(plain, adamw(plain))
    floor, need = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", floor + (need - floor) // 2, tmp_path) as engine:
        engine.training.updates_in_backward = lambda: True
        optimizer = engine.bind_optimizer(adamw(model))
        begun, losses = 0, []

        def step(number: int) -> None:
            nonlocal begun
            with engine.training.backward():
                loss = loss_of(model, number)
                losses.append(loss.detach().clone())
                loss.backward()
                begun += optimizer.updates.early is not None
            optimizer.step()
            optimizer.zero_grad()

        for number in range(STEPS - 1):
            step(number)
        if always:
            step(STEPS - 1)
            expect_same(model, losses, plain, expected)
        else:
            with pytest.raises(StaleGraphError, match="was read in backward after its gradient was complete"):
                step(STEPS - 1)
        assert begun > 0
