"""Stores that nobody waits for and that fail: nothing is lost, nobody who asks for something else is told."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.diskio import Lanes
from ptm_accel.memory.paged import PagedTensor, Place
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.scratch import Io
from ptm_accel.memory.windows import WINDOW_ALIGN
from tests.memory.test_pool import KINDS, STEPS, Step, Twin
from tests.tiers import PAGE, memory_of

ELEMENTS = 2 * WINDOW_ALIGN
PAGES = ELEMENTS * 4 // PAGE


class Faults:
    """System calls of the disk tier that fail so often, or always (-1), and that wait until they may go on."""

    def __init__(self) -> None:
        self.left = {"preadv": 0, "pwritev": 0}
        self.failed = 0
        self.code = errno.EIO
        self.gate = threading.Event()
        self.gate.set()
        self._lock = threading.Lock()

    def io(self) -> Io:
        return Io(preadv=self._call("preadv"), pwritev=self._call("pwritev"))

    def _call(self, name: str) -> Any:
        real = getattr(os, name)

        def run(*args: Any) -> int:
            assert self.gate.wait(20)
            with self._lock:
                fails = self.left[name] != 0
                self.left[name] -= self.left[name] > 0
                self.failed += fails
            if fails:
                raise OSError(self.code, os.strerror(self.code))
            return int(real(*args))

        return run


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    faults = Faults()
    monkeypatch.setattr("ptm_accel.memory.disk.Io", faults.io)
    return faults


def made(pool: Pool, name: str, value: float, elements: int = ELEMENTS) -> PagedTensor:
    tensor = pool.create(name, Tag.PARAM, torch.Size([elements]), torch.float32)
    pool.fault(tensor, write=True).copy_(value + torch.arange(elements))
    return tensor


def holds(values: torch.Tensor, value: float) -> bool:
    return torch.equal(values, value + torch.arange(values.numel()))


def evict_in_vain(pool: Pool, faults: Faults, *tensors: PagedTensor) -> None:
    """Sends them away; the stores wait at the gate, and will fail."""
    faults.gate.clear()
    faults.left["pwritev"] = -1
    for tensor in tensors:
        assert pool.ahead.evict(tensor)
        assert tensor.place is Place.AWAY


def let_fail(faults: Faults) -> None:
    """From here on the stores fail; the disk is sound again as soon as they have."""
    faults.left["pwritev"] = 1
    faults.gate.set()


# ---- whole tensors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adopted", [False, True])
def test_what_could_not_be_stored_has_its_memory_again(
    adopted: bool, faults: Faults, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with memory_of(2 * PAGES, tmp_path) as memory:
        pool = memory.pool
        if adopted:
            # Its end is no whole unit, and is stored apart.
            tensor = pool.create("a", Tag.PARAM, torch.Size([ELEMENTS - 7]), torch.float32)
            pool.adopt(tensor, 1.0 + torch.arange(ELEMENTS - 7))
        else:
            tensor = made(pool, "a", 1.0)
        address, charged = pool.fault(tensor).data_ptr(), pool.budget.used_by_tag()
        evict_in_vain(pool, faults, tensor)
        let_fail(faults)
        pool.room.settle()
        assert (tensor.place, pool.budget.used_by_tag()) == (Place.DIRTY, charged)
        assert tensor in pool.shelf
        memory.check_integrity()
        assert pool.fault(tensor).data_ptr() == address, "the very memory"
        assert holds(pool.fault(tensor), 1.0)
        (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert said.startswith("a transfer failed (1 so far). Nothing is lost: it is made again, and the run ends if")
        assert f" of the scratch file in {tmp_path}: Input/output error (errno 5)" in said
        # What it cannot be sure of it does not do behind compute, until a store that is waited for has ended well.
        assert not pool.ahead.evict(tensor)
        pool.evict(tensor)
        assert holds(pool.fault(tensor, write=True), 1.0)
        assert pool.ahead.evict(tensor)
        assert holds(pool.fault(tensor), 1.0)


def test_who_asks_for_something_else_is_not_told(faults: Faults, tmp_path: Path) -> None:
    with memory_of(3 * PAGES, tmp_path) as memory:
        pool = memory.pool
        a, b = made(pool, "a", 1.0), made(pool, "b", 2.0)
        pool.evict(b)
        evict_in_vain(pool, faults, a)
        let_fail(faults)
        pool.room.settle()
        assert holds(pool.fault(b), 2.0)
        pool.fault(b, write=True)
        pool.evict(b)
        assert holds(pool.fault(made(pool, "c", 3.0)), 3.0)
        assert holds(pool.fault(b), 2.0)
        assert holds(pool.fault(a), 1.0)


@pytest.mark.parametrize("use", ["fault", "prefetch", "window", "windows", "snapshot", "pin", "occupy"])
def test_a_use_behind_a_store_that_fails(use: str, faults: Faults, tmp_path: Path) -> None:
    """The load is queued behind the store and so fails with it, in the middle of the use."""
    with memory_of(4 * PAGES, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0)
        if use in ("prefetch", "window", "windows"):
            evict_in_vain(pool, faults, tensor)
        else:
            # Somebody waits in there; the store fails while it does.
            evict_in_vain(pool, faults, tensor)
            threading.Timer(0.1, let_fail, [faults]).start()
        if use == "fault":
            assert holds(pool.fault(tensor), 1.0)
        elif use == "pin":
            pin = pool.pin(tensor)
            assert holds(pin.tensor, 1.0)
            pin.release()
        elif use == "snapshot":
            assert holds(pool.snapshot(tensor), 1.0)
        elif use == "occupy":
            assert not pool.occupy(tensor)
            assert holds(pool.fault(tensor), 1.0)
        elif use == "prefetch":
            assert pool.ahead.prefetch(tensor)
            window = pool.windows.open(tensor, 0, WINDOW_ALIGN)
            let_fail(faults)
            assert pool.windows.ready(window)[5] == 6.0
            pool.windows.close(window, wrote=False)
        else:
            windows = [pool.windows.open(tensor, start, start + WINDOW_ALIGN) for start in (0, WINDOW_ALIGN)]
            let_fail(faults)
            for window in windows if use == "windows" else windows[:1]:
                pool.windows.ready(window).neg_()
                pool.windows.close(window, wrote=True)
            pool.fault(tensor)[:WINDOW_ALIGN].neg_()
            if use == "windows":
                pool.fault(tensor)[WINDOW_ALIGN:].neg_()
            else:
                assert holds(pool.windows.ready(windows[1]), 1.0 + WINDOW_ALIGN)
                pool.windows.close(windows[1], wrote=False)
        assert faults.failed == 1
        memory.check_integrity()
        assert holds(pool.fault(tensor), 1.0)
        # A snapshot of what may leave the compute tier is taken at home.
        assert tensor.place is (Place.CLEAN if use == "snapshot" else Place.DIRTY)


@pytest.mark.parametrize("use", ["fault", "window"])
def test_what_comes_back_while_room_is_made_for_it(use: str, faults: Faults, tmp_path: Path) -> None:
    """There is no room for another copy of it before its store has ended, and that fails."""
    with memory_of(2 * PAGES, tmp_path) as memory:
        pool = memory.pool
        a, b = made(pool, "a", 1.0), made(pool, "b", 2.0)
        evict_in_vain(pool, faults, a)
        threading.Timer(0.1, let_fail, [faults]).start()
        if use == "fault":
            assert holds(pool.fault(a), 1.0)
        else:
            window = pool.windows.open(a, 0, WINDOW_ALIGN)
            assert holds(pool.windows.ready(window), 1.0)
            pool.windows.close(window, wrote=False)
        memory.check_integrity()
        assert holds(pool.fault(b), 2.0)
        assert holds(pool.fault(a), 1.0)


@pytest.mark.parametrize("end", ["drop", "forget", "adopt", "renew"])
def test_bytes_that_nobody_wants_any_more_do_not_come_back(end: str, faults: Faults, tmp_path: Path) -> None:
    with memory_of(2 * PAGES, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0)
        evict_in_vain(pool, faults, tensor)
        if end == "adopt":
            pool.adopt(tensor, 7.0 + torch.arange(ELEMENTS))
            let_fail(faults)
        else:
            let_fail(faults)
            uses = {"renew": lambda tensor: pool.renew(tensor, 7.0 + torch.arange(ELEMENTS))}
            {"drop": pool.drop, "forget": pool.forget, **uses}[end](tensor)
        pool.room.settle()
        memory.check_integrity()
        used = pool.budget.used_by_tag().get(Tag.PARAM, 0)
        if end in ("drop", "forget"):
            assert (tensor.place, used) == (Place.BLANK, 0)
        else:
            assert used == ELEMENTS * 4
            assert holds(pool.fault(tensor), 7.0)
            pool.evict(tensor)
            assert holds(pool.fault(tensor), 7.0)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_goes_on_failing_is_told_to_who_needs_room(code: int, faults: Faults, tmp_path: Path) -> None:
    with memory_of(2 * PAGES, tmp_path) as memory:
        pool = memory.pool
        a, b = made(pool, "a", 1.0), made(pool, "b", 2.0)
        faults.code, faults.left["pwritev"] = code, -1
        for _ in range(5):
            assert not pool.ahead.make_way(PAGE), "which ends, although all that leaves comes back"
            pool.room.settle()
            assert (a.place, b.place) == (Place.DIRTY, Place.DIRTY)
        before = faults.failed
        for _ in range(3):
            with pytest.raises(DiskError, match=rf"write of [ab] failed: .*{os.strerror(code)} \(errno {code}\)"):
                pool.room.reserve(PAGE, Tag.STAGING, "somebody")
        assert faults.failed <= before + 3 * 2 * PAGES
        memory.check_integrity()
        assert holds(pool.fault(a), 1.0)
        assert holds(pool.fault(b), 2.0)
        faults.left["pwritev"] = 0
        pool.room.reserve(PAGE, Tag.STAGING, "somebody").release()
        assert holds(pool.fault(a), 1.0)
        assert holds(pool.fault(b), 2.0)


@pytest.mark.parametrize("kind", ["host+disk", "mock+host+disk"])
def test_a_store_that_is_waited_for_is_made_once_more(kind: str, faults: Faults, tmp_path: Path) -> None:
    with memory_of(2 * PAGES, tmp_path, kind) as memory:
        pool = memory.pool
        tensors = [made(pool, f"t{n}", float(n)) for n in range(2)]
        faults.left["pwritev"] = 1
        tensors += [made(pool, f"t{n}", float(n)) for n in range(2, 12)]
        assert faults.failed == 1
        for n, tensor in enumerate(tensors):
            assert holds(pool.fault(tensor), float(n))


@pytest.mark.parametrize("ahead", [False, True])
def test_a_load_that_fails_is_made_once_more(ahead: bool, faults: Faults, tmp_path: Path) -> None:
    with memory_of(2 * PAGES, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0)
        pool.evict(tensor)
        faults.left["preadv"] = 1
        if ahead:
            assert pool.ahead.prefetch(tensor)
        assert holds(pool.fault(tensor), 1.0)
        pool.evict(tensor)
        faults.left["preadv"] = 1
        window = pool.windows.open(tensor, 0, WINDOW_ALIGN)
        assert holds(pool.windows.ready(window), 1.0)
        pool.windows.close(window, wrote=False)
        assert faults.failed == 2


def test_a_disk_whose_threads_are_gone_is_told_and_not_waited_for(
    faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can never end neither comes back nor leaves."""
    with memory_of(2 * PAGES, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0)
        faults.gate.clear()
        assert pool.ahead.evict(tensor)
        with monkeypatch.context() as patch:
            patch.setattr(Lanes, "_is_staffed", lambda lanes: False)
            with pytest.raises(DiskError, match=r"all \d threads of the disk tier .* have ended"):
                pool.room.reserve(2 * PAGES * PAGE, Tag.STAGING, "somebody")
            with pytest.raises(DiskError, match=r"all \d threads of the disk tier .* have ended"):
                pool.snapshot(tensor)
        faults.gate.set()
        assert holds(pool.fault(tensor), 1.0)


