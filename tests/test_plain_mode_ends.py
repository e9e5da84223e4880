"""Plain mode may end at any time, whatever a living graph has saved, or saves again as a checkpoint recomputes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import ptm_accel
from ptm_accel.engine import Engine, engine_of
from tests.tiers import AMPLE, config, on_pages

WIDTH, STEPS, LAYERS = 32, 6, 3

Action = Callable[["Net"], object]


class Layer(nn.Module):
    """A frozen base with an adapter that can be turned off, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.base, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down, self.up = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.off = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(self.norm(x))
        if not self.off:
            y = y + self.up(torch.tanh(self.down(x)))
        return x + self.out(torch.tanh(y))


class Net(nn.Module):
    """Layers that a checkpoint of some kind recomputes; with adapters each is several groups, else one.

    Args:
        kind: of the checkpoint.
        adapters: whether only these are trained.
        autocast: whether it computes in bf16.

    Attributes:
        between: called once behind the first layer's forward.
        during: called once in backward, before that of the first layer.
    """

    def __init__(self, kind: str, *, adapters: bool, autocast: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.kind, self.autocast = kind, autocast
        self.between: Callable[[], object] | None = None
        self.during: Callable[[], object] | None = None
        if adapters:
            for name, param in self.layers.named_parameters():
                param.requires_grad_("down" in name or "up" in name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            return self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self._through(layer, x)
            action, self.between = self.between, None
            if action is not None:
                action()
            action, self.during = self.during, None
            if action is not None and x.requires_grad:
                x.register_hook(lambda gradient, action=action: action() and None)
        return x

    def _through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "none":
            return layer(x)
        selective = {"context_fn": lambda: create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])}
        given = selective if self.kind == "selective" else {}
        out: torch.Tensor = checkpoint(layer, x, use_reentrant=self.kind == "reentrant", **given)
        return out


KINDS = ["none", "reentrant", "not reentrant", "selective"]


def batch(number: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))


# ---- what may end it ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def adapters_off(model: Net) -> Iterator[None]:
    """As PEFT's `disable_adapter`, which freezes them meanwhile."""
    trained = [param for name, param in model.named_parameters() if "down" in name or "up" in name]
    for layer in model.layers:
        layer.off = True
    for param in trained:
        param.requires_grad_(False)
    try:
        yield
    finally:
        for param in trained:
            param.requires_grad_(True)
        for layer in model.layers:
            layer.off = False


def nothing(model: Net) -> None: ...


def reference(model: Net) -> None:
    with adapters_off(model), torch.no_grad():
        model(batch(80))


def thaw(model: Net) -> None:
    model.layers[1].norm.requires_grad_(True)


def thaw_after_adapters_were_off(model: Net) -> None:
    """A parameter that was frozen for a time, and saved by a graph meanwhile."""
    reference(model)
    thaw(model)


def other_data(model: Net) -> None:
    for param in model.layers[1].parameters():
        param.data = param.data.clone()


def read_weights(model: Net) -> None:
    model.state_dict()


def gather(model: Net) -> None:
    with ptm_accel.gathered(model.layers[1]):
        assert model.layers[1].base.weight.detach().isfinite().all()


def other_model(model: Net) -> None:
    """It comes to the same tiers."""
    engine = engine_of(model)
    if engine is not None:
        Engine.attach(nn.Linear(WIDTH, WIDTH), config(), memory=engine.memory.join()).close()


def settle(model: Net) -> None:
    """As a checkpoint does, which reads state."""
    engine = engine_of(model)
    if engine is not None:
        engine.settle()


def follow(model: Net) -> None:
    engine = engine_of(model)
    if engine is not None:
        engine.follow()


def make_way(model: Net) -> None:
    """As for a batch that leaves pages too little."""
    engine = engine_of(model)
    if engine is not None and engine.pages.executor.pending_updates is not None:
        assert engine.pages.executor.pending_updates.give_way()


def take_stock(model: Net) -> None:
    engine = engine_of(model)
    if engine is not None:
        engine.check_integrity()


ANYTIME: list[Action] = [other_data, read_weights, gather, settle, make_way]
BETWEEN: list[Action] = [reference, thaw, thaw_after_adapters_were_off, *ANYTIME, other_model, follow, take_stock]


def let_leave(model: Net) -> None:
    """Nothing stays in the compute tier that can leave it."""
    engine = engine_of(model)
    if engine is not None and not engine.training.plain.active:
        for slot in engine.slots:
            if slot.value.block in engine.pool.eviction:
                engine.pool.admission.evict(slot.value.block)


def train(model: Net, optimizer: torch.optim.Optimizer, moment: str, action: Action) -> list[torch.Tensor]:
    """Steps with two graphs alive at once, and `action` at a moment of some of them."""
    losses = []

    def act() -> None:
        action(model)
        let_leave(model)

    for number in range(STEPS):
        acts = number in (2, 4)
        model.between = act if acts and moment == "in the forward" else None
        first = model(batch(2 * number)).square().mean()
        if acts and moment == "between":
            act()
            # What is pinned until the next forward only may leave from then on.
            with torch.no_grad():
                model(batch(70))
            let_leave(model)
        model.during = act if acts and moment == "in the backward" else None
        second = model(batch(2 * number + 1)).square().mean()
        (first + second).backward()
        losses.append((first + second).detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


ROWS = [("between", action) for action in BETWEEN] + [
    (moment, action) for moment in ("in the forward", "in the backward") for action in ANYTIME
]
CASES = [
    (autocast, *row, adapters, kind)
    for autocast, row, adapters, kind in itertools.product([False, True], ROWS, [False, True], KINDS)
]


@pytest.mark.parametrize(
    ("autocast", "moment", "action", "adapters", "kind"),
    CASES,
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@pytest.mark.thinned(24)
def test_same_numbers(autocast: bool, moment: str, action: Action, adapters: bool, kind: str, tmp_path: Path) -> None:
    expected, model = (Net(kind, adapters=adapters, autocast=autocast) for _ in range(2))
    losses = train(expected, adamw(expected), moment, action)
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        blocks = {slot.value.block for slot in engine.slots if "layers.1" in slot.name and slot.group.movable}
        assert len(blocks) == (2 if adapters else 1)
        assert train(model, engine.bind_optimizer(adamw(model)), moment, action) == losses
        for (name, value), there in zip(model.state_dict().items(), expected.state_dict().values(), strict=True):
            assert torch.equal(value, there), name


def test_it_goes_on_where_adapters_are_off_for_a_while(tmp_path: Path) -> None:
    model = Net("not reentrant", adapters=True)
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        train(model, optimizer, "between", nothing)
        loss = model(batch(0)).square().mean()
        reference(model)
        assert engine.training.plain.active
        loss.backward()
        optimizer.step()
        assert engine.training.plain.active


def test_stock_may_be_taken_while_a_graph_is_alive(tmp_path: Path) -> None:
    model = Net("none", adapters=True)
    with on_pages(model, "host+disk", AMPLE, tmp_path) as engine:
        train(model, engine.bind_optimizer(adamw(model)), "between", nothing)
        loss = model(batch(0)).square().mean()
        engine.check_integrity()
        assert engine.pool.tenants.pinned()
        del loss
        engine.check_integrity()
        assert not engine.pool.tenants.pinned()
