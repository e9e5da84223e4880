"""The backing store under a device: states, order, overflow to disk, and room."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.memory.budget import Budget, Reservation, Tag, Tier
from ptm_accel.memory.device import CopyDirection
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.frame_pages import FileStore, FrameHandle, PageState
from ptm_accel.memory.frames import FramePool
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.mapping import FilePiece
from ptm_accel.memory.pinned import HostPin
from ptm_accel.memory.transfer import BackingStore, Buffer, Transfer
from tests.descriptors import open_files
from tests.mock_device import MockCopy, MockDevice

UNIT = 4096
PAGE = 4 * UNIT
BLANK, FRAME, CLEAN, DISK = PageState.BLANK, PageState.FRAME, PageState.CLEAN, PageState.DISK


class LateTransfer:
    """Moves its bytes only when it is waited for: the latest moment that the contract allows."""

    def __init__(self, into: torch.Tensor, source: torch.Tensor, error: Exception | None) -> None:
        self.move: tuple[torch.Tensor, torch.Tensor] | None = (into, source)
        self.error = error

    def done(self) -> bool:
        return self.move is None

    def wait(self) -> None:
        if self.move is not None and self.error is None:
            self.move[0].copy_(self.move[1])
        self.move = None
        if self.error is not None:
            raise self.error

    def order(self) -> None:
        self.wait()


class LateSlot:
    def __init__(self, start: int, nbytes: int, reservation: Reservation) -> None:
        self.start = start
        self.nbytes = nbytes
        self.reservation = reservation
        self.transfers: list[LateTransfer] = []


class LateDisk:
    """A backing store in memory whose transfers end as late as they may. Poisons what is freed."""

    def __init__(self, capacity: int) -> None:
        self.budget = Budget(Tier.DISK, capacity)
        self.fd = os.memfd_create("late disk")
        os.ftruncate(self.fd, 64 * capacity)
        self.bytes = torch.from_file(f"/proc/self/fd/{self.fd}", shared=True, size=64 * capacity, dtype=torch.uint8)
        self.end = 0
        self.slots: dict[LateSlot, None] = {}
        self.reads = self.writes = 0
        self.fail: Callable[[str], Exception | None] = lambda what: None

    def new(self, nbytes: int, tag: Tag, name: str) -> LateSlot:
        slot = LateSlot(self.end, nbytes, self.budget.reserve(nbytes, tag, name))
        self.end += nbytes
        self.slots[slot] = None
        return slot

    def free(self, handle: LateSlot) -> None:
        for transfer in handle.transfers:
            if not transfer.done():
                transfer.wait()
        del self.slots[handle]
        self.view(handle).fill_(0xEE)
        handle.reservation.release()

    def view(self, slot: LateSlot) -> torch.Tensor:
        return self.bytes[slot.start : slot.start + slot.nbytes]

    def store(self, handle: LateSlot, offset: int, source: torch.Tensor) -> Transfer:
        self.writes += 1
        return self._start(handle, self.view(handle)[offset : offset + source.numel()], source, "write")

    def load(self, handle: LateSlot, offset: int, into: torch.Tensor) -> Transfer:
        self.reads += 1
        return self._start(handle, into, self.view(handle)[offset : offset + into.numel()], "read")

    def _start(self, slot: LateSlot, into: torch.Tensor, source: torch.Tensor, what: str) -> Transfer:
        assert slot in self.slots
        transfer = LateTransfer(into, source, self.fail(what))
        slot.transfers.append(transfer)
        return transfer

    def snapshot(self, handle: LateSlot) -> torch.Tensor:
        return self.view(handle).clone()

    def close(self) -> None:
        if self.fd >= 0:
            assert not self.slots, "slots left at close"
            os.close(self.fd)
            self.fd = -1

    def check_integrity(self) -> None:
        assert sum(slot.nbytes for slot in self.slots) == self.budget.used_bytes
        self.budget.check_integrity()

    def pieces(self, handle: LateSlot) -> Sequence[FilePiece]:
        assert all(transfer.done() for transfer in handle.transfers)
        return [FilePiece(self.fd, handle.start, handle.nbytes)]


class Setup:
    """A device, frames for `pages` pages and a disk for `slots` more (beside the two set aside)."""

    def __init__(
        self,
        pages: int = 4,
        slots: int | None = 8,
        disk: FileStore | None = None,
        device: MockDevice | None = None,
        pin: HostPin | None = None,
    ) -> None:
        self.device = device or MockDevice()
        self.host = Budget(Tier.HOST, pages * PAGE)
        self.frames = FramePool(self.host, PAGE, slab_bytes=4 * PAGE, pin=pin)
        self.late = None if disk is not None or slots is None else LateDisk((slots + 2) * PAGE)
        self.backing = HostStore(self.device, self.frames, disk or self.late)
        self.blocks: list[Buffer] = []

    @property
    def disk(self) -> LateDisk:
        assert self.late is not None
        return self.late

    def new(self, pages: float, name: str = "w") -> FrameHandle:
        return self.backing.new(int(pages * PAGE), Tag.MASTER, name)

    def block(self, nbytes: int) -> torch.Tensor:
        self.blocks.append(self.device.allocate(nbytes))
        buffer = self.blocks[-1].octets
        assert buffer is not None
        return buffer

    def store(self, handle: FrameHandle, value: int, offset: int = 0, nbytes: int | None = None) -> None:
        source = self.block(handle.nbytes if nbytes is None else nbytes)
        source.fill_(value)
        self.backing.store(handle, offset, source).wait()

    def load(self, handle: FrameHandle, offset: int = 0, nbytes: int | None = None) -> torch.Tensor:
        into = self.block(handle.nbytes if nbytes is None else nbytes)
        self.backing.load(handle, offset, into).order()
        return into

    def states(self, handle: FrameHandle) -> list[PageState]:
        self.backing.check_integrity()
        return [page.state for page in handle.pages]

    def close(self) -> None:
        self.backing.check_integrity()
        self.backing.close()
        self.backing.close()
        self.device.check_integrity()
        self.device.close()
        assert self.host.used_bytes == 0
        if self.late is not None:
            assert self.late.budget.used_bytes == 0


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    gc.collect()
    threads, descriptors = set(threading.enumerate()), open_files()
    yield
    # Tracebacks of errors that were met on the way hold frames of functions, and those hold mappings.
    gc.collect()
    assert not set(threading.enumerate()) - threads
    assert not open_files() - descriptors


def test_it_is_a_backing_store() -> None:
    s = Setup()
    backing: BackingStore = s.backing
    handle = backing.new(5000, Tag.STATE, "bias")
    assert handle.nbytes == 2 * UNIT
    assert s.host.used_by_tag() == {Tag.STATE: 2 * UNIT}
    assert s.states(handle) == [BLANK]
    backing.free(handle)
    s.close()


def test_bytes_come_back_from_frames_with_tails_and_offsets() -> None:
    s = Setup()
    handle = s.new(2.5)
    values = torch.randint(0, 256, (handle.nbytes,), dtype=torch.uint8)
    source = s.block(handle.nbytes)
    source.copy_(values)
    s.backing.store(handle, 0, source).wait()
    assert s.states(handle) == [FRAME] * 3
    assert torch.equal(s.load(handle), values)
    s.store(handle, 9, offset=3 * UNIT, nbytes=2 * UNIT)
    values[3 * UNIT : 5 * UNIT] = 9
    assert torch.equal(s.load(handle, UNIT, 8 * UNIT), values[UNIT : 9 * UNIT])
    assert torch.equal(s.backing.snapshot(handle), values)
    s.close()


def test_without_the_order_the_device_sees_nan() -> None:
    gate = threading.Event()
    s = Setup(device=MockDevice(delay=lambda copy: (gate.wait(20), None)[1]))
    handle = s.new(1)
    source = s.block(PAGE)
    source.view(torch.float32).fill_(2.0)
    stored = s.backing.store(handle, 0, source)
    into = s.block(PAGE)
    loaded = s.backing.load(handle, 0, into)
    assert not stored.done()
    assert not loaded.done()
    assert into.view(torch.float32).isnan().all()
    gate.set()
    loaded.order()
    assert (into.view(torch.float32) == 2.0).all()
    s.close()


def test_the_host_waits_for_no_copy_to_start_another() -> None:
    """A page that is loaded while it is still stored to, and stored to while it is still loaded."""
    gate = threading.Event()
    s = Setup(device=MockDevice(delay=lambda copy: (gate.wait(20), None)[1]))
    handle = s.new(2)
    source, into, again = (s.block(2 * PAGE) for _ in range(3))
    source.fill_(1)
    again.fill_(2)
    s.backing.store(handle, 0, source)
    first = s.backing.load(handle, 0, into)
    s.backing.store(handle, 0, again)
    last = s.backing.load(handle, 0, source)
    assert s.device.counts["copy_in"] == s.device.counts["copy_out"] == 2
    assert s.device.counts["wait"] == s.device.counts["order"] == 0
    assert not first.done()
    gate.set()
    first.order()
    assert (into == 1).all()
    last.order()
    assert (source == 2).all()
    s.close()


def test_pages_whose_frames_follow_one_another_are_moved_by_one_copy() -> None:
    s = Setup(pages=8)
    left, right = s.new(1, "left"), s.new(1, "right")
    whole = s.new(2)
    s.backing.free(left)
    # Its first page lies where the left one was, and the others behind.
    parts = s.new(2, "parts")
    for handle in (right, whole, parts):
        source = s.block(handle.nbytes)
        source.copy_(torch.randint(0, 256, (handle.nbytes,), dtype=torch.uint8))
        s.backing.store(handle, 0, source).wait()
        assert torch.equal(s.load(handle), source)
        for offset, nbytes in ((UNIT, handle.nbytes - UNIT), (0, handle.nbytes - UNIT)):
            assert torch.equal(s.load(handle, offset, nbytes), source[offset : offset + nbytes])
    before = s.device.counts.copy()
    s.load(whole)
    s.store(whole, 1)
    assert s.device.counts - before == {"copy_in": 1, "copy_out": 1, "order": 1, "wait": 1} | {
        "bytes_in": whole.nbytes,
        "bytes_out": whole.nbytes,
    }
    before = s.device.counts.copy()
    s.load(parts)
    assert s.device.counts["copy_in"] - before["copy_in"] == 2
    s.close()


def test_where_pages_lie_is_looked_for_again_once_one_has_moved() -> None:
    s = Setup(pages=3)
    a = s.new(2, "a")
    s.store(a, 1)
    before = s.device.counts.copy()
    assert (s.load(a) == 1).all()
    assert s.device.counts["copy_in"] - before["copy_in"] == 1
    # Takes the frame of the first page, which comes back into the one that was free.
    b = s.new(1.5, "b")
    s.store(b, 2)
    assert DISK in s.states(a)
    s.backing.free(b)
    assert (s.load(a) == 1).all()
    s.store(a, 3)
    assert DISK not in s.states(a)
    assert (s.load(a) == 3).all()
    s.close()


@pytest.mark.parametrize("slow", CopyDirection)
def test_a_load_after_a_store_waits_for_it_and_a_store_after_a_load_too(slow: CopyDirection) -> None:
    # The slower direction must not be overtaken by the other, which runs in a thread of its own.
    s = Setup(device=MockDevice(delay=lambda copy: time.sleep(0.01 if copy.direction is slow else 0.0)))
    handle = s.new(2)
    transfers: list[Transfer] = []
    blocks = []
    for value in range(1, 4):
        source, into = s.block(2 * PAGE), s.block(2 * PAGE)
        source.fill_(value)
        transfers += [s.backing.store(handle, 0, source), s.backing.load(handle, 0, into)]
        blocks.append(into)
    for transfer in transfers:
        transfer.wait()
    assert [set(block.tolist()) for block in blocks] == [{1}, {2}, {3}]
    s.close()


def test_room_is_made_by_spilling_what_was_used_longest_ago() -> None:
    s = Setup(pages=3)
    a, b, c = (s.new(1, name) for name in "abc")
    for value, handle in enumerate((a, b, c)):
        s.store(handle, value + 1)
    s.load(a)
    d = s.new(1, "d")
    assert [s.states(h) for h in (a, b, c, d)] == [[FRAME], [DISK], [FRAME], [BLANK]]
    s.store(d, 4)
    assert (s.load(b) == 2).all()
    assert [s.states(h) for h in (a, b, c, d)] == [[FRAME], [CLEAN], [DISK], [FRAME]]
    assert s.disk.writes == 2
    # What is clean leaves without a write, what is blank too.
    s.load(a), s.load(d)
    e = s.new(1, "e")
    assert s.states(b) == [DISK]
    assert s.disk.writes == 2
    s.load(a), s.load(d)
    s.new(1, "f")
    assert s.states(e) == [DISK]
    assert s.disk.writes == 2
    assert [int(s.load(h)[0]) for h in (a, b, c, d)] == [1, 2, 3, 4]
    s.close()


def test_a_store_to_a_page_on_disk_reads_only_if_it_covers_a_part() -> None:
    s = Setup(pages=1)
    a, b = s.new(1, "a"), s.new(1, "b")
    s.store(a, 1)
    s.store(b, 2)
    assert s.states(a) == [DISK]
    reads = s.disk.reads
    s.store(a, 3)
    assert s.disk.reads == reads
    assert s.states(a) == [FRAME]
    assert s.states(b) == [DISK]
    s.store(b, 4, offset=UNIT, nbytes=UNIT)
    assert s.disk.reads == reads + 1
    assert s.states(b) == [FRAME]
    assert s.load(b).view(4, UNIT)[:, 0].tolist() == [2, 4, 2, 2]
    assert (s.load(a) == 3).all()
    s.close()


def test_a_load_from_disk_does_not_block_and_moves_on_when_asked() -> None:
    s = Setup(pages=1)
    a, b = s.new(1, "a"), s.new(1, "b")
    s.store(a, 1)
    s.store(b, 2)
    into = s.block(PAGE)
    transfer = s.backing.load(a, 0, into)
    assert s.disk.reads == 1
    assert s.device.counts["copy_in"] == 0
    assert not transfer.done()
    assert (into == 0xFF).all()
    transfer.order()
    assert (into == 1).all()
    s.close()


def test_a_tensor_larger_than_the_frames_streams_through_them() -> None:
    s = Setup(pages=2, slots=8)
    handle = s.new(6.25)
    values = torch.randint(0, 256, (handle.nbytes,), dtype=torch.uint8)
    source = s.block(handle.nbytes)
    source.copy_(values)
    s.backing.store(handle, 0, source).wait()
    for _ in range(2):
        assert torch.equal(s.load(handle), values)
    assert torch.equal(s.backing.snapshot(handle), values)
    assert s.host.peak_bytes <= 2 * PAGE
    s.close()


def test_frames_and_disk_full_to_the_last_byte_still_exchange_pages() -> None:
    s = Setup(pages=2, slots=3)
    handles = [s.new(1, f"h{i}") for i in range(5)]
    for value, handle in enumerate(handles):
        s.store(handle, value + 1)
    with pytest.raises(BudgetError):
        s.new(0.25)
    s.backing.check_integrity()
    for turn in range(3):
        for value, handle in enumerate(handles):
            assert (s.load(handle) == value + 1 + turn).all()
            s.store(handle, value + 2 + turn)
            s.backing.check_integrity()
    s.backing.free(handles[0])
    s.new(1)
    s.close()


def test_no_room_names_both_options() -> None:
    s = Setup(pages=2, slots=None)
    s.new(1.5, "embed")
    with pytest.raises(BudgetError) as caught:
        s.new(1, "lm_head.weight")
    text = str(caught.value)
    assert text.startswith(
        "host frames: cannot place 16384 B for lm_head.weight: 24576 B of 32768 B host memory are in use, "
        "24576 B of it by pages (0 B of them held by snapshots, such as a state dict that is kept), and there is no "
        "disk tier; set host_memory or disk higher. (host budget: "
    )
    assert s.frames.used_bytes == 1.5 * PAGE
    s.close()


def test_a_refused_handle_leaves_room_as_it_was() -> None:
    s = Setup(pages=2, slots=2)
    s.store(s.new(1, "a"), 1)
    with pytest.raises(BudgetError, match=r"nothing more can be moved to the disk; set host_memory or disk higher"):
        s.new(4, "huge")
    s.backing.check_integrity()
    s.new(3, "fits")
    s.close()


def test_a_disk_too_small_for_an_exchange_is_refused_at_once() -> None:
    s = Setup(pages=2, slots=-1)
    with pytest.raises(BudgetError, match=r"set host_memory or disk higher. \(disk budget: .* for exchanging pages"):
        s.new(2)
    # With room for the exchange left in the frames it is none.
    s.new(1)
    s.close()


def test_slots_of_clean_pages_make_room_on_disk() -> None:
    s = Setup(pages=2, slots=2)
    a, b, c = (s.new(1, name) for name in "abc")
    for value, handle in enumerate((a, b, c)):
        s.store(handle, value + 1)
    assert (s.load(a) == 1).all()
    assert [s.states(h) for h in (a, b, c)] == [[CLEAN], [DISK], [FRAME]]
    s.new(1, "d")
    assert [s.states(h) for h in (a, b, c)] == [[FRAME], [DISK], [DISK]]
    assert [int(s.load(h)[0]) for h in (a, b, c)] == [1, 2, 3]
    s.close()


def test_a_snapshot_of_pages_in_all_states() -> None:
    s = Setup(pages=3, disk=LateDisk(10 * PAGE))
    handle = s.new(2.25)
    other = s.new(0.5, "other")
    for page in range(2):
        s.store(handle, page + 1, page * PAGE, PAGE)
    s.store(handle, 3, 2 * PAGE, UNIT)
    s.store(other, 7)
    s.new(1, "more")
    assert DISK in s.states(handle)
    assert FRAME in s.states(handle)
    used = s.host.used_bytes
    snapshot = s.backing.snapshot(handle)
    assert torch.equal(
        snapshot, torch.cat([torch.full((n,), v, dtype=torch.uint8) for n, v in ((PAGE, 1), (PAGE, 2), (UNIT, 3))])
    )
    assert s.host.used_bytes == used
    snapshot.fill_(0)
    assert s.load(handle).float().mean() > 1
    s.close()


def test_snapshots_that_are_kept_leave_frames_to_work_with() -> None:
    s = Setup(pages=4)
    handles = [s.new(1, name) for name in "abcdefgh"]
    for number, handle in enumerate(handles):
        s.store(handle, number)
    snapshots = [s.backing.snapshot(handle) for handle in handles]
    assert sum(s.states(handle) == [DISK] for handle in handles) >= 6
    s.store(s.new(2, "more"), 9)
    for number, (handle, snapshot) in enumerate(zip(handles, snapshots, strict=True)):
        assert (snapshot == number).all()
        assert (s.load(handle) == number).all()
    del snapshot, snapshots
    s.close()


def test_a_living_snapshot_keeps_its_pages_where_they_are() -> None:
    s = Setup(pages=2, disk=LateDisk(10 * PAGE))
    a, b = s.new(1, "a"), s.new(1, "b")
    s.store(a, 1)
    s.store(b, 2)
    snapshot = s.backing.snapshot(a)[UNIT:]
    s.store(s.new(1, "c"), 3)
    assert s.states(a) == [FRAME]
    assert s.states(b) == [DISK]
    s.new(4, "d")
    assert (snapshot == 1).all()
    del snapshot
    s.new(2, "e")
    assert s.states(a) == [DISK]
    assert (s.load(a) == 1).all()
    s.close()


def test_a_refusal_says_what_snapshots_hold() -> None:
    s = Setup(pages=2, slots=None)
    a = s.new(1, "a")
    s.store(a, 1)
    held = s.backing.snapshot(a)
    with pytest.raises(BudgetError, match=rf"\({PAGE} B of them held by snapshots"):
        s.new(2, "b")
    assert (held == 1).all()
    s.close()


def test_a_snapshot_waits_for_stores() -> None:
    s = Setup(device=MockDevice(latency_s=0.02))
    handle = s.new(1)
    source = s.block(PAGE)
    source.fill_(5)
    s.backing.store(handle, 0, source)
    assert (s.backing.snapshot(handle) == 5).all()
    s.close()


def test_freed_frames_are_not_reused_under_a_copy() -> None:
    s = Setup(pages=1, slots=None, device=MockDevice(latency_s=0.02))
    first = s.new(1, "first")
    source = s.block(PAGE)
    source.fill_(5)
    into = s.block(PAGE)
    s.backing.store(first, 0, source).wait()
    loaded = s.backing.load(first, 0, into)
    s.backing.free(first)
    second = s.new(1, "second")
    s.frames._slabs[0].tensor().fill_(9)
    loaded.wait()
    assert (into == 5).all()
    s.backing.free(second)
    s.close()


def test_freed_frames_are_not_reused_under_a_store() -> None:
    s = Setup(pages=1, slots=None, device=MockDevice(latency_s=0.02))
    first = s.new(1, "first")
    source = s.block(PAGE)
    source.fill_(5)
    stored = s.backing.store(first, 0, source)
    s.backing.free(first)
    second = s.new(1, "second")
    s.frames._slabs[0].tensor().fill_(9)
    stored.wait()
    assert (s.load(second) == 9).all()
    s.close()


def test_a_refused_transfer_leaves_no_copy_running() -> None:
    s = Setup(pages=2, device=MockDevice(latency_s=0.02))
    handle, other = s.new(2), s.new(2, "other")
    s.store(handle, 1)
    s.store(other, 2)
    s.load(handle, 0, PAGE)
    assert s.states(handle) == [CLEAN, DISK]
    s.disk.fail = lambda what: DiskError(5, f"{what} failed")
    source = s.block(PAGE + UNIT)
    source.fill_(3)
    with pytest.raises(DiskError, match="failed"):
        s.backing.store(handle, 0, source)
    assert not s.device._running
    into = s.block(2 * PAGE)
    with pytest.raises(DiskError, match="failed"):
        s.backing.load(handle, 0, into)
    assert not s.device._running
    s.disk.fail = lambda what: None
    assert [int(s.load(handle)[at]) for at in (0, PAGE, PAGE + UNIT)] == [3, 1, 1]
    s.close()


def test_make_room_spills_for_others_until_a_slab_is_empty() -> None:
    s = Setup(pages=8, slots=6)
    handles = [s.new(1, f"h{i}") for i in range(8)]
    assert s.backing.make_room(2 * PAGE) == 4 * PAGE
    reservation = s.host.reserve(4 * PAGE, Tag.STAGING, "somebody else")
    # What is set aside for exchanges is not given away for good.
    assert s.backing.make_room(2 * PAGE) == 0
    assert [s.states(h)[0] for h in handles].count(BLANK) >= 2
    reservation.release()
    s.close()


def test_a_failed_write_is_raised_and_loses_nothing() -> None:
    s = Setup(pages=2)
    a, b = s.new(1, "a"), s.new(1, "b")
    s.store(a, 1)
    s.store(b, 2)
    s.disk.fail = lambda what: DiskError(28, "no space left") if what == "write" else None
    with pytest.raises(DiskError, match="no space left"):
        s.new(1, "c")
    assert s.states(a) == [FRAME]
    assert s.states(b) == [FRAME]
    s.disk.fail = lambda what: None
    assert (s.load(a) == 1).all()
    assert (s.load(b) == 2).all()
    s.new(1, "c")
    s.close()


def test_a_failed_read_is_raised_by_its_load_and_may_be_tried_again() -> None:
    s = Setup(pages=1)
    a, b = s.new(1, "a"), s.new(1, "b")
    s.store(a, 1)
    s.store(b, 2)
    s.disk.fail = lambda what: DiskError(5, "read failed") if what == "read" else None
    transfer = s.backing.load(a, 0, s.block(PAGE))
    for ask in (transfer.order, transfer.wait):
        with pytest.raises(DiskError, match="read failed"):
            ask()
    with pytest.raises(DiskError, match="read failed"):
        s.backing.store(a, 0, s.block(UNIT))
    assert s.states(a) == [DISK]
    with pytest.raises(DiskError, match="read failed"):
        s.load(a)
    assert s.states(a) == [CLEAN]
    # Another page needs the frame: the broken one just goes.
    s.disk.fail = lambda what: None
    assert (s.load(b) == 2).all()
    assert s.states(a) == [DISK]
    assert (s.load(a) == 1).all()
    s.close()


def test_a_failed_read_does_not_cost_the_slot_that_is_still_good() -> None:
    s = Setup(pages=2, slots=2)
    a, b, c = (s.new(1, name) for name in "abc")
    for value, handle in enumerate((a, b, c)):
        s.store(handle, value + 1)
    s.disk.fail = lambda what: DiskError(5, "read failed") if what == "read" else None
    s.backing.load(a, 0, s.block(PAGE))
    s.disk.fail = lambda what: None
    assert [s.states(h) for h in (a, b, c)] == [[CLEAN], [DISK], [FRAME]]
    s.new(1, "d")
    assert [s.states(h) for h in (a, b, c)] == [[DISK], [DISK], [FRAME]]
    assert [int(s.load(h)[0]) for h in (a, b, c)] == [1, 2, 3]
    s.close()


def test_a_failed_copy_is_raised_by_its_wait_and_by_loads_until_the_page_is_stored_again() -> None:
    def fail(copy: MockCopy) -> None:
        if copy.direction is CopyDirection.OUT and copy.number == 0:
            raise OSError(5, "link down")

    s = Setup(device=MockDevice(delay=fail))
    handle = s.new(1)
    with pytest.raises(OSError, match="link down"):
        s.store(handle, 1)
    with pytest.raises(OSError, match="link down"):
        s.load(handle)
    with pytest.raises(OSError, match="link down"):
        s.backing.snapshot(handle)
    s.store(handle, 2)
    assert (s.load(handle) == 2).all()
    s.close()


def test_close_while_busy_waits_for_what_runs() -> None:
    s = Setup(pages=2, device=MockDevice(latency_s=0.02))
    a, b, c = (s.new(1, name) for name in "abc")
    sources = [s.block(PAGE) for _ in range(3)]
    transfers = [s.backing.store(h, 0, source) for h, source in zip((a, b, c), sources, strict=True)]
    transfers.append(s.backing.load(a, 0, s.block(PAGE)))
    s.backing.close()
    assert all(transfer.done() for transfer in transfers)
    with pytest.raises(AssertionError, match=r"new\(4096, d\), store closed: True"):
        s.backing.new(UNIT, Tag.MASTER, "d")
    s.close()


def test_misuse_is_caught() -> None:
    s = Setup()
    handle = s.new(1)
    block = s.block(2 * PAGE)
    for offset, nbytes in ((1, UNIT), (0, 100), (0, 2 * PAGE), (PAGE, UNIT)):
        with pytest.raises(AssertionError):
            s.backing.store(handle, offset, block[:nbytes])
        with pytest.raises(AssertionError):
            s.backing.load(handle, offset, block[:nbytes])
    s.backing.free(handle)
    for call in (
        lambda: s.backing.free(handle),
        lambda: s.backing.store(handle, 0, block[:PAGE]),
        lambda: s.backing.load(handle, 0, block[:PAGE]),
        lambda: s.backing.snapshot(handle),
    ):
        with pytest.raises(AssertionError, match=r"handle of w"):
            call()
    s.close()


def test_integrity_sees_states_and_frames_that_disagree() -> None:
    s = Setup()
    handle = s.new(1)
    page = handle.pages[0]
    page.state = CLEAN
    with pytest.raises(AssertionError, match="w: page of 16384 B is clean, its frame is .* its slot None"):
        s.backing.check_integrity()
    page.state = BLANK
    s.backing._framed.remove(page)
    with pytest.raises(AssertionError, match=r"1 pages in frames \(16384 B\), 0 in the order of use"):
        s.backing.check_integrity()
    s.backing._framed.add(page)
    other = s.new(1)
    s.store(other, 1), s.store(handle, 1)
    page.frame, other.pages[0].frame = other.pages[0].frame, page.frame
    with pytest.raises(AssertionError, match="w: a page of 16384 B does not lie where it is copied from"):
        s.backing.check_integrity()
    page.frame, other.pages[0].frame = other.pages[0].frame, page.frame
    s.backing.free(other)
    handle.nbytes += 1
    with pytest.raises(AssertionError, match="w: 16385 B in pages of 16384 B together"):
        s.backing.check_integrity()
    handle.nbytes -= 1
    s.close()


WHAT = ["new", "new", "free", "store", "store", "load", "load", "load", "snapshot", "end of step"]
STEP = st.tuples(st.sampled_from(WHAT), st.integers(0, 2**20))


def check_against_bytes(s: Setup, steps: Sequence[tuple[str, int]]) -> None:
    """Runs steps and holds every load and snapshot to plain bytes; waits for nothing that it need not."""
    oracle: dict[FrameHandle, torch.Tensor] = {}
    running: list[tuple[Transfer, torch.Tensor, torch.Tensor | None]] = []
    for number, (what, pick) in enumerate(steps):
        if what == "new":
            try:
                handle = s.backing.new(pick % 14 * UNIT + 1, Tag.STATE, f"t{number}")
            except BudgetError:
                s.backing.check_integrity()
                continue
            oracle[handle] = torch.zeros(handle.nbytes, dtype=torch.uint8)
            source = s.block(handle.nbytes)
            source.zero_()
            running.append((s.backing.store(handle, 0, source), source, None))
        elif what == "end of step":
            s.backing.end_step(s)
        elif oracle:
            handle = list(oracle)[pick % len(oracle)]
            units = handle.nbytes // UNIT
            first = pick // 7 % units
            length = (pick // 91 % (units - first) + 1) * UNIT
            part = oracle[handle][first * UNIT : first * UNIT + length]
            if what == "free":
                del oracle[handle]
                s.backing.free(handle)
            elif what == "store":
                source = s.block(length)
                source.copy_(torch.arange(length, dtype=torch.int64).add_(number).to(torch.uint8))
                part.copy_(source)
                running.append((s.backing.store(handle, first * UNIT, source), source, None))
            elif what == "load":
                into = s.block(length)
                running.append((s.backing.load(handle, first * UNIT, into), into, part.clone()))
            else:
                try:
                    assert torch.equal(s.backing.snapshot(handle), oracle[handle])
                except BudgetError:
                    # Without a mapping of the disk a large one needs frames for all of it.
                    assert s.late is None
        s.backing.check_integrity()
    for transfer, block, expected in running:
        transfer.wait()
        assert expected is None or torch.equal(block, expected)
    for handle, expected in oracle.items():
        assert torch.equal(s.load(handle), expected)


_CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


@settings(max_examples=60, deadline=None, suppress_health_check=_CHECKS)
@given(steps=st.lists(STEP, min_size=25, max_size=60), pages=st.integers(1, 5), slots=st.integers(0, 6))
def test_any_use_gives_the_bytes_that_were_stored(steps: list[tuple[str, int]], pages: int, slots: int) -> None:
    s = Setup(pages=pages, slots=slots)
    try:
        check_against_bytes(s, steps)
    finally:
        s.close()


def test_small_pages_that_are_scattered_make_way_for_a_whole_one() -> None:
    """With frames and disk full, pages move from one slab into the gaps of others."""
    numbers = [0, 0, 0, 3, 0, 1, 0, 0, 1]
    steps = [*(("new", number) for number in numbers), ("store", 0), ("store", 1), *[("new", 0)] * 14]
    s = Setup(pages=3, slots=2)
    try:
        check_against_bytes(s, steps)
    finally:
        s.close()


def test_small_pages_make_way_within_a_slab() -> None:
    """With frames and disk full, where no slab can be emptied."""
    numbers = [0, 0, 46, 0, 3, *[0] * 7]
    stores = [("store", number) for number in (0, 1, 28)]
    s = Setup(pages=3, slots=2)
    try:
        check_against_bytes(s, [*(("new", number) for number in numbers), *stores, *[("new", 0)] * 10])
    finally:
        s.close()


def test_moves_that_make_no_room_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small pages moved back and forth for ever between slabs that were too small for a whole one."""
    s = Setup(pages=2, slots=1)
    for number in range(3):
        s.store(s.new(1, f"p{number}"), number)
    monkeypatch.setattr(s.backing, "_free_a_place", lambda: True)
    with pytest.raises(BudgetError, match="cannot place 16384 B for more"):
        s.backing._room(PAGE, Tag.STATE, "more", admitting=True)
    s.close()


