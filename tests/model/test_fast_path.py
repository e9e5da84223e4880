"""Modules that torch computes by one kernel where no gradients are wanted (its fast path) are computed so on pages."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.tiers import AMPLE, needs, on_pages

WIDTH = 64
KERNELS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")


class Called(TorchDispatchMode):
    """Counts the calls of torch's kernels for whole modules."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += any(kernel in str(func) for kernel in KERNELS)
        return func(*args, **(kwargs or {}))


def layer() -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, dropout=0.0, batch_first=True)


class Layers(nn.Module):
    """Encoder layers one after the other, between other modules; a mode of the user's lasts as long as the first."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).float()
        with torch.device("cpu"):
            x = self.layers[0](x)
        x = x @ self.last.weight
        for each in self.layers[1:]:
            x = each(x.float())
        out: torch.Tensor = self.last(x)
        return out


class Encoder(nn.Module):
    """Layers that torch gives a nested tensor, since a part of the batch is padded: what is padded becomes zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(layer(), 3)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padded = torch.zeros(x.shape[:2], dtype=torch.bool)
        padded[1:, 5:] = True
        # torch's own fails under autocast.
        with torch.autocast("cpu", enabled=False):
            out: torch.Tensor = self.head(self.encoder(x, src_key_padding_mask=padded))
        return out


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        out: torch.Tensor = self.head(y)
        return out


class Alone(nn.TransformerEncoder):
    """The model is the encoder."""

    def __init__(self) -> None:
        super().__init__(layer(), 3)


MODELS: list[Callable[[], nn.Module]] = [Layers, Encoder, Attention, Alone]


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(seed))


def run(model: nn.Module, optimizer: Any, autocast: bool) -> tuple[list[torch.Tensor], int]:
    """Trains, and evaluates in all ways in between; returns what was computed and how many kernels were called."""
    seen, called = [], Called()
    for step in range(3):
        for frozen, grad in ((False, False), (False, True), (True, True)):
            model.eval().requires_grad_(not frozen)
            with ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(grad))
                stack.enter_context(torch.autocast("cpu", torch.bfloat16, enabled=autocast))
                seen.append(model(batch(step)).detach())
                # Counted in another call: torch may leave the fast path for such a mode as well.
                with called:
                    model(batch(step))
            assert torch.is_autocast_cache_enabled()
        model.train().requires_grad_(True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(batch(step)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
    return seen, called.count


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("roomy", [False, True])
def test_the_same_numbers_on_the_fast_path(
    build: Callable[[], nn.Module], autocast: bool, roomy: bool, tmp_path: Path
) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        return build()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    plain, model = make(), make()
    expected, count = run(plain, adamw(plain), autocast)
    floor, _ = needs(make(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", AMPLE if roomy else floor, tmp_path) as engine:
        found, ours = run(model, engine.bind_optimizer(adamw(model)), autocast)
        assert (engine.pool.stats.evictions > 0) is not roomy
    assert all(map(torch.equal, found, expected))
    assert ours == count > 0


def test_hooks_of_users_keep_torch_from_the_fast_path(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Layers().eval()
    calls: list[nn.Module] = []
    model.layers[1].linear1.register_forward_hook(lambda module, args, output: calls.append(module))
    with torch.no_grad():
        expected = model(batch(0))
        floor, _ = needs(model, tmp_path, "host+disk")
        with on_pages(model, "host+disk", floor, tmp_path):
            assert torch.equal(model(batch(0)), expected)
    assert len(calls) == 2
