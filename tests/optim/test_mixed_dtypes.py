"""What an optimizer of torch shares among the tensors of one call, over parameters of several dtypes in one group.

On pages it is called for a few of them at a time.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.plain_loop import same_bits
from tests.tiers import AMPLE, needs, on_pages

REFUSED = {"LBFGS", "SparseAdam"}
OPTIMIZERS = {
    name: cls
    for name, cls in vars(torch.optim).items()
    if inspect.isclass(cls) and issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer
    if name not in REFUSED
}
OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "SGD": {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
}
WITHOUT_COMPLEX = {"Adafactor", "Muon"}
LOWEST, LOW, WIDE, WIDEST, COMPLEX = torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64


class Net(nn.Module):
    """Layers of several dtypes; the first has no gradient now and then."""

    def __init__(self, *dtypes: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(64, 64, bias=False, dtype=dtype) for dtype in dtypes)

    def forward(self, x: torch.Tensor, skipped: int | None) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number != skipped:
                out = layer(x.to(layer.weight.dtype))
                x = x + (out.real if out.is_complex() else out).double()
        return x.square().mean()


def train(model: nn.Module, optimizer: Any, clip: Any) -> list[Any]:
    seen = []
    for step in range(5):
        x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float64) * 1e-2
        loss = model(x, 0 if step in (1, 3) else None)
        loss.backward()
        seen.append(loss.item())
        if step > 2:
            seen.append(clip(1e-3))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(param.detach().clone() for param in model.parameters())]


def ways(name: str) -> list[dict[str, Any]]:
    """The options that choose what carries an update out."""
    known = inspect.signature(OPTIMIZERS[name]).parameters
    return [{}, *({way: True} for way in ("foreach", "fused") if way in known)]


def check(name: str, way: dict[str, Any], dtypes: str, tmp_path: Path) -> None:
    mixed = [WIDEST, LOW, WIDE, LOW, LOWEST] if dtypes == "up" else [LOW, WIDE, LOWEST, WIDE, WIDEST]
    if name not in WITHOUT_COMPLEX and "fused" not in way:
        mixed.insert(2, COMPLEX)

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return OPTIMIZERS[name](model.parameters(), **OPTIONS.get(name, {}), **way)

    plain = Net(*mixed)
    expected = train(plain, make(plain), lambda most: nn.utils.clip_grad_norm_(plain.parameters(), most))
    floor, _ = needs(Net(*mixed), tmp_path, "host+disk", optimizer=make)
    for budget in (floor, AMPLE):
        model = Net(*mixed)
        with on_pages(model, "host+disk", budget, tmp_path) as engine:
            found = train(model, engine.bind_optimizer(make(model)), engine.clip_grad_norm_)
            assert (engine.pool.stats.evictions > 0) == (budget == floor)
        assert same_bits(found, expected), [a for a, b in zip(found, expected, strict=True) if not same_bits(a, b)]


ORDERS = ["down", "up"]
OTHERS = [(name, way) for name in OPTIMIZERS if name != "Adafactor" for way in ways(name)]


@pytest.mark.parametrize("way", ways("Adafactor"), ids=["single", "foreach"])
@pytest.mark.parametrize("dtypes", ORDERS)
def test_adafactor_over_mixed_dtypes(way: dict[str, Any], dtypes: str, tmp_path: Path) -> None:
    check("Adafactor", way, dtypes, tmp_path)


@pytest.mark.thinned(4)
@pytest.mark.parametrize(("name", "way"), OTHERS, ids=["-".join([name, *way]) for name, way in OTHERS])
@pytest.mark.parametrize("dtypes", ORDERS)
def test_others_over_mixed_dtypes(name: str, way: dict[str, Any], dtypes: str, tmp_path: Path) -> None:
    check(name, way, dtypes, tmp_path)


@pytest.mark.parametrize("foreach", [False, True])
def test_adafactor_over_masters_and_other_parameters(foreach: bool, tmp_path: Path) -> None:
    """The first parameter is none of the model's; masters are in fp32, whatever their parameters are in."""

    def make(model: nn.Module, other: nn.Parameter, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adafactor([other, *params], lr=1e-2, foreach=foreach)

    def run(model: Net, other: nn.Parameter, optimizer: Any) -> list[Any]:
        for step in range(3):
            other.grad = torch.full_like(other, 1e-3) if step else None
            x = torch.randn(4, 64, generator=torch.Generator().manual_seed(step)) * 1e-2
            model(x, None).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [param.detach().clone() for param in (*model.parameters(), other)]

    results = []
    for budget in (None, 200 << 10, AMPLE):
        model, other = Net(WIDE, LOW, WIDE), nn.Parameter(torch.ones(8, dtype=LOW))
        if budget is None:
            results.append(run(model, other, make(model, other, list(model.parameters()))))
            continue
        with on_pages(model, "host+disk", budget, tmp_path) as engine:
            optimizer = engine.bind_optimizer(make(model, other, list(model.parameters())))
            results.append(run(model, other, optimizer))
            assert optimizer.param_groups[0]["eps"] == (None, 1e-3)
    assert same_bits(results[1], results[0])
    assert same_bits(results[2], results[0])
