"""The CUDA tier: copies that overlap, order kept by events alone, pinned frames. Most of it needs a GPU."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory import pinned as pinning
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.card_memory import SMALL_BYTES, device_refusal
from ptm_accel.memory.device import CopyDirection, CudaTier, CudaTransfer, DeviceTier, _Running
from ptm_accel.memory.frames import FramePool
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.pinned import host_pin, register_pinned
from ptm_accel.memory.timeline import QueuedCompute, Span, Timeline
from ptm_accel.memory.transfer import Buffer
from ptm_accel.units import MIB
from tests.queued import FakeEvent

SLEEP_CYCLES = 200_000_000
"""About a tenth of a second of device time."""


class FakeCudart:
    """Stands in for the CUDA runtime, with an answer to `cudaHostRegister`."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.registered: list[tuple[int, int]] = []

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.registered.append((address, nbytes))
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        self.registered = [(start, nbytes) for start, nbytes in self.registered if start != address]
        return 0


def test_a_card_that_is_full_says_what_was_asked_and_what_there_is() -> None:
    error = device_refusal("cuda:0", 96 * MIB, 70 << 30, 79 << 30, 80 << 30)
    assert isinstance(error, DeviceBudgetError)
    assert str(error) == (
        "ptm_accel: the device is out of memory. cuda:0: cannot allocate a block of 96.00 MiB: 70.00 GiB are "
        "allocated and 79.00 GiB reserved by torch, of 80.00 GiB on the card; set device_memory lower, or use a "
        "smaller batch."
    )


def test_pinning_registers_and_unregisters(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart = FakeCudart(0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    unpin = register_pinned(0x1000, 4096)
    assert cudart.registered == [(0x1000, 4096)]
    unpin()
    assert not cudart.registered


def test_a_refused_pin_is_an_os_error_with_the_code(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[bool] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(2))
    monkeypatch.setattr(pinning, "_forget_cuda_error", lambda: forgotten.append(True))
    with pytest.raises(OSError, match=r"cudaHostRegister of 1.00 MiB failed with CUDA error 2"):
        register_pinned(0x1000, MIB)
    assert forgotten == [True]


def test_host_memory_is_pinned_only_where_there_is_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert host_pin() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert host_pin() is register_pinned


def test_the_card_is_limited_until_the_last_tier_on_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(CudaTier, "limit", lambda self, nbytes: limits.append(nbytes))
    first, second, elsewhere = (CudaTier(torch.device("cuda", index)) for index in (0, 0, 1))
    first.close()
    assert not limits
    elsewhere.close()
    second.close()
    assert limits == [None, None]


@pytest.mark.parametrize("allowed", [1.0, 0.5])
def test_what_the_program_allows_torch_on_a_card_holds_during_a_limit_and_after(
    allowed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    card, fraction = torch.device("cuda", 0), [allowed]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (70 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 4 << 30)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fraction.append(share))
    left = min(74 << 30, int(allowed * (80 << 30)))
    tier = CudaTier(card)
    for nbytes, share in ((60 << 30, 0.75), (20 << 30, 0.25), (72 << 30, 0.9)):
        assert CudaTier.left(card) == left, "whatever is limited by us"
        tier.limit(nbytes)
        assert fraction[-1] == min(allowed, share)
    tier.close()
    assert fraction[-1] == allowed
    assert CudaTier.left(card) == left


def test_what_the_program_allows_torch_during_a_limit_is_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card, fraction = torch.device("cuda", 0), [1.0]
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction[-1])
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: fraction.append(share))
    tier = CudaTier(card)
    tier.limit(60 << 30)
    torch.cuda.set_per_process_memory_fraction(0.5, card)
    tier.limit(70 << 30)
    assert fraction[-1] == 0.5
    torch.cuda.set_per_process_memory_fraction(0.6, card)
    tier.close()
    assert fraction[-1] == 0.6


def test_a_transfer_on_a_failed_device_has_ended_and_raises() -> None:
    class BrokenEvent:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        synchronize = query

    transfer = CudaTransfer(BrokenEvent(), torch.device("cuda", 0))  # type: ignore[arg-type]
    assert transfer.done()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            transfer.wait()


class Filled:
    """Stands in for the block that a copy in fills."""


