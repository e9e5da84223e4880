"""Code outside of a module's forward that writes to its parameters, in place or by giving them other data."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ptm_accel
from ptm_accel.engine import Engine
from ptm_accel.errors import BudgetError, PagedModelError, StaleGraphError
from tests.plain_loop import same_bits
from tests.tiers import AMPLE, at_floor, in_groups, needs, on_pages
from tests.zoo import ENTRIES, Entry, use_checkpointing

WIDTH = 64

KINDS = ("host+disk", "mock+host+disk")


def net(layers: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))


def inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(1))


def evict(engine: Engine) -> None:
    for slot in engine.slots:
        if slot.value.block in engine.pool.eviction:
            engine.pool.admission.evict(slot.value.block)


def add_in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.add_(1.0)


def add_to_the_data(layer: nn.Linear) -> None:
    layer.weight.data += 1.0


def exchange(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data + 1.0


def exchange_for_a_part(layer: nn.Linear) -> None:
    layer.weight.data = torch.stack([layer.weight.data + 1.0, layer.weight.data])[0]


def exchange_for_strides(layer: nn.Linear) -> None:
    layer.weight.data = (layer.weight.data.t().contiguous() + 1.0).t()


def turn(layer: nn.Linear) -> None:
    """A view of what it has."""
    layer.weight.data = layer.weight.data.t()


def turn_a_copy(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data.flip(0)
    layer.weight.data = layer.weight.data.t()


WRITES = [add_in_place, add_to_the_data, exchange, exchange_for_a_part, exchange_for_strides, turn, turn_a_copy]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_a_parameter_that_was_read_is_kept(
    write: Callable[[nn.Linear], None], kind: str, tmp_path: Path
) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path, kind) as engine:
        for ours, theirs in zip(model, plain, strict=True):
            evict(engine)
            write(ours)  # type: ignore[arg-type]
            write(theirs)  # type: ignore[arg-type]
            assert same_bits(model(inputs()), plain(inputs()))
        evict(engine)
        for name, value in model.state_dict().items():
            assert same_bits(value, plain.state_dict()[name]), name
        assert engine.pool.budget.peak_bytes <= engine.pool.budget.capacity_bytes
        engine.check_integrity()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_while_gathered_is_trained_on(
    write: Callable[[nn.Linear], None], kind: str, tmp_path: Path
) -> None:
    """Everything stays in memory: nothing is brought in anew that would hide values of before."""
    model, plain = net(), net()

    def train(layers: nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
        for number in range(4):
            layers(inputs()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if number == 1:
                with ptm_accel.gathered(layers, write=True) if layers is model else contextlib.nullcontext():
                    write(layers[2])  # type: ignore[arg-type]

    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9))
    with on_pages(model, kind, AMPLE, tmp_path) as engine:
        train(model, engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)))
        for name, value in model.state_dict().items():
            assert same_bits(value, plain.state_dict()[name]), name
        engine.check_integrity()


@pytest.mark.parametrize("look", ["state_dict", "detach", "copy"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_a_small_parameter_is_kept(
    write: Callable[[nn.Linear], None], kind: str, look: str, tmp_path: Path
) -> None:
    """It never leaves the tier that computes, and who looks at a device from outside sees what it has stored."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 3, bias=False)
    plain = copy.deepcopy(layer)
    with at_floor(layer, tmp_path, kind) as engine:
        assert not engine.slots.by_name["weight"].group.movable
        for _ in range(2):
            write(layer)
            write(plain)
            assert same_bits(layer.state_dict()["weight"], plain.state_dict()["weight"])
        write(layer)
        write(plain)
        if look == "copy":
            assert same_bits(ptm_accel.plain_copy(layer).weight, plain.weight)
        elif look == "detach":
            assert same_bits(engine.detach().state_dict()["weight"], plain.weight)
        else:
            assert same_bits(layer.state_dict()["weight"], plain.weight)


def test_what_is_given_to_a_parameter_that_is_away_is_taken(tmp_path: Path) -> None:
    model, plain = net(), net()
    with at_floor(model, tmp_path) as engine:
        evict(engine)
        for param in [*model.parameters(), *plain.parameters()]:
            param.data = torch.full((WIDTH, WIDTH), 0.01)
        assert same_bits(model(inputs()), plain(inputs()))
        evict(engine)
        assert all(same_bits(value, torch.full((WIDTH, WIDTH), 0.01)) for value in model.state_dict().values())


