"""How a model comes onto pages: refused without harm, without values, or with values there already."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import BudgetError, UnsupportedError
from ptm_accel.memory.block import Place
from ptm_accel.memory.budget import Tag, Tier
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.model.grouping import group_of
from ptm_accel.model.slots import ParamSlot
from ptm_accel.opening import open_memory
from ptm_accel.sizing import refuse_oversized_model
from tests.card import Card, CardTier
from tests.tiers import PAGE, at_floor, config, on_pages
from tests.tiers import open_memory as tiers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(128, 128)
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.b = nn.Linear(128, 128, bias=False)
        self.b.weight = self.a.weight
        self.register_buffer("mean", torch.zeros(128))


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_refused_model_is_left_as_it_was(tmp_path: Path) -> None:
    model = Net()
    before, params = values(model), list(model.parameters())
    memory = tiers("host+disk", 40 * PAGE, tmp_path)
    with pytest.raises(BudgetError, match="this model cannot train under less than"):
        Engine.attach(model, config(), memory=memory)
    assert engine_of(model) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    assert type(model.a._parameters) is dict
    assert memory.closed


def test_a_refused_model_without_values_stays_without(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net()
    with pytest.raises(BudgetError, match="this model cannot train under less than"):
        Engine.attach(model, config(), memory=tiers("host+disk", 40 * PAGE, tmp_path))
    assert all(param.device.type == "meta" for param in model.parameters())


@pytest.mark.parametrize("kind", ["host+disk", "mock+host"])
def test_a_model_without_values_gets_blank_pages(kind: str, tmp_path: Path) -> None:
    with torch.device("meta"):
        model = Net()
    model.mean = torch.zeros(128)  # type: ignore[assignment]
    model.a.bias.requires_grad_(False)
    model.a.weight.note = "kept"  # type: ignore[attr-defined]
    engine = Engine.attach(model, config(), memory=tiers(kind, 4 << 20, tmp_path))
    assert model.a.weight is model.b.weight
    assert model.a.weight.note == "kept"  # type: ignore[attr-defined]
    assert [slot.name for slot in engine.slots] == ["scale", "a.weight", "a.bias"]
    assert engine.slots.by_name["b.weight"] is engine.slots.by_name["a.weight"]
    assert [p.requires_grad for p in model.parameters()] == [True, True, False]
    assert all(torch.equal(value, torch.zeros_like(value)) for value in model.state_dict().values())
    (model.b(model.a(torch.ones(2, 128))).sum() * model.scale).backward()
    engine.check_integrity()
    engine.detach()
    assert all(torch.equal(p, torch.zeros_like(p)) for p in model.parameters())


def test_a_scalar_can_be_away(tmp_path: Path) -> None:
    model = Net()
    engine = Engine.attach(model, config(), memory=tiers("host+disk", 4 << 20, tmp_path))
    value = engine.slots.by_name["scale"].value.block
    engine.pool.admission.evict(value)
    assert value.place is Place.AWAY
    assert value.shape == torch.Size([])
    assert torch.equal(model.state_dict()["scale"], torch.tensor(2.0))
    assert model.scale.item() == 2.0
    engine.detach()


def test_values_that_are_on_pages_are_taken_over(tmp_path: Path) -> None:
    options = PTMConfig(host_memory="4MiB", disk=str(tmp_path), page_size=PAGE)
    resolved, memory = open_memory(options)
    model = Net()
    expected = values(model)
    pages = {}
    for name, param in model.named_parameters():
        group = group_of(f"read as {name}", param, small=0)
        pages[param] = group, group.part(0, "", Tag.PARAM, param.dtype, memory.pool)
        memory.pool.fault(pages[param][1], write=True).copy_(param.detach())
        param.data = torch.full((1,) * param.dim(), float("nan")).expand(param.shape)
    block = pages[model.a.weight][1].block
    memory.pool.admission.evict(block)
    engine = Engine.take_over(model, options, resolved, memory, pages)
    assert engine_of(model) is engine
    assert block.name == "a.weight"
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert torch.equal(model.a.bias, expected["a.bias"])
    engine.check_integrity()
    engine.close()


def test_a_model_that_cannot_be_taken_over_gives_the_memory_back(tmp_path: Path) -> None:
    options = PTMConfig(host_memory="4MiB", disk=str(tmp_path), page_size=PAGE)
    resolved, memory = open_memory(options)
    model = Net()
    model.a.weight.data = torch.zeros(128, 128).t()
    with pytest.raises(UnsupportedError, match="parameter a.weight is not contiguous"):
        Engine.take_over(model, options, resolved, memory, {})
    assert memory.closed


def test_what_is_resident_is_copied_when_it_is_taken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    with on_pages(model, "host+disk", 4 << 20, tmp_path) as engine:
        # At first they lie in the memory that the model brought along.
        for slot in engine.slots:
            engine.pool.admission.evict(slot.value.block)
            engine.pages.executor.fault(slot.value)
        largest = (64 * 64 + 64) * 4
        monkeypatch.setattr("ptm_accel.sizing.available_bytes", lambda: largest - 1)
        with pytest.raises(BudgetError, match="16640 B more of memory are needed for it and 16639 B are"):
            engine.detach()
        monkeypatch.setattr("ptm_accel.sizing.available_bytes", lambda: largest)
        arena = engine.pool.compute
        held: list[int] = []
        take_off = ParamSlot.take_off

        def watched(slot: ParamSlot, values: torch.Tensor) -> None:
            held.append(arena.live_bytes + arena.kept_bytes)
            take_off(slot, values)

        monkeypatch.setattr(ParamSlot, "take_off", watched)
        engine.detach()
    assert len(held) == 16
    # A weight and its bias are one block.
    assert all(later < earlier for earlier, later in itertools.pairwise(held[::2])), held


def test_what_pages_hold_of_a_card_is_free_where_they_can_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    capacities = Capacities(page_bytes=4096, host_bytes=1 << 20, device_bytes=1 << 20)
    memory = build_memory(capacities, CardTier(Card(1 << 20, 1024), 1024))
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    nbytes = sum(param.nbytes for param in model.parameters())
    engine = Engine.attach(model, config(), memory=memory)
    values = [slot.value for slot in engine.slots]
    for value in values:
        engine.pages.executor.fault(value)
    assert engine.pool.card is not None
    monkeypatch.setattr(engine.pool.card, "free_bytes", lambda: 40 << 10)
    assert engine.pool.card.held_bytes + (40 << 10) >= nbytes
    refuse_oversized_model(memory, values)
    host = memory.budgets[Tier.HOST]
    host.capacity_bytes, before = host.used_bytes, host.capacity_bytes
    with pytest.raises(BudgetError, match=r"more of memory are needed for it and 40960 B are free\."):
        refuse_oversized_model(memory, values)
    with pytest.raises(BudgetError, match="cannot be taken off its pages"):
        engine.detach()
    monkeypatch.setattr(engine.pool.card, "free_bytes", lambda: nbytes)
    engine.detach()
    host.capacity_bytes = before


def test_a_model_that_memory_cannot_hold_stays_on_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    truth = {name: param.detach().clone() for name, param in model.named_parameters()}
    with at_floor(model, tmp_path) as engine:
        monkeypatch.setattr("ptm_accel.sizing.available_bytes", lambda: 1000)
        with pytest.raises(
            BudgetError,
            match=r"cannot be taken off its pages: .* more of memory are needed for it and 1000 B are free\. Save it",
        ):
            engine.detach()
        for name, value in model.state_dict().items():
            assert torch.equal(value, truth[name]), name
