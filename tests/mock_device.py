"""A device made of host memory, on which a missing wait gives a wrong number instead of a lucky right one.

Compute is eager, in the calling thread. Copies run in two threads, one per direction, late, and by address: like a
copy engine they hold no tensor and look at nobody's state. Bytes are NaN (0xFF) from `allocate` until a copy lands,
and again from `recycle` on. So compute that runs before its copy, a run that is given back under a copy, and host
bytes that are read or changed too early all show.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue

import torch

from ptm_accel.errors import PTMError
from ptm_accel.memory.budget import Tier
from ptm_accel.memory.card_memory import CardMemory, check_block_size, device_refusal
from ptm_accel.memory.device import CopyDirection, LinkMeter, Moved, check_copy
from ptm_accel.memory.own_threads import OwnThread
from ptm_accel.memory.runs import RunSpace
from ptm_accel.memory.transfer import ALIGN_BYTES, Buffer, Transfer
from ptm_accel.units import format_bytes

POISON = 0xFF
"""Fills bytes that nobody may read: NaN in every float type."""

_ARENA_BYTES = 1 << 20


@dataclass(frozen=True)
class MockCopy:
    """A copy as a delay hook sees it, just before its bytes move.

    Attributes:
        direction: the stream it runs on.
        number: how many copies were started on that stream before it.
        nbytes: its length.
    """

    direction: CopyDirection
    number: int
    nbytes: int


DelayHook = Callable[[MockCopy], None]
"""Runs in the copying thread before each copy; may sleep, wait for a test's event, or raise to fail the copy."""


class MockTransfer:
    """A copy in one of a `MockDevice`'s threads. Knows the copy's end and error, and no tensor."""

    __slots__ = ("_counts", "_ended", "_error", "copy")

    def __init__(self, copy: MockCopy, counts: Counter[str]) -> None:
        self.copy = copy
        self._counts = counts
        self._ended = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the copy has ended, well or not."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Blocks until the copy has ended; raises its error, every time."""
        self._counts["wait"] += 1
        self._join()

    def order(self) -> None:
        """Like `wait`, but counted as an order: on a real device it would not block."""
        self._counts["order"] += 1
        self._join()

    def end(self, error: BaseException | None) -> None:
        """Marks the end, once; for the device only."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()

    def ended(self) -> BaseException | None:
        """Waits for the end, and says with which error; for the device's own threads, which hold up no host."""
        self._ended.wait()
        return self._error

    def _join(self) -> None:
        error = self.ended()
        if error is not None:
            raise error


@dataclass(frozen=True)
class _Job:
    into: int
    source: int
    transfer: MockTransfer
    after: tuple[MockTransfer, ...]
    behind: tuple[MockTransfer, ...]


@dataclass(frozen=True)
class _Region:
    arena: int
    offset: int
    nbytes: int


