"""Going on after the disk has failed once: with the numbers of plain torch."""

from __future__ import annotations

import copy
import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.config import BLOCKING
from ptm_accel.errors import DiskError, LostStepError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.scratch import Io
from ptm_accel.memory.traffic import Traffic
from ptm_accel.optim.state_dicts import state_dict_of
from tests.model.nets import Net, inputs
from tests.plain_loop import same_bits
from tests.tiers import needs, on_pages

NEVER = 1 << 30


class FailsFrom:
    """The system calls of the scratch file: as they are, but for writes from one on.

    Attributes:
        number: of the first write that fails, counted from 1.
        met: it has come.
    """

    def __init__(self) -> None:
        self.number = NEVER
        self.met = False
        self._lock = threading.Lock()

    def io(self) -> Io:
        return Io(pwritev=self._write)

    def _write(self, *args: Any) -> int:
        with self._lock:
            self.number -= 1
            fails = self.number <= 0
            self.met |= fails
        if fails:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(*args)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def floor_of(model: nn.Module, directory: Path) -> int:
    return needs(model, directory, "host+disk", optimizer=adamw, update=BLOCKING)[0]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, again: Callable[[], None]) -> list[float]:
    """Trains; a batch whose forward or backward fails is begun again, after `again`."""
    losses: list[float] = []
    while len(losses) < len(steps):
        try:
            loss = model(**inputs(steps[len(losses)]))
            loss.backward()
        except DiskError:
            again()
            continue
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def refuse() -> None:
    raise AssertionError("plain torch has not failed")


@pytest.mark.parametrize("number", [1, 4, 9])
def test_a_batch_is_begun_again_after_a_write_has_failed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Net()
    expected = train(plain, adamw(plain), range(3), refuse)

    model = Net()
    floor = floor_of(model, tmp_path)
    disk = FailsFrom()
    monkeypatch.setattr("ptm_accel.memory.disk.Io", disk.io)
    failed: list[int] = []
    with on_pages(model, "host+disk", floor, tmp_path, update=BLOCKING) as engine:
        optimizer = engine.bind_optimizer(adamw(model))

        def again() -> None:
            failed.append(number)
            assert len(failed) < 3, "it fails again, though the disk does not"
            disk.number = NEVER
            engine.abort()
            engine.zero_grad()

        disk.number = number
        assert train(model, optimizer, range(3), again) == expected
        assert disk.met
        assert failed
        for name, value in model.state_dict().items():
            assert same_bits(value, plain.state_dict()[name]), name


class StoreFails:
    """A store of a part of an optimizer's state fails, once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.number = 0
        plain = Traffic.start_store

        def start_store(traffic: Traffic, tensor: PagedTensor, *args: Any) -> Any:
            self.number -= tensor.tag is Tag.STATE
            if tensor.tag is Tag.STATE and self.number == 0:
                raise DiskError(errno.ENOSPC, "the disk is full")
            return plain(traffic, tensor, *args)

        patch.setattr(Traffic, "start_store", start_store)


@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_what_is_left_of_a_first_step_can_be_gone_on_from(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are between two steps then; but plain torch trains on from what there is, and so do pages."""
    model, plain = Net(), Net()
    floor = floor_of(model, tmp_path)
    fails = StoreFails(monkeypatch)
    with on_pages(model, "host+disk", floor, tmp_path, update=BLOCKING) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        model(**inputs(0)).backward()
        fails.number = number
        with pytest.raises(DiskError, match="the disk is full"):
            optimizer.step()
        engine.abort()
        engine.zero_grad()
        plain.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        expected = adamw(plain)
        with pytest.raises(LostStepError, match="the update of step 1 failed, and [0-9]+ parameters were not updated"):
            optimizer.state_dict()
        expected.load_state_dict(copy.deepcopy(state_dict_of(optimizer.states, optimizer.param_groups)))
        assert train(model, optimizer, range(1, 3), refuse) == train(plain, expected, range(1, 3), refuse)
        for name, value in model.state_dict().items():
            assert same_bits(value, plain.state_dict()[name]), name
