"""What collectives are made of over gloo, and what is waited for at their end."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.distributed.ranks import Collectives, ShardStats
from ptm_accel.errors import UnsupportedError
from tests.prepared import run_ranks


class Work:
    """A collective that has ended, whose thread holds the memory for longer."""

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        return True


def users(memory: torch.Tensor) -> int:
    return torch._C._storage_Use_Count(StorageWeakRef(memory.untyped_storage()).cdata)


def test_memory_is_nobody_elses_after_a_collective() -> None:
    memory = torch.zeros(64)
    before = users(memory)
    taken, ends = threading.Event(), threading.Event()

    def hold() -> None:
        view = memory[3:]
        taken.set()
        ends.wait()
        time.sleep(0.02)
        del view

    thread = threading.Thread(target=hold)
    thread.start()
    taken.wait()
    assert users(memory) > before
    held = StorageWeakRef(memory.untyped_storage()), before
    collectives = Collectives([Work()], 0, "gathers a layer", ShardStats(), held)
    assert not collectives.done()
    ends.set()
    collectives.order()
    assert users(memory) == before
    assert collectives.done()
    thread.join()


class Keeping(Work):
    """One that keeps its memory as long as it is there itself, as torch's do."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory.detach()


def test_a_collective_that_has_ended_is_done_before_anybody_waits() -> None:
    memory = torch.zeros(64)
    before = users(memory)
    collectives = Collectives(
        [Keeping(memory)], 0, "gathers a layer", ShardStats(), (StorageWeakRef(memory.untyped_storage()), before)
    )
    assert users(memory) > before
    assert collectives.done()
    assert users(memory) == before


class Broken(Work):
    """One whose other ranks have ended."""

    def wait(self) -> None:
        raise RuntimeError("connection reset")


def test_a_collective_that_has_failed_is_done_and_raises_whenever_it_is_waited_for() -> None:
    memory = torch.zeros(64)
    held = StorageWeakRef(memory.untyped_storage()), users(memory)
    collectives = Collectives([Broken()], 1, "gathers a layer", ShardStats(), held)
    assert collectives.done()
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="rank 1 gathers a layer.*connection reset"):
            collectives.order()


def test_a_view_of_somebody_else_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptm_accel.distributed.ranks._LETS_GO_S", 0.01)
    memory = torch.zeros(64)
    held = StorageWeakRef(memory.untyped_storage()), users(memory)
    view = memory[3:]
    collectives = Collectives([Work()], 0, "gathers a layer", ShardStats(), held)
    collectives.order()
    assert collectives.done()
    assert view.numel() == 61


def test_gathers_over_gloo_are_single_works(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    runs = run_ranks(Path(__file__).with_name("gathers_child.py"), count=2, cwd=tmp_path, env=environment)
    assert [run.out for run in runs] == ["2400 gathered\n"] * 2, "\n".join(run.err[-2000:] for run in runs)
