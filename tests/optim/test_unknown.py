"""Optimizers that are neither torch's nor transformers': what they keep is measured, and each is called by tensors."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ptm_accel.errors import BudgetError, UnsupportedError
from ptm_accel.optim.support import is_elementwise, measured_state
from tests.figures import FIGURE, named_bytes
from tests.optim.test_optimizers import Lion, Trust
from tests.plain_loop import same_bits
from tests.tiers import at_floor, on_pages

CPU = torch.device("cpu")


class Descent(torch.optim.Optimizer):
    """What the others here are derived from: gradient descent, with a factor that a subclass makes."""

    def __init__(self, params: Iterable[Any], lr: float | torch.Tensor = 0.1, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    def factor(self) -> float | torch.Tensor:
        """Once a call of `step`."""
        return 1.0

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        factor = self.factor()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * factor * group["lr"])


class CountsInItsGroup(Descent):
    """Every part of a step starts from the same count, so this one is right."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, count=0)

    def factor(self) -> float:
        for group in self.param_groups:
            group["count"] += 1
        return 1 / float(self.param_groups[0]["count"])


class Noisy(Descent):
    """Draws for each tensor in turn, which is the same in one call and in several."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.generator = torch.Generator().manual_seed(3)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(torch.randn(p.shape, generator=self.generator) + torch.randn(p.shape), alpha=1e-3)


class Hoards(Descent):
    """More state than most: four tensors for each of two dimensions, five for the others."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    for key in "abcd" if p.dim() == 2 else "abcde":
                        self.state[p].setdefault(key, torch.zeros_like(p)).add_(p.grad)
                    p.sub_(self.state[p]["d"], alpha=group["lr"])


class OwnRates(Descent):
    """Goes by what somebody has noted on each parameter."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * p.rate)


class Sides(Descent):
    """As Shampoo does: a square matrix for each side of a matrix."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                for at, size in enumerate(p.shape):
                    side = self.state[p].setdefault(f"side{at}", torch.zeros(size, size))
                    side.add_(p.grad.square().mean())
                    p.sub_(p.grad * group["lr"] / side.mean().sqrt())


class Assigns(Descent):
    """Gives parameters other data in the place of changing what they have."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.data = p.data - group["lr"] * p.grad


class ByName(Descent):
    """Goes by the names of its groups (`named_parameters()`)."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * (0.1 if name.endswith("bias") else 1.0))


class BeginsWithState(Descent):
    """Three tensors for each parameter, and what kind of one it is, from the start."""

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {key: torch.zeros_like(p) for key in "abc"} | {"matrix": p.dim() == 2}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    for key in "abc":
                        state[key].add_(p.grad)
                    p.sub_(state["c"], alpha=group["lr"] * (1.0 if state["matrix"] else 0.1))