@settings(max_examples=15, deadline=None, suppress_health_check=_CHECKS)
@given(steps=st.lists(STEP, min_size=20, max_size=40), pages=st.integers(1, 5), slots=st.integers(2, 6))
def test_any_use_over_the_real_disk(tmp_path: Path, steps: list[tuple[str, int]], pages: int, slots: int) -> None:
    budget = Budget(Tier.DISK, slots * PAGE)
    s = Setup(pages=pages, disk=DiskTier([tmp_path], budget, io_threads_per_path=1, block_bytes=PAGE))
    try:
        check_against_bytes(s, steps)
    finally:
        s.close()
    assert budget.used_bytes == 0


def test_threads_share_a_backing_store() -> None:
    s = Setup(pages=3, slots=12, device=MockDevice(latency_s=0.0005))
    errors: list[BaseException] = []
    blocks = [[s.block(2 * PAGE), s.block(2 * PAGE)] for _ in range(3)]

    def work(index: int) -> None:
        try:
            source, into = blocks[index]
            handles: list[Any] = [s.new(2, f"t{index}.{i}") for i in range(2)]
            for turn in range(10):
                for i, handle in enumerate(handles):
                    source.fill_(index * 20 + turn + i)
                    s.backing.store(handle, 0, source).wait()
                for i, handle in enumerate(handles):
                    s.backing.load(handle, 0, into).order()
                    assert (into == index * 20 + turn + i).all()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors
    s.close()
