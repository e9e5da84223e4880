"""A card with no contiguous range that is free: the cheapest one is evicted, and bytes stay what they are."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.block import Block
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.setup import Capacities, Memory, build_memory
from ptm_accel.memory.slabs import Run
from tests.card import Card, CardTier
from tests.tiers import evict_and_wait, jitter

SCALE = 1024
"""Small blocks are of up to a KiB, and slabs are multiples of two."""

PAGE = 4096
PAGES = 16
"""The limit, and the first slab."""


def opened(seed: int = 0) -> Memory:
    capacities = Capacities(page_bytes=PAGE, host_bytes=1 << 20, device_bytes=PAGES * PAGE)
    return build_memory(capacities, CardTier(Card(4 * PAGES * PAGE, SCALE), SCALE, delay=jitter(seed)))


@pytest.fixture
def pool() -> Iterator[Pool]:
    memory = opened()
    yield memory.pool
    memory.check_integrity()
    memory.close()


def made(pool: Pool, pages: int, value: float) -> Block:
    tensor = pool.create(f"t{value:g}", Tag.STATE, torch.Size([pages * PAGE // 4]), torch.float32)
    pool.fault(tensor, write=True).fill_(value)
    return tensor


def run_of(tensor: Block) -> Run:
    assert tensor.extent is not None
    assert tensor.extent.buffer is not None
    assert isinstance(tensor.extent.buffer.region, Run)
    return tensor.extent.buffer.region


def with_gaps(pool: Pool) -> list[Block]:
    """Sixteen pages, every second of which is free."""
    tensors = [made(pool, 1, float(number)) for number in range(PAGES)]
    for tensor in tensors[::2]:
        pool.forget(tensor)
    pool.admission.released.collect()
    return tensors[1::2]


def test_what_is_between_two_gaps_leaves_for_a_larger_one(pool: Pool) -> None:
    tensors = with_gaps(pool)
    before = pool.stats.evictions
    large = made(pool, 3, 100.0)
    assert pool.stats.evictions == before + 1, "one that is between two gaps"
    assert (pool.fault(large) == 100).all()
    for number, tensor in enumerate(tensors):
        assert (pool.fault(tensor) == 2 * number + 1).all()


def test_the_least_bytes_leave_however_recently_they_were_used(pool: Pool) -> None:
    sizes = [2, 1, 1, 2, 1, 1, 1, 1, 6]
    tensors = [made(pool, pages, float(number)) for number, pages in enumerate(sizes)]
    for number in (0, 2, 4, 6, 7):
        pool.forget(tensors[number])
    pool.admission.released.collect()
    # Gaps of 2, 1, 1 and 2 pages, between them 1, 2 and 1.
    made(pool, 4, 100.0)
    assert [number for number in (1, 3, 5, 8) if not tensors[number].place.resident] == [1]


def test_what_is_pinned_or_viewed_stays_where_it_is(pool: Pool) -> None:
    tensors = with_gaps(pool)
    pins = [pool.pin(tensor) for tensor in tensors[:2]]
    views = [pool.fault(tensor)[1:] for tensor in tensors[2:4]]
    where = [run_of(tensor) for tensor in tensors[:4]]
    made(pool, 2, 100.0)
    made(pool, 2, 101.0)
    assert [run_of(tensor) for tensor in tensors[:4]] == where
    assert (views[0] == 5).all()
    assert (views[1] == 7).all()
    for pin in pins:
        pin.release()


def test_nothing_leaves_for_what_is_sent_for(pool: Pool) -> None:
    away = made(pool, 3, 50.0)
    evict_and_wait(pool, away)
    pool.admission.released.settle()
    with_gaps(pool)
    before = pool.stats.evictions
    assert not pool.prefetch(away)
    assert pool.stats.evictions == before
    assert (pool.fault(away) == 50).all()


def test_without_a_range_the_block_comes_out_of_what_is_kept_free(pool: Pool) -> None:
    tensors = with_gaps(pool)
    pins = [pool.pin(tensor) for tensor in tensors]
    large = made(pool, 2, 100.0)
    assert pool.card is not None
    assert pool.card.held_bytes > PAGES * PAGE
    assert (pool.fault(large) == 100).all()
    for pin in pins:
        pin.release()


def test_slabs_that_are_too_many_are_emptied(pool: Pool) -> None:
    tensors = [made(pool, 2, float(number)) for number in range(6)]
    view = pool.fault(tensors[0])[1:]
    assert pool.card is not None
    pool.card.confine(0)
    pool.admission.shrink()
    assert pool.card.slabs.draining, "somebody looks at one"
    assert pool.card.live_bytes == 2 * PAGE
    with pytest.raises(DeviceBudgetError, match="cannot allocate"):
        pool.compute.allocate(PAGE)
    del view
    pool.admission.released.collect()
    assert pool.card.held_bytes == 0
    pool.card.confine(PAGES * PAGE)
    for number, tensor in enumerate(tensors):
        assert (pool.fault(tensor) == number).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_whatever_is_asked_for_bytes_stay_what_they_are(seed: int) -> None:
    rng, memory = random.Random(seed), opened(seed)
    pool = memory.pool
    known: list[tuple[Block, float]] = []
    pins = []
    for step in range(60):
        action = rng.choice(["make", "make", "read", "read", "write", "forget", "pin", "unpin", "send for"])
        if action == "make" and len(known) < 14:
            known.append((made(pool, rng.randint(1, 5), float(step)), float(step)))
        elif action == "unpin" and pins:
            pins.pop(rng.randrange(len(pins))).release()
        elif known:
            at = rng.randrange(len(known))
            tensor, value = known[at]
            if action == "read":
                assert (pool.fault(tensor) == value).all()
            elif action == "write":
                pool.fault(tensor, write=True).fill_(-float(step))
                known[at] = tensor, -float(step)
            elif action == "forget" and not tensor.pins:
                pool.forget(tensor)
                known.pop(at)
            elif action == "pin" and len(pins) < 2 and tensor.slot_bytes <= 2 * PAGE:
                pins.append(pool.pin(tensor))
            elif action == "send for" and not tensor.pins:
                pool.prefetch(tensor)
        pool.check_integrity()
    for pin in pins:
        pin.release()
    for tensor, value in known:
        assert (pool.fault(tensor) == value).all()
    memory.check_integrity()
    memory.close()
