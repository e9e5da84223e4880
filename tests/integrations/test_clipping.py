"""Torch's own functions over gradients that are on pages: the same numbers, or an error, and never nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from ptm_accel.integrations.accelerate import PTMAccelerator
from torch import nn

from ptm_accel import clipping
from ptm_accel.engine import engine_of
from ptm_accel.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("fresh_accelerate")


def backward(accelerator: Accelerator, model: nn.Module, row: dict[str, torch.Tensor], factor: float = 1.0) -> None:
    loss = model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss
    accelerator.backward(loss * factor)


def loop(accelerator: Accelerator, tiny: ModuleType, clip: Callable[[Any], Any]) -> Any:
    """A script that calls torch's functions itself."""
    model = tiny.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    norms = []
    for row in tiny.data(4):
        backward(accelerator, model, row)
        norm = clip(model.parameters())
        norms.append(None if norm is None else norm.item())
        optimizer.step()
        optimizer.zero_grad()
    return norms, tiny.weights(accelerator.unwrap_model(model))


@pytest.mark.parametrize("room", ["roomy", "tight"])
@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5),
        lambda parameters: torch.nn.utils.clip_grad_norm_(list(parameters), max_norm=0.5, norm_type=1, foreach=False),
        lambda parameters: torch.nn.utils.clip_grad.clip_grad_norm_(parameters, 0.5, error_if_nonfinite=True),
        lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1e-3),
    ],
    ids=["norm", "p-norm", "finite", "value"],
)
def test_torchs_own_clipping_gives_the_same_numbers(
    clip: Callable[[Any], Any], room: str, tiny: ModuleType, tmp_path: Path
) -> None:
    plain = loop(Accelerator(cpu=True), tiny, clip)
    ours = loop(PTMAccelerator(cpu=True, ptm_config=tiny.budget(room, tmp_path)), tiny, clip)
    unclipped = loop(PTMAccelerator(cpu=True, ptm_config=tiny.budget(room, tmp_path)), tiny, lambda parameters: None)
    assert ours[0] == plain[0]
    assert tiny.same(ours[1], plain[1])
    assert not tiny.same(unclipped[1], plain[1]), "otherwise nothing was clipped"


def prepared(tiny: ModuleType) -> tuple[PTMAccelerator, nn.Module, dict[str, torch.Tensor]]:
    accelerator = PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB"})
    return accelerator, accelerator.prepare(tiny.model()), tiny.data(1)[0]


def test_a_norm_that_is_not_finite_is_an_error_on_request(tiny: ModuleType) -> None:
    accelerator, model, row = prepared(tiny)
    backward(accelerator, model, row, float("inf"))
    with pytest.raises(RuntimeError, match=r"The total norm of order 2\.0 of 30 gradients is nan"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_"])
def test_gradients_of_others_are_refused_beside_those_on_pages(name: str, tiny: ModuleType) -> None:
    accelerator, model, row = prepared(tiny)
    clip = getattr(torch.nn.utils, name)
    backward(accelerator, model, row)
    foreign = nn.Parameter(torch.zeros(2))
    foreign.grad = torch.ones(2)
    with pytest.raises(UnsupportedError, match=r"was given 31 parameters, and 1 with gradients are not of the model"):
        clip([*model.parameters(), foreign], 1.0)
    other = accelerator.prepare(tiny.model())
    with pytest.raises(UnsupportedError, match=r"was given 60 parameters, and 30 with gradients are not of the model"):
        clip([*model.parameters(), *other.parameters()], 1.0)


def test_a_norm_over_a_part_is_refused(tiny: ModuleType) -> None:
    accelerator, model, row = prepared(tiny)
    backward(accelerator, model, row)
    with pytest.raises(UnsupportedError, match=r"was given 1 parameters, but 29 of 30 gradients belong to others"):
        torch.nn.utils.clip_grad_norm_(model.lm_head.weight, 1.0)


def test_parameters_that_are_not_on_pages_are_clipped_as_ever() -> None:
    clipping.install()
    clipping.install()
    foreign = nn.Parameter(torch.zeros(2))
    foreign.grad = torch.tensor([3.0, 4.0])
    assert torch.nn.utils.clip_grad_norm_(foreign, 1.0) == 5.0
    torch.nn.utils.clip_grad_value_(iter([foreign]), 0.25)
    assert foreign.grad.tolist() == [0.25, 0.25]
    with pytest.raises(TypeError, match="max_norm"):
        torch.nn.utils.clip_grad_norm_(foreign)  # type: ignore[call-arg]


def test_the_step_of_an_optimizer_that_was_not_prepared_is_refused(tiny: ModuleType) -> None:
    accelerator, model, row = prepared(tiny)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()
    backward(accelerator, model, row)
    with pytest.raises(UnsupportedError, match=r"SGD\.step\(\) was called, and 30 gradients of its parameters are on"):
        optimizer.step()
    torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=0.1).step()
    before = tiny.weights(model)
    accelerator.prepare(optimizer).step()
    assert not tiny.same(tiny.weights(model), before), "the gradients are still there"


def test_updates_begin_in_backward_all_the_same(tiny: ModuleType, tmp_path: Path) -> None:
    """A hook before steps that might change something forbids them; the guard changes nothing."""
    accelerator = PTMAccelerator(cpu=True, ptm_config=tiny.budget("tight", tmp_path))
    model = tiny.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    for row in tiny.data(2):
        backward(accelerator, model, row)
        optimizer.step()
        optimizer.zero_grad()
    engine = engine_of(model)
    assert engine is not None
    assert engine.optimizer is not None
    assert engine.optimizer.expects_backward()
    with engine.optimizer.register_step_pre_hook(lambda *_: None):
        assert not engine.optimizer.expects_backward()
