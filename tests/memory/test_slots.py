from __future__ import annotations

import errno
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.memory.slots import GROWTH_BYTES, FreeRuns, Segment, StripedSlots

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
        free = {unit for start, end in file.runs() for unit in range(start // UNIT, end // UNIT)}
        used = {unit for at, unit in units if at == path}
        assert free | used == set(range(file.size_bytes // UNIT))
        assert not free & used
        assert all(file.is_used(unit * UNIT, UNIT) == (unit in used) for unit in free | used)


def test_runs_are_first_fit_and_coalesce() -> None:
    runs = FreeRuns()
    runs.grow(10)
    assert [runs.take(2) for _ in range(5)] == [0, 2, 4, 6, 8]
    assert runs.take(1) is None
    runs.give(2, 2)
    runs.give(6, 2)
    assert runs.runs() == [(2, 4), (6, 8)]
    assert runs.take(3) is None
    runs.give(4, 2)
    assert runs.runs() == [(2, 8)]
    assert runs.take(3) == 2
    runs.give(8, 2)
    assert (runs.runs(), runs.tail_bytes, runs.free_bytes) == ([(5, 10)], 5, 5)
    runs.check_integrity()


@pytest.mark.parametrize(("offset", "nbytes"), [(2, 1), (1, 2), (3, 2), (0, 11), (9, 2), (-1, 1), (0, 0)])
def test_giving_what_is_not_in_use_is_found(offset: int, nbytes: int) -> None:
    runs = FreeRuns()
    runs.grow(10)
    runs.take(10)
    runs.give(2, 2)
    with pytest.raises(AssertionError, match=r"of 10 is not in use"):
        runs.give(offset, nbytes)


def test_pieces_beyond_what_is_free_are_refused() -> None:
    runs = FreeRuns()
    runs.grow(4)
    with pytest.raises(AssertionError, match="5 bytes asked, 4 free"):
        runs.take_pieces(5)


def test_integrity_shows_the_numbers() -> None:
    runs = FreeRuns()
    runs.grow(8)
    runs.free_bytes -= 1
    with pytest.raises(AssertionError, match=r"free runs \[\(0, 8\)\] of 8, free 7"):
        runs.check_integrity()


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
    used = [file.size_bytes - file.free_bytes for file in slots.files]
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
    with pytest.raises(AssertionError, match="beyond the limit"):
        slots.allocate(UNIT)


def test_preallocation_is_in_proportion_and_within_the_limit() -> None:
    slots, files = striped([3.0, 1.0], 1 << 40)
    slots.preallocate(100 * UNIT, UNIT)
    assert files.sizes == [75 * UNIT, 25 * UNIT]
    slots.preallocate(50 * UNIT, UNIT)
    assert files.sizes == [75 * UNIT, 25 * UNIT]
    small, files = striped([1.0], 10 * UNIT)
    small.preallocate(100 * UNIT, UNIT)
    assert files.sizes == [10 * UNIT]


def test_what_the_file_system_has_taken_back_is_not_used_again() -> None:
    slots, files = striped([1.0], 10 * UNIT)
    held = [slots.allocate(2 * UNIT) for _ in range(5)]
    slots.free(held[1])
    slots.free(held[3])
    taken: list[tuple[int, int, int]] = []
    assert slots.give_up(3 * UNIT, lambda *run: taken.append(run)) == 3 * UNIT
    assert taken == [(0, 6 * UNIT, 2 * UNIT), (0, 3 * UNIT, UNIT)]
    assert (slots.size_bytes, slots.used_bytes) == (7 * UNIT, 6 * UNIT)
    assert slots.allocate(3 * UNIT) == [Segment(0, 10 * UNIT, 3 * UNIT)]
    assert slots.allocate(UNIT) == [Segment(0, 2 * UNIT, UNIT)]
    assert (slots.size_bytes, files.sizes) == (10 * UNIT, [13 * UNIT])
    assert slots.give_up(UNIT, lambda *run: taken.append(run)) == 0
    slots.check_integrity()


def test_what_the_file_system_does_not_take_back_stays_free() -> None:
    slots, _ = striped([1.0, 1.0], 10 * UNIT, block=UNIT)
    slots.free(slots.allocate(8 * UNIT))

    def punch(path: int, offset: int, nbytes: int) -> None:
        if path == 1:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    held = slots.files[0].free_bytes
    assert slots.give_up(10 * UNIT, punch) == held
    assert slots.files[0].free_bytes == 0 < slots.files[1].free_bytes == slots.size_bytes
    slots.check_integrity()


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
    assert all(len(file.runs()) <= 1 for file in slots.files)
