"""Hooks on an optimizer's state dictionaries run as those of a plain optimizer."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.checkpoint.plain_state import load_plain_state
from ptm_accel.checkpoint.training_state import load_optimizer_state, save_optimizer_state
from ptm_accel.optim.optimizer import PagedOptimizer
from tests.plain_loop import adamw, same_bits
from tests.stacks import stack, step
from tests.tiers import on_pages

StateDict = dict[str, Any]


def net() -> nn.Sequential:
    return stack(32, 2)


class Hooks:
    """Two of each of the four kinds, which note their calls, and change what they are given or replace it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls: list[Any] = []
        for name in ("first", "second"):
            optimizer.register_state_dict_pre_hook(self.noting(f"before saving, {name}"))
            optimizer.register_state_dict_post_hook(self.scaling(f"after saving, {name}", 2.0))
            optimizer.register_load_state_dict_pre_hook(self.scaling(f"before loading, {name}", 0.75))
            optimizer.register_load_state_dict_post_hook(self.noting(f"after loading, {name}"))
        optimizer.register_state_dict_post_hook(self.marking, prepend=True)

    def noting(self, what: str) -> Any:
        def note(optimizer: torch.optim.Optimizer) -> None:
            self.calls.append((what, torch.is_grad_enabled(), [group["lr"] for group in optimizer.param_groups]))

        return note

    def scaling(self, what: str, factor: float) -> Any:
        def scale(optimizer: torch.optim.Optimizer, state_dict: StateDict) -> StateDict:
            self.calls.append((what, torch.is_grad_enabled(), sorted(state_dict)))
            made = copy.deepcopy(state_dict)
            for entries in made["state"].values():
                entries["exp_avg"] *= factor
            for group in made["param_groups"]:
                group["lr"] *= factor
            return made

        return scale

    def marking(self, optimizer: torch.optim.Optimizer, state_dict: StateDict) -> None:
        """Changes the dictionary in place."""
        state_dict["marked"] = True


def run(optimizer: torch.optim.Optimizer, model: nn.Module, hooks: Hooks, tmp_path: Path) -> list[Any]:
    """Saves and loads by dictionary and by file, and steps; returns what became of all."""
    step(model, optimizer, 0)
    saved = optimizer.state_dict()
    before = copy.deepcopy(saved)
    given = dict(before)
    optimizer.load_state_dict(given)
    assert given.keys() == before.keys()
    step(model, optimizer, 1)
    torch.save({key: before[key] for key in ("state", "param_groups")}, tmp_path / "optimizer.pt")
    if isinstance(optimizer, PagedOptimizer):
        load_plain_state(optimizer, tmp_path / "optimizer.pt")
    else:
        optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt"))
    step(model, optimizer, 2)
    return [before, optimizer.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}]


@pytest.mark.parametrize("when", ["before it is prepared", "after"])
def test_the_same_hooks_with_the_same_results(when: str, tmp_path: Path) -> None:
    plain = net()
    theirs = adamw(plain)
    expected_hooks = Hooks(theirs)
    expected = run(theirs, plain, expected_hooks, tmp_path)
    model = net()
    with on_pages(model, "host+disk", 150 << 10, tmp_path) as engine:
        ours = adamw(model)
        early = Hooks(ours) if when != "after" else None
        optimizer = engine.bind_optimizer(ours)
        hooks = early or Hooks(optimizer)
        found = run(optimizer, model, hooks, tmp_path)
        assert hooks.calls == expected_hooks.calls
        assert len(hooks.calls) == 2 * 4 + 2 * 4
        assert same_bits(found, expected)


def test_checkpoints_run_those_that_need_no_dictionary_and_tell_of_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = net()
    with on_pages(model, "host+disk", 150 << 10, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        step(model, optimizer, 0)
        (tmp_path / "saved").mkdir()
        save_optimizer_state(optimizer, tmp_path / "saved")
        load_optimizer_state(optimizer, tmp_path / "saved")
        assert not caplog.records
        before = copy.deepcopy(optimizer.state_dict())
        hooks = Hooks(optimizer)
        save_optimizer_state(optimizer, tmp_path / "saved")
        (record,) = caplog.records
        assert record.getMessage().startswith("3 hooks of optimizer.register_state_dict_post_hook were not run")
        caplog.clear()
        load_optimizer_state(optimizer, tmp_path / "saved")
        (record,) = caplog.records
        assert record.getMessage().startswith("2 hooks of optimizer.register_load_state_dict_pre_hook were not run")
        ends = [f"{what} {name}" for what in ("before saving,", "after loading,") for name in ("first", "second")]
        assert [what for what, *_ in hooks.calls] == ends
        optimizer._optimizer_state_dict_post_hooks.clear()
        assert same_bits(optimizer.state_dict(), before)
