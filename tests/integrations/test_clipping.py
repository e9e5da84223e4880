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

from ptm_accel import gathered
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine, engine_of
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


def clip_in_two(parameters: list[nn.Parameter]) -> torch.Tensor:
    """The norm first, and what is made of it afterwards."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, float("inf"))
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm=0.5, total_norm=norm, foreach=False)
    return norm


@pytest.mark.thinned(4)
@pytest.mark.parametrize("room", ["roomy", "tight"])
@pytest.mark.parametrize(
    "clip",
    [
        lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.5),
        lambda parameters: torch.nn.utils.clip_grad_norm_(list(parameters), max_norm=0.5, norm_type=1, foreach=False),
        lambda parameters: torch.nn.utils.clip_grad.clip_grad_norm_(parameters, 0.5, error_if_nonfinite=True),
        lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 1e-3),
        lambda parameters: torch.nn.utils.clip_grads_with_norm_(parameters, 0.5, torch.tensor(7.0)),
        lambda parameters: clip_in_two(list(parameters)),
    ],
    ids=["norm", "p-norm", "finite", "value", "with-norm", "in-two"],
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


@pytest.mark.parametrize("total", [0.0, 7.0, float("inf"), float("nan")])
@pytest.mark.parametrize("bound", [False, True])
def test_gradients_are_multiplied_by_what_is_made_of_the_norm(bound: bool, total: float, tiny: ModuleType) -> None:
    accelerator, model, row = prepared(tiny)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1)) if bound else None
    plain = tiny.model()
    plain(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
    backward(accelerator, model, row)
    assert optimizer is None or engine_of(model).optimizer is optimizer.optimizer  # type: ignore[union-attr]
    for each in (plain, model):
        torch.nn.utils.clip_grads_with_norm_(each.parameters(), 0.5, torch.tensor(total))
    assert tiny.same(gradients(model), {name: param.grad for name, param in plain.named_parameters()})


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    with gathered(model, grads=True):
        return {name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None}


def prepared(tiny: ModuleType) -> tuple[PTMAccelerator, nn.Module, dict[str, torch.Tensor]]:
    accelerator = PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB"})
    return accelerator, accelerator.prepare(tiny.model()), tiny.data(1)[0]


def test_a_norm_that_is_not_finite_is_an_error_on_request(tiny: ModuleType) -> None:
    accelerator, model, row = prepared(tiny)
    backward(accelerator, model, row, float("inf"))
    with pytest.raises(RuntimeError, match=r"The total norm of order 2\.0 .* is non-finite"):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize("name", ["clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "accelerator"])
def test_a_part_and_two_models_at_once(name: str, tiny: ModuleType) -> None:
    """Gradients of some parameters, beside those of another model on pages and of an ordinary parameter."""

    def clipped(accelerator: Accelerator) -> list[torch.Tensor]:
        model, other, foreign = accelerator.prepare(tiny.model()), accelerator.prepare(tiny.model()), torch.zeros(2)
        row, foreign = tiny.data(1)[0], nn.Parameter(foreign)
        foreign.grad = torch.tensor([3.0, 4.0])
        for each in (model, other):
            backward(accelerator, each, row)
        params = [*model.lm_head.parameters(), foreign, *other.parameters()]
        if name == "accelerator":
            accelerator.clip_grad_norm_(params, 0.5)
        elif name == "clip_grads_with_norm_":
            torch.nn.utils.clip_grads_with_norm_(params, 0.5, torch.tensor(2.0))
        else:
            getattr(torch.nn.utils, name)(params, 0.5)
        everything = [*model.parameters(), foreign, *other.parameters()]
        return [param.grad.clone() for param in everything if param.grad is not None]

    plain = clipped(Accelerator(cpu=True))
    ours = clipped(PTMAccelerator(cpu=True, ptm_config={"host_memory": "64MiB"}))
    assert len(ours) == len(plain) == 61
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))


def dropping(accelerator: Accelerator, tiny: ModuleType, drop: Callable[[Any], Any]) -> dict[str, torch.Tensor]:
    """A script that drops some gradients between two backwards, and clips before that."""
    model = tiny.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    rows = tiny.data(6)
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        backward(accelerator, model, first)
        accelerator.clip_grad_norm_(model.parameters(), 0.5)
        drop(model)
        backward(accelerator, model, second)
        optimizer.step()
        model.zero_grad()
    weights: dict[str, torch.Tensor] = tiny.weights(accelerator.unwrap_model(model))
    return weights


@pytest.mark.thinned(3)
@pytest.mark.parametrize("room", ["roomy", "tight"])
@pytest.mark.parametrize(
    "drop",
    [
        lambda model: model.zero_grad(),
        lambda model: model.model.layers[1].zero_grad(set_to_none=True),
        lambda model: nn.ModuleList([model, nn.Linear(2, 2)]).zero_grad(),
    ],
    ids=["model", "part", "wrapper"],
)
def test_zero_grad_of_a_model_drops_what_is_on_pages(
    drop: Callable[[Any], Any], room: str, tiny: ModuleType, tmp_path: Path
) -> None:
    plain = dropping(Accelerator(cpu=True), tiny, drop)
    assert tiny.same(dropping(PTMAccelerator(cpu=True, ptm_config=tiny.budget(room, tmp_path)), tiny, drop), plain)
    kept = dropping(PTMAccelerator(cpu=True, ptm_config=tiny.budget(room, tmp_path)), tiny, lambda model: None)
    assert not tiny.same(kept, plain), "otherwise it makes no difference"


def test_zero_grad_leaves_other_models_and_other_parts_alone(tiny: ModuleType) -> None:
    accelerator, model, row = prepared(tiny)
    other = accelerator.prepare(tiny.model())
    for each in (model, other):
        backward(accelerator, each, row)
    before = gradients(other)
    other.lm_head.zero_grad()
    del before["lm_head.weight"]
    model.zero_grad()
    assert not gradients(model)
    assert tiny.same(gradients(other), before)
    foreign = nn.Linear(2, 2)
    foreign(torch.ones(2)).sum().backward()
    foreign.zero_grad(set_to_none=False)
    assert foreign.weight.grad is not None
    assert foreign.weight.grad.count_nonzero() == 0


def test_zero_grad_leaves_a_step_its_gradients_that_runs_beside_the_next_forward(
    tiny: ModuleType, tmp_path: Path
) -> None:
    def weights(drop: Callable[[Any], Any]) -> tuple[dict[str, torch.Tensor], int]:
        engine = Engine.attach(tiny.model(), PTMConfig(**tiny.budget("tight", tmp_path)))
        optimizer = engine.bind_optimizer(torch.optim.AdamW(engine.model.parameters(), lr=1e-3))
        running = 0
        for row in tiny.data(4):
            engine.model(input_ids=row["input_ids"][None], labels=row["labels"][None]).loss.backward()
            optimizer.step()
            running += optimizer.updates.queue is not None
            drop(engine)
        after: dict[str, torch.Tensor] = tiny.weights(engine.model)
        engine.close()
        return after, running

    ours, running = weights(lambda engine: engine.model.zero_grad())
    assert running
    assert tiny.same(ours, weights(lambda engine: engine.zero_grad())[0])


def test_zero_grad_is_refused_between_a_backward_with_updates_and_its_step(tiny: ModuleType, tmp_path: Path) -> None:
    accelerator = PTMAccelerator(cpu=True, ptm_config=tiny.budget("tight", tmp_path))
    model = tiny.model()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    engine = engine_of(model)
    assert engine is not None
    assert engine.optimizer is not None
    engine.training.updates_in_backward = lambda: True
    for row in tiny.data(5):
        backward(accelerator, model, row)
        if engine.optimizer.updates.early is not None:
            break
        optimizer.step()
        model.zero_grad()
    with pytest.raises(UnsupportedError, match=r"looked at or set between backward and optimizer\.step\(\)"):
        model.zero_grad()
    optimizer.step()


def test_parameters_that_are_not_on_pages_are_clipped_as_ever() -> None:
    foreign = nn.Parameter(torch.zeros(2))
    foreign.grad = torch.tensor([3.0, 4.0])
    assert torch.nn.utils.clip_grad_norm_(foreign, 1.0) == 5.0
    torch.nn.utils.clip_grad_value_(iter([foreign]), 0.25)
    assert foreign.grad.tolist() == [0.25, 0.25]
    with pytest.raises(TypeError, match="max_norm"):
        torch.nn.utils.clip_grad_norm_(foreign)  # type: ignore[call-arg]


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
