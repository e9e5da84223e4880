"""What is left by passes that were broken off, or that remember nothing, is in nobody's way afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel.model.away import bare
from tests.plain_loop import same_bits
from tests.stacks import adamw, stack, step
from tests.tiers import MEMORIES, at_floor, needs, on_pages

WIDTH = 48


def net() -> nn.Sequential:
    return stack(WIDTH, 6)


@pytest.mark.parametrize("kind", MEMORIES)
def test_an_evaluation_in_inference_mode_changes_nothing(kind: str, tmp_path: Path) -> None:
    plain = net()
    expected = [step(plain, optimizer, n) for optimizer in [adamw(plain)] for n in range(5)]
    with at_floor(model := net(), tmp_path, kind) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        losses = []
        for number in range(5):
            losses.append(step(model, optimizer, number))
            with torch.inference_mode():
                model(torch.ones(1, WIDTH))
        assert losses == expected
        assert all(same_bits(model.state_dict()[name].clone(), value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("how", ["optimizer", "engine", "abort"])
def test_a_gradient_that_autograd_has_left_is_forgotten(how: str, tmp_path: Path) -> None:
    """Ctrl-C may come between leaving it there and telling us."""
    with at_floor(model := net(), tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        param = next(iter(engine.slots)).param
        with bare():
            param.grad = torch.ones_like(param)
        {"optimizer": optimizer.zero_grad, "engine": engine.zero_grad, "abort": engine.abort}[how]()
        assert param.grad is None


def test_a_group_that_is_added_finds_the_step_done(tmp_path: Path) -> None:
    def parts(model: nn.Sequential) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        return torch.optim.AdamW(model[:4].parameters(), lr=1e-2, fused=True), list(model[4:].parameters())

    plain = net()
    optimizer, more = parts(plain)
    expected = [step(plain, optimizer, n) for n in range(3)]
    optimizer.add_param_group({"params": more, "lr": 1e-3})
    expected += [step(plain, optimizer, n) for n in range(3, 6)]
    floor, need = needs(net(), tmp_path, "host+disk")
    model = net()
    with on_pages(model, "host+disk", floor + (need - floor) // 2, tmp_path) as engine:
        inner, more = parts(model)
        paged = engine.bind_optimizer(inner)
        losses = [step(model, paged, n) for n in range(3)]
        assert engine.pages.executor.pending_updates is not None
        paged.add_param_group({"params": more, "lr": 1e-3})
        assert engine.pages.executor.pending_updates is None
        losses += [step(model, paged, n) for n in range(3, 6)]
        assert losses == expected


def test_a_parameter_that_has_just_become_trainable_has_no_gradient(tmp_path: Path) -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    with at_floor(model, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        step(model, optimizer, 0)
        next(slot for slot in engine.slots if slot.name == "0.weight").param.requires_grad_(True)
        optimizer.zero_grad()
        optimizer.gradients.change(lambda gradient: gradient.zero_())
        optimizer.step()
        step(model, optimizer, 1)
