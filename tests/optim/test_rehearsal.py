"""Optimizers that nobody knows are tried on small tensors: those that couple tensors are refused, others are not."""

from __future__ import annotations

import logging
import random
import re
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import nn

from ptm_accel.errors import BudgetError, UnsupportedError
from ptm_accel.optim.rehearsal import rehearse
from tests.optim.test_optimizers import Lion, Trust
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


class NormOfAll(Descent):
    def factor(self) -> torch.Tensor:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return 1 / torch.nn.utils.get_total_norm(grads)


class CountsCalls(Descent):
    calls = 0

    def factor(self) -> float:
        self.calls += 1
        return 1 / self.calls


class CountsInATensorOfItsGroup(Descent):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, count=torch.zeros(()))

    def factor(self) -> float:
        for group in self.param_groups:
            group["count"] += 1
        return float(1 / self.param_groups[0]["count"])


class CountsInItsGroup(Descent):
    """Every part of a step starts from the same count, so this one is right."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, count=0)

    def factor(self) -> float:
        for group in self.param_groups:
            group["count"] += 1
        return 1 / float(self.param_groups[0]["count"])


class LearnsItsRate(Descent):
    """As Prodigy and D-Adaptation do: one rate for all, from sums over all tensors, kept in the group."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params, d=1e-3)

    def factor(self) -> float:
        for group in self.param_groups:
            group["d"] = max(group["d"], sum(float(p.grad.abs().sum()) for p in group["params"]))
        return float(self.param_groups[0]["d"])


class SharesState(Descent):
    """The numbers of all in the state of the first."""

    def factor(self) -> float:
        state = self.state[self.param_groups[0]["params"][0]]
        state["sum"] = state.get("sum", 0.0) + sum(
            float(p.grad.sum()) for group in self.param_groups for p in group["params"]
        )
        return float(state["sum"])


class NotesTheNorm(Descent):
    """Its parameters are right, and what it keeps of each is not."""

    def factor(self) -> float:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["norm"] = torch.nn.utils.get_total_norm([q.grad for q in group["params"]])
        return 1.0


class NotesTheNormInItsGroup(Descent):
    def factor(self) -> float:
        for group in self.param_groups:
            group["norm"] = float(torch.nn.utils.get_total_norm([p.grad for p in group["params"]]))
        return 1.0


class Around(Descent):
    """As Lookahead and SAM are made: around another optimizer, whose groups are its own."""

    def __init__(self, params: Iterable[Any]) -> None:
        params = list(params)
        super().__init__(params)
        self.base = torch.optim.SGD(params, lr=0.1)


class AroundSeveral(Descent):
    def __init__(self, params: Iterable[Any], within: Callable[[Any], Any] = lambda one: [one]) -> None:
        params = list(params)
        super().__init__(params)
        self.bases = within(torch.optim.SGD(params, lr=0.1))


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


class ByParameter(Descent):
    """Momentum that is kept by the parameter itself, in a dictionary, by its identity, or on it."""

    def __init__(self, params: Iterable[Any], where: str) -> None:
        super().__init__(params)
        self.where = where
        self.kept: dict[Any, torch.Tensor] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                kept = vars(p) if self.where == "attribute" else self.kept
                key = {"attribute": "momentum", "object": p, "identity": id(p)}[self.where]
                kept[key] = kept.get(key, torch.zeros_like(p)) * 0.9 + p.grad
                p.sub_(kept[key], alpha=group["lr"])


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


class Sparing:
    """Something of the user's own, which an optimizer may keep."""

    def __init__(self) -> None:
        self.seen = 0
        self.sizes: deque[int] = deque(maxlen=2)


class Collects(Descent):
    """Keeps counts in all kinds of things, none of which it goes by."""

    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.sparing, self.recent = Sparing(), deque([0], maxlen=3)
        self.by_name: defaultdict[str, list[int]] = defaultdict(list)
        self.ordered = OrderedDict(calls=[0])
        self.nested = {"a": ({"b": [0]},)}
        self.note = self.make_note

    def make_note(self) -> None:
        self.ordered["calls"].append(1)

    def factor(self) -> float:
        self.sparing.seen += 1
        self.sparing.sizes.append(1)
        self.recent.append(1)
        self.by_name["calls"].append(1)
        self.nested["a"][0]["b"].append(1)
        self.note()
        return 1.0


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


