"""Gradients that a loop gives, sums in an order of its own, or changes where they are shown: the numbers of torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.outside import gathered
from tests.optim.loops import LAYERS, LEAST, WIDTH, Clip, assert_as_in_torch, net
from tests.plain_loop import same_bits
from tests.stacks import adamw, backward, stack
from tests.tiers import needs, on_pages


@pytest.mark.parametrize("roomy", [True, False])
def test_a_buffer_that_is_used_for_every_gradient(roomy: bool, tmp_path: Path) -> None:
    """A step that is pending does not read what has been written to it meanwhile."""
    buffers = [torch.empty(WIDTH, WIDTH) for _ in range(LAYERS)]

    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(6):
            weights = [layer.weight for layer in model]
            loss = loss_of(model, number)
            said.append(float(loss.detach()))
            grads = torch.autograd.grad(loss, weights)
            for weight, grad, buffer in zip(weights, grads, buffers, strict=True):
                weight.grad = buffer.copy_(grad)
            del loss, grads
            optimizer.step()
            for buffer in buffers:
                buffer.fill_(7.0)
            optimizer.zero_grad()
        return said

    assert_as_in_torch(loop, tmp_path, roomy=roomy)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean()


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("separately", [False, True])
def test_a_norm_is_summed_in_the_order_that_is_given(separately: bool, twice: bool, tmp_path: Path) -> None:
    """And one that is given twice counts twice, and is multiplied twice."""

    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(4):
            backward(model, number)
            # As of groups with weight decay and without.
            params = sorted(model.parameters(), key=lambda param: param.ndim)
            params = [*params[::-1], params[-1]] if twice else params
            norm = nn.utils.clip_grad_norm_(params, float("inf") if separately else LEAST)
            if separately:
                nn.utils.clip_grads_with_norm_(params, LEAST, norm)
            said.append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
        return said

    assert_as_in_torch(loop, tmp_path)


def test_orders_of_a_norm_differ() -> None:
    """Or the test above would show nothing."""
    model = net()
    norms = set()
    for number in range(4):
        backward(model, number)
        orders = [list(model.parameters()), sorted(model.parameters(), key=lambda param: param.ndim)]
        norms.add(len({float(nn.utils.clip_grad_norm_(params, float("inf"))) for params in orders}))
        model.zero_grad()
    assert 2 in norms


def test_gradients_are_clipped_where_they_are_shown(tmp_path: Path) -> None:
    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(4):
            backward(model, number)
            with gathered(model, grads=True, write=True):
                for param in model.parameters():
                    assert param.grad is not None
                    param.grad.mul_(3.0)
                said.append(float(nn.utils.clip_grad_norm_(model.parameters(), LEAST)))
                nn.utils.clip_grad_value_(model.parameters(), LEAST / 100)
            optimizer.step()
            optimizer.zero_grad()
        return said

    assert_as_in_torch(loop, tmp_path, roomy=True)


class HalfwayError(Exception):
    """In the middle of a change."""


@pytest.mark.parametrize("changes", ["nothing", "a row", "all", "all, and fails"])
def test_sums_that_are_shown_rounded_stay_what_they_are(changes: str, tmp_path: Path) -> None:
    """Sums for fp32 masters are in fp32, and `p.grad` is as wide as its parameter: what is not written to stays."""
    expected, _ = summed(tmp_path / "without", "never looks")
    ours, rounded = summed(tmp_path / "with", changes)
    if changes == "nothing":
        assert same_bits(ours, expected)
        assert not same_bits(ours, rounded)
    elif changes == "a row":
        assert same_bits(ours[1:], expected[1:])
        assert not same_bits(ours[0], expected[0])
    else:
        assert not same_bits(ours, expected)


def summed(directory: Path, changes: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The first moment that a step makes of a sum of two gradients, and of the sum as it is shown."""
    directory.mkdir()
    model = stack(WIDTH, LAYERS, torch.bfloat16)
    _, need = needs(stack(WIDTH, LAYERS, torch.bfloat16), directory, "host+disk", master_weights="fp32")
    with on_pages(model, "host+disk", 2 * need, directory, master_weights="fp32") as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        backward(model, 0)
        backward(model, 1)
        shown = torch.empty(0)
        if changes != "never looks":
            try:
                with gathered(model, grads=True, write=True):
                    grad = model[1].weight.grad
                    assert grad is not None
                    shown = grad.clone()
                    if changes == "a row":
                        grad.data[0] = 1.0
                    elif changes != "nothing":
                        grad.mul_(3.0)
                    if changes == "all, and fails":
                        raise HalfwayError
            except HalfwayError:
                pass
        optimizer.step()
        return first_moment(optimizer, model[1].weight), (shown.float() * 0.1)


def first_moment(optimizer: PagedOptimizer, weight: torch.Tensor) -> torch.Tensor:
    held = [param for group in optimizer.param_groups for param in group["params"]]
    number = next(at for at, param in enumerate(held) if param is weight)
    moment: torch.Tensor = optimizer.state_dict()["state"][number]["exp_avg"]
    return moment.clone()
