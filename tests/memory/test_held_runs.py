"""Bytes that the host changes in place on the pages under a device."""

from __future__ import annotations

import threading

import pytest
import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.host_store import HeldRun
from tests.memory.test_host_store import CLEAN, DISK, FRAME, PAGE, UNIT, Setup
from tests.mock_device import MockDevice


def settled(run: HeldRun) -> torch.Tensor:
    run.wait()
    return run.octets


def test_what_the_host_writes_is_what_the_device_loads() -> None:
    s = Setup()
    handle = s.new(2)
    s.store(handle, 1)
    run = s.backing.hold(handle, PAGE + UNIT, 2 * UNIT)
    assert settled(run).eq(1).all()
    run.octets.fill_(7)
    s.backing.let_go(run, wrote=True)
    loaded = s.load(handle).view(8, UNIT)[:, 0]
    assert loaded.tolist() == [1, 1, 1, 1, 1, 7, 7, 1]
    assert s.states(handle) == [FRAME, FRAME]
    s.close()


@pytest.mark.parametrize("wrote", [True, False])
def test_a_page_on_disk_is_read_and_its_slot_is_out_of_date_once_it_was_changed(wrote: bool) -> None:
    s = Setup(pages=1)
    a, b = s.new(1, "a"), s.new(1, "b")
    s.store(a, 1)
    s.store(b, 2)
    assert s.states(a) == [DISK]
    run = s.backing.hold(a, 0, PAGE)
    assert s.states(a) == [CLEAN]
    assert settled(run).eq(1).all()
    if wrote:
        run.octets.fill_(5)
    s.backing.let_go(run, wrote=wrote)
    assert s.states(a) == [FRAME if wrote else CLEAN]
    assert s.load(b).eq(2).all()
    assert s.states(a) == [DISK]
    assert s.load(a).eq(5 if wrote else 1).all()
    s.close()


def test_a_page_that_is_held_stays_in_its_frame() -> None:
    s = Setup(pages=2)
    a, b = s.new(1, "a"), s.new(1, "b")
    s.store(a, 1)
    s.store(b, 2)
    first, second = s.backing.hold(a, 0, UNIT), s.backing.hold(a, UNIT, UNIT)
    c = s.new(1, "c")
    assert s.states(a) == [FRAME]
    assert s.states(b) == [DISK]
    s.backing.let_go(first, wrote=False)
    other = s.backing.hold(c, 0, UNIT)
    with pytest.raises(BudgetError, match="cannot place"):
        s.backing.hold(b, 0, UNIT)
    assert s.backing.make_room(PAGE) == 0
    s.backing.let_go(second, wrote=False)
    s.backing.let_go(other, wrote=False)
    assert s.load(b).eq(2).all()
    s.close()


def test_a_store_that_still_runs_is_waited_for() -> None:
    gate = threading.Event()
    s = Setup(device=MockDevice(delay=lambda copy: (gate.wait(20), None)[1]))
    handle = s.new(1)
    source = s.block(PAGE)
    source.fill_(3)
    stored = s.backing.store(handle, 0, source)
    run = s.backing.hold(handle, 0, PAGE)
    assert not stored.done()
    gate.set()
    assert settled(run).eq(3).all()
    stored.wait()
    s.backing.let_go(run, wrote=False)
    s.close()


def test_a_store_that_failed_is_raised() -> None:
    s = Setup()
    handle = s.new(1)
    s.store(handle, 3)

    def fail(copy: object) -> None:
        raise OSError("the link is down")

    s.device.delay = fail
    with pytest.raises(OSError, match="the link is down"):
        s.backing.store(handle, 0, s.block(PAGE)).wait()
    s.device.delay = None
    with pytest.raises(OSError, match="the link is down"):
        s.backing.hold(handle, 0, PAGE)
    s.close()


def test_a_read_that_failed_is_tried_again() -> None:
    s = Setup(pages=1)
    a, b = s.new(1, "a"), s.new(1, "b")
    s.store(a, 1)
    s.store(b, 2)
    s.disk.fail = lambda what: OSError("unreadable") if what == "read" else None
    run = s.backing.hold(a, 0, PAGE)
    with pytest.raises(OSError, match="unreadable"):
        settled(run)
    s.backing.let_go(run, wrote=False)
    s.disk.fail = lambda what: None
    run = s.backing.hold(a, 0, PAGE)
    assert settled(run).eq(1).all()
    s.backing.let_go(run, wrote=False)
    s.close()
