"""Members of a group keep what is theirs, whatever happens to their neighbours in the same blocks."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from tests.plain_loop import adamw, same_bits
from tests.tiers import MEMORIES, in_groups, members, needs, on_pages

WIDTH, STEPS = 64, 6


class Block(nn.Module):
    """Three layers, of which a forward may leave out some."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor, used: Iterable[str]) -> torch.Tensor:
        for name in used:
            x = x + torch.tanh(getattr(self, name)(x))
        return x


def blocks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Block() for _ in range(6)])


def train(model: nn.ModuleList, engine: Engine | None, *, assigned: bool) -> dict[str, torch.Tensor]:
    """Steps whose gradients are left at zeros; the last layer is used, or is given a gradient, from the third on."""
    optimizer = adamw(model)
    if engine is not None:
        optimizer = engine.bind_optimizer(optimizer)
    for step in range(STEPS):
        late = step >= 2
        if assigned and late:
            for block in model:
                block.c.weight.grad = torch.full((WIDTH, WIDTH), 1e-3 * step)
        for part in range(2):
            x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).mul(1 + step + part).sin()
            for block in model:
                x = block(x, "abc" if late and not assigned else "ab")
            x.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("assigned", [False, True], ids=["used", "assigned"])
def test_zeros_of_others_stay_when_a_first_gradient_comes(kind: str, assigned: bool, tmp_path: Path) -> None:
    expected = train(blocks(), None, assigned=assigned)
    _, need = needs(blocks(), tmp_path, kind)
    model = blocks()
    with in_groups(), on_pages(model, kind, need // 2, tmp_path) as engine:
        found = train(model, engine, assigned=assigned)
        assert members(engine) > 1
        assert engine.pool.stats.evictions > 0
        assert all(same_bits(found[name], value) for name, value in expected.items())
