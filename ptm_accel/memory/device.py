"""Device compute tiers: their interface, the meter of their link to host memory, and the tier over CUDA.

A device copies on two streams of its own, one per direction, so that copies overlap with compute and with each other.
Order is kept by events alone: a copy waits on its stream for the compute queued before it, compute waits for a copy
only where `Transfer.order` says so, and the host waits for single copies. Nothing here synchronises a whole device.
"""

from __future__ import annotations

import enum
import math
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

import torch

from ptm_accel.memory.budget import Tier
from ptm_accel.memory.card_memory import CardMemory, TorchAllocator
from ptm_accel.memory.timeline import EventScale
from ptm_accel.memory.transfer import Buffer, ComputeTier, Transfer

_FOLD_AFTER = 1024
"""Most copies that wait to be added up."""


class CopyDirection(enum.Enum):
    """One of a device's two copy streams."""

    IN = "host to device"
    OUT = "device to host"


class Moved(NamedTuple):
    """Bytes that ended copies have moved to a device and from it.

    Attributes:
        busy_s: seconds with a copy of either direction under way.
        both_s: of these, seconds with copies of both.
    """

    in_bytes: int
    out_bytes: int
    busy_s: float
    both_s: float


class LinkMeter:
    """Adds up copies that have ended. Thread-safe."""

    def __init__(self) -> None:
        self._bytes: Counter[CopyDirection] = Counter()
        # With a copy of each direction under way, and of either (None): seconds, and the end of the last one.
        self._busy_s: dict[CopyDirection | None, float] = dict.fromkeys((None, *CopyDirection), 0.0)
        self._until_s = dict.fromkeys(self._busy_s, -math.inf)
        self._spans: list[tuple[float, float, CopyDirection]] = []
        self._lock = threading.RLock()

    def add(self, direction: CopyDirection, nbytes: int, began_s: float, ended_s: float) -> None:
        """Counts a copy that has ended; all times are on one scale."""
        with self._lock:
            self._bytes[direction] += nbytes
            self._spans.append((began_s, ended_s, direction))
            if len(self._spans) >= _FOLD_AFTER:
                self._fold()

    def read(self) -> Moved:
        """Returns the totals now."""
        with self._lock:
            self._fold()
            coming, going = (self._busy_s[direction] for direction in CopyDirection)
            either = self._busy_s[None]
            return Moved(self._bytes[CopyDirection.IN], self._bytes[CopyDirection.OUT], either, coming + going - either)

    def _fold(self) -> None:
        # Copies of the two directions overlap, and what they share counts once. They are in order within a direction
        # only. One that began before the last of these and is counted later loses what lies before that one's end: of a
        # thousand, one at the most.
        for began_s, ended_s, direction in sorted(self._spans, key=lambda span: span[:2]):
            for either in (direction, None):
                self._busy_s[either] += max(0.0, ended_s - max(began_s, self._until_s[either]))
                self._until_s[either] = max(self._until_s[either], ended_s)
        self._spans.clear()


