"""Gradients that a model has as it comes onto pages count as in torch, and go with it as it leaves them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import UnsupportedError
from tests.plain_loop import same_bits
from tests.tiers import AMPLE, MEMORIES, config, needs, open_memory

Move = Callable[[nn.Module], Any]
"""Puts a model on pages, or does nothing in the plain run; returns the engine."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(6)))


def backward(model: nn.Module, seed: int) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    model(x).square().mean().backward()


def step(model: nn.Module, engine: Engine | None) -> None:
    plain = torch.optim.SGD(model.parameters(), lr=1.0, weight_decay=0.1)
    optimizer = plain if engine is None else engine.bind_optimizer(plain)
    optimizer.step()
    optimizer.zero_grad()


def at_once(model: nn.Module, attach: Move, detach: Move) -> list[Any]:
    backward(model, 0)
    step(model, attach(model))
    detach(model)
    return []


def in_cycles(model: nn.Module, attach: Move, detach: Move) -> list[Any]:
    seen: list[Any] = []
    for cycle in range(4):
        backward(model, 3 * cycle)
        attach(model)
        if cycle % 2:
            backward(model, 3 * cycle + 1)
        detach(model)
        seen += [param.grad.clone() for param in model.parameters() if param.grad is not None]
        if cycle > 1:
            backward(model, 3 * cycle + 2)
        step(model, attach(model))
        detach(model)
    return seen


def clipped(model: nn.Module, attach: Move, detach: Move) -> list[Any]:
    backward(model, 0)
    engine = attach(model)
    clip = torch.nn.utils.clip_grad_norm_
    seen = clip(model.parameters(), 0.1) if engine is None else engine.clip_grad_norm_(0.1)
    step(model, engine)
    detach(model)
    return [seen]


def frozen_since(model: nn.Module, attach: Move, detach: Move) -> list[Any]:
    """Torch updates what has a gradient, also if it is frozen by then."""
    backward(model, 0)
    model.get_submodule("2").requires_grad_(False)
    engine = attach(model)
    seen = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    step(model, engine)
    detach(model)
    return seen


def kept(model: nn.Module, attach: Move, detach: Move) -> list[Any]:
    backward(model, 0)
    mine = [param.grad for param in model.parameters()]
    step(model, attach(model))
    backward(model, 1)
    step(model, engine_of(model))
    detach(model)
    return mine


def of_a_new_layer(model: nn.Sequential, attach: Move, detach: Move) -> list[Any]:
    backward(model, 0)
    attach(model)
    torch.manual_seed(1)
    layer = nn.Linear(64, 64)
    backward(layer, 1)
    model.append(layer)
    step(model, attach(model))
    detach(model)
    return []


@pytest.mark.parametrize("do", [at_once, in_cycles, clipped, frozen_since, kept, of_a_new_layer])
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("roomy", [False, True])
def test_gradients_that_wait_are_used(do: Any, kind: str, roomy: bool, tmp_path: Path) -> None:
    plain, model = net(), net()
    budget = AMPLE if roomy else 2 * needs(net(), tmp_path, kind)[0]

    def attach(module: nn.Module) -> Engine:
        known = engine_of(module)
        return Engine.attach(module, config(), memory=None if known else open_memory(kind, budget, tmp_path))

    def detach(module: nn.Module) -> None:
        engine = engine_of(module)
        assert engine is not None
        engine.check_integrity()
        engine.detach()

    expected = do(plain, lambda module: None, lambda module: None)
    assert same_bits(do(model, attach, detach), expected)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert same_bits(ours.detach(), theirs.detach())
        assert (ours.grad is None) == (theirs.grad is None)


def test_a_sparse_gradient_that_waits_is_refused_and_all_stay(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Embedding(64, 64, sparse=True))
    model[0](model[1](torch.arange(4))).square().mean().backward()
    before = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(UnsupportedError, match=r"the gradient of 1.weight is torch.sparse_coo; only dense gradients"):
        Engine.attach(model, config(), memory=open_memory("host+disk", AMPLE, tmp_path))
    assert engine_of(model) is None
    assert [type(param) for param in model.parameters()] == [nn.Parameter] * 3
    for param, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(param.grad.to_dense(), gradient.to_dense())
