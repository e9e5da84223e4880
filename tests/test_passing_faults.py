"""A disk that fails once, wherever that is in a run: training goes on, with the numbers of the plain run."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.memory.scratch import Io
from tests.plain_loop import same_bits
from tests.stacks import adamw, backward, tanh_stack
from tests.tiers import needs, on_pages

WIDTH, LAYERS, STEPS = 96, 4, 4

APART = 96
"""Of so many transfers one fails in each run of a test; a run has some hundreds."""

SHORT = -1
"""Instead of an error number: the call moves a page of what it was asked for, or nothing."""


class FailsOnce:
    """The system calls of the scratch files, one of which fails once.

    Attributes:
        at: which call from now on; None for none.
        calls: how many there were.
        met: whether it has failed.
    """

    def __init__(self, call: str, code: int) -> None:
        self.at: int | None = None
        self.calls = 0
        self.met = False
        self._call = call
        self._code = code
        self._lock = threading.Lock()

    def io(self) -> Io:
        return Io(**{self._call: self._faulty(getattr(os, self._call))})

    def _faulty(self, real: Callable[..., int]) -> Callable[..., int]:
        def run(fd: int, views: list[memoryview], offset: int) -> int:
            with self._lock:
                fails = self.calls == self.at
                self.calls += 1
                self.met |= fails
            if fails and self._code == SHORT:
                return real(fd, [views[0][:4096]], offset) if len(views[0]) > 4096 else 0
            if fails:
                raise OSError(self._code, os.strerror(self._code))
            return real(fd, views, offset)

        return run


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Every number of some steps."""
    numbers: dict[str, Any] = {}
    for number in range(STEPS):
        numbers[f"loss {number}"] = backward(model, number)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer.state_dict()["state"]
    numbers |= {f"state {i} {key}": torch.as_tensor(value) for i in state for key, value in state[i].items()}
    return {key: value.clone() for key, value in (numbers | model.state_dict()).items()}


@contextmanager
def on_few_pages(kind: str, floor: int, directory: Path) -> Iterator[tuple[nn.Module, Any]]:
    model = tanh_stack(WIDTH, LAYERS)
    with on_pages(model, kind, floor, directory) as engine:
        yield model, engine.bind_optimizer(adamw(model))


@pytest.mark.parametrize("kind", ["host+disk", "mock+host+disk"])
@pytest.mark.parametrize(
    ("call", "code"),
    [("pwritev", errno.EIO), ("pwritev", errno.ENOSPC), ("pwritev", SHORT), ("preadv", errno.EIO), ("preadv", SHORT)],
    ids=str,
)
@pytest.mark.parametrize("begin", [0, 8, 40])
@pytest.mark.thinned(2)
def test_a_transfer_that_fails_once_changes_no_number(
    call: str,
    code: int,
    begin: int,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain = tanh_stack(WIDTH, LAYERS)
    expected = train(plain, adamw(plain))

    disk = FailsOnce(call, code)
    monkeypatch.setattr("ptm_accel.memory.disk.Io", disk.io)
    floor, _ = needs(tanh_stack(WIDTH, LAYERS), tmp_path, kind, optimizer=adamw)
    number, met = begin, 0
    while True:
        caplog.clear()
        disk.at, disk.calls, disk.met = None, 0, False
        with on_few_pages(kind, floor, tmp_path) as (model, optimizer):
            disk.at, disk.calls = number, 0
            numbers = train(model, optimizer)
            assert numbers.keys() == expected.keys()
            for key, value in expected.items():
                assert same_bits(numbers[key], value), (key, number)
        if not disk.met:
            break
        if code != SHORT:
            warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
            assert any(f"[Errno {code}]" in text and str(tmp_path) in text for text in warnings), (number, warnings)
        met += 1
        number += APART
    assert met > 1, "the run has fewer transfers than this test is for"
