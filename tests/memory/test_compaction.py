"""Closing up gaps: idle extents move within a card, with their bytes, and nobody who looks at one loses it."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.compaction import Compaction
from ptm_accel.memory.paged import PagedTensor, Place
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.setup import Capacities, Memory, build_memory
from ptm_accel.memory.slabs import Run
from tests.card import Card, CardTier
from tests.tiers import jitter

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


def made(pool: Pool, pages: int, value: float) -> PagedTensor:
    tensor = pool.create(f"t{value:g}", Tag.STATE, torch.Size([pages * PAGE // 4]), torch.float32)
    pool.fault(tensor, write=True).fill_(value)
    return tensor


def compaction_of(pool: Pool) -> Compaction:
    assert pool.room.compaction is not None
    return pool.room.compaction


def run_of(tensor: PagedTensor) -> Run:
    assert tensor.extent is not None
    assert tensor.extent.block is not None
    assert isinstance(tensor.extent.block.region, Run)
    return tensor.extent.block.region


def with_gaps(pool: Pool) -> list[PagedTensor]:
    """Sixteen pages, every second of which is free."""
    tensors = [made(pool, 1, float(number)) for number in range(PAGES)]
    for tensor in tensors[::2]:
        pool.forget(tensor)
    pool.room.collect()
    return tensors[1::2]


def test_a_run_that_is_broken_is_mended_and_nothing_leaves(pool: Pool) -> None:
    tensors = with_gaps(pool)
    before = pool.stats.evictions
    large = made(pool, 3, 100.0)
    assert pool.stats.evictions == before
    assert compaction_of(pool).moved_bytes == PAGE, "one that is between two gaps"
    assert (pool.fault(large) == 100).all()
    for number, tensor in enumerate(tensors):
        assert (pool.fault(tensor) == 2 * number + 1).all()


def test_the_least_is_moved(pool: Pool) -> None:
    sizes = [2, 1, 1, 2, 1, 1, 1, 1, 6]
    tensors = [made(pool, pages, float(number)) for number, pages in enumerate(sizes)]
    for number in (0, 2, 4, 6, 7):
        pool.forget(tensors[number])
    pool.room.collect()
    # Gaps of 2, 1, 1 and 2 pages, between them 1, 2 and 1: the last page alone is moved, where there is a gap for it.
    made(pool, 4, 100.0)
    assert compaction_of(pool).moved_bytes == PAGE
    assert run_of(tensors[5]).offset != 8 * PAGE
    assert (pool.fault(tensors[5]) == 5).all()


def test_what_is_pinned_viewed_or_lent_stays_where_it_is(pool: Pool) -> None:
    tensors = with_gaps(pool)
    pins = [pool.pin(tensor) for tensor in tensors[:2]]
    views = [pool.fault(tensor)[1:] for tensor in tensors[2:4]]
    lent = pool.lend(tensors[4])
    del lent
    where = [run_of(tensor) for tensor in tensors[:5]]
    made(pool, 2, 100.0)
    made(pool, 2, 101.0)
    assert [run_of(tensor) for tensor in tensors[:5]] == where
    assert (views[0] == 5).all()
    assert (views[1] == 7).all()
    for pin in pins:
        pin.release()


def test_what_is_stored_while_it_stays_is_not_moved_under_its_copy(pool: Pool) -> None:
    tensors = with_gaps(pool)
    for tensor in tensors:
        tensor.stores = [object()]  # type: ignore[list-item]
    assert compaction_of(pool).make(2 * PAGE) is None
    for tensor in tensors:
        tensor.stores = []
    block = compaction_of(pool).make(2 * PAGE)
    assert block is not None
    block.buffer = None
    pool.compute.recycle(block)


def test_without_a_place_for_what_is_in_the_way_something_leaves(pool: Pool) -> None:
    tensors = [made(pool, pages, float(number)) for number, pages in enumerate((1, 7, 1, 7))]
    for number in (0, 2):
        pool.forget(tensors[number])
    pool.room.collect()
    assert compaction_of(pool).make(2 * PAGE) is None
    assert [tensor.place for tensor in (tensors[1], tensors[3])] == [Place.DIRTY] * 2
    made(pool, 2, 100.0)
    assert pool.stats.evictions == 1


def test_what_is_sent_for_finds_a_run_too_and_nothing_leaves_for_it(pool: Pool) -> None:
    away = made(pool, 3, 50.0)
    pool.evict(away)
    pool.room.settle()
    with_gaps(pool)
    before = pool.stats.evictions
    assert pool.ahead.prefetch(away)
    assert pool.stats.evictions == before
    assert (pool.fault(away) == 50).all()


def test_what_can_come_later_is_not_looked_for_again_before_something_has_come_back(
    pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = [made(pool, pages, float(number)) for number, pages in enumerate((1, 7, 1, 6, 1))]
    for number in (0, 2):
        pool.forget(tensors[number])
    pool.room.collect()
    compaction, looked = compaction_of(pool), list[int]()
    monkeypatch.setattr(compaction, "_run", lambda nbytes: looked.append(nbytes))
    for needed, pages in ((False, 2), (False, 2), (False, 3), (True, 2), (False, 1)):
        assert compaction.make(pages * PAGE, needed=needed) is None
    assert looked == [2 * PAGE, 2 * PAGE, PAGE]
    pool.forget(tensors[4])
    pool.room.collect()
    compaction.make(2 * PAGE, needed=False)
    assert looked[3:] == [2 * PAGE]


def test_small_blocks_and_more_than_there_is_are_not_looked_for(pool: Pool) -> None:
    with_gaps(pool)
    assert compaction_of(pool).make(1024) is None
    assert compaction_of(pool).make(9 * PAGE) is None
    assert compaction_of(pool).moved_bytes == 0


def test_what_somebody_comes_to_view_as_it_is_to_move_stays(pool: Pool) -> None:
    """Its occupant is told that it leaves, and may look at it."""

    class Occupant:
        def __init__(self) -> None:
            self.kept: list[torch.Tensor] = []
            self.back: list[int] = []

        def arrived(self, tensor: torch.Tensor) -> None:
            self.back.append(tensor.data_ptr())

        def was_written(self) -> bool:
            return False

        def leaving(self, tensor: torch.Tensor) -> None:
            if not self.kept:
                self.kept.append(tensor[5:])

    tensors = with_gaps(pool)
    occupant = Occupant()
    for tensor in tensors:
        tensor.occupant = occupant
    assert compaction_of(pool).make(2 * PAGE) is None
    assert occupant.back == [occupant.kept[0].data_ptr() - 20], "it is where it was"
    pool.check_integrity()
    block = compaction_of(pool).make(2 * PAGE)
    assert block is not None, "another one moves"
    assert len(occupant.back) == 2
    block.buffer = None
    pool.compute.recycle(block)
    pool.check_integrity()
    for tensor in tensors:
        tensor.occupant = None
    occupant.kept.clear()
    pool.room.collect()
    for number, tensor in enumerate(tensors):
        assert (pool.fault(tensor) == 2 * number + 1).all()


def test_slabs_that_are_too_many_are_emptied(pool: Pool) -> None:
    tensors = [made(pool, 2, float(number)) for number in range(6)]
    view = pool.fault(tensors[0])[1:]
    assert pool.card is not None
    assert not compaction_of(pool).drain(), "there are none"
    pool.card.confine(0)
    assert compaction_of(pool).drain()
    pool.room.collect()
    assert pool.card.slabs.draining, "somebody looks at one"
    assert pool.card.live_bytes == 2 * PAGE
    with pytest.raises(DeviceBudgetError, match="cannot allocate"):
        pool.compute.allocate(PAGE)
    del view
    pool.room.collect()
    assert pool.card.held_bytes == 0
    pool.card.confine(PAGES * PAGE)
    for number, tensor in enumerate(tensors):
        assert (pool.fault(tensor) == number).all()


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1 << 20))
def test_whatever_is_asked_for_bytes_stay_what_they_are(seed: int) -> None:
    rng, memory = random.Random(seed), opened(seed)
    pool = memory.pool
    known: list[tuple[PagedTensor, float]] = []
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
                pool.ahead.prefetch(tensor)
        pool.check_integrity()
    for pin in pins:
        pin.release()
    for tensor, value in known:
        assert (pool.fault(tensor) == value).all()
    memory.check_integrity()
    memory.close()