# ---- parts of tensors --------------------------------------------------------------------------------------------


def written_in_vain(pool: Pool, faults: Faults) -> PagedTensor:
    """A tensor that is away, the first part of which was written and could not be stored."""
    tensor = made(pool, "a", 1.0)
    pool.evict(tensor)
    window = pool.windows.open(tensor, 0, WINDOW_ALIGN)
    pool.windows.ready(window).neg_()
    faults.left["pwritev"] = -1
    pool.windows.close(window, wrote=True)
    pool.room.settle()
    assert faults.failed
    return tensor


@pytest.mark.parametrize("use", ["fault", "window", "prefetch", "snapshot", "occupy", "room"])
def test_a_part_that_could_not_be_stored_is_stored_again(use: str, faults: Faults, tmp_path: Path) -> None:
    with memory_of(3 * PAGES, tmp_path) as memory:
        pool = memory.pool
        tensor = written_in_vain(pool, faults)
        assert pool.budget.used_by_tag()[Tag.STAGING] >= WINDOW_ALIGN * 4
        assert pool.room.available_bytes() == 3 * PAGES * PAGE, "the room of it can be had"
        uses = {
            "fault": lambda: pool.fault(tensor),
            "window": lambda: pool.windows.open(tensor, 0, WINDOW_ALIGN),
            "snapshot": lambda: pool.snapshot(tensor),
            "occupy": lambda: pool.occupy(tensor),
            "room": lambda: pool.room.reserve(3 * PAGES * PAGE, Tag.STAGING, "somebody"),
        }
        if use == "prefetch":
            assert not pool.ahead.prefetch(tensor), "that would have to be waited for"
        else:
            with pytest.raises(DiskError, match="write of a failed"):
                uses[use]()
        memory.check_integrity()
        faults.left["pwritev"] = 1
        if use == "room":
            uses[use]().release()
        elif use == "window":
            window = uses[use]()
            assert holds(-pool.windows.ready(window), 1.0)
            pool.windows.close(window, wrote=False)
        elif use == "occupy":
            assert pool.occupy(tensor)
            pool.vacate(tensor)
        elif use == "snapshot":
            assert pool.snapshot(tensor)[0] == -1.0
        assert holds(-pool.fault(tensor)[:WINDOW_ALIGN], 1.0)
        assert holds(pool.fault(tensor)[WINDOW_ALIGN:], 1.0 + WINDOW_ALIGN)
        pool.room.collect()
        held = memory.pool.budget.used_by_tag()
        assert held.get(Tag.STAGING, 0) < WINDOW_ALIGN * 4