@pytest.mark.parametrize("ending", ["ordered", "waited for", "done", "dropped"])
def test_a_copy_in_keeps_what_it_fills_until_nobody_can_overtake_it(
    ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[object] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(wait_event=waited.append))
    filled, event = Filled(), FakeEvent()
    alive = weakref.ref(filled)
    transfer = CudaTransfer(event, torch.device("cuda", 0), filled)  # type: ignore[arg-type]
    del filled
    assert not transfer.done()
    assert alive() is not None, "the copy may still write to it"
    event.at_s = 1.0
    if ending == "ordered":
        transfer.order()
    elif ending == "waited for":
        monkeypatch.setattr(FakeEvent, "synchronize", lambda self: None, raising=False)
        transfer.wait()
    elif ending == "done":
        assert transfer.done()
    else:
        del transfer
    assert alive() is None
    # It may still run: whatever is queued from now on comes after it.
    assert waited == ([event] if ending in ("ordered", "dropped") else [])


def test_copies_are_counted_once_their_events_have_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    tier = CudaTier(torch.device("cuda", 0))
    ends = {}
    for direction, nbytes, began_s, ended_s in (
        (CopyDirection.IN, 300, 10.0, 12.0),
        (CopyDirection.OUT, 200, 11.0, 15.0),
        (CopyDirection.IN, 100, 20.0, 21.0),
    ):
        began, ended = FakeEvent(began_s), FakeEvent()
        ends[ended] = ended_s
        tier._in_flight[direction].append(_Running(began, ended, torch.empty(nbytes, dtype=torch.uint8)))  # type: ignore[arg-type]
    assert tier.moved() == (0, 0, 0.0, 0.0)
    *first, last = ends
    for event in first:
        event.at_s = ends[event]
    assert tier.moved() == (300, 200, 5.0, 1.0)
    left = [copy.ended for copies in tier._in_flight.values() for copy in copies]
    assert left == [last], "the others keep no tensor"
    last.at_s = ends[last]
    assert tier.moved() == (400, 200, 6.0, 1.0)


# ---- with a GPU ------------------------------------------------------------------------------------------------------


@pytest.fixture
def tier(monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaTier]:
    """A tier under which nobody may synchronise the whole device."""
    tier = CudaTier()

    def refuse(*args: object) -> None:
        raise AssertionError("the whole device was synchronised")

    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "synchronize", refuse)
        patch.setattr(torch.cuda.Stream, "synchronize", refuse)
        yield tier
        tier.check_integrity()
        tier.close()


