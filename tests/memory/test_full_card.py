"""A card that has no block where the budget has room: its allocator's free memory is in pieces, or others fill it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.memory.windows import Windows
from tests.mock_device import MockDevice
from tests.tiers import PAGE, evict_and_wait, jitter

ON_CARD = 3


@pytest.fixture
def pool() -> Iterator[Pool]:
    """A pool that may use eight pages, on a card that holds three."""
    capacities = Capacities(page_bytes=PAGE, host_bytes=1 << 20, device_bytes=8 * PAGE, disk_paths=[])
    memory = build_memory(capacities, MockDevice(delay=jitter(0), capacity_bytes=ON_CARD * PAGE))
    yield memory.pool
    memory.check_integrity()
    memory.close()


def made(pool: Pool, count: int) -> list[Block]:
    tensors = [pool.create(f"t{n}", Tag.PARAM, torch.Size([PAGE // 4]), torch.float32) for n in range(count)]
    for number, tensor in enumerate(tensors):
        pool.fault(tensor, write=True).fill_(float(number))
    return tensors


def test_idle_tensors_leave_for_what_is_used(pool: Pool) -> None:
    tensors = made(pool, 6)
    assert sum(tensor.place.resident for tensor in tensors) == ON_CARD
    assert pool.stats.evictions == 3
    for number, tensor in enumerate(tensors):
        assert (pool.fault(tensor) == number).all()


def test_so_they_do_for_windows(pool: Pool) -> None:
    tensors = made(pool, 6)
    away = next(tensor for tensor in tensors if tensor.place is Place.AWAY)
    window = Windows(pool).open(away, 0, 1024)
    assert (Windows(pool).ready(window) == tensors.index(away)).all()
    Windows(pool).close(window, wrote=False)
    assert sum(tensor.place.resident for tensor in tensors) < ON_CARD


def test_what_is_sent_for_is_left_where_it_is(pool: Pool) -> None:
    tensors = made(pool, 5)
    evictions = pool.stats.evictions
    away = [tensor for tensor in tensors if tensor.place is Place.AWAY]
    used = pool.budget.used_bytes
    assert not pool.prefetch(away[0])
    assert (pool.stats.evictions, pool.budget.used_bytes) == (evictions, used)
    idle = next(tensor for tensor in tensors if tensor.place.resident)
    evict_and_wait(pool, idle)
    pool.admission.released.settle()
    assert pool.prefetch(away[0])
    assert (pool.fault(away[0]) == tensors.index(away[0])).all()


def test_a_card_that_nothing_can_leave_says_so(pool: Pool) -> None:
    tensors = made(pool, 4)
    away = next(tensor for tensor in tensors if tensor.place is Place.AWAY)
    pins = [pool.pin(tensor) for tensor in tensors if tensor.place.resident]
    used = pool.budget.used_bytes
    with pytest.raises(DeviceBudgetError, match="out of memory"):
        pool.fault(away)
    assert pool.budget.used_bytes == used
    for pin in pins:
        pin.release()
    assert (pool.fault(away) == tensors.index(away)).all()
