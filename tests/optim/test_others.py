"""Parameters of an optimizer that are not the model's: updated, clipped, saved and loaded as without pages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from ptm_accel.checkpoint.plain_state import load_either_state, write_plain_state
from ptm_accel.checkpoint.training_state import INDEX_NAME, load_optimizer_state, save_optimizer_state
from ptm_accel.engine import Engine
from ptm_accel.errors import CheckpointError, UnsupportedError
from tests.plain_loop import same_bits
from tests.stacks import stack
from tests.tiers import AMPLE, needs, on_pages

WIDTH, LAYERS = 48, 4


class Head(nn.Module):
    """What a loss may have of its own: a layer, a temperature, and something without elements."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(WIDTH, 3, dtype=dtype)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = self.layer(x.to(self.layer.weight.dtype)).float() * self.temperature
        return logits.square().mean() * 10 + self.nothing.sum()


Make = Callable[[nn.Sequential, Head], torch.optim.Optimizer]


def grouped(cls: Any, **options: Any) -> Make:
    """Groups that have parameters of both, in an order of their own, and one of the head's alone."""

    def make(model: nn.Sequential, head: Head) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        groups = [
            {"params": [head.layer.weight, first, head.nothing, *rest], "weight_decay": 0.1},
            {"params": [head.layer.bias, head.temperature], "lr": 3e-2},
        ]
        optimizer: torch.optim.Optimizer = cls(groups, lr=1e-2, **options)
        return optimizer

    return make


ADAMW = grouped(torch.optim.AdamW, fused=True)
MAKES = {
    "adamw": ADAMW,
    "sgd": grouped(torch.optim.SGD, momentum=0.9),
    "adafactor": grouped(transformers.Adafactor, relative_step=False, scale_parameter=False, beta1=0.9),
    "rmsprop": grouped(torch.optim.RMSprop),
}


def train(
    model: nn.Sequential, head: Head, optimizer: Any, numbers: range = range(5), *, clip: str = "both"
) -> list[float]:
    """Steps with a schedule; what is clipped are the gradients of both, of the model, or none."""
    said = []
    for number in numbers:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean() + head(model(x))
        loss.backward()
        params = [*model.parameters(), *(head.parameters() if clip == "both" else ())]
        if clip != "none":
            said.append(float(nn.utils.clip_grad_norm_(params, 0.5)))
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
        optimizer.step()
        if number % 2:
            optimizer.zero_grad(set_to_none=number == 1)
        else:
            # As the Trainer does: what is not the model's is added up until somebody drops it.
            model.zero_grad()
        said.append(float(loss.detach()))
    return said