@pytest.mark.parametrize("look", ["state_dict", "detach", "gathered", "copy", "load"])
def test_everybody_sees_what_was_given(look: str, tmp_path: Path) -> None:
    model = net(2)
    with at_floor(model, tmp_path) as engine:
        given = torch.randn(WIDTH, WIDTH)
        model[0].weight.data = given.clone()
        if look == "state_dict":
            seen = model.state_dict()["0.weight"]
        elif look == "detach":
            engine.detach()
            seen = model[0].weight.detach()
        elif look == "copy":
            seen = ptm_accel.plain_copy(model)[0].weight.detach()  # type: ignore[index,union-attr,operator]
        elif look == "load":
            given = given + 1.0
            model.load_state_dict({"0.weight": given}, strict=False)
            seen = model.state_dict()["0.weight"]
        else:
            with ptm_accel.gathered(model):
                seen = next(model.parameters()).detach().clone()
        assert same_bits(seen, given)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("rows", [8, WIDTH + 8])
def test_data_of_another_shape(rows: int, away: bool, tmp_path: Path) -> None:
    model, plain = net(2), net(2)
    _, need = needs(net(2), tmp_path, "host+disk")
    with on_pages(model, "host+disk", 2 * need, tmp_path) as engine:
        if away:
            evict(engine)
        for either in (model, plain):
            either[1].weight.data = torch.full((rows, WIDTH), 0.5)
            assert either[1].weight.shape == (rows, WIDTH)
        assert same_bits(model(inputs()), plain(inputs()))
        evict(engine)
        assert engine.slots.by_name["1.weight"].value.nbytes == rows * WIDTH * 4
        assert same_bits(model.state_dict()["1.weight"], plain.state_dict()["1.weight"])


def test_data_of_another_shape_in_the_middle_of_a_forward_is_refused(tmp_path: Path) -> None:
    model = net(2)

    def shrink(module: nn.Module, args: object) -> None:
        module.weight.data = torch.zeros(8, WIDTH)  # type: ignore[union-attr]
        _ = module.weight

    with at_floor(model, tmp_path) as engine:
        model[1].register_forward_pre_hook(shrink)
        with pytest.raises(PagedModelError) as caught:
            model(inputs())
        assert str(caught.value) == (
            "parameter 1.weight of shape (64, 64) was given data of shape (8, 64) while it was in use. Change it "
            "between two forwards."
        )
        engine.abort()
        model[1].weight.data = torch.zeros(WIDTH, WIDTH)


class Masked(nn.Linear):
    """Computes with other values than its own, and puts those back."""

    copies = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.weight.data.clone() if self.copies else self.weight.data
        self.weight.data = self.weight.data * (self.weight.data > 0)
        y = nn.functional.linear(x, self.weight, self.bias)
        self.weight.data = kept
        return y


def masked() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Masked(WIDTH, WIDTH) for _ in range(4)))


