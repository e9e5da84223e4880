"""Threads that compute on one core each: all is done, nothing hangs, nothing of torch is changed, and the same bits."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ptm_accel.optim import arithmetic
from ptm_accel.optim.arithmetic import InPieces
from ptm_accel.optim.core_threads import CoreThreads
from tests.optim.test_arithmetic import FUSED, PIECE, fused, narrow, on_budget
from tests.plain_loop import Recipe, assert_same, train, train_with_masters
from tests.zoo import ENTRIES

COUNT = 3


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[CoreThreads]:
    monkeypatch.setattr(CoreThreads, "count", COUNT)
    before = set(threading.enumerate())
    cores = CoreThreads("cores")
    yield cores
    cores.close()
    cores.close()
    assert not set(threading.enumerate()) - before


def test_all_pieces_are_carried_out_by_several_with_one_core_each(cores: CoreThreads) -> None:
    done: list[tuple[str, int, bool]] = []
    together = threading.Barrier(COUNT)

    def piece() -> None:
        together.wait(20)
        name = threading.current_thread().name.partition("_")[0]
        done.append((name, torch.get_num_threads(), torch.is_grad_enabled()))

    for _ in range(2):
        with cores.at_work() as give:
            for _ in range(2 * COUNT):
                give(piece)
    assert done == [("cores", 1, False)] * 4 * COUNT


@pytest.mark.parametrize("threads", [2, 5])
def test_torchs_own_number_of_threads_stays(cores: CoreThreads, threads: int) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        with cores.at_work() as give:
            give(lambda: None)
        found = [torch.get_num_threads()]
        # Of a thread that computes for the first time.
        later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert found == [threads, threads]
    finally:
        torch.set_num_threads(before)


def test_as_many_work_as_torch_has_threads() -> None:
    before = torch.get_num_threads()
    cores = CoreThreads("cores")
    try:
        for threads, count in ((1, 1), (3, 3), (40, 16)):
            torch.set_num_threads(threads)
            assert cores.count == count
    finally:
        torch.set_num_threads(before)
        cores.close()


def test_an_error_is_raised_when_nothing_runs_any_more(cores: CoreThreads) -> None:
    ran: list[int] = []
    fails = threading.Event()

    def piece(number: int) -> None:
        if number == 0:
            fails.set()
            raise OSError(5, "gone")
        time.sleep(0.01)
        ran.append(number)

    def work() -> None:
        with cores.at_work() as give:
            give(lambda: piece(0))
            assert fails.wait(20)
            for number in range(1, 200):
                give(partial(piece, number))

    with pytest.raises(OSError, match="gone"):
        work()
    seen = len(ran)
    assert seen < 199, "what had not begun is left out"
    time.sleep(0.05)
    assert len(ran) == seen
    with cores.at_work() as give:
        give(lambda: ran.append(-1))
    assert ran[-1] == -1


def test_what_is_broken_off_leaves_nothing_running(cores: CoreThreads) -> None:
    ran: list[int] = []
    began = threading.Event()

    def piece() -> None:
        began.set()
        time.sleep(0.05)
        ran.append(1)

    def broken_off() -> None:
        with cores.at_work() as give:
            for _ in range(50):
                give(piece)
            assert began.wait(20)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken_off()
    seen = len(ran)
    assert 1 <= seen <= COUNT
    time.sleep(0.1)
    assert len(ran) == seen


def test_those_that_are_forgotten_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CoreThreads, "count", COUNT)
    before = set(threading.enumerate())
    cores = CoreThreads("cores")
    with cores.at_work() as give:
        give(lambda: None)
    begun = set(threading.enumerate()) - before
    assert len(begun) == COUNT
    del cores, give
    gc.collect()
    for thread in begun:
        thread.join(20)
    assert not any(thread.is_alive() for thread in begun)


FORKED = """
import os, sys
from ptm_accel.optim.core_threads import CoreThreads

CoreThreads.count = 2
cores, done = CoreThreads("cores"), []
for _ in range(2):
    with cores.at_work() as give:
        give(lambda: done.append(1))
    if len(done) == 1 and os.fork():
        sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
print(len(done), flush=True)
cores.close()
"""


def test_a_fork_has_threads_of_its_own() -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Pieces so small that several have some; the threads that carry them out."""
    names: set[str] = set()
    run = InPieces._run

    def watched(self: InPieces, kernel: Any, rows: list[Any], *args: Any) -> None:
        names.add(threading.current_thread().name.rpartition("_")[0] or "MainThread")
        run(self, kernel, rows, *args)

    monkeypatch.setattr(InPieces, "_run", watched)
    monkeypatch.setattr(CoreThreads, "count", COUNT)
    monkeypatch.setattr(arithmetic, "PIECE_ELEMENTS", PIECE)
    monkeypatch.setattr(arithmetic, "LEAST_ELEMENTS", 64)
    return names


@pytest.mark.parametrize(("name", "budget"), [("adamw", "floor"), ("adam-amsgrad", "30%"), ("sgd-momentum", "fits")])
def test_masters_come_out_the_same(name: str, budget: str, workers: set[str], tmp_path: Path) -> None:
    assert name in FUSED
    entry, recipe = narrow(ENTRIES["llama"]), Recipe(clip=0.1, optimizer=fused(name))
    oracle = train_with_masters(entry.build(), entry, recipe)
    paged = on_budget(entry, recipe, budget, tmp_path, master_weights="fp32")
    assert_same(paged, oracle)
    assert "ptm_accel arithmetic" in workers


def test_clipped_gradients_come_out_the_same(workers: set[str], tmp_path: Path) -> None:
    entry, recipe = ENTRIES["gpt2"], Recipe(clip=0.1, optimizer=fused("adamw"))
    plain = train(entry.build(), entry, recipe)
    assert_same(on_budget(entry, recipe, "floor", tmp_path), plain)
    assert "ptm_accel arithmetic" in workers


def test_what_nothing_surrounds_is_for_all_cores(workers: set[str], tmp_path: Path) -> None:
    entry, recipe = ENTRIES["llama"], Recipe(clip=None, optimizer=fused("adamw"))
    plain = train(entry.build(), entry, recipe)
    assert_same(on_budget(entry, recipe, "fits", tmp_path), plain)
    assert workers == {"MainThread"}
