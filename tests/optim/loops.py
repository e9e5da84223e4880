"""Loops of one's own, on pages and without: the same loop gives the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.optim.optimizer import PagedOptimizer
from tests.plain_loop import same_bits
from tests.stacks import adamw, stack
from tests.tiers import needs, on_pages

WIDTH, LAYERS = 48, 4
LEAST = 0.01
"""A norm that every gradient exceeds."""

Clip = Callable[[float], torch.Tensor]
Make = Callable[[nn.Module], torch.optim.Optimizer]
Loop = Callable[[nn.Sequential, Any, Clip], list[float]]


def net() -> nn.Sequential:
    return stack(WIDTH, LAYERS, torch.float32)


@contextmanager
def paged(
    directory: Path, model: nn.Sequential, make: Make = adamw, *, roomy: bool = False
) -> Iterator[tuple[Engine, PagedOptimizer]]:
    floor, need = needs(net(), directory, "host+disk", optimizer=make)
    with on_pages(model, "host+disk", need if roomy else floor + (need - floor) // 3, directory) as engine:
        yield engine, engine.bind_optimizer(make(model))


def assert_as_in_torch(
    loop: Loop, directory: Path, model: nn.Sequential | None = None, make: Make = adamw, *, roomy: bool = False
) -> None:
    """The same loop, on pages and without: norms and losses, then weights and state, bit for bit."""
    expected = net()
    for ours, theirs in zip([] if model is None else model.parameters(), expected.parameters(), strict=False):
        theirs.requires_grad_(ours.requires_grad)
    model = net() if model is None else model
    other = make(expected)
    said = loop(expected, other, lambda norm: nn.utils.clip_grad_norm_(expected.parameters(), norm))
    with paged(directory, model, make, roomy=roomy) as (engine, optimizer):
        assert loop(model, optimizer, engine.clip_grad_norm_) == said
        values, states = model.state_dict(), optimizer.state_dict()["state"]
        for name, value in expected.state_dict().items():
            assert same_bits(values[name].clone(), value), name
        kept = other.state_dict()["state"]
        assert states.keys() == kept.keys()
        for number, state in kept.items():
            for key, value in state.items():
                assert same_bits(states[number][key].clone(), value), (number, key)