class OneForTwo(Descent):
    """Two entries of its state are one tensor, which pages would make two of."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["a"] = state["b"] = torch.zeros_like(p)
                state["a"].add_(p.grad)
                p.sub_(state["b"], alpha=group["lr"])


class TakesOut(Descent):
    """Every other step its state is gone, which pages would keep."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                before = self.state[p].pop("before", None)
                if before is None:
                    self.state[p]["before"] = p.grad.clone()
                p.sub_(p.grad if before is None else before, alpha=group["lr"])


class Limits(Descent):
    """Clips by the norm of all, far above what small gradients have."""

    def factor(self) -> float:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return min(1.0, 1000.0 / float(torch.nn.utils.get_total_norm(grads)))


class LooksUp(Descent):
    def __init__(self, params: Iterable[Any], keep: Callable[[Any], Any]) -> None:
        super().__init__(params)
        self.special = keep(self.param_groups)


class Bound(Descent):
    """Its arithmetic is a function that it closes over itself."""

    def __init__(self, params: Iterable[Any], how: str) -> None:
        super().__init__(params)
        self.update = partial(self.one) if how == "partial" else lambda p: self.one(p)

    def one(self, p: nn.Parameter) -> None:
        state = self.state[p]
        state["m"] = state.get("m", torch.zeros_like(p)) * 0.9 + p.grad
        p.sub_(state["m"], alpha=0.1)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p)


class MakesNaN(Descent):
    def factor(self) -> float:
        return float("nan")


class Derived(torch.optim.AdamW):
    """Of a module that nobody knows, but no other arithmetic."""


class KeepsAList(Descent):
    """Goes by the parameters that it was given, whatever is in its groups."""

    def __init__(self, params: Iterable[Any]) -> None:
        self.given = list(params)
        super().__init__(self.given)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for p in self.given:
            if p.grad is not None:
                p.sub_(p.grad)


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


def tried(optimizer: torch.optim.Optimizer) -> int | None:
    return rehearse(optimizer, masters=False, device=CPU)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (NormOfAll, "the parameters"),
        (CountsCalls, "the parameters"),
        (CountsInATensorOfItsGroup, "the parameters"),
        (LearnsItsRate, "the parameters"),
        (SharesState, "the parameters"),
        (NotesTheNorm, "the state"),
        (NotesTheNormInItsGroup, "the parameter groups"),
        (OneForTwo, "the parameters"),
        (TakesOut, "the parameters"),
        (Limits, "the parameters"),
        (lambda p: ByParameter(p, "object"), "the parameters"),
        (lambda p: ByParameter(p, "identity"), "the parameters"),
        (lambda p: ByParameter(p, "attribute"), "the parameters"),
    ],
)
def test_what_couples_tensors_is_refused(make: Callable[[Any], torch.optim.Optimizer], what: str) -> None:
    optimizer = make(model().parameters())
    with pytest.raises(UnsupportedError) as caught:
        tried(optimizer)
    assert str(caught.value) == (
        f"the optimizer {type(optimizer).__name__} cannot run on pages: tried on 3 small tensors for 3 steps, {what} "
        "came out otherwise when it was called for one tensor at a time, as pages need it, than for all at once. It "
        "couples tensors (by a norm over all gradients?), counts the calls of its step outside of param_groups and "
        "state, or keeps by parameter what belongs into state[p]. Use torch.nn.utils.clip_grad_norm_ for norms, and "
        "state[p] for all else."
    )


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Around, "base"),
        (AroundSeveral, "bases"),
        (lambda p: AroundSeveral(p, lambda one: {"matrices": one}), "bases"),
        (lambda p: AroundSeveral(p, lambda one: {one}), "bases"),
        (lambda p: AroundSeveral(p, lambda one: deque([("name", {"of": one})])), "bases"),
    ],
)
def test_what_updates_through_another_is_refused(make: Callable[[Any], torch.optim.Optimizer], name: str) -> None:
    optimizer = make(model().parameters())
    with pytest.raises(UnsupportedError) as caught:
        tried(optimizer)
    assert str(caught.value) == (
        f"the optimizer {type(optimizer).__name__} cannot run on pages: it updates through another one (its attribute "
        f"{name!r}, SGD), which would not see what is on pages. Use that one by itself."
    )


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (Descent, 0),
        (Lion, 1),
        (Trust, 0),
        (CountsInItsGroup, 0),
        (Noisy, 0),
        (MakesNaN, 0),
        (Hoards, 5),
        (Derived, 2),
        (lambda p: Derived(p, fused=True), 2),
        (lambda p: Derived(p, foreach=True, amsgrad=True), 3),
        (Collects, 0),
        (Assigns, 0),
        (BeginsWithState, 3),
        (lambda p: Bound(p, "partial"), 1),
        (torch.optim.Adafactor, None),
        (transformers.Adafactor, None),
    ],
)
def test_what_updates_each_tensor_by_itself_is_taken(
    make: Callable[[Any], torch.optim.Optimizer], kept: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    matrices = [p for p in model().parameters() if p.dim() == 2]
    with caplog.at_level(logging.WARNING):
        assert tried(make(matrices if make is Trust else list(model().parameters()))) == kept
    assert not caplog.records


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
    (nbytes,) = re.findall(r"at least (\d+) bytes", str(least.value))
    model, plain = net(), net()
    with on_pages(model, "host+disk", int(nbytes), tmp_path) as engine:
        paged = train(model, engine.bind_optimizer(Hoards(model.parameters(), lr=1e-4)), 128)
    assert paged == train(plain, Hoards(plain.parameters(), lr=1e-4), 128)


@pytest.mark.parametrize("lr", [0.0, torch.zeros(())])
def test_a_rate_of_zero_hides_nothing(lr: float | torch.Tensor) -> None:
    """A warm-up begins with one."""
    with pytest.raises(UnsupportedError, match="NormOfAll cannot run on pages"):
        tried(NormOfAll(model().parameters(), lr=lr))


def test_tensors_of_several_groups_are_coupled_too() -> None:
    params = list(model().parameters())
    with pytest.raises(UnsupportedError, match="tried on 2 small tensors"):
        tried(NormOfAll([{"params": params[:1]}, {"params": params[1:2]}]))


def test_nothing_of_the_optimizer_is_touched() -> None:
    params = list(model().parameters())
    before = [p.detach().clone() for p in params]
    optimizer = Noisy(params)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("pre"))
    optimizer.register_step_post_hook(lambda *_: called.append("post"))
    drawn, own = torch.get_rng_state(), optimizer.generator.get_state()
    tried(optimizer)
    assert not called
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), drawn)
    assert torch.equal(optimizer.generator.get_state(), own)
    assert all(p.grad is None for p in params)
    assert all(map(torch.equal, params, before))
    counting = CountsInItsGroup(params)
    tried(counting)
    assert counting.param_groups[0]["count"] == 0
    with pytest.raises(UnsupportedError):
        tried(calls := CountsCalls(params))
    assert calls.calls == 0


