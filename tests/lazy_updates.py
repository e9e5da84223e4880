"""An updater that works only while somebody waits for it, so that staleness is as large as it may be, always."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ptm_accel.memory.scratch import ScratchFile
from ptm_accel.optim.lock_free import LockFreeUpdates
from ptm_accel.optim.sweeps import Sweeps


@contextmanager
def lazily() -> Iterator[None]:
    """The updater's transfers begin only while the training thread waits for an update, or for the end."""
    gate, move = threading.Event(), Sweeps._move

    def opened(waits: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*args: Any) -> Any:
            gate.set()
            try:
                return waits(*args)
            finally:
                gate.clear()

        return wait

    def moved(self: Sweeps, transfers: list[Any]) -> None:
        gate.wait()
        move(self, transfers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sweeps, "_move", moved)
        patch.setattr(Sweeps, "clear", opened(Sweeps.clear))
        patch.setattr(LockFreeUpdates, "_wait", _at_the_bound(gate, LockFreeUpdates._wait))
        yield


def _at_the_bound(gate: threading.Event, waits: Callable[..., None]) -> Callable[..., None]:
    def wait(self: LockFreeUpdates, step: int | None) -> None:
        with self._sweeps.changed:
            if self._sweeps.error is None and self._sweeps.reached(step):
                return
        gate.set()
        try:
            waits(self, step)
        finally:
            gate.clear()

    return wait


@contextmanager
def delays(longest_s: float, seed: int = 0) -> Iterator[None]:
    """The updater waits before and after each of its transfers, and so does the disk, for random times."""
    rng, move, on_disk = random.Random(seed), Sweeps._move, ScratchFile.move

    def slow(self: Sweeps, transfers: list[Any]) -> None:
        time.sleep(rng.random() * longest_s)
        move(self, transfers)
        time.sleep(rng.random() * longest_s)

    def slow_disk(self: ScratchFile, *args: Any) -> None:
        time.sleep(rng.random() * longest_s / 8)
        on_disk(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sweeps, "_move", slow)
        patch.setattr(ScratchFile, "move", slow_disk)
        yield
