"""One move of bytes between a tensor and a part of a slot on disk, and the pieces that it is cut into."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from ptm_accel.errors import DiskError
from ptm_accel.memory.budget import Reservation
from ptm_accel.memory.scratch import Direction
from ptm_accel.memory.slots import Segment
from ptm_accel.memory.transfer import ALIGN_BYTES, round_up

if TYPE_CHECKING:
    from ptm_accel.memory.diskio import Lanes


class Failure(NamedTuple):
    """Why a transfer failed, kept so that each call that meets it can raise an error of its own."""

    number: int
    text: str
    filename: str
    cause: BaseException | None

    def error(self) -> DiskError:
        """A new error to raise; the original, with its traceback, is its cause."""
        error = DiskError(self.number, self.text, self.filename)
        error.__cause__ = self.cause
        return error


@dataclass(eq=False)
class DiskSlot:
    """Room on disk for one run of bytes: the handle of the disk tier.

    Attributes:
        name: whose bytes these are, for messages.
        nbytes: the length.
        segments: where they lie, in order.
        reservation: the charge.
        running: transfers that have not ended.
        lost: what failed stores were to write, as (begin, end, why): not to be read until it has been stored again.
    """

    name: str
    nbytes: int
    segments: list[Segment]
    reservation: Reservation
    running: list[DiskTransfer] = field(default_factory=list)
    lost: list[tuple[int, int, Failure]] = field(default_factory=list)
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._starts = [0, *accumulate(segment.nbytes for segment in self.segments)]

    def failure_in(self, begin: int, end: int) -> Failure | None:
        """Why bytes [begin, end) are not to be trusted, if they are not."""
        return next((why for first, last, why in self.lost if first < end and begin < last), None)

    def lose(self, begin: int, end: int, failure: Failure) -> None:
        """A store of these bytes has failed."""
        self.lost.append((begin, end, failure))

    def find(self, begin: int, end: int) -> None:
        """A store of these bytes has ended well."""
        parts = [
            part
            for first, last, why in self.lost
            for part in ((first, min(last, begin), why), (max(first, end), last, why))
        ]
        self.lost = [part for part in parts if part[0] < part[1]]

    def cut(self, offset: int, nbytes: int) -> Iterator[Segment]:
        """The segments of a part of the slot."""
        index = bisect_right(self._starts, offset) - 1
        while nbytes:
            segment = self.segments[index]
            skip = offset - self._starts[index]
            length = min(nbytes, segment.nbytes - skip)
            yield Segment(segment.path, segment.offset + skip, length)
            offset, nbytes, index = offset + length, nbytes - length, index + 1


class Piece(NamedTuple):
    """A run of a transfer that is contiguous in memory and on disk, and is moved by one thread."""

    transfer: DiskTransfer
    path: int
    address: int
    offset: int
    nbytes: int

    @property
    def aligned(self) -> bool:
        """Whether it can be moved past the page cache as it is."""
        return (self.address | self.offset | self.nbytes) % ALIGN_BYTES == 0


class DiskTransfer:
    """A started move of bytes between a tensor and a part of a slot (see `Transfer`).

    Attributes:
        slot: whose bytes.
        direction: which way.
        nbytes: how many.
        failure: the first thing that went wrong, if any.
        seen: whether somebody has been told of the failure.
        unfinished: pieces that have not been moved or given up yet.
        begin: of the first block of the slot that it touches.
        end: of the last.
        blockers: transfers that must end before this one may begin.
        followers: transfers that wait for this one.
    """

    def __init__(self, lanes: Lanes, slot: DiskSlot, direction: Direction, offset: int, buffer: torch.Tensor) -> None:
        self.slot = slot
        self.direction = direction
        self.nbytes = buffer.numel()
        self.failure: Failure | None = None
        self.seen = False
        self.blockers = 0
        self.followers: list[DiskTransfer] = []
        self.pieces = list(_pieces(self, offset, buffer.data_ptr(), lanes.block_bytes))
        self.unfinished = len(self.pieces)
        self.begin = offset // ALIGN_BYTES * ALIGN_BYTES
        self.end = round_up(offset + self.nbytes)
        self._offset = offset
        self._buffer: torch.Tensor | None = buffer
        self._lanes = lanes

    def done(self) -> bool:
        """Whether it has ended, well or not; never blocks."""
        if self.unfinished:
            self._lanes.look()
        return self.unfinished == 0

    def wait(self) -> None:
        """Blocks until the move has ended.

        Raises:
            DiskError: it failed, or nobody is left to finish it; again at every call.
        """
        # The lock is that of all transfers, which most that are waited for need no more.
        if not self.done():
            self._lanes.wait_until(self.done, f"{self.direction.value} of {self.slot.name}")
        if self.failure is not None:
            self.seen = True
            raise self.failure.error()

    def order(self) -> None:
        """On a CPU, where there is no queue of compute to order: `wait`."""
        self.wait()

    def conflicts(self, other: DiskTransfer) -> bool:
        """Whether the two touch the same blocks of their slot and one of them writes."""
        overlap = self.begin < other.end and other.begin < self.end
        return overlap and Direction.WRITE in (self.direction, other.direction)

    def note_end(self) -> None:
        """Notes in the slot what a store that has ended has done to it."""
        if self.failure is not None:
            # The ends of their blocks that are not ours were read and written back.
            self.slot.lose(self.begin, self.end, self.failure)
        elif self.slot.lost:
            end = (self._offset + self.nbytes) // ALIGN_BYTES * ALIGN_BYTES
            self.slot.find(round_up(self._offset), end)

    def let_go(self) -> None:
        """Drops the tensor, and the pieces, which refer back to this."""
        self._buffer = None
        self.pieces.clear()


def _pieces(transfer: DiskTransfer, offset: int, address: int, block_bytes: int) -> Iterator[Piece]:
    """Cuts a transfer where its segments end, and within them at multiples of the alignment."""
    for path, start, nbytes in transfer.slot.cut(offset, transfer.nbytes):
        end = start + nbytes
        while start < end:
            cut = min(end, (start + block_bytes) // ALIGN_BYTES * ALIGN_BYTES)
            yield Piece(transfer, path, address, start, cut - start)
            address += cut - start
            start = cut
