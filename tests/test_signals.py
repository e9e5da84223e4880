"""Handlers of signals that look at the model at any moment see a step's weights, and change nothing."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.plain_loop import same_bits
from tests.tiers import MEMORIES, needs, on_pages

STEPS = 12


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(module for _ in range(6) for module in (nn.Linear(48, 48), nn.GELU())))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 48, generator=generator) for _ in range(STEPS)]


def look(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def plain() -> list[list[torch.Tensor]]:
    """The weights before each step of a plain run, and after the last."""
    model = net()
    optimizer = adamw(model)
    seen = [look(model)]
    for batch in batches():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(look(model))
    return seen


@contextmanager
def ringing(model: nn.Module, rng: random.Random, looks: list[list[torch.Tensor]]) -> Iterator[None]:
    """While it lasts the model is looked at every few milliseconds, wherever the main thread is."""
    on = True

    def handler(number: int, frame: Any) -> None:
        looks.append(look(model))
        if on:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-4, 6e-3))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    try:
        yield
    finally:
        on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# The handler stands where pytest's own alarm stands otherwise.
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("in_backward", [False, True], ids=["at the step", "in backward"])
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("seed", range(2))
def test_handlers_that_look_at_the_model(
    seed: int, kind: str, in_backward: bool, plain: list[list[torch.Tensor]], tmp_path: Path
) -> None:
    looks: list[list[torch.Tensor]] = []
    floor, need = needs(net(), tmp_path, kind, optimizer=adamw)
    model = net()
    with on_pages(model, kind, floor + (need - floor) // 4, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        engine.updates_in_backward = lambda: in_backward
        with ringing(model, random.Random(seed), looks):
            for batch in batches():
                loss = model(batch).square().mean()
                with engine.backward():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert same(look(model), plain[-1])
    assert looks
    assert all(any(same(seen, weights) for weights in plain) for seen in looks)