class DeviceTier(ComputeTier, Protocol):
    """A compute tier with memory of its own, so that bytes are copied between it and host memory.

    Buffers are cut from pieces, so that there need not be one of a size although as many bytes are free; `allocate`
    raises `DeviceBudgetError` then.

    Copies of one direction run in the order they were started; copies of different directions are not ordered. A
    small buffer may be recycled, and a host range reused, only after the copies that touch it are done; one out of
    `memory`'s slabs may be reused behind them (`Buffer.behind`).
    """

    @property
    def memory(self) -> CardMemory | None:
        """Memory that buffers are cut from and other memory grows into; None where there is no other."""
        ...

    def copy_in(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
    ) -> Transfer:
        """Starts copying host bytes to the device, after the compute the calling thread has queued so far.

        Compute queued later sees the bytes after `Transfer.order` (or `wait`), and only then.

        Args:
            into: 1-D contiguous uint8 on the device.
            source: as many bytes in host memory; unchanged until the transfer is done.
            after: copies of this device (`is_own`) that end before this one begins, for which the host does not wait.
                If one that wrote `source` fails, so does this.
            behind: copies of this device that use `into`, and end, well or not, before this one begins.
        """
        ...

    def copy_out(self, into: torch.Tensor, source: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """Starts copying device bytes to the host, after the compute the calling thread has queued so far.

        Args:
            into: 1-D contiguous uint8 in host memory; not read until the transfer is done.
            source: as many bytes on the device, alive and unchanged until the transfer is done.
            after: copies of this device that end, well or not, before this one begins: those that read `into`.
        """
        ...

    def is_own(self, transfer: Transfer) -> bool:
        """Returns whether a transfer is a single copy of a device like this, which others can be put behind."""
        ...

    def moved(self) -> Moved:
        """Sums up the bytes of the copies that have ended so far; waits for none."""
        ...


def check_copy(into: torch.Tensor, source: torch.Tensor) -> None:
    """Asserts what `DeviceTier` asks of both sides of a copy, their devices apart."""
    for side, tensor in (("into", into), ("source", source)):
        assert tensor.dtype == torch.uint8 and tensor.dim() == 1 and tensor.is_contiguous(), (
            f"{side} of a copy is {tensor.dtype} {tuple(tensor.shape)}, not 1-D contiguous uint8"
        )
    assert into.numel() == source.numel(), f"copy of {source.numel()} B into {into.numel()} B"


class CudaTransfer:
    """A copy on one of a `CudaTier`'s streams, with the event that marks its end.

    The source of a copy out is not reused under it: a buffer has its memory until it is recycled, after the copy, and
        of
    memory of its own torch's allocator knows the copy (`record_stream`); the tier keeps the host tensor. What a copy in
    fills is kept here until compute has been ordered behind the copy, or the copy has ended; at the latest compute is
    ordered behind it as this is dropped.

    Args:
        event: marks its end.
        device: where compute waits for it.
        filled: what a copy in fills.
    """

    __slots__ = ("_device", "_ended", "_event", "_filled")

    def __init__(
        self,
        event: torch.cuda.Event,
        device: torch.device,
        filled: torch.Tensor | None = None,
    ) -> None:
        self._event = event
        self._device = device
        self._filled = filled
        # Asked for once per page, and the driver's answer takes a while.
        self._ended = False

    def done(self) -> bool:
        """Returns whether the copy has ended, well or not."""
        if self._ended:
            return True
        try:
            ended = self._ended = bool(self._event.query())
        except RuntimeError:
            # The device has failed; wait() raises what query() raised.
            ended = True
        if ended:
            self._filled = None
        return ended

    def wait(self) -> None:
        """Blocks the host until this copy has ended, and for nothing else.

        Raises:
            RuntimeError: the device has failed (torch's error).
        """
        if not self._ended:
            self._event.synchronize()
            self._ended = True
        self._filled = None

    def order(self) -> None:
        """Makes the calling thread's compute stream wait for the copy."""
        if not self._ended:
            self.precede(torch.cuda.current_stream(self._device))
        self._filled = None

    def precede(self, stream: torch.cuda.Stream) -> None:
        """Makes a stream wait for the copy."""
        if not self._ended:
            stream.wait_event(self._event)

    def __del__(self) -> None:
        if self._filled is not None:
            # It may still run: compute that uses the memory next comes after it.
            self.order()


class _Running(NamedTuple):
    """A copy that may not have ended, with the events around it and its host tensor."""

    began: torch.cuda.Event
    ended: torch.cuda.Event
    on_host: torch.Tensor


class CudaTier:
    """Device memory out of slabs of torch's own caching allocator, so that pages and activations share one card.

    Args:
        device: a CUDA device; without an index, the current one.

    Attributes:
        memory: where buffers come from.
    """

    tier = Tier.DEVICE
    _open: ClassVar[weakref.WeakSet[CudaTier]] = weakref.WeakSet()
    # The share of each limited card that torch's allocator was allowed before, and the one that it was given.
    _limited: ClassVar[dict[torch.device, tuple[float, float]]] = {}

    def __init__(self, device: torch.device | None = None) -> None:
        index = None if device is None else device.index
        self.device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.memory = CardMemory(TorchAllocator(self.device))
        self._streams = {direction: torch.cuda.Stream(self.device) for direction in CopyDirection}
        self._in_flight: dict[CopyDirection, deque[_Running]] = {direction: deque() for direction in CopyDirection}
        self._meter = LinkMeter()
        self._scale = EventScale()
        CudaTier._open.add(self)
        self._lock = threading.RLock()

    def allocate(self, nbytes: int) -> Buffer:
        """Returns a buffer of `nbytes`, contents undefined.

        Raises:
            DeviceBudgetError: what pages may take has no such piece, or the card has no room left.
        """
        return self.memory.allocate(nbytes)

    def recycle(self, buffer: Buffer) -> None:
        """Takes back a buffer whose storage has died; what `Buffer.behind` names may still run."""
        self.memory.recycle(buffer)

    def limit(self, nbytes: int | None) -> None:
        """Makes torch's allocator refuse to reserve more than `nbytes` on the card (None: than it was allowed before).

        Where the program has allowed it less, that holds.
        """
        before = self._allowed(self.device)
        if nbytes is None:
            CudaTier._limited.pop(self.device, None)
            torch.cuda.set_per_process_memory_fraction(before, self.device)
            return
        total = torch.cuda.get_device_properties(self.device).total_memory
        share = min(before, nbytes / total)
        torch.cuda.set_per_process_memory_fraction(share, self.device)
        # As torch has it, which may round.
        CudaTier._limited[self.device] = before, torch.cuda.get_per_process_memory_fraction(self.device)

    @classmethod
    def left(cls, device: torch.device) -> int:
        """Bytes of a card that torch has in this process, or may have: others leave them, and the program allows them.

        Args:
            device: with an index.
        """
        total = torch.cuda.get_device_properties(device).total_memory
        others_leave = int(torch.cuda.mem_get_info(device)[0]) + torch.cuda.memory_reserved(device)
        return min(others_leave, int(cls._allowed(device) * total))

    @classmethod
    def _allowed(cls, device: torch.device) -> float:
        before, ours = cls._limited.get(device, (None, None))
        now = float(torch.cuda.get_per_process_memory_fraction(device))
        # Where the program has set another since, that holds.
        return before if before is not None and now == ours else now

    def copy_in(
        self,
        into: torch.Tensor,
        source: torch.Tensor,
        after: Sequence[Transfer] = (),
        behind: Sequence[Transfer] = (),
    ) -> Transfer:
        """See `DeviceTier.copy_in`."""
        return self._copy(CopyDirection.IN, into, source, (*after, *behind))

    def copy_out(self, into: torch.Tensor, source: torch.Tensor, after: Sequence[Transfer] = ()) -> Transfer:
        """See `DeviceTier.copy_out`."""
        return self._copy(CopyDirection.OUT, into, source, after)

    def is_own(self, transfer: Transfer) -> bool:
        """See `DeviceTier.is_own`."""
        return isinstance(transfer, CudaTransfer)

    def moved(self) -> Moved:
        """See `DeviceTier.moved`."""
        with self._lock:
            self._retire()
        return self._meter.read()

    def record(self) -> torch.cuda.Event:
        """Returns an event after the compute that the calling thread has queued so far; it tells the time."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def close(self) -> None:
        """Waits for the copies still running. Buffers live as long as their tensors."""
        CudaTier._open.discard(self)
        if not any(tier.device == self.device for tier in list(CudaTier._open)):
            self.limit(None)
        with self._lock:
            in_flight = [copy for copies in self._in_flight.values() for copy in copies]
            for copies in self._in_flight.values():
                copies.clear()
        for copy in in_flight:
            copy.ended.synchronize()
        self.memory.close()

    def check_integrity(self) -> None:
        """Raises `AssertionError` if buffers and slabs do not add up."""
        self.memory.check_integrity()

    def _copy(
        self, direction: CopyDirection, into: torch.Tensor, source: torch.Tensor, after: Sequence[Transfer]
    ) -> Transfer:
        check_copy(into, source)
        on_device, on_host = (into, source) if direction is CopyDirection.IN else (source, into)
        assert on_device.device == self.device and on_host.device.type == "cpu", (
            f"copy {direction.value}: from {source.device} to {into.device}, not between the host and {self.device}"
        )
        stream = self._streams[direction]
        # One copy at a time is queued, so that each event marks its own copy whatever thread asks.
        with self._lock:
            stream.wait_stream(torch.cuda.current_stream(self.device))
            for earlier in after:
                assert isinstance(earlier, CudaTransfer)
                earlier.precede(stream)
            with torch.cuda.stream(stream):
                began = torch.cuda.Event(enable_timing=True)
                began.record(stream)
                into.copy_(source, non_blocking=True)
                # A blocking event lets the waiting thread sleep: the cores are needed for updates on the CPU.
                ended = torch.cuda.Event(enable_timing=True, blocking=True)
                ended.record(stream)
            if direction is CopyDirection.OUT:
                # For memory of torch's. Of a buffer it says nothing, whose storage torch has not allocated; the buffer
                # is not given back before the copies that touch it are done.
                on_device.record_stream(stream)
            self._retire()
            self._in_flight[direction].append(_Running(began, ended, on_host))
        return CudaTransfer(ended, self.device, into if direction is CopyDirection.IN else None)

    def _retire(self) -> None:
        """Lets go of copies that have ended, and counts them."""
        for direction, copies in self._in_flight.items():
            while copies and copies[0].ended.query():
                copy = copies.popleft()
                began_s, ended_s = self._scale.seconds(copy.began), self._scale.seconds(copy.ended)
                self._meter.add(direction, copy.on_host.numel(), began_s, ended_s)
