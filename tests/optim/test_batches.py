"""One optimizer step as a sweep: what it looks like from outside, what it holds, and how it fails."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, CheckpointError, DiskError, UnsupportedError
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.batches import Batches
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.optim.state_dicts import converted
from ptm_accel.training import Training
from tests.plain_loop import Recipe, adamw, assert_same, same_bits, train
from tests.tiers import at_floor, needs, on_pages
from tests.zoo import ENTRIES

WIDTH = 64


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 300), nn.Linear(300, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)).to(dtype)


def fused(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()).dtype)).float().square().mean().backward()


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range = range(3)) -> None:
    for number in numbers:
        backward(model, number)
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def expect(model: nn.Module, plain: nn.Module) -> None:
    values = weights(model)
    for name, value in plain.state_dict().items():
        assert same_bits(values[name], value), name


def test_a_closure_is_refused(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        optimizer = engine.bind_optimizer(fused(model))
        with pytest.raises(UnsupportedError) as caught:
            optimizer.step(lambda: 0.0)
        assert str(caught.value) == (
            "optimizer.step(closure) is not possible on pages; call backward first, then step()"
        )


def test_hooks_of_a_step_are_called_once_a_step(tmp_path: Path) -> None:
    model = net()
    called: list[str] = []
    with at_floor(model, tmp_path) as engine:
        inner = fused(model)
        inner.register_step_pre_hook(lambda *given: called.append("before"))
        optimizer = engine.bind_optimizer(inner)
        optimizer.register_step_post_hook(lambda *given: called.append("after"))
        steps(model, optimizer)
    assert called == ["before", "after"] * 3


def test_binding_the_same_optimizer_again_keeps_its_state(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        inner = fused(model)
        optimizer = engine.bind_optimizer(inner)
        steps(model, optimizer)
        assert engine.bind_optimizer(inner) is optimizer
        assert engine.bind_optimizer(optimizer) is optimizer
        steps(model, optimizer)
        theirs = fused(plain)
        steps(plain, theirs)
        steps(plain, theirs)
        expect(model, plain)


def test_an_optimizer_that_has_worked_before_brings_its_state(tmp_path: Path) -> None:
    model, plain = net(), net()
    ours, theirs = fused(model), fused(plain)
    steps(model, ours)
    steps(plain, theirs)
    with at_floor(model, tmp_path) as engine:
        steps(model, engine.bind_optimizer(ours), range(3, 5))
        steps(plain, theirs, range(3, 5))
        expect(model, plain)


def test_state_is_in_the_state_dictionary(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        optimizer, inner = engine.bind_optimizer(fused(model)), fused(plain)
        steps(model, optimizer)
        steps(plain, inner)
        states = optimizer.state_dict()["state"]
        for number, other in enumerate(plain.parameters()):
            state = states[number]
            assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
            assert float(state["step"]) == 3.0
            for key in ("exp_avg", "exp_avg_sq"):
                assert same_bits(state[key].clone(), inner.state[other][key]), key


def test_state_itself_is_refused(tmp_path: Path) -> None:
    model = net()
    message = (
        r"optimizer\.state of AdamW is on pages and cannot be read or written in place\. Read optimizer\.state_dict"
    )
    with at_floor(model, tmp_path) as engine:
        optimizer = engine.bind_optimizer(fused(model))
        with pytest.raises(UnsupportedError, match=message):
            optimizer.state[model[0].weight]
        with pytest.raises(UnsupportedError, match=message):
            optimizer.state = {}


def test_a_new_group_is_updated(tmp_path: Path) -> None:
    model, plain = net(), net()
    recipe: dict[str, Any] = {"lr": 1e-2, "fused": True}
    with at_floor(model, tmp_path) as engine:
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model[0].parameters(), **recipe))
        inner = torch.optim.AdamW(plain[0].parameters(), **recipe)
        steps(model, optimizer)
        steps(plain, inner)
        plain[1].zero_grad()
        plain[2].zero_grad()
        engine.zero_grad()
        for each, module in ((optimizer, model), (inner, plain)):
            each.add_param_group({"params": list(module[1].parameters()), "lr": 1e-3})
        steps(model, optimizer)
        steps(plain, inner)
        expect(model, plain)


@pytest.mark.parametrize("masters", [False, True])
def test_state_dictionaries_go_from_one_engine_to_another(masters: bool, tmp_path: Path) -> None:
    """And between budgets: positional and with real values, as torch has them."""
    options: dict[str, object] = {"master_weights": "fp32"} if masters else {}
    dtype = torch.bfloat16 if masters else torch.float32
    model, again = net(dtype), net(dtype)
    with at_floor(model, tmp_path, **options) as engine:
        optimizer = engine.bind_optimizer(fused(model))
        steps(model, optimizer)
        values = weights(model)
        states = {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]}
        for number, state in optimizer.state_dict()["state"].items():
            states["state"][number] = {k: v.clone() for k, v in state.items()}
        del state
        steps(model, optimizer, range(3, 5))
        expected = weights(model)
    again.load_state_dict(values)
    _, need = needs(again, tmp_path, "mock+host", **options)
    with on_pages(again, "mock+host", 2 * need, tmp_path, **options) as engine:
        optimizer = engine.bind_optimizer(fused(again))
        steps(again, optimizer)
        again.load_state_dict(values)
        optimizer.load_state_dict(states)
        steps(again, optimizer, range(3, 5))
        found = weights(again)
    assert all(same_bits(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("key", "group", "moves"),
    [("row_var", {}, True), ("step", {}, False), ("step", {"fused": True}, True), ("step", {"capturable": True}, True)],
)
def test_small_state_goes_where_the_optimizer_looks_for_it(key: str, group: dict[str, Any], moves: bool) -> None:
    """As torch's own `load_state_dict` has it; a device without memory stands in for a card."""
    slot: Any = SimpleNamespace(param=torch.empty(4, device="meta"), value=SimpleNamespace(shape=torch.Size([4])))
    assert converted(torch.ones(1), slot, None, group, key).device.type == ("meta" if moves else "cpu")
    assert converted(3, slot, None, group, key) == 3
    made = converted({key: torch.ones(1), "other": [torch.ones(1), 3, "text"]}, slot, torch.bfloat16, group)
    assert made[key].device.type == ("meta" if moves else "cpu")
    assert made[key].dtype == (torch.float32 if key == "step" else torch.bfloat16)
    assert made["other"][0].dtype == torch.bfloat16
    assert made["other"][0].device.type == "meta"
    assert made["other"][1:] == [3, "text"]


