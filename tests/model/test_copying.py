"""Ordinary copies of paged models, and what is refused instead of copying placeholders."""

from __future__ import annotations

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ptm_accel
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import PagedModelError
from ptm_accel.memory.block import Place
from ptm_accel.outside import plain_copy

VOCABULARY, WIDTH = 64, 32


class Tied(nn.Module):
    """Embedding and head share a weight; a buffer, a frozen layer, a scalar and a norm beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.inner(self.embed(ids)) + self.frozen(self.embed(ids)))
        return nn.functional.cross_entropy(self.head(x) * self.scale, ids)


def build(seed: int = 0) -> Tied:
    torch.manual_seed(seed)
    return Tied()


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (16,), generator=torch.Generator().manual_seed(step))


def on_pages(model: nn.Module, directory: Path, *, evict: bool = True) -> Engine:
    engine = Engine.attach(model, PTMConfig(host_memory="1MiB", disk=str(directory), page_size=4096))
    if evict:
        for slot in engine.slots:
            if slot.group.movable and slot.value.place.resident:
                engine.pool.admission.evict(slot.value.block)
    return engine


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    loss = model(batch(number))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("evict", [True, False])
def test_a_copy_is_an_ordinary_model(tmp_path: Path, evict: bool) -> None:
    model, twin = build(), build()
    engine = on_pages(model, tmp_path, evict=evict)
    faults = engine.pool.stats.faults
    made = plain_copy(model)
    assert engine.pool.stats.faults == faults
    assert type(made) is Tied
    assert same(made.state_dict(), twin.state_dict())
    assert made.head.weight is made.embed.weight
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in twin.parameters()]
    assert all(type(param) is nn.Parameter for param in made.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._state_dict_hooks for m in made.modules())
    assert not any(m._load_state_dict_pre_hooks or m._load_state_dict_post_hooks for m in made.modules())
    assert not any(m._forward_hooks_always_called for m in made.modules())
    copy.deepcopy(made)
    pickle.dumps(made)
    engine.check_integrity()


def test_a_copy_waits_for_what_is_on_its_way_and_for_updates_that_are_pending(tmp_path: Path) -> None:
    model, twin = build(), build()
    floor = Engine.attach(build(), PTMConfig(host_memory="1MiB", disk=str(tmp_path), page_size=4096)).needs.floor
    budget = floor.total_bytes + floor.moving_bytes + 4096
    engine = Engine.attach(model, PTMConfig(host_memory=budget, disk=str(tmp_path), page_size=4096))
    optimizers = [engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))]
    optimizers.append(torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True))
    for number in range(4):
        for one, optimizer in zip((model, twin), optimizers, strict=True):
            step(one, optimizer, number)
    assert engine.pages.executor.pending_updates is not None
    assert same(plain_copy(model).state_dict(), twin.state_dict())
    for slot in engine.slots:
        if slot.value.block in engine.pool.eviction:
            engine.pool.admission.evict(slot.value.block)
    sent_for = [
        slot for slot in engine.slots if slot.value.place is Place.AWAY and engine.pool.prefetch(slot.value.block)
    ]
    assert any(slot.value.place is Place.ARRIVING for slot in sent_for)
    assert same(plain_copy(model).state_dict(), twin.state_dict())
    engine.check_integrity()


def test_a_copy_and_its_model_go_their_own_ways(tmp_path: Path) -> None:
    model, twin = build(), build()
    engine = on_pages(model, tmp_path)
    made = plain_copy(model)
    ours = torch.optim.AdamW(made.parameters(), lr=1e-2)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2)
    assert [step(made, ours, s) for s in range(3)] == [step(twin, theirs, s) for s in range(3)]
    assert same(made.state_dict(), twin.state_dict())
    assert same(model.state_dict(), build().state_dict())
    engine.check_integrity()
    engine.close()
    assert same(made.state_dict(), twin.state_dict())


def test_hooks_of_the_user_are_kept(tmp_path: Path) -> None:
    model = build()
    calls = []
    model.inner.register_forward_hook(lambda module, args, output: calls.append(type(module)))
    on_pages(model, tmp_path)
    model.norm.register_forward_pre_hook(lambda module, args: calls.append(type(module)))
    made = plain_copy(model)
    made(batch(0))
    assert calls == [nn.Sequential, nn.BatchNorm1d]


def test_a_part_can_be_copied(tmp_path: Path) -> None:
    model, twin = build(), build()
    on_pages(model, tmp_path)
    assert same(plain_copy(model.inner).state_dict(), twin.inner.state_dict())


def test_a_model_that_is_not_on_pages_is_copied_as_ever() -> None:
    model = build()
    made = ptm_accel.plain_copy(model)
    assert made is not model
    assert same(made.state_dict(), model.state_dict())


def test_blank_pages_are_copied_as_their_fill(tmp_path: Path) -> None:
    engine = on_pages(model := build(), tmp_path)
    engine.pool.drop(engine.slots.by_name["inner.0.weight"].value.block)
    engine.pool.drop(engine.slots.by_name["scale"].value.block)
    made = plain_copy(model)
    assert torch.equal(made.inner[0].weight, torch.zeros(4 * WIDTH, WIDTH))
    assert torch.equal(made.scale, torch.tensor(0.0))


def test_an_average_of_the_weights_is_that_of_a_plain_run(tmp_path: Path) -> None:
    model, twin = build(), build()
    engine = on_pages(model, tmp_path)
    ours = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, fused=True)
    ema = AveragedModel(plain_copy(model), multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    oracle = AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    for number in range(4):
        assert step(model, ours, number) == step(twin, theirs, number)
        with ptm_accel.gathered(model):
            ema.update_parameters(model)
        oracle.update_parameters(twin)
    assert same(ema.state_dict(), oracle.state_dict())
    assert not same(ema.module.state_dict(), model.state_dict())


def test_deepcopy_and_pickle_are_refused_with_an_explanation(tmp_path: Path) -> None:
    model = build()
    on_pages(model, tmp_path)
    with pytest.raises(PagedModelError, match=r"cannot be copied by copy.deepcopy.*ptm_accel.plain_copy\(model\)"):
        copy.deepcopy(model)
    rows = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    on_pages(rows, tmp_path)
    for each in (model, rows):
        with pytest.raises(PagedModelError, match=r"cannot be pickled.*model.save_pretrained"):
            pickle.dumps(each)
    with pytest.raises(PagedModelError, match="on pages"):
        AveragedModel(model)


def test_conversions_are_refused_unless_they_change_nothing(tmp_path: Path) -> None:
    model = build()
    engine = on_pages(model, tmp_path)
    with pytest.raises(PagedModelError, match=r"weight \(torch.float32 on cpu\) cannot be given data of torch.b"):
        model.to(torch.bfloat16)
    with pytest.raises(PagedModelError, match="Load or build the model in the wanted dtype"):
        model.half()
    before = engine.pool.stats.faults
    assert model.to("cpu") is model
    assert model.float() is model
    assert engine.pool.stats.faults == before
    assert same(model.state_dict(), build().state_dict())


def test_a_part_can_be_copied_by_deepcopy(tmp_path: Path) -> None:
    """As libraries do that give a head or an embedding a trainable copy of its own."""
    model, twin = build(), build()
    engine = on_pages(model, tmp_path)
    made = copy.deepcopy(model.inner)
    assert same(made.state_dict(), twin.inner.state_dict())
    assert all(type(param) is nn.Parameter for param in made.parameters())
    assert [p.requires_grad for p in made.parameters()] == [p.requires_grad for p in twin.inner.parameters()]
    entered = engine.pool.stats.faults
    assert torch.equal(made(torch.ones(1, WIDTH)), twin.inner(torch.ones(1, WIDTH)))
    assert engine.pool.stats.faults == entered
    with torch.no_grad():
        made[0].weight.zero_()
    assert same(model.state_dict(), twin.state_dict())
    tied = copy.deepcopy(nn.ModuleList([model.embed, model.head]))
    assert tied[0].weight is tied[1].weight
    with pytest.raises(PagedModelError, match=r"cannot be copied by copy\.deepcopy"):
        copy.deepcopy(nn.ModuleList([model]))
    engine.check_integrity()


def test_a_copied_part_keeps_no_engine(tmp_path: Path) -> None:
    model = build()
    memory = on_pages(model, tmp_path).memory
    made = copy.deepcopy(model.inner)
    del model
    gc.collect()
    assert memory.closed
    assert same(made.state_dict(), build().inner.state_dict())
    assert not made(torch.ones(1, WIDTH)).isnan().any()


def test_a_part_and_a_wrapper_can_be_gathered(tmp_path: Path) -> None:
    model, twin = build(), build()
    engine = on_pages(model, tmp_path)
    for look in (model.inner, nn.Sequential(model)):
        values = list((twin.inner if look is model.inner else twin).parameters())
        with ptm_accel.gathered(look, write=True):
            seen = [p.detach().clone() for p in look.parameters()]
            slots = [engine.slots.of(param) for param in look.parameters()]
            assert set(engine.pool.tenants.pinned()) == {slot.value.block for slot in slots if slot is not None}
            with torch.no_grad():
                model.inner[0].weight.add_(1.0)
                twin.inner[0].weight.add_(1.0)
            assert all(torch.equal(a, b.detach()) for a, b in zip(seen[1:], values[1:], strict=True) if a.dim() != 2)
    assert same(model.state_dict(), twin.state_dict())
    engine.check_integrity()
