"""Linked blocks train as a model that was tied by hand, and delinked ones as one whose blocks were cloned by hand."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, UnsupportedError
from ptm_accel.memory.budget import Tier
from ptm_accel.recipes.delinking import delink
from ptm_accel.recipes.linking import is_linked, link, places_of
from tests.plain_loop import adamw, same_bits
from tests.prepared import run_ranks
from tests.tiers import MEMORIES, budget_bytes, in_groups, needs, on_pages
from tests.zoo import ENTRIES, Entry, use_checkpointing

LISTS = {
    "llama": ["model.layers"],
    "gpt2": ["transformer.h"],
    "t5": ["encoder.block", "decoder.block"],
    "bert": ["bert.encoder.layer"],
    "mixtral": ["model.layers"],
}
STEPS = 3
"""In each of the two stages."""


def tie_by_hand(model: nn.Module, name: str) -> None:
    """Independently of the code under test."""
    for path in LISTS[name]:
        first, *others = model.get_submodule(path)
        for other in others:
            for key, param in list(other.named_parameters()):
                try:
                    shared = first.get_parameter(key)
                except AttributeError:
                    continue
                if shared.shape == param.shape:
                    owner, _, attribute = key.rpartition(".")
                    setattr(other.get_submodule(owner), attribute, shared)


def clone_by_hand(model: nn.Module, name: str, optimizer: torch.optim.Optimizer, moments: str) -> None:
    """Independently of the code under test."""
    for path in LISTS[name]:
        first, *others = model.get_submodule(path)
        for key, shared in list(first.named_parameters()):
            having = [block for block in others if any(param is shared for param in block.parameters())]
            if not having:
                continue
            state = optimizer.state.pop(shared)
            if moments == "scale":
                for entry in ("exp_avg", "exp_avg_sq"):
                    state[entry] = state[entry] * (1.0 / (1 + len(having)))
            if moments != "reset":
                optimizer.state[shared] = state
            for block in having:
                owner, _, attribute = key.rpartition(".")
                clone = nn.Parameter(shared.detach().clone())
                setattr(block.get_submodule(owner), attribute, clone)
                next(g for g in optimizer.param_groups if any(p is shared for p in g["params"]))["params"].append(clone)
                if moments != "reset":
                    optimizer.state[clone] = copy.deepcopy(state)


def steps(
    model: nn.Module, entry: Entry, optimizer: torch.optim.Optimizer, first: int, engine: Engine | None
) -> list[float]:
    losses = []
    for number in range(first, first + STEPS):
        loss = model(**entry.batch_at(number)).loss
        losses.append(loss.item())
        loss.backward()
        del loss
        if engine is None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def two_stages(
    entry: Entry,
    linking: Callable[[nn.Module], Any],
    delinking: Callable[[nn.Module, Any], Any],
    engine: Engine | None = None,
    model: nn.Module | None = None,
    checkpointing: str = "off",
) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = entry.build() if model is None else model
    use_checkpointing(model, checkpointing)
    linking(model)
    optimizer: torch.optim.Optimizer = adamw(model)
    if engine is not None:
        optimizer = engine.bind_optimizer(optimizer)
    torch.manual_seed(7)
    losses = steps(model, entry, optimizer, 0, engine)
    number = STEPS
    with torch.random.fork_rng():
        before = model(**entry.batch_at(number)).loss.item()
    delinking(model, optimizer)
    with torch.random.fork_rng():
        assert model(**entry.batch_at(number)).loss.item() == before, "the loss across delinking"
    optimizer.zero_grad()
    losses += steps(model, entry, optimizer, number, engine)
    return losses, {name: value.clone() for name, value in model.state_dict().items()}


def oracle(name: str, moments: str = "copy", checkpointing: str = "off") -> tuple[list[float], dict[str, torch.Tensor]]:
    return two_stages(
        ENTRIES[name],
        lambda model: tie_by_hand(model, name),
        lambda model, optimizer: clone_by_hand(model, name, optimizer, moments),
        checkpointing=checkpointing,
    )


def check(found: tuple[list[float], dict[str, torch.Tensor]], wanted: tuple[list[float], Any]) -> None:
    assert found[0] == wanted[0]
    assert found[1].keys() == wanted[1].keys()
    assert all(same_bits(value, wanted[1][name]) for name, value in found[1].items())


@pytest.mark.parametrize("moments", ["copy", "scale", "reset"])
@pytest.mark.parametrize("name", LISTS)
def test_an_ordinary_model_is_linked_and_delinked(name: str, moments: str) -> None:
    found = two_stages(ENTRIES[name], link, lambda model, optimizer: delink(model, optimizer, moments=moments))
    check(found, oracle(name, moments))


@pytest.mark.thinned(10)
@pytest.mark.parametrize("budget", ["fits", "30%", "floor"])
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("name", LISTS)
def test_a_model_on_pages_is_linked_and_delinked(name: str, kind: str, budget: str, tmp_path: Path) -> None:
    moments = ("copy", "scale", "reset")[len(name + kind + budget) % 3]
    checkpointing = ENTRIES[name].checkpointing[len(name + budget) % len(ENTRIES[name].checkpointing)]
    floor, need = needs(ENTRIES[name].build(), tmp_path, kind)
    model = ENTRIES[name].build()
    with in_groups(), on_pages(model, kind, budget_bytes(budget, floor, need), tmp_path) as engine:
        found = two_stages(
            ENTRIES[name],
            link,
            lambda model, optimizer: delink(model, optimizer, moments=moments),
            engine,
            model,
            checkpointing,
        )
    check(found, oracle(name, moments, checkpointing))


def test_linked_blocks_move_and_hold_as_much_as_one(tmp_path: Path) -> None:
    """Twelve blocks: at most 1.1/12 of the bytes, of what is moved, and of the updates."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        blocks = (nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96)) for _ in range(12))
        return nn.Sequential(nn.ModuleList(blocks))

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for block in model[0]:  # type: ignore[index,union-attr]
            x = torch.tanh(block(x))
        return x

    floor, _ = needs(build(), tmp_path, "host+disk")
    figures = {}
    for linked in (False, True):
        model = build()
        # So little that a block that was used has left before the next step.
        with on_pages(model, "host+disk", floor, tmp_path) as engine:
            if linked:
                link(model)
            optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
            for number in range(4):
                if number == 1:
                    before = engine.pool.stats.loaded_bytes + engine.pool.stats.stored_bytes
                forward(model, torch.full((2, 96), float(number))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            engine.settle()
            moved = engine.pool.stats.loaded_bytes + engine.pool.stats.stored_bytes - before
            held = sum(tensor.slot_bytes for tensor in engine.pool.tensors())
            updated = sum(state.slot.value.numel for state in optimizer.states)
            on_disk = engine.memory.budgets[Tier.DISK].used_bytes
            figures[linked] = moved, held, updated, on_disk
    for whole, one in zip(figures[False], figures[True], strict=True):
        assert one <= whole * 1.1 / 12, figures


def test_a_linked_model_is_saved_as_an_ordinary_checkpoint(tmp_path: Path) -> None:
    model: Any = ENTRIES["llama"].build()
    link(model)
    model.save_pretrained(tmp_path / "plain")
    saved = load_file(tmp_path / "plain" / "model.safetensors")
    again: Any = type(model).from_pretrained(tmp_path / "plain")
    for place in places_of(model):
        assert same_bits(saved[place.name], saved[place.source])
        assert same_bits(again.get_parameter(place.name), model.get_parameter(place.source))
    assert not is_linked(again)
    batch = ENTRIES["llama"].batch_at(0)
    assert same_bits(again(**batch).loss, model.eval()(**batch).loss)


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_linked_model_on_pages_is_saved_as_one_that_is_not(kind: str, tmp_path: Path) -> None:
    plain: Any = ENTRIES["llama"].build()
    link(plain)
    plain.save_pretrained(tmp_path / "plain")
    floor, need = needs(ENTRIES["llama"].build(), tmp_path, kind)
    model: Any = ENTRIES["llama"].build()
    disk = {"disk": str(tmp_path)} if kind.endswith("disk") else {}
    with on_pages(model, kind, floor + (need - floor) // 2, tmp_path, **disk) as engine:
        link(model)
        charged = engine.pool.budget.used_bytes
        model.save_pretrained(tmp_path / "paged")
        assert engine.pool.budget.used_bytes <= charged, "the copies are gone"
    ours, theirs = (load_file(tmp_path / folder / "model.safetensors") for folder in ("paged", "plain"))
    assert ours.keys() == theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)


def test_what_cannot_be_linked_or_delinked_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no repeated blocks"):
        link(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(UnsupportedError, match="no repeated blocks"):
        link(ENTRIES["albert"].build())
    model = ENTRIES["llama"].build()
    with pytest.raises(UnsupportedError, match="are not linked"):
        delink(model)
    link(model)
    with pytest.raises(UnsupportedError, match="linked already"):
        link(model)
    with pytest.raises(UnsupportedError, match="write one of copy, scale, reset"):
        delink(model, moments="halve")
    model(**ENTRIES["llama"].batch_at(0)).loss.backward()
    with pytest.raises(UnsupportedError, match="have gradients"):
        delink(model)
    assert is_linked(model)


def test_experts_of_a_block_and_what_is_frozen_stay_what_they_are() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.frozen = nn.Parameter(torch.randn(4), requires_grad=False)

    model = nn.Module()
    model.blocks = nn.ModuleList(Block() for _ in range(3))
    assert link(model) == 2 * 4
    assert model.get_parameter("blocks.2.experts.1.weight") is model.get_parameter("blocks.0.experts.1.weight")
    assert model.get_parameter("blocks.0.experts.0.weight") is not model.get_parameter("blocks.0.experts.1.weight")
    assert model.get_parameter("blocks.0.frozen") is not model.get_parameter("blocks.1.frozen")
    delink(model)
    assert len(list(model.parameters())) == 3 * 5


def test_a_group_that_names_its_parameters_names_clones() -> None:
    model = ENTRIES["llama"].build()
    link(model)
    optimizer = torch.optim.AdamW(model.named_parameters())
    delink(model, optimizer)
    (group,) = optimizer.param_groups
    names = {param: name for name, param in model.named_parameters()}
    assert [names[param] for param in group["params"]] == group["param_names"] == list(names.values())


def test_delinking_without_room_is_an_error(tmp_path: Path) -> None:
    floor, need = needs(ENTRIES["llama"].build(), tmp_path, "mock+host")
    model = ENTRIES["llama"].build()
    link(model)
    host = sum(param.nbytes for param in model.parameters()) * 4
    with on_pages(model, "mock+host", floor, tmp_path, host_bytes=max(host, need // 2)) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        steps(model, ENTRIES["llama"], optimizer, 0, engine)
        with pytest.raises(BudgetError):
            delink(model, optimizer)


@pytest.mark.process
def test_two_processes_link_and_delink_alike(tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    child = Path(__file__).with_name("linked_child.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = run_ranks(child, tmp_path / "pages", count=2, cwd=tmp_path, env=environment)
    for rank, run in enumerate(runs):
        assert run.code == 0, run.err[-4000:]
        assert run.out == f"process {rank} agrees\n"
