"""What backward needs and somebody has changed in place since: an error where plain torch has one, and nowhere else."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from ptm_accel.engine import Engine
from ptm_accel.errors import StaleGraphError
from tests.plain_loop import same_bits
from tests.tiers import at_floor, needs, on_pages

WIDTH = 64


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Net(nn.Module):
    """Layers, a tied one among them, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(linear() for _ in range(5))
        self.layers[4].weight = self.layers[1].weight
        self.batch = nn.BatchNorm1d(WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.register_buffer("seen", torch.zeros(()))
        self.kept: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.sigmoid(layer(x))
            self.kept.append(x)
        with torch.no_grad():
            self.seen.add_(1.0)
        return self.batch(x) * self.scale


@torch.no_grad()
def change(tensor: torch.Tensor) -> None:
    tensor.mul_(0.9)


def loss_of(model: Net, seed: int = 0) -> torch.Tensor:
    model.kept.clear()
    loss: torch.Tensor = model(inputs(seed)).square().mean()
    return loss


def outcome(model: Net, run: Callable[[Net], object], engine: Engine | None = None) -> object:
    """What a script comes to: an error, or all gradients."""
    try:
        run(model)
    except RuntimeError as error:
        expected = "modified by an inplace operation" in str(error)
        if not expected or isinstance(error, StaleGraphError) != (engine is not None):
            raise
        return "error"
    if engine is None:
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert engine.gradients is not None
    grads = ((g.slot.name, g.value) for g in engine.gradients.present())
    return {name: engine.pages.executor.snapshot(value).clone() for name, value in grads if value is not None}


def between(model: Net, written: Callable[[Net], object]) -> None:
    loss = loss_of(model)
    written(model)
    loss.backward()


def activation(model: Net) -> None:
    between(model, lambda model: change(model.kept[2]))


def part_of_an_activation(model: Net) -> None:
    between(model, lambda model: change(model.kept[2][:2]))


def buffer(model: Net) -> None:
    between(model, lambda model: change(model.scale))


def weight(model: Net) -> None:
    between(model, lambda model: change(model.layers[3].weight))


def tied_weight(model: Net) -> None:
    between(model, lambda model: change(model.layers[4].weight))


def weight_by_a_kept_view(model: Net) -> None:
    kept = model.layers[3].weight.detach()
    between(model, lambda model: change(kept))


def loaded_state(model: Net) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    between(model, lambda model: model.load_state_dict(state))


def second_backward(model: Net) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    change(model.layers[2].weight)
    loss.backward()


def weight_in_the_forward(model: Net) -> None:
    model.layers[3].register_forward_hook(lambda module, args, out: change(module.weight))
    loss_of(model).backward()


def weight_in_backward(model: Net) -> None:
    """The second use of a tied weight comes first; the first has saved what it was."""
    model.layers[4].register_full_backward_hook(lambda module, into, out: change(module.weight))
    loss_of(model).backward()


def a_view_that_torch_counts_by_itself(model: Net) -> None:
    data = model.layers[3].weight.data
    model.layers[3].register_forward_hook(lambda module, args, out: F.linear(out, data))
    between(model, lambda model: change(data))


ERRORS = [
    activation,
    part_of_an_activation,
    buffer,
    weight,
    tied_weight,
    weight_by_a_kept_view,
    loaded_state,
    second_backward,
    weight_in_the_forward,
    weight_in_backward,
    a_view_that_torch_counts_by_itself,
]


def unsaved(model: Net) -> None:
    between(model, lambda model: (change(model.seen), change(model.layers[2].bias), change(model.kept[4].new_ones(3))))


def two_forwards(model: Net) -> None:
    """Batch norm writes its buffers in each."""
    (loss_of(model) - loss_of(model, 1)).backward()


def accumulated(model: Net) -> None:
    for seed in range(3):
        loss_of(model, seed).backward()


def before_the_forward(model: Net) -> None:
    for layer in model.layers:
        layer.register_forward_pre_hook(lambda module, args: change(module.weight) if module.training else None)
    model.layers[4].eval()
    for seed in range(2):
        loss_of(model, seed).backward()


def retained(model: Net) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def double_backward(model: Net) -> None:
    x = inputs()
    (slope,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
    slope.square().sum().backward()


def in_place_activations(model: Net) -> None:
    parts = [
        nn.ReLU(inplace=True),
        nn.Dropout(0.2, inplace=True),
        nn.LeakyReLU(0.1, inplace=True),
        nn.ELU(inplace=True),
    ]
    torch.manual_seed(0)
    x = inputs()
    for layer, part in zip(model.layers, parts, strict=False):
        x = part(layer(x))
    x.square().mean().backward()


def not_needed_any_more(model: Net) -> None:
    """What is written is needed by nobody: the input of the first layer has no gradient, so its weight is not saved."""
    loss = model.batch(model.layers[0](inputs().detach())).mean()
    change(model.layers[0].weight)
    loss.backward()


def reentrant(model: Net) -> None:
    checkpoint(model, inputs(), use_reentrant=True).square().mean().backward()


def not_reentrant(model: Net) -> None:
    checkpoint(model, inputs(), use_reentrant=False).square().mean().backward()


def written_and_recomputed(model: Net) -> None:
    """A forward that writes its weight writes it again when it is recomputed."""
    for layer in model.layers[:4]:
        layer.register_forward_pre_hook(lambda module, args: change(module.weight))
    checkpoint(model, inputs(), use_reentrant=False).square().mean().backward()


def written_before_it_is_recomputed(model: Net) -> None:
    loss = checkpoint(model, inputs(), use_reentrant=False).square().mean()
    change(model.layers[3].bias)
    loss.backward()


NO_ERRORS = [
    unsaved,
    two_forwards,
    accumulated,
    before_the_forward,
    retained,
    double_backward,
    in_place_activations,
    not_needed_any_more,
    reentrant,
    not_reentrant,
    written_and_recomputed,
    written_before_it_is_recomputed,
]


@pytest.mark.parametrize("kind", ["host+disk", "mock+host+disk"])
@pytest.mark.parametrize("run", [*ERRORS, *NO_ERRORS], ids=lambda run: run.__name__)
def test_it_is_an_error_where_plain_torch_has_one(run: Callable[[Net], object], kind: str, tmp_path: Path) -> None:
    expected = outcome(Net(), run)
    assert (expected == "error") == (run in ERRORS)
    model = Net()
    floor, need = needs(model, tmp_path, kind)
    # A graph of a backward keeps what it needs where it is.
    with on_pages(model, kind, need if run is double_backward else floor, tmp_path) as engine:
        found = outcome(model, run, engine)
        assert not engine.pool.tenants.pinned()
        engine.zero_grad()
        if isinstance(expected, dict):
            assert isinstance(found, dict)
            assert found.keys() == expected.keys()
            assert all(same_bits(found[name], expected[name]) for name in expected)
        else:
            assert found == expected


def test_what_the_errors_say(tmp_path: Path) -> None:
    model = Net()
    with at_floor(model, tmp_path) as engine:
        # Torch counts from the making of a parameter, which its initialisation writes in place.
        for change_it, text in [
            (
                activation,
                "a tensor of shape (4, 64) and torch.float32 that backward needs has been modified by an inplace "
                "operation: it is at version 1, and was at version 0 when it was saved. Use an operation there that is "
                "not in place, or change a clone().",
            ),
            (
                weight,
                "parameter layers.3.weight of shape (64, 64) has been modified by an inplace operation between a "
                "forward and its backward, which needs it: it is at version 2, and was at version 1 when it was saved. "
                "Change it before the forward or after backward.",
            ),
        ]:
            with pytest.raises(StaleGraphError) as caught:
                change_it(model)
            assert str(caught.value) == text
            engine.zero_grad()
        loss_of(model).backward()


@pytest.mark.parametrize("how", ["autocast", "saved on the CPU"])
def test_a_weight_of_which_plain_torch_keeps_a_copy_is_refused(how: str, tmp_path: Path) -> None:
    """The copy has the values from before the change, which pages do not have any more."""

    def run(model: Net, *, changes: bool) -> None:
        with torch.autocast("cpu", torch.bfloat16) if how == "autocast" else save_on_cpu():
            loss = loss_of(model)
        if changes:
            change(model.layers[3].weight)
        loss.backward()

    for changes in (False, True):
        plain, model = Net(), Net()
        run(plain, changes=changes)
        with at_floor(model, tmp_path) as engine:
            if not changes:
                found = outcome(model, lambda model: run(model, changes=False), engine)
                assert isinstance(found, dict)
                assert all(same_bits(found[n], p.grad) for n, p in plain.named_parameters() if p.grad is not None)
                continue
            with pytest.raises(StaleGraphError, match="layers.3.weight .* modified by an inplace operation"):
                run(model, changes=True)
            engine.zero_grad()


def test_pages_that_come_and_go_are_no_changes(tmp_path: Path) -> None:
    """Nor is what an update writes, as long as each backward comes before it."""
    model, plain = Net(), Net()
    with at_floor(model, tmp_path) as engine:
        ours = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        theirs = torch.optim.AdamW(plain.parameters(), fused=True)
        for step, (net, optimizer) in itertools.product(range(4), [(model, ours), (plain, theirs)]):
            loss = loss_of(net, step)
            for slot in engine.slots if net is model else ():
                if slot.value.block in engine.pool.eviction:
                    engine.pool.admission.evict(slot.value.block)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.pool.stats.evictions > 0
        for name, value in model.state_dict().items():
            assert same_bits(value, plain.state_dict()[name]), name
