"""Workers of a data loader that are forked while bytes move: they load data, and the numbers are the plain ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.plain_loop import same_bits
from tests.tiers import needs, on_pages

WIDTH = 64


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    data = TensorDataset(torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH))
    losses = []
    for _ in range(3):
        for (batch,) in DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork"):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", ["host+disk", "mock+host+disk"])
def test_forked_workers_load_data_beside_transfers(kind: str, tmp_path: Path) -> None:
    plain, model = net(), net()
    expected = train(plain, adamw(plain))
    floor, _ = needs(net(), tmp_path, kind, optimizer=adamw)
    with on_pages(model, kind, floor, tmp_path) as engine:
        assert train(model, engine.bind_optimizer(adamw(model))) == expected
        assert engine.memory.disk is not None
        assert engine.memory.disk.bytes_read > 0
        for name, value in model.state_dict().items():
            assert same_bits(value, plain.state_dict()[name]), name
