"""Tensors that somebody puts in `p.grad` and goes on using: backward adds to them, and updates read a copy."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.plain_loop import same_bits
from tests.stacks import adamw, tanh_stack
from tests.tiers import needs, on_pages

WIDTH, LAYERS, STEPS = 64, 6, 5

Buffers = list[torch.Tensor]


def net() -> nn.Sequential:
    return tanh_stack(WIDTH, LAYERS)


def single(model: nn.Module) -> Buffers:
    return [torch.zeros(p.shape) for p in model.parameters()]


def flat(model: nn.Module) -> Buffers:
    sizes = [p.numel() for p in model.parameters()]
    parts = torch.zeros(sum(sizes)).split(sizes)
    return [part.view(p.shape) for part, p in zip(parts, model.parameters(), strict=True)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, buffers: Buffers, how: str) -> list[torch.Tensor]:
    """Trains, and returns each loss with what the buffers have after each backward."""
    seen = []
    for step in range(STEPS):
        if how == "before the backward":
            for param, buffer in zip(model.parameters(), buffers, strict=True):
                param.grad = buffer.fill_(0.125)
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        if how.startswith("between two backwards"):
            given = [buffer.fill_(0.125 * (number + step - 3)) for number, buffer in enumerate(buffers)]
            copied = how.endswith("which nobody else has")
            for param, buffer in list(zip(model.parameters(), given, strict=True))[::2]:
                param.grad = buffer.clone() if copied else buffer
            model(2 * x).square().mean().backward()
        if how == "after the backward":
            for number, (param, buffer) in enumerate(zip(model.parameters(), buffers, strict=True)):
                param.grad = buffer.fill_(0.125 * (number + step - 3))
        seen += [loss.detach().clone(), *(buffer.clone() for buffer in buffers)]
        optimizer.step()
        for buffer in buffers:
            buffer.fill_(torch.nan)
        optimizer.zero_grad()
    return seen


@pytest.mark.thinned(16)
@pytest.mark.parametrize(
    "how",
    [
        "before the backward",
        "after the backward",
        "between two backwards",
        "between two backwards, in a tensor which nobody else has",
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("kind", ["host+disk", "mock+host+disk"])
@pytest.mark.parametrize("make", [single, flat])
def test_a_buffer_that_is_used_again_after_the_step(
    make: Callable[[nn.Module], Buffers], kind: str, share: float, how: str, tmp_path: Path
) -> None:
    """An update that is still owed does not see it."""
    plain, model = net(), net()
    expected = train(plain, adamw(plain), make(plain), how)
    floor, need = needs(net(), tmp_path, kind, optimizer=adamw)
    with on_pages(model, kind, floor + int((need - floor) * share), tmp_path) as engine:
        seen = train(model, engine.bind_optimizer(adamw(model)), make(model), how)
        assert all(same_bits(ours, theirs) for ours, theirs in zip(seen, expected, strict=True))
        values = plain.state_dict()
        assert all(same_bits(value, values[name]) for name, value in model.state_dict().items())


def test_it_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    _, need = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", 2 * need, tmp_path) as engine, caplog.at_level(logging.WARNING):
        optimizer = engine.bind_optimizer(adamw(model))
        train(model, optimizer, [], "not at all")
        assert not caplog.messages
        train(model, optimizer, single(model), "before the backward")
        assert caplog.messages == [
            "the gradient of 10.bias has arrived in a tensor that is used elsewhere too, as where p.grad was set "
            "before backward: on pages there is a copy of it now. What is written to that tensor before the step "
            "changes nothing, and later gradients are not added to it. Set p.grad after backward, or change gradients "
            "within ptm_accel.gathered(model, grads=True, write=True)."
        ]


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_gradients_that_autograd_has_made_are_not_copied(share: float, tmp_path: Path) -> None:
    """Those of tied weights, which it adds up, and those that a hook has kept, of which it makes a copy itself."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = net()
            self.layers[4].weight = self.layers[0].weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layers(x) + self.layers[2].weight.sum()
            return out

    model, copied, kept = Tied(), [], []
    floor, need = needs(Tied(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", floor + int((need - floor) * share), tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        adopt = engine.pool.adopt

        def watched(tensor: object, data: torch.Tensor, **how: bool) -> None:
            copied.append(how.get("copied", False))
            adopt(tensor, data, **how)  # type: ignore[arg-type]

        engine.pool.adopt = watched  # type: ignore[method-assign,assignment]
        model.layers[6].weight.register_hook(kept.append)
        train(model, optimizer, [], "not at all")
        del engine.pool.adopt
    assert copied
    assert not any(copied)
