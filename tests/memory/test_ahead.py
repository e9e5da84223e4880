"""Sending for tensors before they are used, and sending them away behind compute."""

from __future__ import annotations

import errno
import gc
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.scratch import Io
from ptm_accel.memory.windows import Windows
from tests.tiers import PAGE, evict_and_wait, memory_of

KINDS = ("host+disk", "mock+host", "mock+host+disk")


class Gate:
    """System calls of the disk tier that wait, or fail, while they are told to."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.failing: set[str] = set()

    def io(self) -> Io:
        return Io(preadv=self.call("preadv"), pwritev=self.call("pwritev"))

    def call(self, name: str) -> Any:
        real = getattr(os, name)

        def run(*args: Any) -> int:
            assert self.open.wait(20)
            if name in self.failing:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return int(real(*args))

        return run


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    gate = Gate()
    monkeypatch.setattr("ptm_accel.memory.disk.Io", gate.io)
    return gate


def made(pool: Pool, name: str, value: float, pages: int = 1) -> Block:
    tensor = pool.create(name, Tag.PARAM, torch.Size([1024 * pages]), torch.float32)
    pool.fault(tensor, write=True).fill_(value)
    return tensor


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_sent_for_is_no_fault(kind: str, tmp_path: Path) -> None:
    with memory_of(2, tmp_path, kind) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 3.0)
        assert pool.prefetch(tensor)
        assert tensor.place is Place.DIRTY
        evict_and_wait(pool, tensor)
        faults = pool.stats.faults
        assert pool.prefetch(tensor)
        assert pool.prefetch(tensor)
        assert tensor.place is Place.ARRIVING
        memory.check_integrity()
        assert (pool.fault(tensor) == 3.0).all()
        assert tensor.place is Place.CLEAN
        assert (pool.stats.faults, pool.stats.hits) == (faults, 1)


def test_nothing_is_moved_and_nothing_waited_for(gate: Gate, tmp_path: Path) -> None:
    with memory_of(2, tmp_path) as memory:
        pool = memory.pool
        a, b, c = (made(pool, name, value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
        assert a.place is Place.AWAY
        assert not pool.prefetch(a), "there is no room for it"
        assert (b.place, c.place) == (Place.DIRTY, Place.DIRTY)
        gate.open.clear()
        pool.admission.evict(b)
        assert b.place is Place.AWAY
        assert pool.prefetch(a), "the room comes free as the store ends, and the load comes behind it"
        assert a.arrival is not None
        assert not a.arrival.done()
        assert not pool.prefetch(b), "one load only has the room of a store"
        assert c.place is Place.DIRTY
        memory.check_integrity()
        gate.open.set()
        pool.admission.released.settle()
        assert not pool.prefetch(b)
        assert (pool.fault(a) == 1.0).all()
        assert (pool.fault(b) == 2.0).all()
        assert not pool.prefetch(pool.create("blank", Tag.PARAM, torch.Size([8]), torch.float32))


def test_a_load_takes_the_room_of_several_stores(gate: Gate, tmp_path: Path) -> None:
    """In memory of its own, which takes none before theirs has been given back."""
    with memory_of(4, tmp_path) as memory:
        pool = memory.pool
        large = made(pool, "large", 5.0, pages=3)
        a, b, c, d = (made(pool, name, value) for name, value in zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True))
        assert large.place is Place.AWAY
        used = pool.budget.used_bytes
        gate.open.clear()
        for each in (a, b, c):
            pool.admission.evict(each)
        assert pool.prefetch(large)
        assert large.arrival is not None
        assert not large.arrival.done()
        assert pool.budget.used_bytes == used
        memory.check_integrity()
        assert not pool.prefetch(a), "that room is taken"
        gate.open.set()
        assert (pool.fault(large) == 5.0).all()
        assert (pool.fault(d) == 4.0).all()
        for each, value in ((a, 1.0), (b, 2.0), (c, 3.0)):
            assert (pool.fault(each) == value).all()
        memory.check_integrity()


def test_a_load_does_not_take_memory_that_is_viewed(gate: Gate, tmp_path: Path) -> None:
    with memory_of(2, tmp_path) as memory:
        pool = memory.pool
        a, b, _ = (made(pool, name, value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
        kept = pool.fault(b).view(-1)[:4]
        gate.open.clear()
        pool.admission.evict(b)
        assert not pool.prefetch(a)
        gate.open.set()
        assert (pool.fault(a) == 1.0).all()
        assert (kept == 2.0).all()
        del kept


def test_a_load_that_is_given_up_behind_a_store_gives_its_room_back(gate: Gate, tmp_path: Path) -> None:
    with memory_of(2, tmp_path) as memory:
        pool = memory.pool
        a, b, c = (made(pool, name, value) for name, value in (("a", 1.0), ("b", 2.0), ("c", 3.0)))
        gate.open.clear()
        pool.admission.evict(b)
        assert pool.prefetch(a)
        pool.admission.turn_back(a)
        assert a.place is Place.AWAY
        assert pool.prefetch(a), "the load that was given up still writes there, and this one comes behind it"
        pool.admission.turn_back(a)
        gate.open.set()
        pool.admission.released.settle()
        for each, value in ((b, 2.0), (a, 1.0), (c, 3.0)):
            assert (pool.fault(each) == value).all()
        memory.check_integrity()


def test_a_load_comes_after_the_store_of_the_same_bytes(gate: Gate, tmp_path: Path) -> None:
    with memory_of(2, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0)
        gate.open.clear()
        pool.admission.evict(tensor)
        assert pool.prefetch(tensor), "there is room for it beside what still leaves"
        gate.open.set()
        assert (pool.fault(tensor) == 1.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_arriving_tensors_make_room_for_what_is_wanted_now(kind: str, tmp_path: Path) -> None:
    with memory_of(2, tmp_path, kind) as memory:
        pool = memory.pool
        tensors = [made(pool, name, float(n)) for n, name in enumerate("abcd")]
        a, b, c, d = tensors
        evict_and_wait(pool, c)
        evict_and_wait(pool, d)
        assert pool.prefetch(a)
        assert pool.prefetch(b)
        assert (pool.fault(c) == 2.0).all()
        assert a.place is Place.AWAY
        assert b.place is Place.ARRIVING
        pool.drop(b)
        assert b.place is Place.BLANK
        assert pool.prefetch(d)
        pool.forget(d)
        assert (pool.fault(a) == 0.0).all()


def test_adopted_bytes_replace_those_that_arrive(tmp_path: Path) -> None:
    with memory_of(4, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0)
        evict_and_wait(pool, tensor)
        assert pool.prefetch(tensor)
        pool.adopt(tensor, torch.full((1024,), 7.0))
        assert (pool.fault(tensor) == 7.0).all()


def test_a_window_over_a_tensor_that_arrives(tmp_path: Path) -> None:
    with memory_of(8, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0, pages=4)
        evict_and_wait(pool, tensor)
        window = Windows(pool).open(tensor, 0, 4096)
        assert pool.prefetch(tensor)
        Windows(pool).ready(window).fill_(9.0)
        Windows(pool).close(window, wrote=True)
        assert (pool.fault(tensor) == 9.0).all()
        evict_and_wait(pool, tensor)
        assert pool.prefetch(tensor)
        window = Windows(pool).open(tensor, 0, 4096)
        assert (Windows(pool).ready(window) == 9.0).all()
        Windows(pool).close(window, wrote=False)


def test_a_window_that_is_all_of_a_tensor_has_its_shape(tmp_path: Path) -> None:
    with memory_of(8, tmp_path) as memory:
        pool = memory.pool
        tensor = pool.create("a", Tag.STATE, torch.Size([4, 1024]), torch.float32)
        values = torch.arange(4096.0).view(4, 1024)
        pool.fault(tensor, write=True).copy_(values)
        for sent_for in (True, False):
            # There, arriving or staged; all of it or a part.
            for stop in (4096, 2048):
                expected = values if stop == 4096 else values.view(-1)[:stop]
                window = Windows(pool).open(tensor, 0, stop)
                here = Windows(pool).shaped(window)
                assert torch.equal(here, expected)
                assert tensor.extent is not None
                assert here.data_ptr() == tensor.extent.tensor.data_ptr()
                assert here is not tensor.extent.tensor, "an optimizer may give it other data"
                assert torch.equal(Windows(pool).ready(window), expected.reshape(-1))
                assert torch.equal(Windows(pool).shaped(window), expected)
                here.add_(1)
                values.view(-1)[:stop] += 1
                Windows(pool).close(window, wrote=True)
                with pytest.raises(AssertionError, match="after its end"):
                    Windows(pool).shaped(window)
                evict_and_wait(pool, tensor)
                staged = Windows(pool).open(tensor, 0, stop)
                assert torch.equal(Windows(pool).shaped(staged), expected)
                Windows(pool).close(staged, wrote=False)
                del here, window, staged
                if sent_for:
                    assert pool.prefetch(tensor)
                else:
                    pool.fault(tensor)
        assert torch.equal(pool.fault(tensor), values)


def test_a_tensor_that_arrives_stays_for_each_of_its_windows(tmp_path: Path) -> None:
    with memory_of(3, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 3.0, pages=2)
        evict_and_wait(pool, tensor)
        assert pool.prefetch(tensor)
        first, second, third = (Windows(pool).open(tensor, 0, 1024) for _ in range(3))
        Windows(pool).ready(first)
        Windows(pool).close(first, wrote=False)
        assert tensor not in pool.eviction, "the others have not been closed"
        with pytest.raises(BudgetError):
            pool.admission.reserve(2 * PAGE, Tag.STAGING, "somebody else")
        faults = pool.stats.faults
        assert (Windows(pool).ready(second) == 3.0).all()
        Windows(pool).close(second, wrote=True)
        Windows(pool).close(third, wrote=False)
        assert tensor in pool.eviction
        assert (pool.stats.faults, tensor.place) == (faults, Place.DIRTY)


def test_windows_of_a_tensor_that_did_not_come_end_without_harm(gate: Gate, tmp_path: Path) -> None:
    with memory_of(3, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 3.0)
        evict_and_wait(pool, tensor)
        gate.failing = {"preadv"}
        assert pool.prefetch(tensor)
        window = Windows(pool).open(tensor, 0, 1024)
        with pytest.raises(DiskError):
            Windows(pool).ready(window)
        Windows(pool).close(window, wrote=False)
        assert tensor.place is Place.AWAY
        pool.admission.released.collect()
        assert pool.admission.available_bytes() == 3 * PAGE


def test_a_load_that_fails_is_told_to_who_reads(gate: Gate, tmp_path: Path) -> None:
    with memory_of(2, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0)
        evict_and_wait(pool, tensor)
        gate.failing.add("preadv")
        assert pool.prefetch(tensor)
        with pytest.raises(DiskError, match="read of a failed"):
            pool.fault(tensor)
        assert tensor.place is Place.AWAY
        with pytest.raises(DiskError, match="read of a failed"):
            pool.prefetch(tensor)


def test_a_store_behind_that_fails_is_told_to_the_next_who_needs_the_disk(gate: Gate, tmp_path: Path) -> None:
    with memory_of(2, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0)
        gate.failing.add("pwritev")
        other = made(pool, "b", 2.0)
        pool.admission.evict(tensor)
        pool.admission.released.settle()
        for use in (pool.fault, pool.snapshot, pool.prefetch):
            with pytest.raises(DiskError, match="write of a failed"):
                use(tensor)
        with pytest.raises(DiskError, match="write of a failed"):
            pool.admission.reserve(2 * PAGE, Tag.STAGING, "somebody else")
        assert (pool.fault(other) == 2.0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_what_leaves_behind_comes_back_as_it_was(kind: str, tmp_path: Path) -> None:
    with memory_of(3, tmp_path, kind) as memory:
        pool = memory.pool
        tensors = [made(pool, f"t{n}", float(n)) for n in range(6)]
        for _ in range(3):
            for n, tensor in enumerate(tensors):
                values = pool.fault(tensor, write=True)
                assert (values == float(n)).all()
                del values
                pool.admission.evict(tensor)
                pool.prefetch(tensors[(n + 2) % 6])


def test_a_full_backing_store_keeps_what_should_leave(tmp_path: Path) -> None:
    with memory_of(4, tmp_path) as memory:
        pool = memory.pool
        tensor = made(pool, "a", 1.0)
        assert memory.disk is not None
        with memory.disk.budget.reserve(memory.disk.budget.free_bytes, Tag.STAGING, "somebody else"):
            with pytest.raises(BudgetError, match="disk"):
                pool.admission.evict(tensor)
            assert tensor.place is Place.DIRTY
            assert not pool.admission.make_way(pool.budget.capacity_bytes), "nothing can leave, which is no error here"
            assert tensor.place is Place.DIRTY


def test_what_a_plan_wants_last_leaves_first(tmp_path: Path) -> None:
    with memory_of(3, tmp_path) as memory:
        pool = memory.pool
        a, b, c = (made(pool, name, 1.0) for name in "abc")
        pool.next_use = lambda block: {"a": 3, "b": 9, "c": 5}.get(block.name, 0)
        made(pool, "d", 1.0)
        assert (a.place.resident, b.place, c.place.resident) == (True, Place.AWAY, True)
        made(pool, "e", 1.0)
        assert (a.place.resident, c.place) == (True, Place.AWAY)
        pool.next_use = None
        made(pool, "f", 1.0)
        assert a.place is Place.AWAY, "used longest ago"


class EndsUnseen:
    """A transfer that has not ended when it is first asked, and has at every later look."""

    def __init__(self) -> None:
        self.asked = 0

    def done(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def wait(self) -> None:
        raise AssertionError("nobody has to wait for what has ended")

    def order(self) -> None:
        self.wait()


def test_a_transfer_that_ends_between_two_looks_is_no_reason_to_refuse(tmp_path: Path) -> None:
    with memory_of(1, tmp_path) as memory:
        admission = memory.pool.admission
        reservation, buffer = admission.take_buffer(PAGE, Tag.STAGING, "a window")
        octets = buffer.octets
        assert octets is not None
        admission.released.add(octets, buffer, reservation, EndsUnseen())
        del octets
        admission.reserve(PAGE, Tag.STAGING, "the next window").release()


@pytest.mark.parametrize("call", ["preadv", "pwritev"])
def test_an_error_that_was_caught_holds_no_memory(call: str, tmp_path: Path, gate: Gate) -> None:
    """What is raised refers to the frames that it has passed: in a cycle, they would last until the collector comes."""
    with memory_of(16, tmp_path, "mock+host+disk") as memory:
        pool = memory.pool
        tensors = [made(pool, f"t{number}", number, pages=8) for number in range(8)]
        for tensor in tensors:
            if tensor.place.resident:
                evict_and_wait(pool, tensor)
        pool.admission.released.settle()
        gc.collect()
        gc.disable()
        try:
            before = pool.budget.used_by_tag()
            gate.failing = {call}
            for tensor in tensors:
                with suppress(DiskError):
                    pool.fault(tensor)
                    evict_and_wait(pool, tensor)
                with suppress(DiskError):
                    window = Windows(pool).open(tensor, 0, tensor.numel)
                    try:
                        Windows(pool).ready(window)
                    finally:
                        Windows(pool).close(window, wrote=False)
            gate.failing = set()
            pool.admission.released.collect()
            assert pool.budget.used_by_tag() == before
        finally:
            gc.enable()
