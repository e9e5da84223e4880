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
    """Why the disk tier has failed, kept so that each call can raise an error of its own."""

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
    """

    name: str
    nbytes: int
    segments: list[Segment]
    reservation: Reservation
    running: list[DiskTransfer] = field(default_factory=list)
    _starts: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self._starts = [0, *accumulate(segment.nbytes for segment in self.segments)]

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


class DiskTransfer:
    """A started move of bytes between a tensor and a part of a slot (see `Transfer`).

    Attributes:
        slot: whose bytes.
        direction: which way.
        nbytes: how many.
        failure: why it could not be made, if that is so.
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
        self.blockers = 0
        self.followers: list[DiskTransfer] = []
        self.pieces = list(_pieces(self, offset, buffer.data_ptr(), lanes.block_bytes))
        self.unfinished = len(self.pieces)
        self.begin = offset // ALIGN_BYTES * ALIGN_BYTES
        self.end = round_up(offset + self.nbytes)
        self._buffer: torch.Tensor | None = buffer
        self._lanes = lanes

    def done(self) -> bool:
        """Whether it has ended, well or not; never blocks."""
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
            raise self.failure.error()

    def order(self) -> None:
        """On a CPU, where there is no queue of compute to order: `wait`."""
        self.wait()

    def conflicts(self, other: DiskTransfer) -> bool:
        """Whether the two touch the same blocks of their slot and one of them writes."""
        overlap = self.begin < other.end and other.begin < self.end
        return overlap and Direction.WRITE in (self.direction, other.direction)

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
