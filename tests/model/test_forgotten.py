"""A model that nobody uses any more takes its pages with it, in whichever thread the collector finds it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ptm_accel.engine import Engine
from ptm_accel.memory.own_threads import OwnThread
from ptm_accel.optim.core_threads import CoreThreads
from tests.prepared import run_prepared
from tests.tiers import config, open_memory

ROOT = Path(__file__).resolve().parents[2]
IN_ITS_OWN_THREAD = """
import gc, sys, threading, time
from pathlib import Path
from types import SimpleNamespace
import torch
from torch import nn
from ptm_accel.engine import Engine
from ptm_accel.memory.scratch import ScratchFile
from tests.tiers import config, open_memory

held, dropped, closed = threading.Event(), threading.Event(), threading.Event()
move = ScratchFile.move

def collecting(self, *args):
    if not dropped.is_set():
        held.set()
        dropped.wait()
        gc.collect()
    return move(self, *args)

def forget():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)))
    memory = open_memory("host+disk", 1 << 20, Path(sys.argv[1]))
    memory.parts.append(SimpleNamespace(close=closed.set))
    engine = Engine.attach(model, config(), memory=memory)
    model(torch.ones(2, 64)).sum().backward()
    ScratchFile.move = collecting
    for slot in engine.slots:
        if slot.value.block in engine.pool.eviction:
            slot.fetch()
            slot.changed()
            engine.pool.admission.evict(slot.value.block)
    while not held.is_set():
        time.sleep(0.001)

gc.disable()
forget()
dropped.set()
print("closed" if closed.wait(30) else "waits for itself", flush=True)
"""


def test_one_that_is_found_by_a_thread_that_moves_its_pages(tmp_path: Path) -> None:
    """In a process of its own, which can be ended if it waits for itself."""
    done = run_prepared("-c", IN_ITS_OWN_THREAD, tmp_path, cwd=ROOT)
    assert done.out.splitlines() == ["closed"], done.err
    assert done.code == 0


def in_a_core_thread(work: Callable[[], object]) -> None:
    threads = CoreThreads("ptm-test-core")
    with threads.at_work() as give:
        give(work)
    threads.close()


def in_an_own_thread(work: Callable[[], object]) -> None:
    thread = OwnThread(work, (), "ptm-test")
    thread.start()
    thread.join()


def in_another_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def here(work: Callable[[], object]) -> None:
    work()


@pytest.mark.parametrize("where", [in_a_core_thread, in_an_own_thread, in_another_thread, here])
def test_threads_of_our_own_close_nothing(where: Callable[[Callable[[], object]], None], tmp_path: Path) -> None:
    found: list[threading.Thread] = []

    def forget() -> weakref.ref[nn.Module]:
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        memory = open_memory("host+disk", 1 << 20, tmp_path)
        memory.parts.append(SimpleNamespace(close=lambda: found.append(threading.current_thread())))  # type: ignore[arg-type]
        Engine.attach(model, config(), memory=memory)
        with torch.no_grad():
            model(torch.ones(2, 64))
        return weakref.ref(model)

    gc.disable()
    try:
        model = forget()
        where(gc.collect)
    finally:
        gc.enable()
    assert model() is None
    deadline = time.monotonic() + 60
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert not isinstance(found[0], OwnThread)
    assert (found[0] is threading.current_thread()) == (where is here)
