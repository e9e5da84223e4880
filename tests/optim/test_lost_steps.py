"""What is between two steps, because an update has failed, is not saved as if it were whole."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.checkpoint.training_state import load_optimizer_state, save_optimizer_state
from ptm_accel.engine import Engine
from ptm_accel.errors import DiskError, LostStepError
from ptm_accel.optim.batches import Batches
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.optim.optimizer import PagedOptimizer
from tests.optim.test_update_queue import assert_same_weights, net, owing, plain
from tests.plain_loop import same_bits
from tests.stacks import adamw, backward, step
from tests.tiers import MEMORIES, needs, on_pages


@contextmanager
def one_failure(after: int) -> Iterator[None]:
    """The update that comes after so many batches fails, and no other."""
    original, count = ComputeUpdates.carry_out, itertools.count()

    def carry_out(self: ComputeUpdates, *args: Any) -> None:
        if next(count) == after:
            raise DiskError("the disk is gone")
        original(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComputeUpdates, "carry_out", carry_out)
        yield


@pytest.mark.parametrize("way", ["state_dict", "index"])
def test_after_a_lost_update_nothing_is_saved_until_all_is_loaded(way: str, tmp_path: Path) -> None:
    """The plain run would have ended there; what is loaded goes on as it does."""
    whole, _ = plain(5)
    before, there = plain(3)
    with owing(tmp_path, warm=3) as (model, engine, optimizer):
        saved = {"weights": copy.deepcopy(before.state_dict()), "state": copy.deepcopy(there.state_dict())}
        (tmp_path / "state").mkdir()
        save_optimizer_state(optimizer, tmp_path / "state")
        step(model, optimizer, 3)
        with one_failure(after=1), pytest.raises(DiskError, match="the disk is gone"):
            engine.settle()
        count = len(list(engine.slots))
        said = r"cannot save between two steps: the update of step 4 failed, and (\d+) parameters were not"
        with pytest.raises(LostStepError, match=said) as caught:
            optimizer.state_dict()
        number = re.search(r"and (\d+) parameters", str(caught.value))
        assert number is not None
        changed = [n for n, v in model.state_dict().items() if not same_bits(v.clone(), before.state_dict()[n])]
        assert 0 < int(number[1]) == count - len(changed) < count
        (tmp_path / "other").mkdir()
        with pytest.raises(LostStepError, match=said):
            save_optimizer_state(optimizer, tmp_path / "other")
        assert not list((tmp_path / "other").iterdir())
        model.load_state_dict(saved["weights"])
        with pytest.raises(LostStepError, match=said):
            optimizer.state_dict()
        if way == "index":
            load_optimizer_state(optimizer, tmp_path / "state")
        else:
            optimizer.load_state_dict(saved["state"])
        for number_of_step in (3, 4):
            step(model, optimizer, number_of_step)
        assert_same_weights(model, whole)
        optimizer.state_dict()


def test_weights_that_are_of_no_step_are_given_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        found = [record.getMessage() for record in caplog.records if "between two steps" in record.getMessage()]
        caplog.clear()
        return found

    with owing(tmp_path, warm=3) as (model, engine, optimizer):
        (tmp_path / "state").mkdir()
        save_optimizer_state(optimizer, tmp_path / "state")
        for after in (1, 0):
            model.state_dict()
            assert not warnings()
            step(model, optimizer, 3)
            with one_failure(after), pytest.raises(DiskError, match="the disk is gone"):
                engine.settle()
            with engine.state_dicts.names_only():
                model.state_dict()
            assert not warnings(), "that gave no values"
            model.state_dict()
            assert [re.findall(r"the update of step \d failed, and \d+ parameters", said) for said in warnings()]
            model.state_dict()
            assert not warnings(), "it was said"
            load_optimizer_state(optimizer, tmp_path / "state")


def test_a_failure_that_a_state_dict_meets_is_warned_of_by_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with owing(tmp_path, warm=3) as (model, _, optimizer):
        step(model, optimizer, 3)
        with one_failure(after=1), pytest.raises(DiskError, match="the disk is gone"):
            model.state_dict()
        caplog.clear()
        model.state_dict()
        assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_step_that_was_not_asked_for_is_missed_by_nobody(tmp_path: Path) -> None:
    with owing(tmp_path, warm=3) as (_, engine, optimizer):
        engine.settle()
        queue = optimizer.updates._begin(early=True)
        queue.give_up()
        optimizer.state_dict()


@contextmanager
def nothing_comes() -> Iterator[None]:
    """No update can begin."""

    def open_none(self: Batches, *args: Any, **kwargs: Any) -> Any:
        raise DiskError("the disk is gone")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batches, "open", open_none)
        yield


@contextmanager
def blocking(directory: Path, kind: str) -> Iterator[tuple[nn.Sequential, Engine, PagedOptimizer]]:
    model = net()
    floor, _ = needs(model, directory, kind, optimizer=adamw, update="blocking")
    with on_pages(model, kind, floor, directory, update="blocking") as engine:
        yield model, engine, engine.bind_optimizer(adamw(model))


@pytest.mark.parametrize("warm", [0, 2])
@pytest.mark.parametrize("kind", MEMORIES)
def test_a_blocking_step_that_fails_in_the_middle_is_lost(kind: str, warm: int, tmp_path: Path) -> None:
    """Nothing of it is saved, and what is left of its gradients is in no other step."""
    whole, _ = plain(warm + 2)
    before, there = plain(warm)
    saved = {"weights": copy.deepcopy(before.state_dict()), "state": copy.deepcopy(there.state_dict())}
    with blocking(tmp_path, kind) as (model, engine, optimizer):
        for number in range(warm):
            step(model, optimizer, number)
        backward(model, warm)
        engine.clip_grad_norm_(0.01)
        with one_failure(after=1), pytest.raises(DiskError, match="the disk is gone"):
            optimizer.step()
        assert engine.gradients is not None
        assert not engine.gradients.present()
        said = rf"cannot save between two steps: the update of step {warm + 1} failed, and (\d+) parameters"
        with pytest.raises(LostStepError, match=said) as caught:
            optimizer.state_dict()
        number_left = re.search(r"and (\d+) parameters", str(caught.value))
        assert number_left is not None
        assert 0 < int(number_left[1]) < len(list(engine.slots))
        (tmp_path / "other").mkdir()
        with pytest.raises(LostStepError, match=said):
            save_optimizer_state(optimizer, tmp_path / "other")
        assert not list((tmp_path / "other").iterdir())
        model.load_state_dict(saved["weights"])
        optimizer.load_state_dict(saved["state"])
        for number in range(warm, warm + 2):
            step(model, optimizer, number)
        assert_same_weights(model, whole)
        optimizer.state_dict()


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_step_that_cannot_begin_can_be_tried_again(kind: str, tmp_path: Path) -> None:
    """With the same gradients, clipped as they were."""
    expected = net()
    theirs = adamw(expected)
    with blocking(tmp_path, kind) as (model, engine, optimizer):
        for number in range(2):
            backward(model, number)
            backward(expected, number)
            engine.clip_grad_norm_(0.01)
            nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
            with nothing_comes(), pytest.raises(DiskError, match="the disk is gone"):
                optimizer.step()
            optimizer.state_dict()
            optimizer.step()
            theirs.step()
            optimizer.zero_grad()
            theirs.zero_grad()
            assert_same_weights(model, expected)


def test_clipping_takes_parameters_that_the_optimizer_has_not(tmp_path: Path) -> None:
    """They are multiplied as in torch, once, whether a step comes or not."""

    def half(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(list(model.parameters())[::2], lr=1e-2, fused=True)

    model, expected = net(), net()
    floor, _ = needs(model, tmp_path, "host+disk", optimizer=half)
    with on_pages(model, "host+disk", floor, tmp_path) as engine:
        ours, theirs = engine.bind_optimizer(half(model)), half(expected)
        for number in range(4):
            backward(model, number)
            backward(expected, number)
            engine.clip_grad_norm_(0.01)
            nn.utils.clip_grad_norm_(expected.parameters(), 0.01)
            if number == 2:
                ours.add_param_group({"params": [list(model.parameters())[1]]})
                theirs.add_param_group({"params": [list(expected.parameters())[1]]})
            if number != 1:
                ours.step()
                theirs.step()
            else:
                ours.zero_grad()
                theirs.zero_grad()
            assert engine.gradients is not None
            executor = engine.pages.executor
            sums = {g.slot.name: executor.snapshot(g.value).clone() for g in engine.gradients.present() if g.value}
            for name, total in sums.items():
                grad = expected.get_parameter(name).grad
                assert grad is not None
                assert same_bits(total, grad), (name, number)
            assert len(sums) >= 3
            ours.zero_grad()
            theirs.zero_grad()
            assert_same_weights(model, expected)