def pinned(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def buffer_of(buffer: Buffer) -> torch.Tensor:
    assert buffer.octets is not None
    return buffer.octets


def give_back(tier: CudaTier, buffer: Buffer) -> None:
    buffer.octets = None
    tier.recycle(buffer)


@pytest.mark.gpu
def test_bytes_go_in_and_out(tier: CudaTier) -> None:
    device_tier: DeviceTier = tier
    buffer = device_tier.allocate(MIB)
    source, into = pinned(MIB), pinned(MIB)
    source.copy_(torch.randint(0, 256, (MIB,), dtype=torch.uint8))
    device_tier.copy_in(buffer_of(buffer), source).order()
    buffer_of(buffer).add_(1)
    out = device_tier.copy_out(into, buffer_of(buffer))
    out.wait()
    assert out.done()
    assert torch.equal(into, source + 1)
    assert tier.memory.live_bytes == MIB
    give_back(tier, buffer)
    assert tier.memory.live_bytes == 0


@pytest.mark.gpu
def test_starting_copies_does_not_hold_up_the_host_and_wait_waits_for_one(tier: CudaTier) -> None:
    buffer, source, into = tier.allocate(MIB), pinned(MIB), pinned(MIB)
    source.fill_(3)
    early = tier.copy_in(buffer_of(buffer), source)
    early.wait()
    begin = time.perf_counter()
    torch.cuda._sleep(SLEEP_CYCLES)
    late = tier.copy_out(into, buffer_of(buffer))
    early.wait()
    started_s = time.perf_counter() - begin
    assert not late.done()
    late.wait()
    assert started_s < 0.5 * (time.perf_counter() - begin)
    assert (into == 3).all()
    give_back(tier, buffer)


@pytest.mark.gpu
def test_a_copy_in_waits_for_compute_that_still_reads_the_block(tier: CudaTier) -> None:
    buffer, source = tier.allocate(MIB), pinned(MIB)
    buffer_of(buffer).fill_(1)
    source.fill_(2)
    torch.cuda._sleep(SLEEP_CYCLES)
    before = buffer_of(buffer).clone()
    copy = tier.copy_in(buffer_of(buffer), source)
    copy.order()
    after = buffer_of(buffer).clone()
    assert (before.cpu() == 1).all()
    assert (after.cpu() == 2).all()
    give_back(tier, buffer)


@pytest.mark.gpu
def test_a_copy_in_waits_for_a_copy_out_to_the_same_memory_and_the_host_for_neither(tier: CudaTier) -> None:
    first, second, frame = tier.allocate(MIB), tier.allocate(MIB), pinned(MIB)
    buffer_of(first).fill_(1)
    frame.fill_(2)
    torch.cuda._sleep(SLEEP_CYCLES)
    out = tier.copy_out(frame, buffer_of(first))
    copy = tier.copy_in(buffer_of(second), frame, after=[out])
    assert not out.done()
    copy.order()
    assert (buffer_of(second).cpu() == 1).all()
    give_back(tier, first)
    give_back(tier, second)


@pytest.mark.gpu
def test_memory_of_torchs_that_is_freed_under_a_copy_out_is_not_reused_before_its_end(tier: CudaTier) -> None:
    into = pinned(64 * MIB)
    mine = torch.ones(64 * MIB, dtype=torch.uint8, device=tier.device)
    torch.cuda._sleep(SLEEP_CYCLES)
    copy = tier.copy_out(into, mine)
    del mine
    torch.full((64 * MIB,), 2, dtype=torch.uint8, device=tier.device)
    copy.wait()
    assert (into == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", [4096, SMALL_BYTES, 64 * MIB])
def test_a_block_is_memory_of_the_card_that_nothing_else_is_given(tier: CudaTier, nbytes: int) -> None:
    blocks = [tier.allocate(nbytes) for _ in range(5)]
    for number, buffer in enumerate(blocks):
        buffer_of(buffer).fill_(number)
    torch.full((64 * MIB,), 9, dtype=torch.uint8, device=tier.device)
    for number, buffer in enumerate(blocks):
        assert buffer_of(buffer).device == tier.device
        assert len({buffer_of(buffer).untyped_storage()._cdata, *map(id, blocks)}) == 6, "a storage of its own"
        assert (buffer_of(buffer) == number).all()
    held = tier.memory.held_bytes
    assert tier.memory.live_bytes == 5 * nbytes <= held <= torch.cuda.memory_reserved(tier.device)
    for buffer in blocks:
        give_back(tier, buffer)
    tier.memory.confine(0)
    assert (tier.memory.live_bytes, tier.memory.held_bytes) == (0, 0)


@pytest.mark.gpu
def test_what_is_reserved_beside_pages(tier: CudaTier) -> None:
    tier.memory.trim()
    before = tier.memory.beside_bytes()
    buffer = tier.allocate(256 * MIB)
    assert tier.memory.beside_bytes() == before
    other = torch.ones(64 * MIB, dtype=torch.uint8, device=tier.device)
    assert tier.memory.beside_bytes() == before + 64 * MIB
    del other
    assert tier.memory.beside_bytes() == before + 64 * MIB, "kept for what comes next"
    tier.memory.trim()
    assert tier.memory.beside_bytes() == before
    give_back(tier, buffer)


@pytest.mark.gpu
def test_a_copy_in_that_nobody_waits_for_does_not_overtake_what_uses_its_block_next(tier: CudaTier) -> None:
    source = pinned(256 * MIB)
    source.fill_(1)
    buffer = tier.allocate(256 * MIB)
    tier.copy_in(buffer_of(buffer), source)
    buffer_of(buffer).fill_(2)
    assert (buffer_of(buffer) == 2).all()
    give_back(tier, buffer)


@pytest.mark.gpu
@pytest.mark.parametrize("direction", list(CopyDirection))
def test_a_copy_holds_up_neither_those_of_the_other_direction_nor_compute(
    tier: CudaTier, direction: CopyDirection
) -> None:
    """Whether that makes both faster is for a benchmark to say: it depends on the link."""
    nbytes = 2048 * MIB
    first, second = tier.allocate(nbytes), tier.allocate(MIB)
    large, small = pinned(nbytes), pinned(MIB)
    buffer_of(second).fill_(1)
    small.fill_(2)
    values = torch.ones(64, 64, device=tier.device)
    torch.mm(values, values)
    if direction is CopyDirection.IN:
        long, short = tier.copy_in(buffer_of(first), large), tier.copy_out(small, buffer_of(second))
    else:
        long, short = tier.copy_out(large, buffer_of(first)), tier.copy_in(buffer_of(second), small)
    short.wait()
    assert not long.done()
    torch.mm(values, values)
    computed = torch.cuda.Event()
    computed.record()
    computed.synchronize()
    assert not long.done()
    long.wait()
    for buffer in (first, second):
        give_back(tier, buffer)


@pytest.mark.gpu
def test_what_has_been_moved_is_counted_as_it_ends(tier: CudaTier) -> None:
    nbytes = 64 * MIB
    buffer, source, into = tier.allocate(nbytes), pinned(nbytes), pinned(nbytes)
    buffer_of(buffer).fill_(1)
    torch.cuda._sleep(SLEEP_CYCLES)
    held = tier.copy_out(into, buffer_of(buffer))
    assert tier.moved() == (0, 0, 0.0, 0.0), "it waits for compute"
    held.wait()
    begin = time.perf_counter()
    tier.copy_in(buffer_of(buffer), source).wait()
    took_s = time.perf_counter() - begin
    moved = tier.moved()
    assert (moved.in_bytes, moved.out_bytes) == (nbytes, nbytes)
    # Neither of them waited on its stream after it had begun.
    assert 0 < moved.busy_s < 4 * took_s
    give_back(tier, buffer)


@pytest.mark.gpu
def test_a_timeline_tells_compute_from_waiting_without_waiting(tier: CudaTier) -> None:
    nbytes = 256 * MIB
    buffer, source, into = tier.allocate(nbytes), pinned(nbytes), pinned(nbytes)
    buffer_of(buffer).fill_(1)
    tier.copy_in(buffer_of(buffer), source).wait()
    assert isinstance(tier, QueuedCompute)
    timeline = Timeline(tier.record)
    before = tier.moved()
    begin = time.perf_counter()
    timeline.switch(Span.PASS)
    copies = [tier.copy_in(buffer_of(buffer), source) for _ in range(8)]
    with timeline.during(Span.WAIT):
        copies[-1].order()
    torch.cuda._sleep(SLEEP_CYCLES)
    ended = timeline.switch(Span.OTHER)
    queued_s = time.perf_counter() - begin
    timeline.look()
    assert ended.moment is None, "the device is not there yet"
    # A copy back waits for all that was queued.
    tier.copy_out(into, buffer_of(buffer)).wait()
    took_s = time.perf_counter() - begin
    timeline.look()
    assert ended.moment is not None
    copied_s = tier.moved().busy_s - before.busy_s
    assert queued_s < ended.moment.total_s < took_s
    assert timeline.spent_s(Span.PASS) == ended.moment.compute_s
    assert 0.02 < timeline.spent_s(Span.PASS) < took_s - timeline.spent_s(Span.WAIT)
    assert 0.5 * copied_s < timeline.spent_s(Span.WAIT) <= copied_s
    give_back(tier, buffer)


@pytest.mark.gpu
def test_a_card_without_room_is_a_device_error(tier: CudaTier) -> None:
    total = torch.cuda.get_device_properties(tier.device).total_memory
    text = r" out of memory\. cuda:\d+: cannot allocate a block of .* on the card; set device_memory lower"
    with pytest.raises(DeviceBudgetError, match=text):
        tier.allocate((2 * total // 4096) * 4096)
    assert tier.memory.live_bytes == 0


@pytest.mark.gpu
def test_frames_are_pinned_and_a_backing_store_works_over_them(tier: CudaTier) -> None:
    budget = Budget(Tier.HOST, 64 * MIB)
    frames = FramePool(budget, 4 * MIB, slab_bytes=16 * MIB, pin=host_pin())
    backing = HostStore(tier, frames, None)
    handle = backing.new(10 * MIB, Tag.PARAM, "w")
    assert handle.pages[0].frame is not None
    assert handle.pages[0].frame.pinned
    assert handle.pages[0].frame.view(0, 4096).is_pinned()
    buffer, again = tier.allocate(10 * MIB), tier.allocate(10 * MIB)
    values = torch.randint(0, 256, (10 * MIB,), dtype=torch.uint8)
    buffer_of(buffer).copy_(values)
    backing.store(handle, 0, buffer_of(buffer))
    load = backing.load(handle, 0, buffer_of(again))
    load.order()
    assert torch.equal(buffer_of(again).cpu(), values)
    assert torch.equal(backing.snapshot(handle), values)
    backing.check_integrity()
    for used in (buffer, again):
        give_back(tier, used)
    backing.close()
    assert budget.used_bytes == 0


@pytest.mark.gpu
def test_a_failed_pin_leaves_no_error_behind_for_the_next_kernel() -> None:
    with pytest.raises(OSError, match="cudaHostRegister"):
        register_pinned(0x1000, 4096)
    assert torch.ones(8, device="cuda").sum().item() == 8