class _Arena:
    """Anonymous memory that buffers are cut from; mapped as long as the device is open."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.memory))
        self.runs = RunSpace(nbytes)


class MockDevice:
    """A `DeviceTier` on the CPU, for tests of everything above one.

    Args:
        latency_s: how long each copy takes before its bytes move.
        bandwidth_bytes_per_s: adds `nbytes / bandwidth` to the latency; None for no limit.
        capacity_bytes: memory of the imagined card; None for no limit.
        delay: called before each copy moves its bytes.
        close_timeout_s: how long `close` waits for copies whose hook does not return.

    Attributes:
        counts: what has happened, by name: `copy_in`, `copy_out`, `bytes_in`, `bytes_out`, `wait`, `order`.
    """

    tier = Tier.DEVICE

    def __init__(
        self,
        *,
        latency_s: float = 0.0,
        bandwidth_bytes_per_s: float | None = None,
        capacity_bytes: int | None = None,
        delay: DelayHook | None = None,
        close_timeout_s: float = 5.0,
    ) -> None:
        self.device = torch.device("cpu")
        self.memory: CardMemory | None = None
        self.counts: Counter[str] = Counter()
        self.delay = delay
        self._latency_s = latency_s
        self._bandwidth = bandwidth_bytes_per_s
        self._capacity_bytes = capacity_bytes
        self._close_timeout_s = close_timeout_s
        self._arenas: list[_Arena] = []
        self._live: dict[_Region, None] = {}
        self._started: Counter[CopyDirection] = Counter()
        self._running: dict[MockTransfer, None] = {}
        self._meter = LinkMeter()
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._queues: dict[CopyDirection, SimpleQueue[_Job | None]] = {d: SimpleQueue() for d in CopyDirection}
        self._threads = [
            OwnThread(self._run, (queue,), f"mock copy {direction.value}") for direction, queue in self._queues.items()
        ]
        for thread in self._threads:
            thread.start()

    @property
    def live_bytes(self) -> int:
        """Bytes in buffers handed out and not yet recycled."""
        with self._lock:
            return sum(region.nbytes for region in self._live)

    def allocate(self, nbytes: int) -> Buffer:
        """A buffer full of NaN.

        Raises:
            DeviceBudgetError: the imagined card is full.
        """
        check_block_size(nbytes)
        with self._lock:
            live = self.live_bytes
            if self._capacity_bytes is not None and live + nbytes > self._capacity_bytes:
                reserved = sum(arena.runs.size for arena in self._arenas)
                raise device_refusal("mock device", nbytes, live, reserved, self._capacity_bytes)
            region = self._place(nbytes)
            arena = self._arenas[region.arena]
            ctypes.memset(arena.address + region.offset, POISON, nbytes)
            self._live[region] = None
            # A storage of its own for each buffer: its death is what tells that nobody views the run any more.
            return Buffer(torch.frombuffer(arena.memory, dtype=torch.uint8, count=nbytes, offset=region.offset), region)

    def recycle(self, buffer: Buffer) -> None:
        """Poisons the run, and takes it back to be handed out again at once."""
        region = buffer.region
        assert buffer.octets is None, f"block of {buffer.nbytes} B recycled with its buffer"
        with self._lock:
            if not self._arenas:
                return
            assert region in self._live, f"block of {buffer.nbytes} B recycled twice"
            del self._live[region]
            arena = self._arenas[region.arena]
            ctypes.memset(arena.address + region.offset, POISON, region.nbytes)
            arena.runs.give(region.offset, region.nbytes)

    def copy_in(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
    ) -> MockTransfer:
        """See `DeviceTier.copy_in`.

        Raises:
            PTMError: the device is closed.
        """
        return self._start(CopyDirection.IN, into, source, after, behind)

    def copy_out(self, into: torch.Tensor, source: torch.Tensor, after: Sequence[Transfer] = ()) -> MockTransfer:
        """See `DeviceTier.copy_out`.

        Raises:
            PTMError: the device is closed.
        """
        return self._start(CopyDirection.OUT, into, source, (), after)

    def is_own(self, transfer: Transfer) -> bool:
        """See `DeviceTier.is_own`."""
        return isinstance(transfer, MockTransfer)

    def moved(self) -> Moved:
        """See `DeviceTier.moved`."""
        return self._meter.read()

    def close(self) -> None:
        """Runs the copies already started, without their latencies, and stops the threads. Idempotent.

        A copy whose hook does not return in time ends with an error; nothing waits for it for ever.
        """
        with self._lock:
            if self._closing.is_set():
                return
            self._closing.set()
            for queue in self._queues.values():
                queue.put(None)
        for thread in self._threads:
            thread.join(self._close_timeout_s)
        with self._lock:
            stuck, self._running = list(self._running), {}
            # Memory that a stuck copy may still write to must stay mapped.
            if not stuck:
                self._arenas.clear()
            self._live.clear()
        for transfer in stuck:
            transfer.end(
                PTMError(
                    f"mock device: copy {transfer.copy.number} {transfer.copy.direction.value} "
                    f"({format_bytes(transfer.copy.nbytes)}) had not ended {self._close_timeout_s} s after close(); "
                    f"let the delay hook return before closing."
                )
            )

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless live runs and gaps cover every arena exactly."""
        with self._lock:
            for number, arena in enumerate(self._arenas):
                arena.runs.check_integrity()
                spans = [(r.offset, r.nbytes) for r in self._live if r.arena == number] + arena.runs.gaps()
                end = 0
                for offset, nbytes in sorted(spans):
                    if offset != end:
                        raise AssertionError(f"mock device, arena {number}: run {offset}+{nbytes} after {end}")
                    end = offset + nbytes
                if end != arena.runs.size:
                    raise AssertionError(f"mock device, arena {number}: live + free = {end} of {arena.runs.size} B")

    def _place(self, nbytes: int) -> _Region:
        for number, arena in enumerate(self._arenas):
            offset = arena.runs.take(nbytes)
            if offset is not None:
                return _Region(number, offset, nbytes)
        arena = _Arena(max(_ARENA_BYTES, nbytes))
        self._arenas.append(arena)
        offset = arena.runs.take(nbytes, ALIGN_BYTES)
        assert offset is not None
        return _Region(len(self._arenas) - 1, offset, nbytes)

    def _start(
        self,
        direction: CopyDirection,
        into: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Transfer],
        behind: Sequence[Transfer],
    ) -> MockTransfer:
        check_copy(into, source)
        written = tuple(earlier for earlier in after if isinstance(earlier, MockTransfer))
        ended = tuple(earlier for earlier in behind if isinstance(earlier, MockTransfer))
        assert len(written) + len(ended) == len(after) + len(behind), "copies of another device"
        with self._lock:
            if self._closing.is_set():
                raise PTMError(
                    f"mock device: cannot copy {format_bytes(into.numel())} {direction.value}: the device is closed; "
                    f"start copies before close()."
                )
            transfer = MockTransfer(MockCopy(direction, self._started[direction], into.numel()), self.counts)
            self._started[direction] += 1
            name = "in" if direction is CopyDirection.IN else "out"
            self.counts[f"copy_{name}"] += 1
            self.counts[f"bytes_{name}"] += into.numel()
            self._running[transfer] = None
            self._queues[direction].put(_Job(into.data_ptr(), source.data_ptr(), transfer, written, ended))
            return transfer

    def _run(self, queue: SimpleQueue[_Job | None]) -> None:
        while (job := queue.get()) is not None:
            error: BaseException | None = None
            began_s = time.perf_counter()
            try:
                self._move(job)
                copy = job.transfer.copy
                self._meter.add(copy.direction, copy.nbytes, began_s, time.perf_counter())
            except BaseException as caught:
                # Whatever it is belongs to whoever waits for this copy; the thread goes on with the next one.
                error = caught
            with self._lock:
                self._running.pop(job.transfer, None)
            job.transfer.end(error)

    def _move(self, job: _Job) -> None:
        copy = job.transfer.copy
        for earlier in job.behind:
            earlier.ended()
        for earlier in job.after:
            error = earlier.ended()
            if error is not None:
                raise error
        seconds = self._latency_s + (copy.nbytes / self._bandwidth if self._bandwidth else 0.0)
        if seconds > 0:
            self._closing.wait(seconds)
        if self.delay is not None:
            self.delay(copy)
        if not job.transfer.done():
            # Both sides are touched as late as possible, so that whoever came too early is found out.
            ctypes.memmove(job.into, job.source, copy.nbytes)
