"""Hyperparameters that ask for more state, or more memory, than the optimizer had when it was put on pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.checkpoint.training_state import load_optimizer_state, save_optimizer_state
from ptm_accel.errors import BudgetError
from ptm_accel.units import format_least
from tests.plain_loop import same_bits
from tests.stacks import stack, step
from tests.tiers import needs, on_pages

WIDTH, LAYERS = 96, 4

Make = Callable[[nn.Module], torch.optim.Optimizer]


def net() -> nn.Sequential:
    return stack(WIDTH, LAYERS)


def making(cls: Any = torch.optim.AdamW, **options: Any) -> Make:
    return lambda model: cls(model.parameters(), lr=1e-2, **options)


MODEST = making(fused=True)
GREEDY = making(fused=False, foreach=False, amsgrad=True)


def switch_on(optimizer: torch.optim.Optimizer, name: str, value: object) -> None:
    for group in optimizer.param_groups:
        group[name] = value


def floor_of(make: Make, directory: Path) -> int:
    return needs(net(), directory, "host+disk", optimizer=make)[0]


@pytest.mark.parametrize("how", ["state_dict", "checkpoint", "groups"])
def test_what_does_not_fit_is_refused_before_anything_changes(how: str, tmp_path: Path) -> None:
    little, much = floor_of(MODEST, tmp_path), floor_of(GREEDY, tmp_path)
    assert little < much
    folder = tmp_path / "saved"
    folder.mkdir()
    model = net()
    with on_pages(model, "host+disk", 2 * much, tmp_path) as engine:
        greedy = engine.bind_optimizer(GREEDY(model))
        step(model, greedy, 0)
        saved = greedy.state_dict()
        states = {n: {k: v.clone() for k, v in entries.items()} for n, entries in saved["state"].items()}
        saved = {"state": states, "param_groups": saved["param_groups"]}
        save_optimizer_state(greedy, folder)
    model = net()
    with on_pages(model, "host+disk", little, tmp_path) as engine:
        optimizer = engine.bind_optimizer(MODEST(model))
        step(model, optimizer, 0)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        if how == "groups":
            switch_on(optimizer, "fused", False)
            switch_on(optimizer, "amsgrad", True)
        attempt = {
            "state_dict": lambda: optimizer.load_state_dict(saved),
            "checkpoint": lambda: load_optimizer_state(optimizer, folder),
            "groups": lambda: step(model, optimizer, 1),
        }[how]
        said = f"cannot train under less than.*Set host_memory to at least {format_least(much)}[.]"
        with pytest.raises(BudgetError, match=said):
            attempt()
        if how == "groups":
            switch_on(optimizer, "fused", True)
            switch_on(optimizer, "amsgrad", False)
            engine.zero_grad()
        assert all(same_bits(model.state_dict()[name], value) for name, value in before.items())
        assert not optimizer.param_groups[0]["amsgrad"]
        assert set(optimizer.state_dict()["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
        step(model, optimizer, 1)
        assert engine.pool.budget.peak_bytes <= little


def test_what_fits_is_charged(tmp_path: Path) -> None:
    """At the floor of the greedier one, and with its numbers."""
    much = floor_of(GREEDY, tmp_path)
    model, expected = net(), net()
    other = MODEST(expected)
    with on_pages(model, "host+disk", much, tmp_path) as engine:
        optimizer = engine.bind_optimizer(MODEST(model))
        assert engine.needs.floor.total_bytes < much
        for each in (optimizer, other):
            for name, value in (("fused", False), ("foreach", False), ("amsgrad", True)):
                switch_on(each, name, value)
        for number in range(3):
            step(model, optimizer, number)
            step(expected, other, number)
        assert engine.needs.floor.total_bytes == much
        assert optimizer.optimizer_memory.state_tensors == 3
        values = model.state_dict()
        assert all(same_bits(values[name], value) for name, value in expected.state_dict().items())


def test_momentum_that_comes_later(tmp_path: Path) -> None:
    """Its buffers begin as the gradients, in every window."""
    plain, heavy = making(torch.optim.SGD, dampening=0.25), making(torch.optim.SGD, dampening=0.25, momentum=0.9)
    model, expected = net(), net()
    with on_pages(model, "host+disk", floor_of(heavy, tmp_path), tmp_path) as engine:
        optimizer, other = engine.bind_optimizer(plain(model)), plain(expected)
        for number in range(5):
            if number == 2:
                switch_on(optimizer, "momentum", 0.9)
                switch_on(other, "momentum", 0.9)
            step(model, optimizer, number)
            step(expected, other, number)
        values = model.state_dict()
        assert all(same_bits(values[name], value) for name, value in expected.state_dict().items())
