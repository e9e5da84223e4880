"""`optimizer.state` on pages: what is read is what plain torch has, and what is written counts as it does there."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.errors import BudgetError, PagedModelError, UnsupportedError
from ptm_accel.memory.paged import Place
from ptm_accel.optim.optimizer import PagedOptimizer
from tests.plain_loop import same_bits
from tests.stacks import adamw, backward, stack, step
from tests.tiers import needs, on_pages

WIDTH, LAYERS = 48, 4

Change = Callable[[nn.Sequential, Any], object]
"""What somebody does to an optimizer between two steps."""


def net() -> nn.Sequential:
    return stack(WIDTH, LAYERS, torch.float32)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, dampening=0.1)


def rmsprop(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(model.parameters(), lr=1e-3)


def assert_same_state(ours: Any, theirs: Any) -> None:
    states, kept = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert {n for n, state in states.items() if state} == {n for n, state in kept.items() if state}
    for number, state in kept.items():
        assert states.get(number, {}).keys() == state.keys()
        for key, value in state.items():
            assert same_bits(states[number][key], value), (number, key)


def clears(model: nn.Sequential, optimizer: Any) -> None:
    optimizer.state.clear()


def removes_one(model: nn.Sequential, optimizer: Any) -> None:
    del optimizer.state[model[1].weight]
    assert model[1].weight not in optimizer.state
    assert optimizer.state.get(model[1].weight) is None
    with pytest.raises(KeyError):
        optimizer.state.pop(model[1].weight)
    assert optimizer.state.pop(model[1].weight, 7) == 7


def zeroes_moments(model: nn.Sequential, optimizer: Any) -> None:
    for entries in optimizer.state.values():
        for key, value in entries.items():
            if key != "step":
                value.zero_()


def scales_part_of_a_moment(model: nn.Sequential, optimizer: Any) -> None:
    for key, value in optimizer.state[model[2].weight].items():
        if key != "step":
            value[3:7].mul_(0.25)
            value[:, 5] = 0.0


def gives_one_a_dictionary(model: nn.Sequential, optimizer: Any) -> None:
    before = optimizer.state[model[0].weight]
    optimizer.state[model[0].weight] = {
        key: value.clone() if key == "step" else value * 0.5 for key, value in before.items()
    }


def gives_one_an_entry(model: nn.Sequential, optimizer: Any) -> None:
    for param, entries in optimizer.state.items():
        for key in [key for key in entries if key != "step"]:
            entries[key] = torch.full(param.shape, 0.125)


def sets_steps(model: nn.Sequential, optimizer: Any) -> None:
    for number, entries in enumerate(optimizer.state.values()):
        if "step" not in entries:
            continue
        if number % 2:
            entries["step"] = torch.tensor(1.0)
        else:
            entries["step"].fill_(5.0)


def begins_anew(model: nn.Sequential, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)


def begins_anew_below(model: nn.Sequential, optimizer: Any) -> None:
    getattr(optimizer, "inner", optimizer).state = defaultdict(dict)


def keeps_some(model: nn.Sequential, optimizer: Any) -> None:
    optimizer.state = defaultdict(dict, {p: s for p, s in optimizer.state.items() if p.dim() > 1})


def swaps_two(model: nn.Sequential, optimizer: Any) -> None:
    one, other = optimizer.state.pop(model[0].weight), optimizer.state.pop(model[1].weight)
    optimizer.state[model[0].weight], optimizer.state[model[1].weight] = other, one


def takes_out_and_puts_back(model: nn.Sequential, optimizer: Any) -> None:
    entries = optimizer.state.get(model[3].weight)
    for key in [key for key in entries if key != "step"]:
        entries[key] = torch.zeros_like(entries[key])
    del optimizer.state[model[3].weight]
    optimizer.state[model[3].weight] = entries
    optimizer.state[model[3].weight] = optimizer.state[model[3].weight]


def restores_a_copy(model: nn.Sequential, optimizer: Any) -> None:
    saved = {param: copy.deepcopy(entries) for param, entries in optimizer.state.items()}
    zeroes_moments(model, optimizer)
    optimizer.state.update(saved)


def begins_with_defaults(model: nn.Sequential, optimizer: Any) -> None:
    had = dict(optimizer.state[model[0].weight].items())
    del optimizer.state[model[0].weight]
    assert optimizer.state.setdefault(model[0].weight, had).keys() == had.keys()
    assert optimizer.state.setdefault(model[1].weight, {}).keys() == had.keys()


def notes_something_of_its_own(model: nn.Sequential, optimizer: Any) -> None:
    optimizer.state["note"]["count"] = optimizer.state["note"].get("count", 0) + 1
    assert optimizer.state["note"] == {"count": 1}
    assert "note" in optimizer.state
    assert optimizer.state.pop("note") == {"count": 1}


CHANGES: list[Change] = [
    clears,
    removes_one,
    zeroes_moments,
    scales_part_of_a_moment,
    gives_one_a_dictionary,
    gives_one_an_entry,
    sets_steps,
    begins_anew,
    begins_anew_below,
    keeps_some,
    swaps_two,
    takes_out_and_puts_back,
    restores_a_copy,
    begins_with_defaults,
    notes_something_of_its_own,
]


@pytest.mark.thinned(20)
@pytest.mark.parametrize("make", [adamw, sgd, rmsprop])
@pytest.mark.parametrize("kind", ["host+disk", "mock+host"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_counts_as_in_torch(
    change: Change, kind: str, make: Callable[[nn.Module], torch.optim.Optimizer], tmp_path: Path
) -> None:
    """In the middle of a training whose updates run beside its forwards, and in what is saved after it."""
    model, expected = net(), net()
    floor, need = needs(net(), tmp_path, kind, optimizer=make)
    other = make(expected)
    with on_pages(model, kind, floor + (need - floor) // 3, tmp_path) as engine:
        optimizer = engine.bind_optimizer(make(model))
        for number in range(6):
            assert same_bits(step(model, optimizer, number), step(expected, other, number)), number
            if number == 3:
                change(model, optimizer)
                change(expected, other)
                assert_same_state(optimizer, other)
        assert_same_state(optimizer, other)
        values = model.state_dict()
        assert all(same_bits(values[name], value) for name, value in expected.state_dict().items())


def test_a_moment_that_is_held_is_the_optimizers_own(tmp_path: Path) -> None:
    """Across steps, read and written, however little memory there is."""
    model, expected = net(), net()
    floor, need = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", floor + (need - floor) // 3, tmp_path) as engine:
        optimizer, other = engine.bind_optimizer(adamw(model)), adamw(expected)
        step(model, optimizer, 0)
        step(expected, other, 0)
        ours = [optimizer.state[model[1].weight]["exp_avg"], optimizer.state[model[2].weight]["exp_avg_sq"][4:8]]
        theirs = [other.state[expected[1].weight]["exp_avg"], other.state[expected[2].weight]["exp_avg_sq"][4:8]]
        for number in range(1, 6):
            for module, each, held in ((model, optimizer, ours), (expected, other, theirs)):
                backward(module, number)
                held[0].mul_(0.5)
                each.step()
                each.zero_grad()
                held[1].add_(1e-6)
            assert all(same_bits(mine, value) for mine, value in zip(ours, theirs, strict=True)), number
            engine.check_integrity()
        assert_same_state(optimizer, other)
        ours.clear()
        assert engine.pool.handouts.collect()
        assert not engine.pool.pinned()
        step(model, optimizer, 6)
        step(expected, other, 6)
        assert_same_state(optimizer, other)


def test_masters_stay_when_moments_go(tmp_path: Path) -> None:
    """The same as if only masters had been loaded."""
    found = []
    floor, need = needs(net().bfloat16(), tmp_path, "host+disk", optimizer=adamw, master_weights="fp32")
    for clear in (True, False):
        model = net().bfloat16()
        with on_pages(model, "host+disk", (floor + need) // 2, tmp_path, master_weights="fp32") as engine:
            optimizer = engine.bind_optimizer(adamw(model))
            for number in range(3):
                step(model, optimizer, number)
            if clear:
                optimizer.state.clear()
                assert not optimizer.state
            else:
                saved = optimizer.state_dict()
                masters = {n: {"master": entries["master"].clone()} for n, entries in saved["state"].items()}
                optimizer.load_state_dict({**saved, "state": masters})
            for number in range(3, 6):
                step(model, optimizer, number)
            found.append({n: copy.deepcopy(entries) for n, entries in optimizer.state_dict()["state"].items()})
    cleared, loaded = found
    assert cleared.keys() == loaded.keys()
    for number, entries in loaded.items():
        assert all(same_bits(cleared[number][key], value) for key, value in entries.items()), number


def paged_tensors(optimizer: PagedOptimizer) -> list[Any]:
    return [tensor for state in optimizer.states for tensor in state.paged.values()]


def test_looking_at_what_there_is_brings_nothing_in(tmp_path: Path) -> None:
    model = net()
    floor, _ = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", floor, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        step(model, optimizer, 0)
        before = [tensor.place for tensor in paged_tensors(optimizer)]
        assert before.count(Place.AWAY) > LAYERS
        assert len(optimizer.state) == 2 * LAYERS
        assert list(optimizer.state) == list(model.parameters())
        for param, entries in optimizer.state.items():
            assert param in optimizer.state
            assert list(entries) == ["step", "exp_avg", "exp_avg_sq"]
            assert len(entries) == 3
            assert "exp_avg" in entries
            assert float(entries["step"]) == 1.0
        assert "(48, 48) of torch.float32 on pages" in repr(optimizer.state[model[0].weight])
        assert repr(optimizer.state) == "<optimizer.state of 8 parameters, on pages>"
        assert optimizer.state[model[0].weight] is not optimizer.state[model[1].weight]
        assert [tensor.place for tensor in paged_tensors(optimizer)] == before


def test_looking_at_all_of_it_one_at_a_time_needs_no_more_memory(tmp_path: Path) -> None:
    model = net()
    floor, _ = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", floor, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        step(model, optimizer, 0)
        for entries in optimizer.state.values():
            for value in entries.values():
                assert torch.isfinite(value).all()
        assert engine.pool.budget.peak_bytes <= floor
        with pytest.raises(BudgetError, match="exp_avg"):
            [entries.copy() for entries in optimizer.state.values()]
        del entries, value
        step(model, optimizer, 1)


def test_clearing_needs_no_memory_and_gives_pages_back(tmp_path: Path) -> None:
    model = net()
    floor, _ = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", floor, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        step(model, optimizer, 0)
        tensors = paged_tensors(optimizer)
        held = optimizer.state[model[0].weight]
        optimizer.state.clear()
        living = set(engine.pool.tensors())
        assert len(living.intersection(tensors)) == 2
        assert held["exp_avg"].abs().sum() > 0
        held["exp_avg"] = torch.zeros(WIDTH, WIDTH)
        assert not optimizer.state
        del held
        step(model, optimizer, 1)
        assert not living.intersection(tensors).intersection(engine.pool.tensors())
        assert {float(entries["step"]) for entries in optimizer.state.values()} == {1.0}


def test_what_does_not_fit_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    floor, _ = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", floor, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        step(model, optimizer, 0)
        before = {key: value.clone() for key, value in optimizer.state[model[0].weight].items()}
        given = {key: value + 1 for key, value in before.items()}
        fault, left = engine.pool.fault, [1]

        def scarce(*args: Any, **kwargs: Any) -> torch.Tensor:
            if kwargs.get("write") and not left:
                raise BudgetError("no room")
            if kwargs.get("write"):
                left.pop()
            return fault(*args, **kwargs)

        with monkeypatch.context() as patched:
            patched.setattr(engine.pool, "fault", scarce)
            with pytest.raises(BudgetError, match="no room"):
                optimizer.state[model[0].weight] = given
            with pytest.raises(BudgetError, match="no room"):
                optimizer.state[model[0].weight]["exp_avg"] = given["exp_avg"]
        after = optimizer.state[model[0].weight]
        assert all(same_bits(after[key], value) for key, value in before.items())


def test_state_on_pages_is_not_pickled(tmp_path: Path) -> None:
    model = net()
    floor, _ = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", 2 * floor, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        step(model, optimizer, 0)
        message = (
            "optimizer.state (8 entries) is on pages and cannot be copied or pickled as a whole. Use "
            "optimizer.state_dict(), which has the values, or copy.deepcopy(optimizer.state[param])."
        )
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(PagedModelError) as caught:
                attempt(optimizer.state)
            assert str(caught.value) == message
        with pytest.raises(PagedModelError, match="3 entries"):
            pickle.dumps(optimizer.state[model[0].weight])


def test_what_is_no_dictionary_is_refused(tmp_path: Path) -> None:
    model = net()
    floor, _ = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", 2 * floor, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        step(model, optimizer, 0)
        wanted = (
            "was given a list, and 1 dictionary is wanted; nothing was changed. Assign a dictionary of what the "
            "optimizer keeps, such as {} to begin anew."
        )
        with pytest.raises(UnsupportedError) as caught:
            optimizer.state[model[0].weight] = []
        assert str(caught.value) == f"optimizer.state of 0.weight {wanted}"
        with pytest.raises(UnsupportedError) as caught:
            optimizer.state = []
        assert str(caught.value) == f"optimizer.state {wanted}"
        with pytest.raises(UnsupportedError) as caught:
            optimizer.state = {model[0].bias: {}, model[0].weight: []}
        assert str(caught.value) == f"optimizer.state of 0.weight {wanted}"
        assert len(optimizer.state) == 2 * LAYERS


def test_state_is_not_touched_while_half_a_step_is_done(tmp_path: Path) -> None:
    model = net()
    floor, need = needs(net(), tmp_path, "host+disk", optimizer=adamw)
    with on_pages(model, "host+disk", floor + (need - floor) // 3, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        for number in range(3):
            step(model, optimizer, number)
        state, entries = optimizer.state, optimizer.state[model[0].weight]
        engine.updates_in_backward = lambda: True
        for number in range(3, 6):
            with engine.backward():
                backward(model, number)
            if optimizer.in_backward.chase is not None:
                break
            optimizer.step()
            optimizer.zero_grad()
        assert optimizer.in_backward.chase is not None
        with pytest.raises(UnsupportedError, match="between backward and optimizer.step"):
            state.clear()
        with pytest.raises(UnsupportedError, match="between backward and optimizer.step"):
            entries["exp_avg"]
        optimizer.step()
        optimizer.zero_grad()
        assert len(state) == 2 * LAYERS