def test_what_is_small_in_a_dictionary_is_put_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = net(), list[str]()

    def watched(value: Any, slot: ParamSlot, dtype: torch.dtype, group: dict[str, Any], key: str | None = None) -> Any:
        if key == "step":
            seen.append(f"{slot.name} {key} {group['lr']}")
        return converted(value, slot, dtype, group, key)

    with at_floor(model, tmp_path) as engine:
        head, body = [{"params": list(part.parameters())} for part in (model[2], model[:2])]
        optimizer = engine.bind_optimizer(torch.optim.AdamW([head, {**body, "lr": 0.5}], lr=0.1, fused=True))
        steps(model, optimizer)
        monkeypatch.setattr("ptm_accel.optim.state_dicts.converted", watched)
        optimizer.load_state_dict(optimizer.state_dict())
    assert seen == ["2.weight step 0.1", *(f"{name} step 0.5" for name in ("0.weight", "0.bias", "1.weight", "1.bias"))]


def test_an_empty_state_begins_anew(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        ours, theirs = engine.bind_optimizer(fused(model)), fused(plain)
        for each, module in ((ours, model), (theirs, plain)):
            steps(module, each)
            each.load_state_dict({"state": {}, "param_groups": each.state_dict()["param_groups"]})
            steps(module, each)
        expect(model, plain)


def test_state_of_other_groups_is_refused(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        optimizer = engine.bind_optimizer(fused(model))
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}, {"params": [2]}]})
        assert str(caught.value) == (
            "the optimizer state has parameter groups of [2, 1] parameters, this optimizer has [5]: it is of another "
            "model or of another grouping."
        )


def test_a_master_of_another_shape_is_refused(tmp_path: Path) -> None:
    model = net(torch.bfloat16)
    with at_floor(model, tmp_path, master_weights="fp32") as engine:
        optimizer = engine.bind_optimizer(fused(model))
        saved = optimizer.state_dict()
        saved["state"] = {0: {"step": torch.tensor(1.0), "master": torch.zeros(3)}}
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state_dict(saved)
        assert str(caught.value) == (
            "the fp32 master of 0.weight in the checkpoint has shape (3,), the parameter has (300, 64): this "
            "checkpoint is of another model."
        )


def test_the_next_batch_is_opened_before_the_present_one_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that its transfers run meanwhile; where there is no room it waits."""
    order: list[str] = []
    open_batch, update = Batches.open, ComputeUpdates.carry_out

    def watched_open(self: Batches, *args: Any, **kwargs: Any) -> Any:
        units = open_batch(self, *args, **kwargs)
        if units:
            order.append("insists" if kwargs["insist"] else "ahead")
        return units

    def watched_update(self: ComputeUpdates, *args: Any) -> None:
        order.append("update")
        update(self, *args)

    monkeypatch.setattr(Batches, "open", watched_open)
    monkeypatch.setattr(ComputeUpdates, "carry_out", watched_update)
    floor, need = needs(net(), tmp_path, "host+disk")
    for capacity, ahead in ((need // 2, True), (floor, False)):
        order.clear()
        model = net()
        with on_pages(model, "host+disk", capacity, tmp_path) as engine:
            optimizer = engine.bind_optimizer(fused(model))
            steps(model, optimizer, range(2))
        assert order[0] == "insists"
        assert (order.count("ahead") > order.count("insists")) == ahead
        assert order.count("update") == order.count("insists") + order.count("ahead")


class Failing:
    """A backing store whose stores fail from the n-th on, as those of a disk that is full or broken do."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception]) -> None:
        self.left = 1 << 30
        backing = engine.pool.backing
        assert backing is not None
        real = backing.store

        def store(*args: Any) -> Any:
            self.left -= 1
            if self.left <= 0:
                raise error()
            return real(*args)

        monkeypatch.setattr(backing, "store", store)


