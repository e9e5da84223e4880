"""State dicts of a model whose pages are mostly away."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.tiers import MEMORIES, at_floor, needs, on_pages


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", MEMORIES)
def test_one_that_is_kept_leaves_room_to_load_and_to_train(kind: str, tmp_path: Path) -> None:
    other = {name: value.clone() for name, value in net(1).state_dict().items()}
    plain, model = net(), net()
    batch = torch.ones(2, 64)
    with at_floor(model, tmp_path, kind) as engine:
        kept = model.state_dict()
        assert same(kept, plain.state_dict())
        model.load_state_dict(other)
        plain.load_state_dict(other)
        again = model.state_dict()
        assert same(again, other)
        model(batch).square().mean().backward()
        plain(batch).square().mean().backward()
        assert engine.gradients is not None
        for grad, param in zip(engine.gradients.slots(), plain.parameters(), strict=True):
            assert grad.value is not None
            with engine.pool.pin(grad.value) as total:
                assert torch.equal(total, param.grad)
        assert len(kept) == len(again)
    del kept, again


@pytest.mark.parametrize("frozen", [False, True])
def test_what_fits_is_given_as_it_is(frozen: bool, tmp_path: Path) -> None:
    """As in plain torch: the tensors of a state dict are those of the model, and what is written to them is kept."""
    model = net().requires_grad_(not frozen)
    _, whole = needs(copy.deepcopy(model), tmp_path, "host+disk")
    with on_pages(model, "host+disk", whole, tmp_path) as engine:
        kept = [model.state_dict() for _ in range(100)]
        for value in kept[-1].values():
            value.fill_(1)
        for slot in engine.slots:
            with engine.pool.pin(slot.value) as values:
                assert (values == 1).all()
        assert engine.memory.disk is not None
        assert engine.memory.disk.bytes_written == 0


def test_state_dicts_that_are_kept_view_nothing_that_may_leave(tmp_path: Path) -> None:
    model = net()
    floor, whole = needs(copy.deepcopy(model), tmp_path, "host+disk")
    with on_pages(model, "host+disk", (floor + whole) // 2, tmp_path) as engine:
        # What somebody has read by its name is no exception.
        kept: list[Any] = [model[0].weight, *(model.state_dict() for _ in range(3))]
        assert len(kept[-1]) == len(list(engine.slots))
        assert not [slot.name for slot in engine.slots if slot.group.movable and slot.value.block.viewed]


def test_state_of_an_optimizer_that_is_kept_leaves_room_to_train(tmp_path: Path) -> None:
    model, plain = net(), net()
    floor, _ = needs(copy.deepcopy(model), tmp_path, "host+disk")
    with on_pages(model, "host+disk", floor + (64 << 10), tmp_path) as engine:
        pairs = [(m, torch.optim.AdamW(m.parameters(), fused=True)) for m in (plain, model)]
        optimizers = [pairs[0][1], engine.bind_optimizer(pairs[1][1])]
        kept = []
        for _ in range(3):
            losses = []
            for (module, _), optimizer in zip(pairs, optimizers, strict=True):
                loss = module(torch.ones(2, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
            kept.append(optimizers[1].state_dict())
        assert len(kept) == 3
