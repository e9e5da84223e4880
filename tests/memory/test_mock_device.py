"""The mock device: a missing wait gives a wrong number, and nothing hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.errors import DeviceBudgetError, PTMError
from ptm_accel.memory.device import CopyDirection, DeviceTier
from ptm_accel.memory.transfer import Buffer
from tests.mock_device import MockCopy, MockDevice

N = 4096


class Gate:
    """A delay hook that holds the copies of one direction until it is opened."""

    def __init__(self, direction: CopyDirection | None = None) -> None:
        self.direction = direction
        self.opened = threading.Event()
        self.seen: list[MockCopy] = []

    def __call__(self, copy: MockCopy) -> None:
        if self.direction in (None, copy.direction):
            self.opened.wait(20)
        self.seen.append(copy)


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
def device(gate: Gate) -> Iterator[MockDevice]:
    before = set(threading.enumerate())
    device = MockDevice(delay=gate)
    yield device
    gate.opened.set()
    device.check_integrity()
    device.close()
    assert not set(threading.enumerate()) - before


def host(value: float) -> torch.Tensor:
    return torch.full((N // 4,), value).view(torch.uint8)


def floats(buffer: Buffer) -> torch.Tensor:
    assert buffer.octets is not None
    return buffer.octets.view(torch.float32)


def give_back(device: MockDevice, buffer: Buffer) -> None:
    buffer.octets = None
    device.recycle(buffer)


def test_it_is_a_device_tier(device: MockDevice) -> None:
    tier: DeviceTier = device
    assert tier.device.type == "cpu"
    assert tier.tier.value == "device"


def test_fresh_and_reused_blocks_are_nan(device: MockDevice) -> None:
    buffer = device.allocate(N)
    assert floats(buffer).isnan().all()
    floats(buffer).fill_(1.0)
    address = floats(buffer).data_ptr()
    view = floats(buffer)
    give_back(device, buffer)
    # Whoever still looks sees it at once, not only when somebody else has written there.
    assert view.isnan().all()
    again = device.allocate(N)
    assert floats(again).data_ptr() == address
    assert floats(again).isnan().all()


def test_compute_before_the_copy_was_ordered_sees_nan(device: MockDevice, gate: Gate) -> None:
    buffer = device.allocate(N)
    source = host(3.0)
    copy = device.copy_in(floats(buffer).view(torch.uint8), source)
    assert not copy.done()
    assert floats(buffer).sum().isnan()  # the missing order()
    gate.opened.set()
    copy.order()
    assert copy.done()
    assert floats(buffer).sum() == 3.0 * N / 4
    assert device.counts == {"copy_in": 1, "bytes_in": N, "order": 1}


def test_a_source_changed_under_the_copy_arrives_changed(device: MockDevice, gate: Gate) -> None:
    buffer = device.allocate(N)
    source = host(3.0)
    copy = device.copy_in(floats(buffer).view(torch.uint8), source)
    source.view(torch.float32).fill_(4.0)  # the missing wait()
    gate.opened.set()
    copy.wait()
    assert (floats(buffer) == 4.0).all()


def test_a_block_recycled_under_its_copy_out_stores_nan(device: MockDevice, gate: Gate) -> None:
    buffer = device.allocate(N)
    floats(buffer).fill_(5.0)
    into = host(0.0)
    copy = device.copy_out(into, floats(buffer).view(torch.uint8))
    give_back(device, buffer)  # the missing wait()
    gate.opened.set()
    copy.wait()
    assert into.view(torch.float32).isnan().all()


def test_a_block_recycled_under_its_copy_in_corrupts_the_next_owner(device: MockDevice, gate: Gate) -> None:
    buffer = device.allocate(N)
    source = host(5.0)
    copy = device.copy_in(floats(buffer).view(torch.uint8), source)
    give_back(device, buffer)  # the missing wait()
    other = device.allocate(N)
    floats(other).fill_(1.0)
    gate.opened.set()
    copy.wait()
    assert (floats(other) == 5.0).all()


def test_host_bytes_are_old_until_waited_for(device: MockDevice, gate: Gate) -> None:
    buffer = device.allocate(N)
    floats(buffer).fill_(6.0)
    into = host(0.0)
    copy = device.copy_out(into, floats(buffer).view(torch.uint8))
    assert (into.view(torch.float32) == 0.0).all()
    gate.opened.set()
    copy.wait()
    assert (into.view(torch.float32) == 6.0).all()
    assert device.counts == {"copy_out": 1, "bytes_out": N, "wait": 1}


def test_copies_of_one_direction_keep_their_order(device: MockDevice, gate: Gate) -> None:
    buffer = device.allocate(N)
    sources = [host(float(i)) for i in range(4)]
    copies = [device.copy_in(floats(buffer).view(torch.uint8), source) for source in sources]
    gate.opened.set()
    copies[-1].wait()
    assert all(copy.done() for copy in copies)
    assert [copy.number for copy in gate.seen] == [0, 1, 2, 3]
    assert (floats(buffer) == 3.0).all()


def test_directions_do_not_wait_for_each_other(device: MockDevice, gate: Gate) -> None:
    gate.direction = CopyDirection.IN
    buffer, source, into = device.allocate(N), host(1.0), host(0.0)
    held = device.copy_in(floats(buffer).view(torch.uint8), source)
    other = device.allocate(N)
    device.copy_out(into, floats(other).view(torch.uint8)).wait()
    assert not held.done()
    assert into.view(torch.float32).isnan().all()


def test_latency_and_bandwidth_take_their_time() -> None:
    device = MockDevice(latency_s=0.4, bandwidth_bytes_per_s=N / 0.6)
    buffer, source = device.allocate(N), host(1.0)
    begin = time.perf_counter()
    copy = device.copy_in(floats(buffer).view(torch.uint8), source)
    assert time.perf_counter() - begin < 0.4
    copy.wait()
    assert time.perf_counter() - begin >= 1.0
    device.close()


def test_what_has_been_moved_is_counted_as_it_ends(device: MockDevice, gate: Gate) -> None:
    buffer, source = device.allocate(N), host(1.0)
    copy = device.copy_in(floats(buffer).view(torch.uint8), source)
    assert device.moved() == (0, 0, 0.0, 0.0)
    gate.opened.set()
    copy.wait()
    assert device.moved()[:2] == (N, 0)


def test_a_link_is_busy_while_something_moves() -> None:
    device = MockDevice(latency_s=0.02)
    buffer, source, into = device.allocate(N), host(1.0), host(0.0)
    begin = time.perf_counter()
    device.copy_in(floats(buffer).view(torch.uint8), source).wait()
    first = device.moved()
    assert (first.in_bytes, first.out_bytes) == (N, 0)
    assert 0.019 < first.busy_s <= time.perf_counter() - begin
    time.sleep(0.02)
    device.copy_out(into, floats(buffer).view(torch.uint8)).wait()
    second = device.moved()
    assert (second.in_bytes, second.out_bytes) == (N, N)
    assert first.busy_s + 0.019 < second.busy_s <= time.perf_counter() - begin - 0.02
    device.close()


def test_an_error_in_the_thread_is_raised_by_every_wait_and_by_no_other_copy() -> None:
    def fail_first(copy: MockCopy) -> None:
        if copy.number == 0:
            raise OSError(5, "link down")

    device = MockDevice(delay=fail_first)
    buffer, source = device.allocate(N), host(1.0)
    bad = device.copy_in(floats(buffer).view(torch.uint8), source)
    good = device.copy_in(floats(buffer).view(torch.uint8), source)
    for ask in (bad.wait, bad.order, bad.wait):
        with pytest.raises(OSError, match="link down"):
            ask()
    assert bad.done()
    good.wait()
    assert (floats(buffer) == 1.0).all()
    assert device.moved().in_bytes == N, "the other moved nothing"
    device.close()


def test_copies_of_one_direction_come_after_those_of_the_other_where_that_is_said() -> None:
    gate = Gate(CopyDirection.OUT)
    device = MockDevice(delay=gate)
    first, second, frame = device.allocate(N), device.allocate(N), host(0.0)
    floats(first).fill_(1.0)
    out = device.copy_out(frame, floats(first).view(torch.uint8))
    behind = device.copy_in(floats(second).view(torch.uint8), frame, after=[out])
    early = device.copy_in(floats(first).view(torch.uint8), host(3.0))
    time.sleep(0.02)
    assert not any(copy.done() for copy in (out, behind, early)), "a stream keeps its order"
    gate.opened.set()
    behind.order()
    assert (floats(second) == 1.0).all()
    early.wait()
    device.close()


@pytest.mark.parametrize("direction", CopyDirection)
def test_what_reads_what_a_failed_copy_should_have_written_fails_too(direction: CopyDirection) -> None:
    def fail(copy: MockCopy) -> None:
        if copy.direction is not direction and copy.number == 0:
            raise OSError(5, "link down")

    device = MockDevice(delay=fail)
    buffer, frame = device.allocate(N), host(2.0)
    ours = floats(buffer).view(torch.uint8)
    if direction is CopyDirection.IN:
        behind = device.copy_in(ours, frame, after=[device.copy_out(frame, ours)])
        with pytest.raises(OSError, match="link down"):
            behind.wait()
    else:
        # Nothing was read from where it writes, which is no reason not to.
        floats(buffer).fill_(1.0)
        device.copy_out(frame, ours, after=[device.copy_in(ours, frame)]).wait()
        assert (frame.view(torch.float32) == 1.0).all()
    device.close()


def test_a_full_card_is_a_device_error_that_batch_size_search_understands() -> None:
    device = MockDevice(capacity_bytes=2 * N)
    kept = device.allocate(N)
    with pytest.raises(DeviceBudgetError) as caught:
        device.allocate(2 * N)
    text = str(caught.value)
    assert " out of memory." in text
    assert "cannot allocate a block of 8192 B: 4096 B are allocated and 1.00 MiB reserved" in text
    assert "of 8192 B on the card; set device_memory lower, or use a smaller batch." in text
    assert isinstance(caught.value, RuntimeError)
    give_back(device, kept)
    device.allocate(2 * N)
    device.close()


def test_each_block_has_a_storage_of_its_own(device: MockDevice) -> None:
    first, second = device.allocate(N), device.allocate(N)
    ref = StorageWeakRef(floats(first).untyped_storage())
    view = floats(first)[3:5]
    first.octets = None
    assert not ref.expired()
    del view
    assert ref.expired()
    assert floats(second).isnan().all()


def test_misuse_is_caught(device: MockDevice) -> None:
    buffer = device.allocate(N)
    with pytest.raises(AssertionError, match="recycled with its buffer"):
        device.recycle(buffer)
    give_back(device, buffer)
    with pytest.raises(AssertionError, match="block of 4096 B recycled twice"):
        device.recycle(buffer)
    with pytest.raises(AssertionError, match="block of 100 B, not a positive multiple of 4096"):
        device.allocate(100)
    with pytest.raises(AssertionError, match="copy of 4096 B into 8192 B"):
        device.copy_in(torch.empty(2 * N, dtype=torch.uint8), host(0.0))
    with pytest.raises(AssertionError, match="into of a copy is torch.float32"):
        device.copy_in(torch.empty(N), host(0.0))


def test_integrity_sees_a_lost_run(device: MockDevice) -> None:
    device.allocate(N)
    lost = device.allocate(N)
    device.check_integrity()
    del device._live[lost.region]
    with pytest.raises(AssertionError, match="mock device, arena 0: run 8192"):
        device.check_integrity()
    device._live[lost.region] = None


def test_large_blocks_get_an_arena_of_their_own(device: MockDevice) -> None:
    blocks = [device.allocate(3 << 20), device.allocate(N), device.allocate(1 << 20)]
    device.check_integrity()
    assert device.live_bytes == (4 << 20) + N
    for buffer in blocks:
        give_back(device, buffer)
    assert device.live_bytes == 0


def test_close_while_busy_runs_what_was_started_without_its_latency() -> None:
    before = set(threading.enumerate())
    device = MockDevice(latency_s=60.0)
    buffer, sources = device.allocate(N), [host(1.0), host(2.0)]
    buffer = floats(buffer)
    copies = [device.copy_in(buffer.view(torch.uint8), source) for source in sources]
    begin = time.perf_counter()
    device.close()
    device.close()
    assert time.perf_counter() - begin < 5.0
    for copy in copies:
        copy.wait()
    assert (buffer == 2.0).all()
    assert not set(threading.enumerate()) - before
    with pytest.raises(PTMError, match=r"cannot copy 4096 B host to device: the device is closed; start copies before"):
        device.copy_in(buffer.view(torch.uint8), sources[0])


def test_close_does_not_hang_on_a_hook_that_does_not_return() -> None:
    gate = Gate(CopyDirection.IN)
    device = MockDevice(delay=gate, close_timeout_s=0.05)
    buffer, source = device.allocate(N), host(1.0)
    buffer = floats(buffer)
    copies = [device.copy_in(buffer.view(torch.uint8), source) for _ in range(2)]
    device.close()
    for number, copy in enumerate(copies):
        text = rf"copy {number} host to device \(4096 B\) had not ended 0.05 s after close\(\); let the delay hook"
        with pytest.raises(PTMError, match=text):
            copy.wait()
    gate.opened.set()
    for thread in device._threads:
        thread.join(5)
        assert not thread.is_alive()
    # It was given up: its bytes must not appear afterwards.
    assert buffer.isnan().all()
