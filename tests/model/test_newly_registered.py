"""Parameters that are on pages already, and come to be another module's too: each is read there with its values."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from tests.plain_loop import same_bits
from tests.tiers import MEMORIES, at_floor, needs, on_pages

WIDTH, WORDS = 64, 128


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.body = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(self.embedding(ids)))
        return out


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).mT


def tie(model: Net) -> None:
    """A new head, tied."""
    model.head = nn.Linear(WIDTH, WORDS, bias=False)
    model.head.weight = model.embedding.weight


def symmetrise(model: Net) -> None:
    parametrize.register_parametrization(model.body[1], "weight", Symmetric())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    losses = []
    for number in range(steps):
        ids = torch.randint(0, WORDS, (4, 8), generator=torch.Generator().manual_seed(number))
        loss = model(ids).square().mean()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("change", [tie, symmetrise])
def test_the_values_are_read_where_the_parameter_is_now(change: object, kind: str, tmp_path: Path) -> None:
    model = Net()
    floor, _ = needs(model, tmp_path, kind, optimizer=adamw)
    plain = copy.deepcopy(model)
    largest = WORDS * WIDTH * 4
    with on_pages(model, kind, floor + largest, tmp_path) as engine:
        ours, theirs = engine.bind_optimizer(adamw(model)), adamw(plain)
        assert all(same_bits(a, b) for a, b in zip(train(model, ours), train(plain, theirs), strict=True))
        for which in (model, plain):
            change(which)  # type: ignore[operator]
        assert all(same_bits(a, b) for a, b in zip(train(model, ours), train(plain, theirs), strict=True))
        expected = plain.state_dict()
        found = model.state_dict()
        assert list(found) == list(expected)
        for name, value in expected.items():
            assert same_bits(found[name].clone(), value), name
        model.load_state_dict({name: value + 1 for name, value in expected.items()})
        plain.load_state_dict({name: value + 1 for name, value in expected.items()})
        ids = torch.arange(8)
        assert same_bits(model(ids).detach(), plain(ids).detach())
        engine.follow()
        assert same_bits(model(ids).detach(), plain(ids).detach())
        assert same_bits(engine.detach()(ids).detach(), plain(ids).detach())
    assert all(type(param) is nn.Parameter for param in model.parameters())


def test_a_module_that_is_no_part_of_the_model_reads_them_and_may_go(tmp_path: Path) -> None:
    model = Net()
    with at_floor(model, tmp_path) as engine:
        expected = model.body[2].weight.detach().clone()
        for slot in engine.slots:
            if slot.value.block in engine.pool.eviction:
                engine.pool.admission.evict(slot.value.block)
        other = nn.Linear(WIDTH, WIDTH)
        other.weight = model.body[2].weight
        assert same_bits(other.weight.detach().clone(), expected)
        gone = weakref.ref(other)
        del other
        gc.collect()
        assert gone() is None