def test_the_other_parts_are_stored_beside_one_that_could_not_be(faults: Faults, tmp_path: Path) -> None:
    with memory_of(3 * PAGES, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0)
        pool.evict(tensor)
        windows = [pool.windows.open(tensor, start, start + WINDOW_ALIGN) for start in (0, WINDOW_ALIGN)]
        for window in windows:
            pool.windows.ready(window).neg_()
        faults.left["pwritev"] = 1
        for window in windows:
            pool.windows.close(window, wrote=True)
        assert holds(-pool.fault(tensor), 1.0)
        assert faults.failed == 1


def test_a_part_that_could_not_be_stored_ends_with_its_tensor(faults: Faults, tmp_path: Path) -> None:
    with memory_of(3 * PAGES, tmp_path) as memory:
        pool = memory.pool
        tensor = written_in_vain(pool, faults)
        pool.drop(tensor)
        pool.room.collect()
        assert pool.room.available_bytes() == pool.budget.free_bytes == 3 * PAGES * PAGE


# ---- any order ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=25, deadline=None)
@given(steps=STEPS, pages=st.integers(10, 40), failing=st.sets(st.integers(0, 60)))
# A load that is behind a store that fails has not failed itself.
@example(steps=[("window", 1, 1), ("window", 1, 0)], pages=10, failing={2, 3})
def test_any_order_of_accesses_with_a_failure_now_and_then(
    kind: str, steps: list[Step], pages: int, failing: set[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    faults = Faults()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ptm_accel.memory.disk.Io", faults.io)
        with memory_of(pages, tmp_path_factory.mktemp("pool"), kind) as memory:
            twin = Twin(memory.pool)
            for number, step in enumerate(steps):
                faults.left = {"preadv": int(number * 2 in failing), "pwritev": int(number * 2 + 1 in failing)}
                try:
                    twin.step(*step)
                except BudgetError:
                    assert twin.pins or twin.views
                memory.pool.check_integrity()
            faults.left = {"preadv": 0, "pwritev": 0}
            twin.end()
