"""Which optimizers run on pages, how finely, and with how much memory; the others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ptm_accel.errors import UnsupportedError
from ptm_accel.model.floor import OptimizerMemory
from ptm_accel.optim.support import is_elementwise, optimizer_memory_of
from tests.tiers import at_floor

HELP = (
    " Use optim='adamw_torch_fused', 'sgd', 'adagrad', 'adafactor', or any torch.optim optimizer that updates each "
    "tensor by itself."
)


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(8, 8))]


class Better(torch.optim.AdamW):
    """A subclass may do more than its base, so it gets whole tensors."""


class NeedsClosure(torch.optim.SGD):
    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


class LOMO(torch.optim.Optimizer):
    """Named as the one that updates inside backward."""


class Derived(LOMO):
    pass


@pytest.mark.parametrize(
    ("make", "optimizer_memory"),
    [
        (lambda p: torch.optim.AdamW(p, fused=True), OptimizerMemory(2, 0)),
        (lambda p: torch.optim.AdamW(p, foreach=True), OptimizerMemory(2, 3)),
        (lambda p: torch.optim.Adam(p, amsgrad=True, fused=True), OptimizerMemory(3, 0)),
        (lambda p: torch.optim.SGD(p, fused=True), OptimizerMemory(0, 0)),
        (lambda p: torch.optim.SGD(p, momentum=0.9), OptimizerMemory(1, 3)),
        (lambda p: torch.optim.Adagrad(p, fused=True), OptimizerMemory(1, 0)),
        (lambda p: torch.optim.RMSprop(p), OptimizerMemory(1, 3, whole=True)),
        (lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True), OptimizerMemory(3, 3, whole=True)),
        (lambda p: torch.optim.Muon(p), OptimizerMemory(1, 3, whole=True)),
        (lambda p: torch.optim.Adafactor(p), OptimizerMemory(0, 3, whole=True)),
        (lambda p: transformers.Adafactor(p, beta1=0.9), OptimizerMemory(1, 3, whole=True)),
        (lambda p: torch.optim.NAdam(p), OptimizerMemory(2, 3, whole=True)),
        (lambda p: Better(p, fused=True), OptimizerMemory(2, 3, whole=True)),
    ],
)
def test_what_is_supported(make: Callable[[Any], torch.optim.Optimizer], optimizer_memory: OptimizerMemory) -> None:
    optimizer = make(params())
    assert is_elementwise(optimizer) is not optimizer_memory.whole
    assert optimizer_memory_of(optimizer) == optimizer_memory


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda p: torch.optim.LBFGS(p),
            "the optimizer LBFGS cannot run on pages: it needs a closure and couples all tensors in one line search.",
        ),
        (
            lambda p: torch.optim.SparseAdam(p),
            "the optimizer SparseAdam cannot run on pages: it needs sparse gradients.",
        ),
        (
            lambda p: LOMO(p, {}),
            "the optimizer LOMO cannot run on pages: it updates inside backward through hooks of its own.",
        ),
        (
            lambda p: Derived(p, {}),
            "the optimizer Derived cannot run on pages: it updates inside backward through hooks of its own.",
        ),
        (lambda p: NeedsClosure(p), "the optimizer NeedsClosure cannot run on pages: its step needs a closure."),
    ],
)
def test_what_is_refused(make: Callable[[Any], torch.optim.Optimizer], text: str) -> None:
    with pytest.raises(UnsupportedError) as caught:
        is_elementwise(make(params()))
    assert str(caught.value) == text + HELP


@pytest.mark.parametrize("library", ["bitsandbytes", "schedulefree", "apollo_torch", "galore_torch", "torchao"])
@pytest.mark.parametrize("derived", [False, True])
def test_libraries_with_state_of_their_own_are_refused(library: str, derived: bool) -> None:
    cls = type("AdamW8bit", (torch.optim.AdamW,), {"__module__": f"{library}.optim.adamw"})
    if derived:
        cls = type("Mine", (cls,), {})
    with pytest.raises(UnsupportedError) as caught:
        is_elementwise(cls(params()))
    assert str(caught.value) == (
        f"the optimizer {cls.__name__} cannot run on pages: AdamW8bit of {library} keeps state or parameters of its "
        f"own outside torch.optim's.{HELP}"
    )


class ScheduleFree(torch.optim.SGD):
    """As schedule-free optimizers are, in a copy of somebody's own."""

    def train(self) -> None:
        """Takes the parameters that are trained."""

    def eval(self) -> None:
        """Takes their average."""


def test_parameters_that_an_optimizer_exchanges_are_refused() -> None:
    with pytest.raises(UnsupportedError) as caught:
        is_elementwise(ScheduleFree(params()))
    assert str(caught.value) == (
        "the optimizer ScheduleFree cannot run on pages: its train() and eval() exchange the parameters for others of "
        f"its own, as schedule-free optimizers do.{HELP}"
    )


def test_a_refused_optimizer_leaves_the_engine_as_it_was(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with at_floor(model, tmp_path) as engine:
        kept = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        with pytest.raises(UnsupportedError):
            engine.bind_optimizer(torch.optim.LBFGS(model.parameters()))
        assert engine.optimizer is kept
