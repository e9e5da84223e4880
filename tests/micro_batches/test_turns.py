"""Threads that take turns: exactly one runs, and each goes on where it has stopped."""

from __future__ import annotations

import contextvars
import gc
import random
import threading
import time
from collections.abc import Callable

import pytest

from ptm_accel.micro_batches.turns import Abandoned, Worker

ASKED: contextvars.ContextVar[str] = contextvars.ContextVar("ASKED", default="nothing")


def steps(worker: Worker, name: str, count: int, log: list[str]) -> Callable[[], str]:
    def job() -> str:
        for number in range(count):
            log.append(f"{name}{number}")
            if number < count - 1:
                worker.stop()
        return name

    return job


@pytest.mark.parametrize("seed", range(5))
def test_jobs_run_in_the_order_of_their_turns(seed: int) -> None:
    draw = random.Random(seed)
    workers = [Worker(str(number)) for number in range(3)]
    for _ in range(3):
        log: list[str] = []
        counts = [draw.randint(1, 4) for _ in workers]
        for worker, name, count in zip(workers, "abc", counts, strict=True):
            worker.begin(steps(worker, name, count, log), ())
        expected, done = [], dict.fromkeys("abc", 0)
        while waiting := [number for number, worker in enumerate(workers) if not worker.over]:
            number = draw.choice(waiting)
            workers[number].turn()
            name = "abc"[number]
            expected.append(f"{name}{done[name]}")
            done[name] += 1
        assert log == expected
        assert [worker.result for worker in workers] == ["a", "b", "c"]


def test_a_job_has_the_callers_context() -> None:
    worker, found = Worker("x"), []
    entered: list[str] = []

    class Context:
        def __enter__(self) -> None:
            entered.append(threading.current_thread().name)

        def __exit__(self, *error: object) -> None:
            entered.append("left")

    token = ASKED.set("something")
    worker.begin(lambda: found.append(ASKED.get()), (Context,))
    ASKED.reset(token)
    worker.turn()
    assert found == ["something"]
    assert entered == ["x", "left"]


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3)])
def test_what_a_job_raises_reaches_the_caller(error: BaseException) -> None:
    worker = Worker("x")

    def job() -> None:
        worker.stop()
        raise error

    worker.begin(job, ())
    worker.turn()
    with pytest.raises(type(error)) as caught:
        worker.turn()
    assert caught.value is error
    assert any("job" in str(entry.name) for entry in caught.traceback)
    assert worker.over
    worker.begin(lambda: 7, ())
    worker.turn()
    assert worker.result == 7


def test_an_abandoned_job_unwinds() -> None:
    worker, log = Worker("x"), []

    def job() -> None:
        for _ in range(2):
            # Somebody catches everything, and goes on.
            try:
                worker.stop()
            except Abandoned:
                log.append("unwound")
        worker.stop()

    worker.begin(job, ())
    worker.turn()
    worker.abandon()
    assert worker.over
    assert log == ["unwound", "unwound"]
    worker.begin(lambda: log.append("not begun"), ())
    worker.abandon()
    assert log == ["unwound", "unwound"]


def test_an_interrupted_wait_leaves_no_two_threads_running() -> None:
    """Ctrl-C comes to the thread that waits, while the job runs on to its next stop."""
    worker, log = Worker("x"), []

    def job() -> None:
        worker.stop()
        time.sleep(0.05)
        log.append("ran on")
        worker.stop()

    worker.begin(job, ())
    worker.turn()
    real = worker._back.get
    calls = 0

    class Interrupting:
        def get(self) -> None:
            nonlocal calls
            calls += 1
            if calls == 1:
                time.sleep(0.01)
                raise KeyboardInterrupt
            real()

        put = staticmethod(worker._back.put)

    worker._back = Interrupting()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        worker.turn()
    worker.abandon()
    assert log == ["ran on"]
    assert worker.over


def test_threads_end_with_their_workers() -> None:
    def living() -> int:
        return sum(thread.name.startswith("ends") for thread in threading.enumerate())

    workers = [Worker(f"ends {number}") for number in range(4)]
    workers[0].begin(lambda: None, ())
    workers[0].turn()
    assert living() == 4
    del workers
    gc.collect()
    until = time.monotonic() + 5
    while living() and time.monotonic() < until:
        time.sleep(0.01)
    assert not living()
