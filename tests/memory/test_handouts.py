"""What is handed out stays, live, as long as somebody views it, and leaves as everything else after that."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.paged import PagedTensor, Place
from ptm_accel.memory.pool import Pool
from tests.tiers import open_memory

ELEMENTS = 1024
NBYTES = 4 * ELEMENTS
CAPACITY = 5 * NBYTES
"""Room for three of them beside what the tiers hold themselves."""


def tensors(pool: Pool, count: int) -> list[PagedTensor]:
    made = [pool.create(str(n), Tag.STATE, torch.Size([ELEMENTS]), torch.float32, fill=float(n)) for n in range(count)]
    for tensor in made:
        pool.fault(tensor, write=True)
    return made


@pytest.mark.parametrize("kind", ["host+disk", "mock+host", "mock+host+disk"])
def test_a_view_is_live_until_it_is_dropped(kind: str, tmp_path: Path) -> None:
    memory = open_memory(kind, CAPACITY, tmp_path)
    pool = memory.pool
    first, *others = tensors(pool, 8)
    view = pool.handouts.give(first)[100:200]
    for tensor in others:
        pool.fault(tensor)
    view.fill_(7.0)
    # The home is given what there is; what is written afterwards counts as well.
    pool.flush(first)
    view[:50] = 8.0
    for tensor in others:
        pool.fault(tensor)
    assert pool.handouts.viewed(first)
    del view
    assert pool.handouts.collect()
    for tensor in others:
        pool.fault(tensor)
    assert first.place is Place.AWAY
    assert pool.fault(first)[100:200].tolist() == [8.0] * 50 + [7.0] * 50
    assert not pool.pinned()
    pool.check_integrity()
    memory.close()


def test_too_much_at_a_time_is_refused(tmp_path: Path) -> None:
    memory = open_memory("host+disk", CAPACITY, tmp_path)
    made = tensors(memory.pool, 8)
    held = [memory.pool.handouts.give(tensor) for tensor in made[:3]]
    with pytest.raises(BudgetError, match="0 .*pinned"):
        memory.pool.handouts.give(made[3])
    held.clear()
    assert memory.pool.idle_bytes == 3 * NBYTES
    memory.pool.handouts.give(made[3])
    memory.close()


def test_what_is_forgotten_stays_with_who_holds_it(tmp_path: Path) -> None:
    memory = open_memory("host+disk", CAPACITY, tmp_path)
    tensor = tensors(memory.pool, 2)[1]
    held = memory.pool.handouts.give(tensor)
    memory.pool.forget(tensor)
    assert held.tolist() == [1.0] * ELEMENTS
    assert not memory.pool.handouts.holds(tensor)
    del held
    memory.pool.check_integrity()
    memory.close()


def test_adopted_bytes_are_nobodys_view(tmp_path: Path) -> None:
    memory = open_memory("host+disk", CAPACITY, tmp_path)
    tensor = memory.pool.create("adopted", Tag.STATE, torch.Size([32, 32]), torch.float32)
    memory.pool.adopt(tensor, torch.ones(ELEMENTS).view(32, 32))
    assert not tensor.viewed
    held = memory.pool.handouts.give(tensor)
    assert memory.pool.handouts.viewed(tensor)
    del held
    assert not memory.pool.handouts.viewed(tensor)
    memory.close()