@pytest.mark.parametrize("copies", [True, False])
def test_values_that_are_exchanged_in_a_forward_and_put_back(
    copies: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Masked, "copies", copies)
    model, plain = masked(), masked()
    with at_floor(model, tmp_path) as engine, torch.no_grad():
        for _ in range(3):
            assert same_bits(model(inputs()), plain(inputs()))
        evict(engine)
        assert all(same_bits(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_a_backward_through_what_was_there_before_is_an_error(tmp_path: Path) -> None:
    model = net(2)
    with at_floor(model, tmp_path):
        out = model(inputs())
        model[1].weight.data = torch.ones(WIDTH, WIDTH)
        _ = model[1].weight
        with pytest.raises(StaleGraphError, match=r"parameter 1\.weight was updated 1 time"):
            out.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_updates_what_was_given(kind: str, tmp_path: Path) -> None:
    model, plain = net(), net()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True)
    with at_floor(model, tmp_path, kind) as engine:
        ours = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
        for number in range(4):
            for either, optimizer in ((model, ours), (plain, theirs)):
                either(inputs()).square().mean().backward()
                layer = either[number]
                if number % 2:
                    exchange(layer)
                else:
                    add_to_the_data(layer)
                optimizer.step()
                optimizer.zero_grad()
        assert all(same_bits(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_cut_by_giving_it_a_part_of_its_own_data(kind: str, tmp_path: Path) -> None:
    """As one cuts a vocabulary."""
    model, plain = net(), net()
    with at_floor(model, tmp_path, kind) as engine:
        for which in (model, plain):
            which[4].weight.data = which[4].weight.data[:10]
        for ours, theirs in zip(model, plain, strict=True):
            evict(engine)
            assert same_bits(ours.weight.detach().clone(), theirs.weight.detach())
        evict(engine)
        assert same_bits(model(inputs()), plain(inputs()))
        assert model.state_dict()["4.weight"].shape == (10, WIDTH)
        engine.check_integrity()


def test_a_view_of_itself_in_its_own_forward(tmp_path: Path) -> None:
    class Turning(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data = self.weight.data.t()
            return super().forward(x)

    torch.manual_seed(0)
    model = nn.Sequential(Turning(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    plain = copy.deepcopy(model)
    with at_floor(model, tmp_path) as engine:
        for _ in range(3):
            assert same_bits(model(inputs()), plain(inputs()))
            evict(engine)


def test_one_after_the_other_they_fit_any_budget(tmp_path: Path) -> None:
    model, plain = net(20), net(20)
    with at_floor(model, tmp_path) as engine:
        for ours, theirs in zip(model, plain, strict=True):
            exchange(ours)  # type: ignore[arg-type]
            exchange(theirs)  # type: ignore[arg-type]
        assert same_bits(model(inputs()), plain(inputs()))
        assert engine.pool.budget.peak_bytes <= engine.pool.budget.capacity_bytes


def test_what_is_written_to_a_view_is_kept_while_another_parameter_is_read(tmp_path: Path) -> None:
    model, plain = net(), net()
    floor, _ = needs(net(), tmp_path, "host+disk")
    with on_pages(model, "host+disk", floor + WIDTH * WIDTH * 4, tmp_path) as engine:
        model(inputs()).sum().backward()
        for first, second in ((0, 3), (4, 1), (2, 0)):
            evict(engine)
            for either in (model, plain):
                view = either[first].weight.data
                view.lerp_(either[second].weight.data, 0.5)
        assert all(same_bits(value, plain.state_dict()[name]) for name, value in model.state_dict().items())


def test_data_that_finds_no_room_is_refused(tmp_path: Path) -> None:
    model = net(2)
    with at_floor(model, tmp_path) as engine:
        with pytest.raises(BudgetError, match=r"1\.weight"):
            model[1].weight.data = torch.ones(64 * WIDTH, WIDTH)
        assert same_bits(model(inputs()), net(2)(inputs()))
        engine.check_integrity()


class StopError(Exception):
    """The user's own exception."""


def break_off_backward(model: nn.Module, entry: Entry) -> None:
    """A checkpointed layer has been recomputed when an exception ends the backward, which the caller of it catches."""

    def fail(gradient: torch.Tensor) -> None:
        raise StopError

    def watch(module: nn.Module, args: object, output: torch.Tensor) -> None:
        output.register_hook(fail)

    handle = model.get_submodule("model.layers.1.mlp.down_proj").register_forward_hook(watch)
    with pytest.raises(StopError):
        model(**entry.batch_at(0)).loss.backward()
    handle.remove()
    model.zero_grad()


@pytest.mark.parametrize("kind", ["host+disk", "mock+host"])
def test_writes_after_a_backward_that_was_broken_off_are_kept(kind: str, tmp_path: Path) -> None:
    """The layer recomputed last had ordinary parameters until the next forward: a write to `data` was missed."""
    entry = ENTRIES["llama-tied"]
    plain, model = entry.build(), entry.build()
    for each in (plain, model):
        use_checkpointing(each, "non-reentrant")
    break_off_backward(plain, entry)
    floor, need = needs(model, tmp_path, kind)
    with in_groups(), on_pages(model, kind, floor + (need - floor) // 3, tmp_path) as engine:
        break_off_backward(model, entry)
        assert not engine.pool.tenants.pinned()
        for each in (plain, model):
            for param in each.parameters():
                param.data.mul_(0.5)
        evict(engine)
        values = model.state_dict()
        assert all(same_bits(values[name], value) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("reentrant", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("autocast", [False, True])
def test_ctrl_c_in_recomputation_leaves_nothing_behind(autocast: bool, reentrant: str, tmp_path: Path) -> None:
    """The next forward, or `abort`, took off a second time what recomputation had put on: an error of torch."""
    entry = ENTRIES["llama-tied"]
    plain, model = entry.build(), entry.build()

    def backward(each: nn.Module) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss: torch.Tensor = each(**entry.batch_at(0)).loss
        loss.backward()
        return loss.detach()

    def interrupted(each: nn.Module) -> None:
        calls = []

        def stop(module: nn.Module, args: object, output: object) -> None:
            calls.append(module)
            if len(calls) == 2:
                raise KeyboardInterrupt

        handle = each.get_submodule("model.layers.1.self_attn.o_proj").register_forward_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            backward(each)
        handle.remove()
        each.zero_grad()

    for each in (plain, model):
        use_checkpointing(each, reentrant)
    interrupted(plain)
    with at_floor(model, tmp_path) as engine:
        interrupted(model)
        assert not engine.pool.tenants.pinned()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert not torch.overrides._len_torch_function_stack()
        for each in (plain, model):
            for param in each.parameters():
                param.data.mul_(0.5)
        assert same_bits(backward(model), backward(plain))
        engine.abort()
        values = model.state_dict()
        assert all(same_bits(values[name], value) for name, value in plain.state_dict().items())
