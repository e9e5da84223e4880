"""What loops of one's own do between a backward and its step comes out as in torch, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.engine import engine_of
from ptm_accel.errors import UnsupportedError
from ptm_accel.outside import gathered
from tests.optim.loops import LEAST, WIDTH, Clip, Make, assert_as_in_torch, net, paged
from tests.plain_loop import same_bits
from tests.stacks import adamw, backward, step
from tests.tiers import needs, on_pages


def test_a_norm_that_is_clipped_before_every_backward(tmp_path: Path) -> None:
    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(3):
            for part in range(3):
                said.append(float(backward(model, 3 * number + part)))
                said.append(float(clip(LEAST)))
            optimizer.step()
            optimizer.zero_grad()
        return said

    assert_as_in_torch(loop, tmp_path)


def test_a_backward_after_the_norm_was_clipped(tmp_path: Path) -> None:
    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(3):
            backward(model, 2 * number)
            said.append(float(clip(LEAST)))
            backward(model, 2 * number + 1)
            optimizer.step()
            optimizer.zero_grad()
        return said

    assert_as_in_torch(loop, tmp_path)


def test_what_is_frozen_after_its_backward_is_updated_and_forgotten(tmp_path: Path) -> None:
    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(4):
            said.append(float(backward(model, number)))
            model[1].weight.requires_grad_(number % 2 == 1)
            optimizer.step()
            optimizer.zero_grad()
        return said

    assert_as_in_torch(loop, tmp_path)


@pytest.mark.parametrize("given", [False, True])
def test_who_follows_the_model_keeps_the_gradients_that_there_are(given: bool, tmp_path: Path) -> None:
    """What is frozen and unfrozen between a backward and its step takes no gradient from what is not."""

    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(6):
            for part in range(2):
                said.append(float(backward(model, 2 * number + part)))
                if given:
                    next(model[2].parameters()).grad = torch.full((WIDTH, WIDTH), 0.01)
                model[number % 2].requires_grad_(part == 1)
                if (engine := engine_of(model)) is not None:
                    engine.follow()
            said.append(float(clip(LEAST)))
            optimizer.step()
            optimizer.zero_grad()
        return said

    assert_as_in_torch(loop, tmp_path)


def wrap(model: nn.Sequential) -> nn.Sequential:
    return nn.Sequential(model)


def grow(model: nn.Sequential) -> nn.Sequential:
    torch.manual_seed(3)
    return model.append(nn.Linear(WIDTH, WIDTH))


def freeze_and_grow(model: nn.Sequential) -> nn.Sequential:
    model[1].requires_grad_(False)
    return grow(model)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("change", [wrap, grow, freeze_and_grow])
def test_a_model_that_changes_between_two_backwards_keeps_its_gradients(
    change: Callable[[nn.Sequential], nn.Sequential], clips: bool, tmp_path: Path
) -> None:
    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(3):
            said.append(float(backward(model, number)))
            if number == 1:
                engine = engine_of(model)
                said.append(float(clip(LEAST)) if clips else 0.0)
                model = change(model)
                if engine is not None:
                    engine.follow(model)
                said.append(float(backward(model, 7)))
            optimizer.step()
            optimizer.zero_grad()
        return [*said, *(float(value.double().sum()) for value in model.state_dict().values())]

    expected, other = net(), net()
    theirs = adamw(expected)
    said = loop(expected, theirs, lambda norm: nn.utils.clip_grad_norm_(expected.parameters(), norm))
    with paged(tmp_path, other, roomy=True) as (engine, ours):
        assert loop(other, ours, engine.clip_grad_norm_) == said


@pytest.mark.parametrize("how", ["as it is", "clipped", "given", "zeros"])
@pytest.mark.parametrize("kind", ["host+disk", "mock+host+disk"])
def test_a_model_that_is_taken_off_its_pages_has_its_gradients(kind: str, how: str, tmp_path: Path) -> None:
    def loop(model: nn.Module, optimizer: Any, clip: Clip) -> None:
        step(model, optimizer, 0)
        backward(model, 1)
        backward(model, 2)
        if how == "clipped":
            clip(LEAST)
        elif how == "given":
            next(model.parameters()).grad = torch.full((WIDTH, WIDTH), 0.01)
        elif how == "zeros":
            optimizer.zero_grad(set_to_none=False)

    plain, model = net(), net()
    loop(plain, adamw(plain), lambda norm: nn.utils.clip_grad_norm_(plain.parameters(), norm))
    floor, need = needs(net(), tmp_path, kind, optimizer=adamw)
    with on_pages(model, kind, floor + (need - floor) // 3, tmp_path) as engine:
        loop(model, engine.bind_optimizer(adamw(model)), engine.clip_grad_norm_)
        engine.detach()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert same_bits(ours.grad, theirs.grad)
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("micro", [1, 2])
def test_layers_that_are_unfrozen_on_the_way(micro: int, tmp_path: Path) -> None:
    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(6):
            for part in range(micro):
                if number == 3 and part == micro - 1:
                    # In the middle of a step, where there are several backwards.
                    model[0].requires_grad_(True)
                said.append(float(backward(model, micro * number + part)))
            said.append(float(clip(LEAST)))
            optimizer.step()
            optimizer.zero_grad()
        return said

    model = net()
    model[0].requires_grad_(False)
    assert_as_in_torch(loop, tmp_path, model)


@pytest.mark.parametrize("micro", [1, 2])
def test_layers_that_are_unfrozen_and_frozen_again_within_a_step(micro: int, tmp_path: Path) -> None:
    """What has arrived for them meanwhile counts in the norm, and is updated; then they are trained for good."""

    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(6):
            for part in range(micro):
                if number in (1, 4) and part == 0:
                    model[0].requires_grad_(True)
                said.append(float(backward(model, micro * number + part)))
                if number == 1:
                    model[0].requires_grad_(False)
            said.append(float(clip(LEAST)))
            optimizer.step()
            optimizer.zero_grad()
        return said

    model = net()
    model[0].requires_grad_(False)
    assert_as_in_torch(loop, tmp_path, model)


def test_the_gradient_of_what_was_unfrozen_is_on_pages(tmp_path: Path) -> None:
    model = net()
    model[0].requires_grad_(False)
    with paged(tmp_path, model) as (engine, optimizer):
        step(model, optimizer, 0)
        model[0].requires_grad_(True)
        step(model, optimizer, 1)
        backward(model, 2)
        assert engine.gradients is not None
        assert len(engine.gradients.present()) == len(list(model.parameters()))


def test_an_optimizer_that_gave_up_its_state_makes_no_step(tmp_path: Path) -> None:
    model = net()
    with paged(tmp_path, model) as (engine, first):
        step(model, first, 0)
        second = engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        backward(model, 1)
        with pytest.raises(UnsupportedError, match="another one was prepared.*one optimizer a parameter group"):
            first.step()
        for name, value in model.state_dict().items():
            assert same_bits(value.clone(), before[name]), name
        second.step()


def test_an_optimizer_that_is_refused_leaves_the_one_that_there_is(tmp_path: Path) -> None:
    model = net()
    with paged(tmp_path, model) as (engine, optimizer):
        step(model, optimizer, 0)
        with pytest.raises(UnsupportedError, match="LBFGS cannot run on pages"):
            engine.bind_optimizer(torch.optim.LBFGS(model.parameters()))
        assert engine.optimizer is optimizer
        assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
        step(model, optimizer, 1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.1)


@pytest.mark.parametrize("make", [adamw, sgd], ids=["adamw", "sgd"])
@pytest.mark.parametrize("how", ["optimizer"])
def test_zeros_that_are_left_for_gradients(how: str, make: Make, tmp_path: Path) -> None:
    """A parameter without a new gradient is updated all the same: its moments and its weights decay."""

    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(9):
            # One has no gradient before the third step, and none after it; another has one now and then.
            model[0].requires_grad_(number == 2)
            model[2].weight.requires_grad_(number % 3 == 1)
            said += [float(backward(model, 2 * number + part)) for part in range(1 + number % 2)]
            if number % 3:
                said.append(float(clip(LEAST)))
            optimizer.step()
            (optimizer if how == "optimizer" else model).zero_grad(set_to_none=number == 6)
            said.append(float(clip(LEAST)))
        return said

    model = net()
    model[0].requires_grad_(False)
    assert_as_in_torch(loop, tmp_path, model, make)


@pytest.mark.parametrize("how", ["optimizer", "model", "zeros", "by hand"])
def test_gradients_that_are_forgotten_and_set_where_they_are_shown(how: str, tmp_path: Path) -> None:
    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(6):
            said.append(float(backward(model, 3 * number)))
            with gathered(model, grads=True, write=True):
                if how == "by hand":
                    for param in model[1].parameters():
                        param.grad = None
                else:
                    forgets = model if how == "model" else optimizer
                    forgets.zero_grad(set_to_none=how != "zeros")
                for param in model[2].parameters():
                    param.grad = torch.full_like(param, 0.1 * number)
            if number % 2:
                with gathered(model, grads=True, write=True):
                    for param in model[3].parameters():
                        assert (param.grad is None) == (how in ("optimizer", "model"))
                        param.grad = torch.full_like(param, 0.2)
                said.append(float(backward(model, 3 * number + 1)))
            if number % 3 == 2:
                with gathered(model, grads=True, write=True):
                    said.append(float(backward(model, 3 * number + 2)))
            said.append(float(clip(LEAST)))
            optimizer.step()
            optimizer.zero_grad()
        return said

    assert_as_in_torch(loop, tmp_path, roomy=True)


@pytest.mark.parametrize("how", ["zero_grad", "never", "twice"])
def test_gradients_that_torch_would_use_once_more_are_told_of(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    with paged(tmp_path, model) as (_, optimizer):
        for number in range(3):
            backward(model, number)
            optimizer.step()
            if how == "twice":
                optimizer.step()
            if how != "never":
                optimizer.zero_grad()
    assert caplog.text.count("was used up by the last step, and zero_grad() has not been called since") == (
        how != "zero_grad"
    )


@pytest.mark.parametrize("clips", ["never", "before", "after"])
def test_gradients_that_are_put_in_their_place_are_used(clips: str, tmp_path: Path) -> None:
    """As by those who combine the gradients of several losses; some over what a backward has left, some not."""

    def loop(model: nn.Module, optimizer: Any, clip: Any) -> list[float]:
        said = []
        for number in range(5):
            params = list(model.parameters())
            if number % 2:
                said.append(float(backward(model, 2 * number)))
            if clips == "before":
                # What is given after it is not clipped.
                said.append(float(clip(LEAST)) if number % 2 else 0.0)
            loss = loss_of(model, number)
            said.append(float(loss.detach()))
            some = params if number % 3 else params[:3]
            for param, grad in zip(some, torch.autograd.grad(loss, some), strict=True):
                param.grad = grad
            if clips == "after":
                said.append(float(clip(LEAST)))
            optimizer.step()
            optimizer.zero_grad()
        return said

    assert_as_in_torch(loop, tmp_path, roomy=True)


def loss_of(model: nn.Module, number: int) -> torch.Tensor:
    return model(torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))).square().mean()


Regroup = Callable[[Any], object]


def _without_a_group(optimizer: Any) -> None:
    del optimizer.param_groups[1]


def _without_a_parameter(optimizer: Any) -> None:
    del optimizer.param_groups[1]["params"][0]


def _with_another_group(optimizer: Any) -> None:
    group = optimizer.param_groups[1]
    optimizer.param_groups[1] = {**group, "lr": 0.3, "params": group["params"][1:]}


def _with_a_group_moved(optimizer: Any) -> None:
    optimizer.param_groups.append(optimizer.param_groups.pop(0))


def _with_another_list(optimizer: Any) -> None:
    optimizer.param_groups = [{**group, "weight_decay": 0.2} for group in optimizer.param_groups[::2]]


REGROUP = pytest.mark.parametrize(
    "regroup",
    [_without_a_group, _without_a_parameter, _with_another_group, _with_a_group_moved, _with_another_list],
)


def in_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [{"params": list(layer.parameters()), "lr": 10.0**-n} for n, layer in enumerate(model.children(), 1)],
        fused=True,
    )


@REGROUP
@pytest.mark.parametrize("begun", [False, True], ids=["forward", "backward"])
def test_groups_that_change_while_a_step_is_pending(regroup: Regroup, begun: bool, tmp_path: Path) -> None:
    """The step is done with the groups as they were; the next ones with those that there are."""
    expected, model = net(), net()
    other = in_groups(expected)
    floor, need = needs(net(), tmp_path, "host+disk", optimizer=in_groups)
    with on_pages(model, "host+disk", floor + (need - floor) // 2, tmp_path) as engine:
        engine.training.updates_in_backward = lambda: begun
        optimizer = engine.bind_optimizer(in_groups(model))
        for number in range(8):
            if number == 5 and not begun:
                assert engine.pages.executor.pending_updates is not None
                regroup(optimizer)
            loss = loss_of(model, number)
            if number == 5 and begun:
                regroup(optimizer)
            with engine.training.backward():
                loss.backward()
            assert (optimizer.updates.early is not None) == begun or number != 5
            if number == 5:
                regroup(other)
            assert loss == backward(expected, number)
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
        values = model.state_dict()
        for name, value in expected.state_dict().items():
            assert same_bits(values[name].clone(), value), name
        truth = [float(other.state[param]["step"]) for group in other.param_groups for param in group["params"]]
        assert [float(entry["step"]) for entry in optimizer.state_dict()["state"].values()] == truth


@REGROUP
def test_groups_that_change_after_updates_have_begun(regroup: Regroup, tmp_path: Path) -> None:
    model = net()
    floor, need = needs(net(), tmp_path, "host+disk", optimizer=in_groups)
    with on_pages(model, "host+disk", floor + (need - floor) // 2, tmp_path) as engine:
        engine.training.updates_in_backward = lambda: True
        optimizer = engine.bind_optimizer(in_groups(model))
        for number in range(4):
            with engine.training.backward():
                backward(model, number)
            if number < 3:
                optimizer.step()
                optimizer.zero_grad()
        assert optimizer.updates.early is not None
        regroup(optimizer)
        with pytest.raises(UnsupportedError, match=r"groups or hyperparameters were changed between backward and"):
            optimizer.step()


def test_looking_at_clipped_gradients_changes_no_number(tmp_path: Path) -> None:
    found = []
    for look in (False, True):
        model = net().bfloat16()
        floor, need = needs(net().bfloat16(), tmp_path, "host+disk", optimizer=adamw, master_weights="fp32")
        with on_pages(model, "host+disk", (floor + need) // 2, tmp_path, master_weights="fp32") as engine:
            optimizer = engine.bind_optimizer(adamw(model))
            for number in range(3):
                backward(model, number)
                engine.clip_grad_norm_(LEAST)
                if look:
                    with gathered(model, grads=True):
                        assert all(param.grad is not None for param in model.parameters())
                optimizer.step()
                optimizer.zero_grad()
            states = optimizer.state_dict()["state"]
            found.append({(n, key): value.clone() for n, state in states.items() for key, value in state.items()})
    blind, looked = found
    assert blind.keys() == looked.keys()
    for entry, value in blind.items():
        assert same_bits(looked[entry], value), entry
