"""State dicts of a model whose pages are mostly away."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import PagedModelError
from tests.tiers import MEMORIES, at_floor, needs, on_pages


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("kind", MEMORIES)
def test_one_that_is_kept_leaves_room_to_load_and_to_train(kind: str, tmp_path: Path) -> None:
    other = {name: value.clone() for name, value in net(1).state_dict().items()}
    plain, model = net(), net()
    batch = torch.ones(2, 64)
    with at_floor(model, tmp_path, kind) as engine:
        kept = model.state_dict()
        assert same(kept, plain.state_dict())
        model.load_state_dict(other)
        plain.load_state_dict(other)
        again = model.state_dict()
        assert same(again, other)
        model(batch).square().mean().backward()
        plain(batch).square().mean().backward()
        assert engine.gradients is not None
        for grad, param in zip(engine.gradients.slots(), plain.parameters(), strict=True):
            assert grad.value is not None
            with engine.pages.executor.pin(grad.value) as total:
                assert torch.equal(total, param.grad)
        assert len(kept) == len(again)
    del kept, again


@pytest.mark.parametrize("frozen", [False, True])
def test_what_fits_is_given_as_it_is(frozen: bool, tmp_path: Path) -> None:
    """As in plain torch: the tensors of a state dict are those of the model, and what is written to them is kept."""
    model = net().requires_grad_(not frozen)
    _, whole = needs(copy.deepcopy(model), tmp_path, "host+disk")
    with on_pages(model, "host+disk", whole, tmp_path) as engine:
        kept = [model.state_dict() for _ in range(100)]
        for value in kept[-1].values():
            value.fill_(1)
        for slot in engine.slots:
            with engine.pages.executor.pin(slot.value) as values:
                assert (values == 1).all()
        assert engine.memory.disk is not None
        assert engine.memory.disk.bytes_written == 0


def test_state_dicts_that_are_kept_view_nothing_that_may_leave(tmp_path: Path) -> None:
    model = net()
    floor, whole = needs(copy.deepcopy(model), tmp_path, "host+disk")
    with on_pages(model, "host+disk", (floor + whole) // 2, tmp_path) as engine:
        # What somebody has read by its name is no exception.
        kept: list[Any] = [model[0].weight, *(model.state_dict() for _ in range(3))]
        assert len(kept[-1]) == len(list(engine.slots))
        assert not [slot.name for slot in engine.slots if slot.group.movable and slot.value.block.viewed]


def test_state_of_an_optimizer_that_is_kept_leaves_room_to_train(tmp_path: Path) -> None:
    model, plain = net(), net()
    floor, _ = needs(copy.deepcopy(model), tmp_path, "host+disk")
    with on_pages(model, "host+disk", floor + (64 << 10), tmp_path) as engine:
        pairs = [(m, torch.optim.AdamW(m.parameters(), fused=True)) for m in (plain, model)]
        optimizers = [pairs[0][1], engine.bind_optimizer(pairs[1][1])]
        kept = []
        for _ in range(3):
            losses = []
            for (module, _), optimizer in zip(pairs, optimizers, strict=True):
                loss = module(torch.ones(2, 64)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            assert losses[0] == losses[1]
            kept.append(optimizers[1].state_dict())
        assert len(kept) == 3


# ---- values of what is away ------------------------------------------------------------------------------------------


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, start: dict[str, torch.Tensor] | None = None) -> float:
    """A step, with a loss that pulls towards values, if there are any (L2-SP)."""
    loss = model(torch.ones(2, 64)).square().mean()
    for name, value in (start or {}).items():
        loss = loss + ((model.get_parameter(name) - value) * value).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


@contextmanager
def trained(kind: str, directory: Path) -> Iterator[tuple[nn.Module, torch.optim.Optimizer, Engine]]:
    model = net()
    floor, whole = needs(net(), directory, kind, optimizer=adamw)
    with on_pages(model, kind, (floor + whole) // 2, directory) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        for _ in range(3):
            step(model, optimizer)
        yield model, optimizer, engine


@pytest.fixture
def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = adamw(model)
    for _ in range(3):
        step(model, optimizer)
    return model, optimizer


Trained = tuple[nn.Module, torch.optim.Optimizer]


@pytest.mark.parametrize("kind", MEMORIES)
def test_values_stay_what_they_were_and_are_used_in_a_loss(kind: str, plain: Trained, tmp_path: Path) -> None:
    theirs = {name: value.clone() for name, value in plain[0].state_dict().items()}
    with trained(kind, tmp_path) as (model, optimizer, engine):
        ours = model.state_dict()
        made = [nn.Parameter(value) for value in ours.values()]
        for _ in range(3):
            assert step(model, optimizer, ours) == step(*plain, theirs)
        assert same(model.state_dict(), plain[0].state_dict())
        assert same(ours, theirs)
        assert all(torch.equal(a, b) for a, b in zip(made, theirs.values(), strict=True))
        engine.check_integrity()


@pytest.mark.parametrize("kind", MEMORIES)
def test_what_is_kept_for_values_is_free_after_them(kind: str, tmp_path: Path) -> None:
    with trained(kind, tmp_path) as (model, optimizer, engine):
        step(model, optimizer)
        backing = engine.memory.disk or engine.pool.backing
        assert backing is not None
        before = backing.budget.used_bytes
        for _ in range(3):
            kept = model.state_dict()
            step(model, optimizer)
            step(model, optimizer)
            assert kept
            del kept
        step(model, optimizer)
        # The last ones are freed by the next that are kept.
        kept = model.state_dict()
        step(model, optimizer)
        assert kept
        weights = sum(slot.value.slot_bytes for slot in engine.slots)
        assert backing.budget.used_bytes <= before + 2 * weights
        engine.check_integrity()


def written(values: dict[str, torch.Tensor], model: nn.Module) -> None:
    with torch.no_grad():
        values["4.weight"].mul_(2.0)
        values["5.bias"].fill_(3.0)


def written_and_dropped(values: dict[str, torch.Tensor], model: nn.Module) -> None:
    values.clear()
    model.state_dict()["4.weight"].copy_(torch.ones(64, 64))


def written_by_a_parameter(values: dict[str, torch.Tensor], model: nn.Module) -> None:
    made = nn.Parameter(values["4.weight"])
    made.sum().backward()
    torch.optim.SGD([made], lr=0.5).step()


def written_and_loaded(values: dict[str, torch.Tensor], model: nn.Module) -> None:
    values["4.weight"].zero_()
    model.load_state_dict(values)


def written_after_a_forward(values: dict[str, torch.Tensor], model: nn.Module) -> None:
    model(torch.ones(2, 64))
    values["4.weight"].zero_()
    values["4.weight"][0] = 1.0


def written_as_part_of_a_graph(values: dict[str, torch.Tensor], model: nn.Module) -> None:
    values["4.weight"].requires_grad_()
    with torch.no_grad():
        values["4.weight"].mul_(0.5)


WRITES = [
    written,
    written_and_dropped,
    written_by_a_parameter,
    written_and_loaded,
    written_after_a_forward,
    written_as_part_of_a_graph,
]


@pytest.mark.parametrize(
    ("write", "kind"), [*((write, "host+disk") for write in WRITES), *((written, kind) for kind in MEMORIES[::2])]
)
def test_what_is_written_to_values_is_taken_over(
    write: Callable[[dict[str, torch.Tensor], nn.Module], None], kind: str, plain: Trained, tmp_path: Path
) -> None:
    with trained(kind, tmp_path) as (model, optimizer, _):
        kept = [each.state_dict() for each in (model, plain[0])]
        for values, each in zip(kept, (model, plain[0]), strict=True):
            write(values, each)
        assert step(model, optimizer) == step(*plain)
        assert same(model.state_dict(), plain[0].state_dict())


def test_what_is_written_is_seen_by_the_next_use(plain: Trained, tmp_path: Path) -> None:
    uses: list[Callable[[nn.Module], torch.Tensor]] = [
        lambda m: m[4].weight.detach().clone(),
        lambda m: m.state_dict()["4.weight"].clone(),
        lambda m: copy.deepcopy(m[4].weight).detach(),
        lambda m: m(torch.ones(1, 64)),
        lambda m: m[4](torch.ones(1, 64)),
    ]
    with trained("host+disk", tmp_path) as (model, _, _):
        for use in uses:
            for each in (model, plain[0]):
                each.state_dict()["4.weight"].mul_(1.5)
            assert torch.equal(use(model), use(plain[0]))


def test_a_write_after_the_parameter_has_changed_is_an_error(tmp_path: Path) -> None:
    with trained("host+disk", tmp_path) as (model, optimizer, _):
        kept = model.state_dict()
        step(model, optimizer)
        now = {name: value.clone() for name, value in model.state_dict().items()}
        kept["4.weight"].mul_(2.0)
        with pytest.raises(PagedModelError) as raised:
            model(torch.ones(2, 64))
        assert str(raised.value) == (
            "a write to a value of state_dict() cannot reach the model (1 time(s)): the value is a copy of 4.weight, "
            "which has changed since then, or it was dropped before the model was used again. Call `state_dict()` anew "
            "before writing, or write to the parameter (`param.data.copy_(...)`)."
        )
        assert same(model.state_dict(), now)


def test_a_write_that_nobody_kept_is_an_error(tmp_path: Path) -> None:
    with trained("host+disk", tmp_path) as (model, _, _):
        kept = model.state_dict()
        model(torch.ones(2, 64))
        kept["4.weight"].mul_(2.0)
        del kept
        with pytest.raises(PagedModelError, match=r"the model \(1 time\(s\)\): the value is a copy of 4.weight"):
            model[4].weight.sum()


def test_a_write_where_hooks_have_come_off_is_an_error(tmp_path: Path) -> None:
    """Where everything fits on a card, what was given before the first step is a copy all the same."""
    model = net()
    _, whole = needs(net(), tmp_path, "mock+host", optimizer=adamw)
    with on_pages(model, "mock+host", 2 * whole, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        kept = model.state_dict()
        step(model, optimizer)
        assert engine.training.plain.active
        kept["4.weight"].mul_(2.0)
        with pytest.raises(PagedModelError, match="cannot reach the model"):
            model(torch.ones(2, 64))
        model.state_dict()["4.weight"].fill_(2.0)
        step(model, optimizer)
        assert (model[4].weight > 1.9).all()


def test_values_are_saved_and_copied(plain: Trained, tmp_path: Path) -> None:
    theirs = plain[0].state_dict()
    with trained("host+disk", tmp_path) as (model, _, _):
        values = model.state_dict()
        assert same(copy.deepcopy(values), theirs)
        safetensors.torch.save_file(values, tmp_path / "values.safetensors")
        assert same(safetensors.torch.load_file(tmp_path / "values.safetensors"), dict(theirs))
        file = io.BytesIO()
        torch.save(values, file)
        file.seek(0)
        assert same(torch.load(file), theirs)
        with torch.inference_mode():
            assert not any(value.is_inference() for value in model.state_dict().values())
        other = net(1)
        other.load_state_dict(values, assign=True)
        assert same(other.state_dict(), theirs)
