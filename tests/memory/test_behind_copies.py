"""Memory that is used again behind the copies that still use it: the thread that computes waits for none of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.device import CopyDirection
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.setup import Capacities, Memory, build_memory
from ptm_accel.units import MIB
from tests.card import Card, CardTier
from tests.memory.test_host_store import PAGE, UNIT, Setup
from tests.mock_device import MockCopy, MockDevice


class Gate:
    """Holds copies of some directions up until it is opened."""

    def __init__(self, *directions: CopyDirection) -> None:
        self._closed = set(directions)
        self._opened = threading.Event()

    def __call__(self, copy: MockCopy) -> None:
        if copy.direction in self._closed:
            assert self._opened.wait(20)

    def open(self) -> None:
        self._opened.set()


@contextmanager
def card(pages: int, delay: Gate, *, small: bool = False) -> Iterator[tuple[Pool, CardTier]]:
    """A card whose pages are of 4 KiB, and all of which are cut from slabs, or are none of them as they are `small`."""
    tier = CardTier(Card(16 * MIB), 1) if small else CardTier(Card(16 * pages * 4096, 1024), 1024)
    memory: Memory = build_memory(Capacities(page_bytes=4096, host_bytes=1 << 20, device_bytes=pages * 4096), tier)
    tier.delay = delay
    try:
        yield memory.pool, tier
        memory.check_integrity()
    finally:
        delay.open()
        memory.close()


def made(pool: Pool, value: float) -> Block:
    tensor = pool.create(f"t{value:g}", Tag.STATE, torch.Size([1024]), torch.float32)
    pool.fault(tensor, write=True).fill_(value)
    return tensor


def test_a_load_takes_the_memory_of_a_store_that_runs() -> None:
    gate = Gate(CopyDirection.OUT)
    with card(2, gate) as (pool, tier):
        gate.open()
        first, second, third = made(pool, 1), made(pool, 2), made(pool, 3)
        assert [t.place for t in (first, second, third)] == [Place.AWAY, Place.DIRTY, Place.DIRTY]
        for store in first.stores:
            store.wait()
        tier.delay = gate = Gate(CopyDirection.OUT)
        pool.admission.evict(second)
        assert pool.prefetch(first)
        assert first.place is Place.ARRIVING
        assert not any(store.done() for store in second.stores), "nobody has waited for it"
        gate.open()
        assert pool.fault(first).eq(1).all()
        assert pool.fault(second).eq(2).all()
        assert pool.fault(third).eq(3).all()


@pytest.mark.parametrize("small", [False, True], ids=["slabs", "small"])
def test_what_is_written_to_such_memory_comes_after_the_store(small: bool) -> None:
    gate = Gate(CopyDirection.OUT)
    with card(1, gate, small=small) as (pool, _):
        first = made(pool, 1)
        threading.Timer(0.2, gate.open).start()
        second = made(pool, 2)
        assert pool.fault(first).eq(1).all()
        assert pool.fault(second).eq(2).all()


def test_a_load_that_is_given_up_leaves_its_memory_to_the_next() -> None:
    gate = Gate(CopyDirection.IN)
    with card(2, gate) as (pool, _):
        tensors = [made(pool, value) for value in (1, 2, 3, 4)]
        assert tensors[0].place is tensors[1].place is Place.AWAY
        for tensor in tensors[2:]:
            pool.admission.evict(tensor)
        assert pool.prefetch(tensors[0])
        pool.admission.turn_back(tensors[0])
        assert pool.prefetch(tensors[1])
        assert pool.prefetch(tensors[2])
        gate.open()
        for value in (2, 3, 1, 4):
            assert pool.fault(tensors[value - 1]).eq(value).all()


@pytest.mark.parametrize("of_torch", [False, True], ids=["small", "adopted"])
def test_memory_without_a_slab_is_kept_until_its_store_has_ended(of_torch: bool) -> None:
    gate = Gate(CopyDirection.OUT)
    with card(2, gate, small=True) as (pool, _):
        first = pool.create("t1", Tag.GRAD, torch.Size([1024]), torch.float32)
        if of_torch:
            pool.adopt(first, torch.ones(1024))
        else:
            pool.fault(first, write=True).fill_(1)
        pool.admission.evict(first)
        pool.admission.released.collect()
        assert pool.admission.released.nbytes == 4096, "charged until then, too"
        second = made(pool, 2)
        threading.Timer(0.2, gate.open).start()
        third = made(pool, 3)
        assert second.place.resident, "what comes free with the store is waited for, and nothing leaves for it"
        assert pool.fault(first).eq(1).all()
        assert pool.fault(second).eq(2).all()
        assert pool.fault(third).eq(3).all()


@pytest.mark.parametrize("small", [False, True], ids=["slabs", "small"])
def test_a_view_keeps_its_memory_however_the_store_stands(small: bool) -> None:
    gate = Gate(CopyDirection.OUT)
    with card(2, gate, small=small) as (pool, _):
        first = made(pool, 1)
        kept = pool.fault(first)[:4]
        pool.admission.evict(first)
        second = made(pool, 2)
        assert kept.eq(1).all()
        assert pool.admission.released.nbytes == 4096
        gate.open()
        del kept
        assert pool.fault(first).eq(1).all()
        assert pool.fault(second).eq(2).all()


def test_a_store_that_fails_is_no_matter_of_who_has_its_memory_next() -> None:
    gate = Gate()
    with card(2, gate) as (pool, tier):
        first, second = made(pool, 1), made(pool, 2)
        pool.admission.evict(first)
        assert pool.fault(second).eq(2).all()
        for store in first.stores:
            store.wait()

        def fail(copy: MockCopy) -> None:
            if copy.direction is CopyDirection.OUT:
                raise OSError("the link is down")

        tier.delay = fail
        pool.admission.evict(second)
        while not second.stores[-1].done():
            time.sleep(1e-3)
        tier.delay = None
        third = made(pool, 3)
        assert pool.fault(first).eq(1).all()
        assert pool.fault(third).eq(3).all()
        with pytest.raises(OSError, match="the link is down"):
            pool.fault(second)
        # Let go of without another store.
        pool.drop(second)


def test_a_frame_is_freed_without_waiting_for_copies_of_the_device() -> None:
    gate = Gate(CopyDirection.IN)
    s = Setup(pages=2, slots=None, device=MockDevice(delay=gate))
    handle = s.new(1)
    s.store(handle, 5)
    into = s.block(PAGE)
    load = s.backing.load(handle, 0, into)
    s.backing.free(handle)
    assert not load.done()
    assert s.host.used_bytes == PAGE, "the copy still reads it"
    s.backing.check_integrity()
    other = s.new(1, "other")
    s.store(other, 6)
    assert s.host.used_bytes == 2 * PAGE
    threading.Timer(0.2, gate.open).start()
    third = s.new(1, "third")
    assert load.done(), "the last frame was waited for"
    s.store(third, 7)
    assert into.eq(5).all()
    assert s.load(other).eq(6).all()
    s.close()


def test_a_page_is_held_while_it_is_read_and_changed_after_that() -> None:
    gate = Gate(CopyDirection.IN)
    s = Setup(pages=2, slots=None, device=MockDevice(delay=gate))
    handle = s.new(1)
    s.store(handle, 5)
    into = s.block(PAGE)
    load = s.backing.load(handle, 0, into)
    run = s.backing.hold(handle, 0, PAGE)
    assert not load.done()
    threading.Timer(0.2, gate.open).start()
    run.wait()
    assert load.done()
    run.octets.fill_(6)
    s.backing.let_go(run, wrote=True)
    assert into.eq(5).all()
    assert s.load(handle).eq(6).all()
    s.close()


def test_a_store_comes_after_what_the_cpu_still_adds_there() -> None:
    gate = Gate(CopyDirection.OUT)
    gate.open()
    s = Setup(pages=4, slots=None, device=MockDevice(delay=gate))
    total, more = s.new(1, "total"), s.new(1, "more")
    s.store(total, 1)
    source = s.block(PAGE)
    source.fill_(2)
    s.device.delay = gate = Gate(CopyDirection.OUT)
    s.backing.store(more, 0, source)
    added = s.backing.add(total, torch.uint8, more, torch.uint8, [(0, PAGE)])
    assert added is not None
    assert not added.done(), "what is added has not come yet"
    threading.Timer(0.2, gate.open).start()
    s.store(total, 7)
    assert added.done()
    assert s.load(total).eq(7).all()
    third = s.new(1, "third")
    s.store(third, 5)
    again = s.backing.add(third, torch.uint8, total, torch.uint8, [(0, 16), (UNIT, PAGE)])
    assert again is not None
    # A load comes after it, and so does the end of the handle that is read.
    s.backing.free(total)
    loaded = s.load(third)
    assert loaded[:16].eq(12).all()
    assert loaded[16:UNIT].eq(5).all()
    assert loaded[UNIT:].eq(12).all()
    s.close()
