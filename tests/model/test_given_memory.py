"""Parameters that are given other memory by `Tensor.set_`, by what of torch uses it, and by an exchange of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from ptm_accel.engine import Engine
from ptm_accel.errors import PagedModelError
from ptm_accel.outside import gathered
from tests.plain_loop import same_bits
from tests.tiers import budget_bytes, needs, on_pages

WIDTH = 64
BUDGETS = ("fits", "30%", "floor")


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def normed() -> nn.Sequential:
    model = net()
    parametrizations.spectral_norm(model[1])
    return model


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for _ in range(3):
        model(torch.ones(2, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def trained(
    budget: str, directory: Path, build: Callable[[], nn.Module] = net
) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Engine]]:
    """A model on pages after some steps, whose last updates may be pending."""
    floor, whole = needs(build(), directory, "host+disk", optimizer=adamw)
    model = build()
    with on_pages(model, "host+disk", budget_bytes(budget, floor, whole), directory) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        train(model, optimizer)
        yield model, optimizer, engine


def same(model: nn.Module, plain: nn.Module) -> bool:
    ours, theirs = model.state_dict(), plain.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@torch.no_grad()
def given_by_method(model: nn.Module) -> None:
    for number, p in enumerate(model.parameters()):
        p.set_(torch.full_like(p, 0.01 * number))


@torch.no_grad()
def given_storage(model: nn.Module) -> None:
    for number, p in enumerate(model.parameters()):
        p.set_(torch.full((p.numel(),), 0.01 * number).untyped_storage(), 0, p.shape)


@torch.no_grad()
def given_each_other(model: nn.Module) -> None:
    model[0].weight.set_(model[1].weight)
    model[0].weight.mul_(2.0)
    # Shared in torch.
    model[1].weight.data = model[0].weight.clone()


@torch.no_grad()
def given_while_gathered(model: nn.Module) -> None:
    for number, layer in enumerate(model):
        with gathered(layer):
            layer.weight.set_(torch.full((WIDTH, WIDTH), 0.01 * number))


@pytest.mark.parametrize("give", [given_by_method, given_storage, given_each_other, given_while_gathered])
@pytest.mark.parametrize("budget", BUDGETS)
def test_what_set_gives(give: Callable[[nn.Module], None], budget: str, tmp_path: Path) -> None:
    plain = net()
    optimizer = adamw(plain)
    train(plain, optimizer)
    give(plain)
    with trained(budget, tmp_path) as (model, ours, _):
        give(model)
        assert same(model, plain)
        train(plain, optimizer)
        train(model, ours)
        assert same(model, plain)


@pytest.mark.parametrize("budget", BUDGETS)
def test_parametrizations_are_removed(budget: str, tmp_path: Path) -> None:
    plain = normed()
    optimizer = adamw(plain)
    train(plain, optimizer)
    with trained(budget, tmp_path, normed) as (model, ours, _):
        for each in (plain, model):
            parametrize.remove_parametrizations(each[1], "weight")
        assert same(model, plain)
        train(plain, optimizer)
        train(model, ours)
        assert same(model, plain)


def test_set_refuses_what_torch_refuses(tmp_path: Path) -> None:
    with trained("floor", tmp_path) as (model, _, _):
        with pytest.raises(RuntimeError, match="leaf Variable that requires grad is being used in an in-place"):
            model[0].weight.set_(torch.zeros(WIDTH, WIDTH))
        with torch.no_grad(), pytest.raises(RuntimeError, match="dtype|type"):
            model[0].weight.set_(torch.zeros(WIDTH, WIDTH, dtype=torch.float64))


@pytest.fixture
def swapping() -> Iterator[None]:
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(False)


_SWAPPED = (
    r"parameter 0.weight cannot be exchanged by torch.utils.swap_tensors: it is on pages. Assign `p.data = x`, and "
    r"call `torch.__future__.set_swap_module_params_on_conversion\(False\)`."
)


def test_an_exchange_of_tensors_is_refused(tmp_path: Path) -> None:
    with trained("floor", tmp_path) as (model, _, _):
        before = model[0].weight.detach().clone()
        for pair in ((model[0].weight, nn.Parameter(torch.zeros(WIDTH, WIDTH))), (model[0].weight, model[1].weight)):
            with pytest.raises(PagedModelError, match=_SWAPPED):
                torch.utils.swap_tensors(*pair)
        assert same_bits(model[0].weight.detach(), before)


def test_loading_by_exchange_is_refused(swapping: None, tmp_path: Path) -> None:
    with trained("floor", tmp_path) as (model, _, _):
        with pytest.raises(RuntimeError, match=_SWAPPED):
            model.load_state_dict(net(1).state_dict())
        torch.__future__.set_swap_module_params_on_conversion(False)
        model.load_state_dict(net(1).state_dict())
        assert same(model, net(1))


def test_loading_by_exchange_where_everything_fits(swapping: None, tmp_path: Path) -> None:
    """Without hooks parameters are ordinary ones."""
    plain = net()
    optimizer = adamw(plain)
    train(plain, optimizer)
    with trained("fits", tmp_path) as (model, ours, engine):
        assert engine.training.plain.active
        for each in (plain, model):
            each.load_state_dict(net(1).state_dict())
        train(plain, optimizer)
        train(model, ours)
        assert same(model, plain)
