"""One of two processes: trains a model with DDP and one on pages, on the same data, and compares every bit.

Started by torchrun with one argument: a folder for pages.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import UnsupportedError

STEPS, ACCUMULATION, WIDTH = 4, 2, 48


class Net(nn.Module):
    """Layers, one of which only some processes use, and running means."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.never = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, extra: bool) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        x = self.norm(x)
        return (self.sometimes(x) if extra else x).square().mean()


def net(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def batches(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(8, WIDTH, generator=generator) for _ in range(STEPS * ACCUMULATION)]


def train_plain(rank: int) -> tuple[Net, list[float]]:
    # Each process begins elsewhere; DDP takes the first one's values.
    model = net(rank)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for number, batch in enumerate(batches(rank)):
        last = number % ACCUMULATION == ACCUMULATION - 1
        with nullcontext() if last else wrapped.no_sync():
            wrapped(batch, rank == 0 and number % 4 == 3).backward()
        if last:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return model, norms


def train_paged(rank: int, folder: Path) -> tuple[Net, list[float], Engine]:
    model = net(rank)
    engine = Engine.attach(
        model, PTMConfig(host_memory=110 << 10, page_size=4096, disk=str(folder)), device=torch.device("cpu")
    )
    engine.replicate()
    engine.replicate()
    optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2))
    norms = []
    for number, batch in enumerate(batches(rank)):
        last = number % ACCUMULATION == ACCUMULATION - 1
        with nullcontext() if last else engine.no_sync():
            model(batch, rank == 0 and number % 4 == 3).backward()
        if last:
            norms.append(float(engine.clip_grad_norm_(0.5)))
            optimizer.step()
            optimizer.zero_grad()
    return model, norms, engine


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    plain, expected = train_plain(rank)
    model, norms, engine = train_paged(rank, folder)
    assert norms == expected, (norms, expected)
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name
    assert engine.pool.stats.loaded_bytes, "everything stayed in memory, so this shows little"
    engine.check_integrity()
    engine.close()
    other = nn.Linear(WIDTH, WIDTH + rank)
    refused = Engine.attach(other, PTMConfig(host_memory="1MiB", page_size=4096), device=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="the 2 processes have different models"):
        refused.replicate()
    sys.stdout.write(f"process {rank} agrees over {len(norms)} steps\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