@pytest.mark.parametrize("nth", [1, 2, 5, 9])
@pytest.mark.parametrize(
    "error", [lambda: DiskError(errno.EIO, "the disk is gone"), lambda: BudgetError("the disk is full")]
)
def test_a_step_that_fails_leaves_nothing_open(
    error: Callable[[], Exception], nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        optimizer, inner = engine.bind_optimizer(fused(model)), fused(plain)
        steps(model, optimizer)
        steps(plain, inner)
        before, state = weights(model), {n: dict(s) for n, s in inner.state_dict()["state"].items()}
        state = {n: {k: v.clone() for k, v in s.items()} for n, s in state.items()}
        failing = Failing(engine, monkeypatch, error)
        backward(model)
        failing.left = nth
        with pytest.raises(type(error()), match="the disk is"):
            optimizer.step()
        failing.left = 1 << 30
        assert not engine.pool.tenants.pinned()
        engine.zero_grad()
        engine.check_integrity()
        # What a checkpoint brings back is all it takes to go on.
        model.load_state_dict(before)
        optimizer.load_state_dict({"state": state, "param_groups": inner.state_dict()["param_groups"]})
        steps(model, optimizer, range(3, 5))
        steps(plain, inner, range(3, 5))
        expect(model, plain)


def test_parameters_without_gradients_are_left_alone(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        optimizer, inner = engine.bind_optimizer(fused(model)), fused(plain)
        optimizer.step()
        inner.step()
        for each, module in ((optimizer, model), (inner, plain)):
            module[2](torch.ones(1, WIDTH)).sum().backward()
            each.step()
            each.zero_grad()
        expect(model, plain)
        assert sorted(optimizer.state_dict()["state"]) == sorted(inner.state_dict()["state"])


def test_gradients_are_used_up_by_a_step(tmp_path: Path) -> None:
    model = net()
    with at_floor(model, tmp_path) as engine:
        optimizer = engine.bind_optimizer(fused(model))
        backward(model)
        optimizer.step()
        once = weights(model)
        optimizer.step()
        assert all(same_bits(value, once[name]) for name, value in weights(model).items())
        assert engine.gradients is not None
        assert not engine.gradients.present()


def test_a_batch_is_no_larger_than_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ENTRIES["llama"]
    batches: list[int] = []
    update = ComputeUpdates.carry_out

    def watched(self: ComputeUpdates, units: list[Any], *args: Any) -> None:
        batches.append(len(units))
        update(self, units, *args)

    monkeypatch.setattr(ComputeUpdates, "carry_out", watched)
    plain = train(entry.build(), entry, Recipe())
    counts = {}
    for batch in (0, 100 << 10, 1 << 20):
        monkeypatch.setattr(Training, "_batch_bytes", lambda self, batch=batch: batch)
        batches.clear()
        model = entry.build()
        _, need = needs(entry.build(), tmp_path, "host+disk")
        with on_pages(model, "host+disk", need // 2, tmp_path) as engine:
            assert_same(train(model, entry, Recipe(optimizer=adamw), engine), plain)
        counts[batch] = max(batches)
    assert counts[0] == 1
    assert counts[0] < counts[100 << 10] < counts[1 << 20]


@pytest.mark.parametrize("kind", ["mock+host", "host+disk"])
def test_windows_are_larger_on_a_device_that_has_room(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a device each window costs the host time; where there is no room they are as small as anywhere."""
    parts: list[int] = []
    update = ComputeUpdates.carry_out

    def watched(self: ComputeUpdates, units: list[Any], *args: Any) -> None:
        parts.extend(unit.stop - unit.start for unit in units if not unit.whole)
        update(self, units, *args)

    monkeypatch.setattr(ComputeUpdates, "carry_out", watched)

    def wide() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512), nn.Linear(512, 512))

    def trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        for number in range(2):
            model(torch.full((2, 512), 1.0 + number)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weights(model)

    plain = wide()
    expected = trained(plain, fused(plain))
    largest = {}
    least, _ = needs(wide(), tmp_path, kind, optimizer=fused)
    for nbytes in (least, least + (2 << 20)):
        parts.clear()
        model = wide()
        with on_pages(model, kind, nbytes, tmp_path) as engine:
            values = trained(model, engine.bind_optimizer(fused(model)))
            assert all(same_bits(values[name], expected[name]) for name in expected)
        largest[nbytes - least] = max(parts)
    assert largest[0] == 4096, "the least: aligned for every dtype"
    assert largest[2 << 20] == (8192 if kind == "mock+host" else 4096)