class Wide(Descent):
    """Two moments in fp32 whatever the parameter is."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                for key in "mv":
                    self.state[p].setdefault(key, torch.zeros_like(p, dtype=torch.float32)).add_(p.grad)
                p.sub_(self.state[p]["m"].to(p.dtype), alpha=group["lr"])


class Derived(torch.optim.AdamW):
    """Of a module that nobody knows, but no other arithmetic."""


class OnlyLarge(Descent):
    def factor(self) -> float:
        for group in self.param_groups:
            for p in group["params"]:
                if p.numel() < 1000:
                    raise ValueError("too small for its blocks")
        return 1.0


def train(model: nn.Module, optimizer: torch.optim.Optimizer, width: int) -> list[float]:
    losses = []
    for number in range(3):
        loss = model(torch.full((2, width), 1.0 + number)).square().sum()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 12), nn.LayerNorm(12), nn.Linear(12, 4))


def measured(optimizer: torch.optim.Optimizer) -> int | None:
    return measured_state(optimizer, masters=False, device=CPU)


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (Descent, 0),
        (Lion, 1),
        (Trust, 0),
        (CountsInItsGroup, 0),
        (Noisy, 0),
        (Hoards, 4),
        (Derived, 2),
        (lambda p: Derived(p, fused=True), 2),
        (lambda p: Derived([{"params": p, "amsgrad": True}], foreach=True), 3),
        (BeginsWithState, 3),
        (Wide, 2),
        (torch.optim.Adafactor, None),
        (transformers.Adafactor, None),
    ],
)
def test_what_an_optimizer_keeps_is_measured(make: Callable[[Any], torch.optim.Optimizer], kept: int | None) -> None:
    params = [p for p in model().parameters() if p.dim() == 2]
    optimizer = make(params)
    before = copy.deepcopy((params, optimizer.state_dict())), torch.get_rng_state()
    assert measured(optimizer) == kept
    after = (params, optimizer.state_dict()), torch.get_rng_state()
    assert same_bits(after[0][1], before[0][1])
    assert torch.equal(after[1], before[1])
    assert all(p.grad is None and torch.equal(p, q) for p, q in zip(params, before[0][0], strict=True))


def test_the_largest_parameter_of_a_group_that_is_trained_counts() -> None:
    frozen = nn.Parameter(torch.ones(1000, 1000), requires_grad=False)
    groups = [{"params": [frozen]}, {"params": [nn.Parameter(torch.ones(8, 8, 8)), nn.Parameter(torch.ones(8, 8))]}]
    assert measured(Hoards(groups)) == 5
    assert measured(Hoards(groups[:1])) is None


def test_state_that_is_wider_than_its_parameter_is_counted_by_its_bytes() -> None:
    assert measured(Wide(model().bfloat16().parameters())) == 4
    assert measured_state(Wide(model().bfloat16().parameters()), masters=True, device=CPU) == 2


def test_lengths_that_differ_stay_different() -> None:
    assert measured(Sides([nn.Parameter(torch.ones(1000, 1000))])) == 2
    assert measured(Sides([nn.Parameter(torch.ones(10, 2000))])) == 0


def test_what_cannot_be_measured_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert measured(OnlyLarge(model().parameters())) is None
    assert [record.getMessage() for record in caplog.records] == [
        "the optimizer OnlyLarge is not of torch or transformers. On pages its step() is called for some whole tensors "
        "at a time; if it couples tensors, or counts the calls of step() outside of param_groups and state, its "
        "numbers will differ from a plain run's.",
        "the state of the optimizer OnlyLarge could not be measured on small tensors (ValueError: too small for its "
        "blocks); two tensors for each parameter are assumed.",
    ]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Prodigy", "it learns one rate for all from sums over all tensors"),
        ("DAdaptAdam", "it learns one rate for all from sums over all tensors"),
        ("Lamb", "it goes by a norm over all tensors"),
    ],
)
def test_what_is_known_to_couple_tensors_is_refused(name: str, why: str) -> None:
    with pytest.raises(UnsupportedError, match=f"the optimizer {name} cannot run on pages: {why}. Use optim="):
        is_elementwise(type(name, (Descent,), {})(model().parameters()))


class Around(Descent):
    """As Lookahead and SAM are made: around another optimizer, whose groups are its own."""

    def __init__(self, params: Iterable[Any], within: Callable[[Any], Any] = lambda one: one) -> None:
        params = list(params)
        super().__init__(params)
        self.base = within(torch.optim.SGD(params, lr=0.1))


@pytest.mark.parametrize("within", [lambda one: one, lambda one: [one]])
def test_what_updates_through_another_is_refused(within: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        is_elementwise(Around(model().parameters(), within))
    assert str(caught.value) == (
        "the optimizer Around cannot run on pages: it updates through another one (its attribute 'base', SGD), which "
        "would not see what is on pages. Use that one by itself."
    )


def test_what_is_kept_is_part_of_the_least_budget(tmp_path: Path) -> None:
    """An optimizer that keeps more than two moments gets the room for them, or is refused before the first step."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 8))

    refused = net()
    with (
        at_floor(refused, tmp_path) as engine,
        pytest.raises(BudgetError, match="Set host_memory to at least") as least,
    ):
        engine.bind_optimizer(Hoards(refused.parameters(), lr=1e-4))
    nbytes = named_bytes(f"at least {FIGURE}", least.value)
    model, plain = net(), net()
    with on_pages(model, "host+disk", nbytes, tmp_path) as engine:
        paged = train(model, engine.bind_optimizer(Hoards(model.parameters(), lr=1e-4)), 128)
    assert paged == train(plain, Hoards(plain.parameters(), lr=1e-4), 128)


@pytest.mark.parametrize("tier", ["host", "host+disk", "mock+host"])
@pytest.mark.parametrize("cls", [OwnRates, Assigns, ByName, BeginsWithState])
def test_what_is_taken_gives_the_numbers_of_plain(cls: type[Descent], tier: str, tmp_path: Path) -> None:
    """Rates that are noted on parameters, other data that is given to them, names in groups, state from the start."""

    def net() -> nn.Module:
        torch.manual_seed(0)
        made = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 8))
        for at, param in enumerate(made.parameters(), 1):
            param.rate = 0.5**at
        return made

    model, plain = net(), net()
    tight = (176 if cls is BeginsWithState else 112) << 10
    kind, nbytes = ("host+disk", 1 << 30) if tier == "host" else (tier, tight)
    with on_pages(model, kind, nbytes, tmp_path) as engine:
        paged = train(model, engine.bind_optimizer(cls(model.named_parameters(), lr=1e-4)), 64)
    assert paged == train(plain, cls(plain.named_parameters(), lr=1e-4), 64)