def assert_same_state(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, entries in theirs["state"].items():
        assert ours["state"][number].keys() == entries.keys()
        for key, value in entries.items():
            same = same_bits(ours["state"][number][key].clone(), value) if isinstance(value, torch.Tensor) else True
            assert same, (number, key)


def assert_same(model: nn.Module, head: Head, plain: nn.Module, other: Head) -> None:
    values = model.state_dict()
    for name, value in plain.state_dict().items():
        assert same_bits(values[name].clone(), value), name
    for (name, ours), theirs in zip(head.named_parameters(), other.parameters(), strict=True):
        assert same_bits(ours.detach(), theirs.detach()), name


@contextmanager
def on_budget(make: Make, directory: Path, budget: str, **options: Any) -> Iterator[tuple[nn.Sequential, Head, Engine]]:
    floor, need = needs(stack(WIDTH, LAYERS), directory, "host+disk", optimizer=lambda model: make(model, Head()))
    model = stack(WIDTH, LAYERS)
    nbytes = {"fits": AMPLE, "third": floor + (need - floor) // 3, "floor": floor}[budget]
    with on_pages(model, "host+disk", nbytes, directory, **options) as engine:
        yield model, Head(), engine


@pytest.mark.thinned(18)
@pytest.mark.parametrize("clip", ["both", "model", "none"])
@pytest.mark.parametrize("budget", ["fits", "third", "floor"])
@pytest.mark.parametrize("name", list(MAKES))
def test_they_are_trained_as_without_pages(name: str, budget: str, clip: str, tmp_path: Path) -> None:
    plain, other = stack(WIDTH, LAYERS), Head()
    theirs = MAKES[name](plain, other)
    expected = train(plain, other, theirs, clip=clip)
    with on_budget(MAKES[name], tmp_path, budget) as (model, head, engine):
        optimizer = engine.bind_optimizer(MAKES[name](model, head))
        assert train(model, head, optimizer, clip=clip) == expected
        assert_same(model, head, plain, other)
        assert_same_state(optimizer.state_dict(), theirs.state_dict())


def test_updates_that_begin_in_backward(tmp_path: Path) -> None:
    plain, other = stack(WIDTH, LAYERS), Head()
    theirs = ADAMW(plain, other)

    def loop(model: nn.Sequential, head: Head, optimizer: Any, engine: Engine | None) -> int:
        begun = 0
        for number in range(6):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
            loss = head(model(x))
            if engine is None:
                loss.backward()
            else:
                with engine.training.backward():
                    loss.backward()
                begun += optimizer.updates.early is not None
            optimizer.step()
            optimizer.zero_grad()
        return begun

    loop(plain, other, theirs, None)
    with on_budget(ADAMW, tmp_path, "third") as (model, head, engine):
        engine.training.updates_in_backward = lambda: True
        optimizer = engine.bind_optimizer(ADAMW(model, head))
        assert loop(model, head, optimizer, engine) > 0
        assert_same(model, head, plain, other)
        assert_same_state(optimizer.state_dict(), theirs.state_dict())


@pytest.mark.parametrize("where", ["dictionary", "folder", "exported", "plain dictionary"])
@pytest.mark.parametrize("name", ["adamw", "adafactor"])
def test_they_are_saved_and_loaded(name: str, where: str, tmp_path: Path) -> None:
    make, saved = MAKES[name], tmp_path / "saved"
    saved.mkdir()
    plain, other = stack(WIDTH, LAYERS), Head()
    theirs = make(plain, other)
    train(plain, other, theirs, range(3))
    dictionary = copy.deepcopy(theirs.state_dict())
    with on_budget(make, tmp_path, "third") as (model, head, engine):
        optimizer = engine.bind_optimizer(make(model, head))
        train(model, head, optimizer, range(3))
        values, grads = copy.deepcopy(head.state_dict()), [param.grad for param in head.parameters()]
        weights = {key: value.clone() for key, value in model.state_dict().items()}
        if where == "dictionary":
            dictionary = copy.deepcopy(optimizer.state_dict())
        elif where != "plain dictionary":
            save_optimizer_state(optimizer, saved)
        if where == "exported":
            write_plain_state(saved, saved / "optimizer.pt")
            assert_same_state(torch.load(saved / "optimizer.pt"), dictionary)
            (saved / INDEX_NAME).unlink()
    expected = train(plain, other, theirs, range(3, 6))
    with on_budget(make, tmp_path, "floor") as (model, head, engine):
        model.load_state_dict(weights)
        head.load_state_dict(values)
        for param, grad in zip(head.parameters(), grads, strict=True):
            param.grad = grad
        optimizer = engine.bind_optimizer(make(model, head))
        if where == "folder":
            load_optimizer_state(optimizer, saved)
        elif where == "exported":
            load_either_state(optimizer, saved / "optimizer.pt")
        else:
            optimizer.load_state_dict(dictionary)
        assert train(model, head, optimizer, range(3, 6)) == expected
        assert_same(model, head, plain, other)
        assert_same_state(optimizer.state_dict(), theirs.state_dict())


def test_a_checkpoint_without_them_is_refused(tmp_path: Path) -> None:
    with on_budget(ADAMW, tmp_path, "fits") as (model, _, engine):
        save_optimizer_state(engine.bind_optimizer(torch.optim.AdamW(model.parameters())), tmp_path)
    with on_budget(ADAMW, tmp_path, "fits") as (model, head, engine):
        params = [*model.parameters(), head.temperature]
        optimizer = engine.bind_optimizer(torch.optim.AdamW(params))
        differs = "parameter 8 of group 0 differs: the checkpoint has no more, this run has other/0.8"
        with pytest.raises(CheckpointError, match=differs):
            load_optimizer_state(optimizer, tmp_path)


def test_norms_of_other_dtypes_are_summed_in_torchs_order(tmp_path: Path) -> None:
    plain, other = stack(WIDTH, LAYERS), Head(torch.bfloat16)
    theirs = ADAMW(plain, other)
    expected = train(plain, other, theirs)
    with on_budget(ADAMW, tmp_path, "third") as (model, _, engine):
        head = Head(torch.bfloat16)
        assert train(model, head, engine.bind_optimizer(ADAMW(model, head))) == expected
        assert_same(model, head, plain, other)


def test_a_group_of_theirs_may_be_added_later(tmp_path: Path) -> None:
    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    plain, other = stack(WIDTH, LAYERS), Head()
    theirs = adamw(plain)
    with on_budget(lambda model, _: adamw(model), tmp_path, "third") as (model, head, engine):
        optimizer: Any = engine.bind_optimizer(adamw(model))
        for each, module, loss in ((theirs, plain, other), (optimizer, model, head)):
            train(module, loss, each, range(2))
            each.add_param_group({"params": list(loss.parameters())})
        assert train(model, head, optimizer, range(2, 5)) == train(plain, other, theirs, range(2, 5))
        assert_same(model, head, plain, other)


def test_parameters_of_two_models_on_pages_are_refused(tmp_path: Path) -> None:
    with (
        on_budget(ADAMW, tmp_path, "fits") as (model, _, engine),
        on_budget(ADAMW, tmp_path, "fits") as (second, _, _),
        pytest.raises(UnsupportedError, match="16 parameters, of Sequential and of Sequential, which are both on"),
    ):
        engine.bind_optimizer(torch.optim.AdamW([*model.parameters(), *second.parameters()]))
