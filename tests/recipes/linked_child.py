"""One of two processes: trains a linked model on pages on data of its own, delinks it, and compares with a plain model.

Started by torchrun with one argument: a folder for pages.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.recipes.delinking import delink
from ptm_accel.recipes.linking import link

WIDTH, LAYERS, STEPS = 48, 4, 3


class Net(nn.Module):
    """Layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()  # type: ignore[no-any-return]


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """With the mean of the gradients of both processes' batches."""
    grads = []
    for rank in range(2):
        model(batch(step, rank)).backward()
        grads.append([param.grad for param in model.parameters()])
        model.zero_grad()
    for param, first, second in zip(model.parameters(), *grads, strict=True):
        param.grad = (first + second) / 2  # type: ignore[operator]
    optimizer.step()
    optimizer.zero_grad()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plain, model = Net(), Net()
    link(plain)
    engine = Engine.attach(model, PTMConfig(host_memory="112KiB", page_size=4096, disk=sys.argv[1]))
    engine.training.replicate()
    link(model)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    ours = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in range(2 * STEPS):
        if step == STEPS:
            delink(plain, theirs)
            delink(model, ours)
        plain_step(plain, theirs, step)
        model(batch(step, rank)).backward()
        ours.step()
        ours.zero_grad()
        for name, value in model.state_dict().items():
            assert torch.equal(value, plain.state_dict()[name]), (step, name)
    engine.close()
    assert not list(Path(sys.argv[1]).iterdir())
    sys.stdout.write(f"process {rank} agrees\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