@pytest.mark.parametrize("size", [16, 128])
def test_what_changes_nothing_is_said(size: int, caplog: pytest.LogCaptureFixture) -> None:
    params = [*model().parameters(), *nn.Linear(size, size).parameters()]
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    with caplog.at_level(logging.WARNING):
        assert tried(KeepsAList(params)) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "the optimizer KeepsAList changed none of 3 small tensors in 3 steps. If it goes by a list of its own in the "
        "place of param_groups, it will not change what is on pages."
    ]
    assert all(map(torch.equal, params, before))


def test_what_cannot_be_tried_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tried(OnlyLarge(model().parameters()))
    assert [record.getMessage() for record in caplog.records] == [
        "the optimizer OnlyLarge could not be tried on small tensors (ValueError: too small for its blocks). Pages "
        "call it for some tensors at a time; if it couples tensors, or counts the calls of its step, its numbers will "
        "differ from a plain run's."
    ]


def test_it_is_refused_before_anything_is_lost(tmp_path: Path) -> None:
    """By the engine, which goes on with the optimizer that it had."""
    net = model()
    with at_floor(net, tmp_path) as engine:
        first = engine.bind_optimizer(torch.optim.AdamW(net.parameters(), fused=True))
        with pytest.raises(UnsupportedError, match="NormOfAll cannot run on pages"):
            engine.bind_optimizer(NormOfAll(net.parameters()))
        assert engine.optimizer is first
        net(torch.ones(2, 16)).sum().backward()
        first.step()


def test_groups_that_are_frozen_are_not_what_is_tried() -> None:
    params = list(model().parameters())
    frozen = [{"params": [nn.Parameter(torch.ones(3), requires_grad=False)]} for _ in range(6)]
    with pytest.raises(UnsupportedError, match="tried on 3 small tensors"):
        tried(NormOfAll([*frozen, {"params": params}]))
    assert tried(NormOfAll(frozen)) is None


def test_a_square_is_no_tensor_of_a_parameters_shape(caplog: pytest.LogCaptureFixture) -> None:
    """Where a parameter is no square: sizes that differ stay different, however small they become."""
    with caplog.at_level(logging.WARNING):
        assert tried(Sides([nn.Parameter(torch.ones(1000, 1000))])) == 2
        assert not caplog.records
        assert tried(Sides([nn.Parameter(torch.ones(10, 2000)), nn.Parameter(torch.ones(1000, 10))])) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "the optimizer Sides keeps state that is neither as its parameters are nor small ('side0', of the shape (9, 9) "
        "where a parameter was tried as (9, 11)). It stays in memory, and beside what host_memory counts."
    ]


