"""Transfers between memory and scratch files, and the threads that make them.

A transfer is cut into pieces. Each file has a queue of pieces and a few threads. A transfer holds its tensor until its
last piece has been moved, or given up. Transfers that touch the same bytes of a slot, one of them writing, run in the
order in which they were started.

A piece that fails is moved once more. If that fails too, the tier has failed: nothing is moved any more, queued
transfers end with the error, and every later call raises it. Threads do not survive a fork: in a child all calls raise.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import torch

from ptm_accel.errors import DiskError
from ptm_accel.memory.budget import Reservation
from ptm_accel.memory.mapping import MappedRun, anonymous_run
from ptm_accel.memory.own_threads import OwnThread
from ptm_accel.memory.scratch import Direction, ScratchFile
from ptm_accel.memory.slots import Segment
from ptm_accel.memory.transfer import ALIGN_BYTES, round_up
from ptm_accel.memory.verified import UnitSums, move_verified
from ptm_accel.units import format_bytes

logger = logging.getLogger(__name__)

_PATIENCE_S = 0.2
"""Time that a waiting thread sleeps before it checks that its transfer is still worked on."""


class Failure(NamedTuple):
    """Reason why the disk tier has failed: each call raises a new error."""

    number: int
    text: str
    filename: str
    cause: BaseException | None

    def error(self) -> DiskError:
        """Returns a new error, with the original as its cause."""
        error = DiskError(self.number, self.text, self.filename)
        error.__cause__ = self.cause
        return error


@dataclass(eq=False)
class DiskSlot:
    """Room on disk for one run of bytes, in `segments`: the handle of the disk tier; `sums` with `disk.verify`."""

    name: str
    nbytes: int
    segments: list[Segment]
    reservation: Reservation
    sums: UnitSums = field(default_factory=dict)
    running: list[DiskTransfer] = field(default_factory=list)
    snapshots: list[weakref.ref[MappedRun]] = field(default_factory=list)
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._starts = [0, *accumulate(segment.nbytes for segment in self.segments)]

    def held(self) -> bool:
        """Returns whether a snapshot is alive."""
        self.snapshots = [ref for ref in self.snapshots if ref() is not None]
        return bool(self.snapshots)

    def cut(self, offset: int, nbytes: int) -> Iterator[Segment]:
        """Yields the segments of a part of the slot."""
        index = bisect_right(self._starts, offset) - 1
        while nbytes:
            segment = self.segments[index]
            skip = offset - self._starts[index]
            length = min(nbytes, segment.nbytes - skip)
            yield Segment(segment.path, segment.offset + skip, length)
            offset, nbytes, index = offset + length, nbytes - length, index + 1

    def units(self, offset: int, nbytes: int, unit_bytes: int) -> Iterator[tuple[Segment, Segment]]:
        """The units that a part of the slot touches, each with what is touched of it.

        A segment is cut into units of `unit_bytes` from its start; its last one may be shorter.
        """
        index = bisect_right(self._starts, offset) - 1
        while nbytes:
            segment = self.segments[index]
            skip = offset - self._starts[index]
            begin = skip // unit_bytes * unit_bytes
            unit = Segment(segment.path, segment.offset + begin, min(unit_bytes, segment.nbytes - begin))
            length = min(nbytes, begin + unit.nbytes - skip)
            yield unit, Segment(segment.path, segment.offset + skip, length)
            offset, nbytes = offset + length, nbytes - length
            index += offset == self._starts[index + 1]


class Piece(NamedTuple):
    """A run of a transfer that is contiguous in memory and on disk, and is moved by one thread.

    Attributes:
        unit: what it is a part of, where the file is verified.
    """

    transfer: DiskTransfer
    path: int
    address: int
    offset: int
    nbytes: int
    unit: Segment | None = None


class DiskTransfer:
    """A started move of bytes between a tensor and a part of a slot (see `Transfer`).

    Attributes:
        failure: why it failed, if it did.
        unfinished: pieces that have not been moved or given up yet.
        begin: of the first aligned unit of the slot that it touches.
        end: of the last.
        blockers: how many transfers must end before this one may begin.
        followers: transfers that wait for this one.
    """

    def __init__(self, lanes: Lanes, slot: DiskSlot, direction: Direction, offset: int, buffer: torch.Tensor) -> None:
        self.slot = slot
        self.direction = direction
        self.nbytes = buffer.numel()
        self.failure: Failure | None = None
        self.blockers = 0
        self.followers: list[DiskTransfer] = []
        self.begin = offset // ALIGN_BYTES * ALIGN_BYTES
        self.end = round_up(offset + self.nbytes)
        if lanes.verifies:
            self.pieces = list(_units(self, offset, buffer.data_ptr(), lanes.block_bytes))
            # A part of a unit moves the whole unit.
            if self.pieces:
                first, last = self.pieces[0], self.pieces[-1]
                assert first.unit is not None and last.unit is not None
                self.begin = offset - (first.offset - first.unit.offset)
                self.end = offset + self.nbytes + (last.unit.offset + last.unit.nbytes - last.offset - last.nbytes)
        else:
            self.pieces = list(_pieces(self, offset, buffer.data_ptr(), lanes.block_bytes))
        self.unfinished = len(self.pieces)
        self._buffer: torch.Tensor | None = buffer
        self._lanes = lanes

    def done(self) -> bool:
        """Returns whether it has ended, well or not; never blocks."""
        return self.unfinished == 0

    def wait(self) -> None:
        """Blocks until the move has ended.

        Raises:
            DiskError: it failed, or no thread is left to finish it; again at every call.
        """
        # Without the lock of all transfers where that is possible.
        if not self.done():
            self._lanes.wait_until(self.done, f"{self.direction.value} of {self.slot.name}")
        if self.failure is not None:
            raise self.failure.error()

    def order(self) -> None:
        """Waits, as `wait` does."""
        self.wait()

    def conflicts(self, other: DiskTransfer) -> bool:
        """Returns whether both touch the same units of their slot and one of them writes."""
        overlap = self.begin < other.end and other.begin < self.end
        return overlap and Direction.WRITE in (self.direction, other.direction)

    def is_of(self, lanes: Lanes) -> bool:
        """Whether these lanes move it."""
        return self._lanes is lanes

    def let_go(self) -> None:
        """Drops the tensor, and the pieces, which refer back to this."""
        self._buffer = None
        self.pieces.clear()


def _pieces(transfer: DiskTransfer, offset: int, address: int, block_bytes: int) -> Iterator[Piece]:
    """Cuts a transfer at the ends of its segments, and within them at aligned offsets."""
    for path, start, nbytes in transfer.slot.cut(offset, transfer.nbytes):
        end = start + nbytes
        while start < end:
            cut = min(end, (start + block_bytes) // ALIGN_BYTES * ALIGN_BYTES)
            yield Piece(transfer, path, address, start, cut - start)
            address += cut - start
            start = cut


def _units(transfer: DiskTransfer, offset: int, address: int, unit_bytes: int) -> Iterator[Piece]:
    """Cuts a transfer at the ends of units."""
    for unit, (path, start, nbytes) in transfer.slot.units(offset, transfer.nbytes, unit_bytes):
        yield Piece(transfer, path, address, start, nbytes, unit)
        address += nbytes


def needs_bounce(file: ScratchFile, *, verifies: bool) -> bool:
    """Whether transfers of a file need bounce buffers."""
    return file.direct or verifies


class _Lane:
    """A scratch file and the queue of its pieces."""

    def __init__(self, file: ScratchFile, lock: threading.RLock) -> None:
        self.file = file
        self.queue: deque[Piece] = deque()
        self.ready = threading.Condition(lock)


class Lanes:
    """All files of a tier with their threads.

    Args:
        files: the scratch files; closed with this.
        threads_per_file: how many pieces of a file are moved at the same time.
        block_bytes: the greatest piece.
        verifies: whether what is read is compared with the CRC of what was written.

    Attributes:
        lock: guards all state of the lanes, and that of the tier that owns them.
        failure: why the tier has failed; None while it has not.
    """

    def __init__(
        self, files: Sequence[ScratchFile], threads_per_file: int, block_bytes: int, *, verifies: bool = False
    ) -> None:
        self.block_bytes = block_bytes
        self.verifies = verifies
        self.bytes_read = 0
        self.bytes_written = 0
        self.failure: Failure | None = None
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)
        self._lanes = [_Lane(file, self.lock) for file in files]
        self._moving = 0
        self._busy_s = 0.0
        self._busy_from = 0.0
        self._closing = False
        self._process = os.getpid()
        # All mapped before the first thread starts, since this can fail.
        work = [
            (
                lane,
                anonymous_run(block_bytes, "a bounce buffer of the disk tier")
                if needs_bounce(lane.file, verifies=verifies)
                else None,
            )
            for lane in self._lanes
            for _ in range(threads_per_file)
        ]
        self._threads: list[threading.Thread] = []
        for index, args in enumerate(work):
            thread = OwnThread(self._work, args, f"ptm-disk-{index}")
            try:
                thread.start()
            except RuntimeError as error:
                self.close()
                raise _unstarted(len(work), index, self._lanes[0].file.folder, error) from error
            self._threads.append(thread)

    @property
    def busy_s(self) -> float:
        """Seconds in which something was being moved, since the start."""
        with self.lock:
            return self._busy_s + (time.perf_counter() - self._busy_from if self._moving else 0.0)

    @property
    def inherited(self) -> bool:
        """Whether this process is a fork of the one that has made this: its lock may stay locked here."""
        return os.getpid() != self._process

    def submit(self, transfer: DiskTransfer, behind: Iterable[DiskTransfer] = ()) -> None:
        """Starts a transfer behind those that it conflicts with, and others of these lanes."""
        with self.lock:
            conflicts = filter(transfer.conflicts, transfer.slot.running)
            for other in dict.fromkeys([*conflicts, *behind]):
                if not other.done():
                    other.followers.append(transfer)
                    transfer.blockers += 1
            transfer.slot.running.append(transfer)
            if not transfer.blockers:
                self._enqueue(transfer)

    def wait_until(self, ended: Callable[[], bool], what: str) -> None:
        """Blocks until `ended`, which changes only as transfers end.

        Raises:
            DiskError: no thread is left that could make it so.
        """
        if self.inherited:
            raise self._unavailable(what)
        with self.lock:
            while not ended():
                if not self._is_busy():
                    raise self._unavailable(what)
                if not self._changed.wait(_PATIENCE_S):
                    # Ctrl-C may have kept a thread from being woken.
                    self._wake()

    def require_open(self, what: str) -> None:
        """Raises `DiskError` if the tier has failed, is closed, or belongs to another process.

        Args:
            what: is to be started, for the message.
        """
        if self._closing or self.inherited:
            raise self._unavailable(what)
        if self.failure is not None:
            raise self.failure.error()

    def close(self) -> None:
        """Ends the threads after all that has been started, and closes the files. Idempotent."""
        if not self.inherited:
            with self.lock:
                self._closing = True
                self._wake()
            for thread in self._threads:
                thread.join()
        for lane in self._lanes:
            lane.file.close()

    def _is_busy(self) -> bool:
        waits = self._moving > 0 or any(lane.queue for lane in self._lanes)
        return waits and any(thread.is_alive() for thread in self._threads)

    def _enqueue(self, transfer: DiskTransfer) -> None:
        for piece in transfer.pieces:
            lane = self._lanes[piece.path]
            lane.queue.append(piece)
            lane.ready.notify()

    def _wake(self) -> None:
        for lane in self._lanes:
            lane.ready.notify_all()

    def _work(self, lane: _Lane, bounce: MappedRun | None) -> None:
        while (piece := self._take(lane)) is not None:
            failure = self._move(lane.file, piece, bounce)
            self._finish(piece, failure)
            # While it waits for the next one, this thread keeps no tensor.
            del piece

    def _take(self, lane: _Lane) -> Piece | None:
        with self.lock:
            while not lane.queue:
                if self._closing and not self._is_busy():
                    return None
                lane.ready.wait()
            if not self._moving:
                self._busy_from = time.perf_counter()
            self._moving += 1
            return lane.queue.popleft()

    def _move(self, file: ScratchFile, piece: Piece, bounce: MappedRun | None) -> Failure | None:
        """Moves a piece, with one retry; returns the second error."""
        for again in (True, False):
            if self.failure is not None:
                return self.failure
            try:
                self._move_once(file, piece, bounce)
            except BaseException as error:  # the thread must live on: others wait for it
                failure = _failure_of(file, piece, error)
                if again:
                    what = piece.transfer.direction.value, piece.transfer.slot.name, file.folder
                    # As text: an error refers to the frames that it has passed, and handlers keep records.
                    logger.warning("a %s of %s in %s has failed, and is tried once more: %s", *what, str(error))
            else:
                return None
        return failure

    def _move_once(self, file: ScratchFile, piece: Piece, bounce: MappedRun | None) -> None:
        direction, part = piece.transfer.direction, Segment(piece.path, piece.offset, piece.nbytes)
        if piece.unit is None:
            file.move(direction, piece.address, piece.offset, piece.nbytes, bounce)
            return
        assert bounce is not None, "a verified file and no bounce buffer"
        move_verified(file, direction, piece.address, part, piece.unit, piece.transfer.slot.sums, bounce)

    def _finish(self, piece: Piece, failure: Failure | None) -> None:
        transfer = piece.transfer
        with self.lock:
            self._moving -= 1
            if not self._moving:
                self._busy_s += time.perf_counter() - self._busy_from
            if failure is not None:
                self.failure = self.failure or failure
                transfer.failure = self.failure
            if transfer.unfinished > 1:
                transfer.unfinished -= 1
            else:
                self._end(transfer)
            if self._closing and not self._is_busy():
                self._wake()

    def _end(self, transfer: DiskTransfer) -> None:
        transfer.let_go()
        transfer.slot.running.remove(transfer)
        if transfer.failure is None and transfer.direction is Direction.WRITE:
            self.bytes_written += transfer.nbytes
        elif transfer.failure is None:
            self.bytes_read += transfer.nbytes
        for follower in transfer.followers:
            follower.blockers -= 1
            if not follower.blockers:
                self._enqueue(follower)
        transfer.followers.clear()
        # Last, since `done` looks without the lock.
        transfer.unfinished = 0
        self._changed.notify_all()

    def _unavailable(self, what: str) -> DiskError:
        folder = str(self._lanes[0].file.folder)
        if self.inherited:
            reason = f"the disk tier in {folder} belongs to process {self._process} and this is its fork {os.getpid()}"
            remedy = "use the model only in the process that trains it, or start workers with the spawn method"
        elif self._closing:
            reason = f"the disk tier in {folder} has been closed"
            remedy = "keep the engine open for as long as its model is used"
        else:
            reason = f"no thread of the disk tier in {folder} works on it"
            remedy = "start the run again from the last checkpoint"
        return DiskError(errno.EIO, f"cannot finish {what}: {reason}; {remedy}.", folder)


def _unstarted(wanted: int, started: int, folder: Path, error: RuntimeError) -> DiskError:
    text = (
        f"the disk tier in {folder} needs {wanted} threads, and the system let it start {started}: {error}; "
        "raise the limit of processes and threads (ulimit -u, or pids.max of the container), or leave disk out."
    )
    return DiskError(errno.EAGAIN, text, str(folder))


def _failure_of(file: ScratchFile, piece: Piece, error: BaseException) -> Failure:
    number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
    reason = error.strerror if isinstance(error, OSError) and error.strerror else repr(error)
    text = (
        f"{piece.transfer.direction.value} of {piece.transfer.slot.name} failed: {format_bytes(piece.nbytes)} at "
        f"offset {piece.offset} of the scratch file in {file.folder}: {reason} (errno {number}), {file.free_text()}; "
        f"set disk.paths to a folder on a sound disk with enough room, and start again from the last checkpoint."
    )
    return Failure(number, text, str(file.folder), error)
