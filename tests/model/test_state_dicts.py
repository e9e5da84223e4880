"""State dicts of a model whose pages are mostly away."""

from __future__ import annotations

import copy
from pathlib import Path

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


def test_what_fits_is_given_as_it_is(tmp_path: Path) -> None:
    """As in plain torch: the tensors of a state dict are those of the model."""
    model = net()
    _, whole = needs(copy.deepcopy(model), tmp_path, "host+disk")
    with on_pages(model, "host+disk", 8 * whole, tmp_path) as engine:
        kept = model.state_dict()
        for name, value in kept.items():
            slot = next(slot for slot in engine.slots if slot.name == name)
            assert slot.value.extent is not None
            assert value.data_ptr() == slot.value.extent.tensor.data_ptr()
        assert engine.memory.disk is not None
        assert engine.memory.disk.bytes_written == 0
