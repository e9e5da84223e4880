"""Small modules that are compiled in the tests, and inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self, reentrant: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 8)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x).square().mean()


def inputs(step: int) -> dict[str, Any]:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
    return {"x": x.requires_grad_()}


def compile_layers(net: nn.Module, **options: Any) -> nn.Module:
    for layer in net.layers:  # type: ignore[union-attr]
        layer.compile(**options)
    return net


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held = nn.Identity()


class Builder(Net):
    """Makes modules in its forward, so that Dynamo traces torch's hooks on the making of modules."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(Holder().held(x))


class Reader(nn.Module):
    """Reads the weight of a module that is not under it."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = nn.Linear(64, 64)
        self.others = (other,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.own(x) @ self.others[0].weight).sum()


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.other = nn.Linear(64, 64)
        self.reader = Reader(self.other)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reader(x)
