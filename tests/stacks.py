"""A stack of equal linear layers, and steps of it that are told apart by their number."""

from __future__ import annotations

import torch
from torch import nn


def stack(width: int, layers: int, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """Always the same values."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers))).to(dtype)


def tanh_stack(width: int, layers: int) -> nn.Sequential:
    """The same with something between that backward needs; always the same values."""
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*parts)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def backward(model: nn.Module, number: int) -> torch.Tensor:
    """Forward and backward on the batch of that number; returns the loss."""
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    x = torch.randn(4, first.in_features, generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = model(x.to(next(model.parameters()).dtype)).float().square().mean()
    loss.backward()
    return loss.detach()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    """`backward` and the optimizer's step; returns the loss."""
    loss = backward(model, number)
    optimizer.step()
    optimizer.zero_grad()
    return loss
