from __future__ import annotations

import errno
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.memory.slots import GROWTH_BYTES, Segment, StripedSlots

UNIT = 4096


class Files:
    """Stands in for the scratch files: lengths, and how long they may get."""

    def __init__(self, *most: int) -> None:
        self.most = list(most)
        self.sizes = [0] * len(most)

    def grow(self, path: int, least: int, wish: int) -> int:
        gained = next((size for size in (wish, least) if self.sizes[path] + size <= self.most[path]), None)
        if gained is None:
            raise OSError(errno.ENOSPC, "full")
        self.sizes[path] += gained
        return gained


def striped(weights: list[float], limit: int, block: int = 4 * UNIT, most: int = 1 << 60) -> tuple[StripedSlots, Files]:
    files = Files(*[most for _ in weights])
    return StripedSlots(weights, block, lambda: limit, files.grow), files


def check_disjoint(slots: StripedSlots, held: list[list[Segment]]) -> None:
    """The naive twin: every unit of every file in a set."""
    slots.check_integrity()
    units = [
        (path, unit)
        for segments in held
        for path, offset, nbytes in segments
        for unit in range(offset // UNIT, (offset + nbytes) // UNIT)
    ]
    assert len(set(units)) == len(units)
    assert slots.used_bytes == len(units) * UNIT
    for path, file in enumerate(slots.files):
        free = {unit for start, nbytes in file.gaps() for unit in range(start // UNIT, (start + nbytes) // UNIT)}
        used = {unit for at, unit in units if at == path}
        assert free | used == set(range(file.size // UNIT))
        assert not free & used


def test_one_path_is_contiguous_as_long_as_the_limit_allows() -> None:
    slots, files = striped([1.0], 64 * UNIT)
    held = [slots.allocate(8 * UNIT) for _ in range(6)]
    slots.free(held.pop(0))
    slots.free(held.pop(1))
    # 16 free in two holes and 16 at the end: not the holes, ...
    assert slots.allocate(10 * UNIT) == [Segment(0, 48 * UNIT, 10 * UNIT)]
    # ... unless there is no other room.
    pieces = slots.allocate(20 * UNIT)
    assert [piece.nbytes // UNIT for piece in pieces] == [8, 8, 4]
    assert files.sizes == [64 * UNIT]


def test_growth_comes_in_large_steps() -> None:
    slots, files = striped([1.0], 1 << 40)
    slots.allocate(UNIT)
    assert files.sizes == [GROWTH_BYTES]
    slots.allocate(GROWTH_BYTES * 3)
    assert files.sizes == [GROWTH_BYTES * 3 + UNIT]


def test_a_nearly_full_file_grows_by_what_is_needed_then_fills_its_holes() -> None:
    slots, files = striped([1.0], 1 << 40, most=10 * UNIT)
    held = [slots.allocate(3 * UNIT) for _ in range(3)]
    slots.free(held[0])
    assert slots.allocate(4 * UNIT) == [Segment(0, 0, 3 * UNIT), Segment(0, 9 * UNIT, UNIT)]
    with pytest.raises(OSError, match="full"):
        slots.allocate(2 * UNIT)
    assert slots.used_bytes == files.sizes[0] == 10 * UNIT


def test_a_failed_slot_takes_nothing() -> None:
    slots, files = striped([1.0, 1.0], 1 << 40)
    files.most = [1 << 40, 2 * UNIT]
    with pytest.raises(OSError, match="full"):
        slots.allocate(64 * UNIT)
    assert slots.used_bytes == 0
    slots.check_integrity()


@pytest.mark.parametrize("slot_units", [1, 4, 1000])
def test_bytes_are_dealt_by_weight(slot_units: int) -> None:
    slots, _ = striped([3.0, 1.0], 1 << 40)
    for _ in range(4000 // slot_units):
        slots.allocate(slot_units * UNIT)
    used = [file.size - file.free for file in slots.files]
    assert used[0] == pytest.approx(3 * used[1], rel=0.02)


def test_blocks_alternate_between_paths() -> None:
    slots, _ = striped([1.0, 1.0], 1 << 40)
    assert [segment.path for segment in slots.allocate(16 * UNIT)] == [0, 1, 0, 1]


def test_room_on_one_path_serves_when_the_other_is_used_up() -> None:
    slots, _ = striped([1.0, 1.0], 64 * UNIT)
    held = [slots.allocate(4 * UNIT) for _ in range(16)]
    for slot in held:
        if slot[0].path == 0:
            slots.free(slot)
    assert {segment.path for segment in slots.allocate(32 * UNIT)} == {0}
    with pytest.raises(AssertionError, match="a slot beyond the limit"):
        slots.allocate(UNIT)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 0.3]), min_size=1, max_size=3),
    limit=st.integers(1, 200),
    seed=st.integers(0, 2**32),
)
def test_any_order_of_calls_keeps_slots_apart(weights: list[float], limit: int, seed: int) -> None:
    slots, files = striped(weights, limit * UNIT)
    rng = random.Random(seed)
    held: list[list[Segment]] = []
    for _ in range(40):
        room = limit - slots.used_bytes // UNIT
        if held and (not room or rng.random() < 0.4):
            slots.free(held.pop(rng.randrange(len(held))))
        else:
            wanted = rng.randint(1, room)
            held.append(slots.allocate(wanted * UNIT))
            assert sum(segment.nbytes for segment in held[-1]) == wanted * UNIT
        check_disjoint(slots, held)
        assert slots.size_bytes == sum(files.sizes) <= limit * UNIT
    while held:
        slots.free(held.pop())
    check_disjoint(slots, held)
    assert all(len(file.gaps()) <= 1 for file in slots.files)