def test_nothing_that_it_keeps_is_touched() -> None:
    optimizer = Collects(model().parameters())
    tried(optimizer)
    assert (optimizer.sparing.seen, list(optimizer.sparing.sizes), list(optimizer.recent)) == (0, [], [0])
    assert (dict(optimizer.by_name), optimizer.ordered["calls"], optimizer.nested) == ({}, [0], {"a": ({"b": [0]},)})


class KeepsAModule(Descent):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.average = nn.Linear(2, 2)


class Closes:
    def __del__(self) -> None:
        pass


class KeepsAFile(Descent):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.log = Closes()


@pytest.mark.parametrize(
    ("cls", "why"),
    [
        (KeepsAModule, "TypeError: it keeps a Linear, which cannot be tried on small tensors"),
        (KeepsAFile, "TypeError: it keeps a Closes, which does something when it goes"),
    ],
)
def test_what_there_can_be_no_second_one_of_is_said(
    cls: type[Descent], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert tried(cls(model().parameters())) is None
    assert why in caplog.text


@pytest.mark.parametrize(
    "keep",
    [
        lambda groups: {groups[0]["params"][0]},
        lambda groups: {id(groups[0]["params"][0])},
        lambda groups: {groups[0]["params"][0]: 0.1},
        lambda groups: [{"of": {id(groups[0]["params"][0]): "name"}}],
        lambda groups: [groups[0]],
    ],
    ids=["set", "identities", "keys", "nested", "groups"],
)
def test_what_looks_parameters_up_is_refused(keep: Callable[[Any], Any]) -> None:
    with pytest.raises(UnsupportedError) as caught:
        tried(LooksUp(model().parameters(), keep))
    assert str(caught.value) == (
        "the optimizer LooksUp cannot run on pages: its attribute 'special' holds parameters or groups by the object, "
        "and its step is given others in their place. Keep what it says of a parameter in its group, in state[p], or "
        "on the parameter itself (p.rate = 0.1)."
    )


@pytest.mark.parametrize("keep", [lambda groups: list(groups[0]["params"]), lambda groups: {1, 2, "three"}])
def test_what_may_be_for_anything_is_taken(keep: Callable[[Any], Any]) -> None:
    assert tried(LooksUp(model().parameters(), keep)) == 0


def test_state_that_is_wider_than_its_parameter_is_counted_by_its_bytes() -> None:
    assert tried(Wide(model().parameters())) == 2
    assert tried(Wide(model().bfloat16().parameters())) == 4


def test_a_function_that_is_bound_cannot_be_tried(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = Bound(model().parameters(), "closure")
    with caplog.at_level(logging.WARNING):
        assert tried(optimizer) is None
    assert "TypeError: it keeps a function that is bound to it (<lambda>)" in caplog.text
    assert not optimizer.state


def test_what_is_put_around_a_step_is_not_called(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = Descent(model().parameters())
    calls: list[int] = []
    step = optimizer.step

    def counted(closure: Callable[[], float] | None = None) -> None:
        calls.append(1)
        step(closure)

    optimizer.step = counted  # type: ignore[method-assign]
    with caplog.at_level(logging.WARNING):
        assert tried(optimizer) == 0
    assert not caplog.records
    assert not calls


class KeepsASchedule(Descent):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.schedule = torch.optim.lr_scheduler.StepLR(self, 1)


def test_a_schedule_that_it_keeps_is_not_moved(caplog: pytest.LogCaptureFixture) -> None:
    optimizer = KeepsASchedule(model().parameters())
    with caplog.at_level(logging.WARNING):
        assert tried(optimizer) is None
    assert "it keeps a StepLR" in caplog.text
    assert optimizer.schedule.last_epoch == 0


class Draws(Descent):
    def __init__(self, params: Iterable[Any]) -> None:
        super().__init__(params)
        self.own = random.Random(0)

    def factor(self) -> float:
        return 1.0 + 0.0 * (self.own.random() + random.random() + float(numpy.random.random()))


def test_pythons_own_random_numbers_are_left_alone() -> None:
    optimizer = Draws(model().parameters())

    numpy.random.seed(0)
    before = random.getstate(), optimizer.own.getstate()
    assert tried(optimizer) == 0
    assert before == (random.getstate(), optimizer.own.getstate())
    assert numpy.random.random() == numpy.random.RandomState(0).random()


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
