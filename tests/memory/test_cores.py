"""Where threads of our own run: on the kernel's choice, also where OpenMP has bound the thread that starts them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ptm_accel.memory import cores, own_threads
from ptm_accel.memory.cores import cores_of_own_threads, usable_cores
from ptm_accel.memory.own_threads import OwnThread

ALL = frozenset(os.sched_getaffinity(0))
several_cores = pytest.mark.skipif(len(ALL) < 2, reason="on one core nothing can be bound to another")

TELL = """
import json, os
from queue import SimpleQueue
import torch
from ptm_accel.hardware.cache import machine_fingerprint
from ptm_accel.memory.own_threads import OwnThread
from ptm_accel.optim.hands import Hands

# All of OpenMP's threads begin.
torch.ones(1 << 20).mul_(2)
found = SimpleQueue()

def tell():
    found.put(sorted(os.sched_getaffinity(0)))

def of_one_of(count):
    # The second is started beside the first, which is of our own and takes no core from it.
    threads = [OwnThread(tell, (), "own", count) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    return [found.get() for _ in threads]

hands = Hands("hands")
with hands.at_work() as give:
    give(tell)
of_hands = found.get()
print(json.dumps({
    "trains": sorted(os.sched_getaffinity(0)), "one": of_one_of(1), "all": of_one_of(os.cpu_count()),
    "hands": of_hands, "fingerprint": machine_fingerprint().cores,
}))
"""


def told(**environment: str) -> dict[str, object]:
    """What a process says of its threads; it may run on two cores."""
    two = set(sorted(ALL)[:2])
    done = subprocess.run(
        [sys.executable, "-c", TELL],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        preexec_fn=lambda: os.sched_setaffinity(0, two),
    )
    return json.loads(done.stdout)


@several_cores
def test_threads_leave_the_core_of_the_thread_that_trains() -> None:
    first, second = sorted(ALL)[:2]
    found = told(OMP_PROC_BIND="true", OMP_NUM_THREADS="2")
    assert found == {
        "trains": [first],
        "one": [[first, second]] * 2,
        "all": [[first, second]] * 2,
        "hands": [first, second],
        "fingerprint": 2,
    }


@several_cores
def test_a_core_that_nothing_is_bound_to_is_taken_where_there_are_enough() -> None:
    first, second = sorted(ALL)[:2]
    found = told(OMP_PROC_BIND="true", OMP_NUM_THREADS="1")
    assert found == {
        "trains": [first],
        "one": [[second]] * 2,
        "all": [[first, second]] * 2,
        "hands": [second],
        "fingerprint": 2,
    }


def test_a_thread_that_has_ended_is_our_own_as_long_as_the_kernel_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bound to what it was bound to, and takes no core from the next one."""
    lingers = [True]
    monkeypatch.setattr(own_threads, "_kernel_has", lambda number: lingers[0])
    monkeypatch.setattr(own_threads, "_leaving", set())
    thread = OwnThread(lambda: None, (), "own")
    thread.start()
    thread.join()
    assert thread.native_id in own_threads.own_numbers()
    lingers[0] = False
    assert thread.native_id not in own_threads.own_numbers()


@several_cores
def test_where_nothing_is_bound_the_kernel_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(number: int, chosen: object) -> None:
        raise AssertionError(f"thread {number} was bound to {chosen}")

    monkeypatch.setattr(os, "sched_setaffinity", never)
    seen: list[frozenset[int]] = []
    thread = OwnThread(lambda: seen.append(frozenset(os.sched_getaffinity(0))), (), "own")
    thread.start()
    thread.join()
    assert seen == [ALL]
    assert usable_cores() == ALL


def test_what_may_not_be_changed_is_said_and_the_work_done(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(number: int, chosen: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(cores, "usable_cores", lambda: ALL | {max(ALL) + 1})
    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    done: list[int] = []
    thread = OwnThread(lambda: done.append(1), (), "ptm-disk-0")
    thread.start()
    thread.join()
    assert done == [1]
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == (
        "ptm-disk-0 stays on the cores that it has inherited, which may be slow: [Errno 1] Operation not permitted"
    )


@pytest.mark.parametrize(
    ("count", "taken", "chosen"),
    [
        (1, {0}, {1, 2, 3}),
        (3, {0}, {1, 2, 3}),
        (4, {0}, {0, 1, 2, 3}),
        (1, {0, 1, 2, 3}, {0, 1, 2, 3}),
    ],
)
def test_free_cores_are_for_as_many_as_there_are(count: int, taken: set[int], chosen: set[int]) -> None:
    assert cores_of_own_threads(count, {0, 1, 2, 3}, taken) == chosen
