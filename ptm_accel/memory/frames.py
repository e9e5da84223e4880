"""Host memory under a device: slabs, and the frames cut from them that hold pages.

Slabs are allocated once, on demand, and kept. Each is a memory file mapped as shared, so that any set of frames can be
mapped a second time, one after the other, without a copy (`Frame.piece`); and each is pinned where that is possible,
since the device copies from pinned memory at full speed and without the host.

Frames in use are charged by their owner. What is free in a slab is *kept*: a slab counts as resident whole. When the
budget is short, slabs in which nothing is in use are released.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterable

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Budget, Reservation, Tag
from ptm_accel.memory.mapping import FilePiece
from ptm_accel.memory.pinned import HostPin
from ptm_accel.memory.runs import RunSpace
from ptm_accel.memory.transfer import ALIGN_BYTES
from ptm_accel.units import GIB, format_bytes

_LARGE_SLAB_BYTES = 4 * GIB


def default_slab_bytes(capacity_bytes: int, frame_bytes: int) -> int:
    """The slab size for a host budget: about a sixteenth of it, at most 4 GiB, at least a frame; a power of two."""
    share = min(max(capacity_bytes // 16, 1), _LARGE_SLAB_BYTES)
    return max(frame_bytes, _power_of_two_below(share))


class Frame:
    """A run of host bytes that holds a page, or what is left of a tensor after its last whole page.

    Attributes:
        nbytes: its length, a multiple of `ALIGN_BYTES`.
        reservation: the owner's charge for it.
    """

    __slots__ = ("_offset", "_slab", "nbytes", "reservation")

    def __init__(self, slab: _FrameSlab, offset: int, nbytes: int, reservation: Reservation) -> None:
        self._slab = slab
        self._offset = offset
        self.nbytes = nbytes
        self.reservation = reservation

    def view(self, start: int, stop: int) -> torch.Tensor:
        """Bytes [start, stop) from the frame's first on, as 1-D uint8; not to be kept beyond the frame's life.

        They may go on in frames that follow it (`is_followed_by`).
        """
        return self._slab.tensor()[self._offset + start : self._offset + stop]

    def is_followed_by(self, other: Frame) -> bool:
        """Returns whether another frame begins in memory where this one ends."""
        return other._slab is self._slab and other._offset == self._offset + self.nbytes

    @property
    def piece(self) -> FilePiece:
        """Offset of the bytes in the slab's memory file."""
        return FilePiece(self._slab.fd, self._offset, self.nbytes)

    @property
    def pinned(self) -> bool:
        """Whether the device copies from it at full speed."""
        return self._slab.pinned


class FramePool:
    """Frames over slabs of host memory. Thread-safe.

    Args:
        budget: the budget of the host tier. The pool is its reclaimer.
        frame_bytes: the largest frame, a power of two.
        page_bytes: a power of two that divides it; what is a multiple of it starts at one. None for `frame_bytes`.
        slab_bytes: a power of two; None for `default_slab_bytes`.
        pin: what pins a slab (`pinned.host_pin()`); None for pageable memory.
    """

    def __init__(
        self,
        budget: Budget,
        frame_bytes: int,
        *,
        page_bytes: int | None = None,
        slab_bytes: int | None = None,
        pin: HostPin | None = None,
    ) -> None:
        self.budget = budget
        self.frame_bytes = frame_bytes
        self._page_bytes = page_bytes or frame_bytes
        self.slab_bytes = slab_bytes or default_slab_bytes(budget.capacity_bytes, frame_bytes)
        assert frame_bytes % ALIGN_BYTES == 0 and _power_of_two_below(frame_bytes) == frame_bytes, frame_bytes
        assert frame_bytes % self._page_bytes == 0, (frame_bytes, page_bytes)
        assert self.slab_bytes >= frame_bytes and _power_of_two_below(self.slab_bytes) == self.slab_bytes, slab_bytes
        self._pin = pin
        self._slabs: list[_FrameSlab] = []
        self._frames: dict[Frame, None] = {}
        # `_turn` makes `take` and `give` atomic. `_lock` guards the slabs, and is not held while the budget is called,
        # which calls `reclaim` under a lock of its own.
        self._turn = threading.RLock()
        self._lock = threading.RLock()
        self._closed = False
        budget.set_reclaimer(lambda: self.kept_bytes, self.reclaim)

    @property
    def used_bytes(self) -> int:
        """Bytes in frames that are in use."""
        with self._lock:
            return sum(frame.nbytes for frame in self._frames)

    @property
    def kept_bytes(self) -> int:
        """Bytes of slabs that no frame uses."""
        with self._lock:
            return sum(slab.kept_bytes for slab in self._slabs)

    @property
    def room_bytes(self) -> int:
        """Bytes of the budget that others can charge: a slab that is used in part stays whole."""
        with self._lock:
            stays = sum(slab.kept_bytes for slab in self._slabs if not slab.empty)
            return self.budget.free_bytes - stays

    @property
    def slab_count(self) -> int:
        """Number of slabs now."""
        return len(self._slabs)

    def take(self, nbytes: int, tag: Tag, name: str, *, beside: Frame | None = None) -> Frame:
        """Returns a frame of `nbytes` (a multiple of `ALIGN_BYTES`, at most `frame_bytes`); contents undefined.

        Args:
            nbytes: see above.
            tag: what it is for.
            name: whose it is.
            beside: if given, only a gap of another slab than that of this frame is taken.

        Raises:
            BudgetError: the host budget has no room, or only in pieces that are too small.
        """
        assert 0 < nbytes <= self.frame_bytes and nbytes % ALIGN_BYTES == 0, f"frame of {nbytes} B for {name}"
        with self._turn:
            # The run is taken first, so that it no longer counts as kept when the budget looks.
            with self._lock:
                assert not self._closed, "take from a closed frame pool"
                place = self._place(nbytes, None if beside is None else beside._slab)
            if place is None:
                raise self._refusal(nbytes, name)
            slab, offset = place
            try:
                reservation = self.budget.reserve(nbytes, tag, name)
            except BudgetError:
                with self._lock:
                    slab.give(offset, nbytes)
                raise
            with self._lock:
                frame = Frame(slab, offset, nbytes, reservation)
                self._frames[frame] = None
            if self.budget.used_bytes + self.kept_bytes > self.budget.capacity_bytes:
                # A slab that is used in part stays whole, and somebody else has charged what was left beside it.
                self.give(frame)
                raise self._refusal(nbytes, name)
            return frame

    def give(self, frame: Frame) -> None:
        """Takes a frame back and ends its charge. No transfer may still be running on it."""
        with self._turn:
            with self._lock:
                assert frame in self._frames, f"frame of {frame.nbytes} B given back twice"
                del self._frames[frame]
                frame._slab.give(frame._offset, frame.nbytes)
            # Last: in between `reserve` sees the bytes twice and frees too much, not too little.
            frame.reservation.release()

    def by_use(self, frames: Iterable[Frame]) -> list[list[Frame]]:
        """Frames by slab; the slab of which they use least comes first."""
        found: dict[_FrameSlab, list[Frame]] = {}
        for frame in frames:
            found.setdefault(frame._slab, []).append(frame)
        return sorted(found.values(), key=lambda group: sum(frame.nbytes for frame in group))

    def by_page(self, frames: Iterable[Frame]) -> list[list[Frame]]:
        """Frames by the place of a whole page that they lie in; the place of which they use least comes first."""
        found: dict[tuple[_FrameSlab, int], list[Frame]] = {}
        for frame in frames:
            found.setdefault(self._place_of(frame), []).append(frame)
        return sorted(found.values(), key=lambda group: sum(frame.nbytes for frame in group))

    def is_beside(self, frame: Frame, other: Frame) -> bool:
        """Returns whether two frames lie in the place of the same whole page."""
        return self._place_of(frame) == self._place_of(other)

    def _place_of(self, frame: Frame) -> tuple[_FrameSlab, int]:
        return frame._slab, frame._offset // self.frame_bytes

    def reclaim(self, nbytes: int) -> int:
        """Releases empty slabs until `nbytes` are free or none is left; returns how many are. For the budget."""
        freed = 0
        with self._lock:
            for slab in reversed(list(self._slabs)):
                if freed >= nbytes:
                    break
                if slab.empty:
                    freed += slab.nbytes
                    self._slabs.remove(slab)
                    slab.close()
        return freed

    def close(self) -> None:
        """Ends the charges of all frames, unpins and unmaps. Idempotent; no transfer may still be running."""
        with self._lock:
            self._closed = True
            frames, slabs = list(self._frames), self._slabs
            self._frames.clear()
            self._slabs = []
        for frame in frames:
            frame.reservation.release()
        for slab in slabs:
            slab.close()

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless frames and gaps cover the slabs, and charges add up."""
        with self._lock:
            for slab in self._slabs:
                slab.check_integrity([(f._offset, f.nbytes) for f in self._frames if f._slab is slab])
            charged = sum(frame.reservation.nbytes for frame in self._frames if frame.reservation.live)
            if charged != self.used_bytes or charged > self.budget.used_bytes:
                raise AssertionError(
                    f"frame pool: frames {self.used_bytes} B, charged {charged} B, budget {self.budget.used_bytes} B"
                )
        self.budget.check_integrity()

    def _place(self, nbytes: int, other: _FrameSlab | None) -> tuple[_FrameSlab, int] | None:
        for slab in self._slabs:
            offset = None if slab is other else slab.take(nbytes, self._page_bytes)
            if offset is not None:
                return slab, offset
        new = None if other is not None else self._new_slab(nbytes)
        if new is None:
            return None
        offset = new.take(nbytes, self._page_bytes)
        assert offset is not None
        return new, offset

    def _new_slab(self, nbytes: int) -> _FrameSlab | None:
        room = self.budget.capacity_bytes - self.budget.used_bytes - self.kept_bytes
        if room < nbytes:
            # Empty slabs that are too small for it.
            room += self.reclaim(nbytes - room)
        size = min(self.slab_bytes, _power_of_two_below(room)) if room >= nbytes else 0
        if size < nbytes:
            return None
        slab = _FrameSlab(size)
        if self._pin is not None:
            try:
                slab.pin(self._pin)
            except (OSError, RuntimeError) as error:
                self._pin = None
                _warn_pageable(size, error)
        self._slabs.append(slab)
        return slab

    def _refusal(self, nbytes: int, name: str) -> BudgetError:
        budget, kept = self.budget, self.kept_bytes
        return BudgetError(
            f"host budget: cannot place {format_bytes(nbytes)} for {name}: {format_bytes(budget.used_bytes)} of "
            f"{format_bytes(budget.capacity_bytes)} are in use and {format_bytes(kept)} are free in "
            f"{len(self._slabs)} slabs, but in no run that is long enough; set host_memory higher."
        )


class _FrameSlab:
    """A memory file, mapped once as shared, and which of its units are taken."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.fd = -1
        try:
            self.fd = os.memfd_create("ptm_accel frames", os.MFD_CLOEXEC)
            os.ftruncate(self.fd, nbytes)
            self._memory = mmap.mmap(self.fd, nbytes, mmap.MAP_SHARED)
        except (OSError, ValueError) as error:
            if self.fd >= 0:
                os.close(self.fd)
            raise BudgetError(
                f"cannot map {format_bytes(nbytes)} of host memory for frames: {error}, although the budget of the "
                f"host allows it; set host_memory lower, to what this machine or container really has."
            ) from error
        # Huge pages make disk transfers faster, where the kernel has them for shared memory.
        with contextlib.suppress(OSError):
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._tensor: torch.Tensor | None = torch.frombuffer(self._memory, dtype=torch.uint8)
        self._runs = RunSpace(nbytes // ALIGN_BYTES)
        self._unpin: Callable[[], None] | None = None

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    @property
    def empty(self) -> bool:
        return self._runs.free == self._runs.size

    @property
    def kept_bytes(self) -> int:
        return self._runs.free * ALIGN_BYTES

    def tensor(self) -> torch.Tensor:
        assert self._tensor is not None, "frame used after its slab was released"
        return self._tensor

    def pin(self, pin: HostPin) -> None:
        self._unpin = pin(self.tensor().data_ptr(), self.nbytes)

    def take(self, nbytes: int, page_bytes: int) -> int | None:
        """Takes a run; whole pages are aligned, so that small runs break up as few of them as possible."""
        units = nbytes // ALIGN_BYTES
        unit = self._runs.take(units, 1 if nbytes % page_bytes else page_bytes // ALIGN_BYTES)
        return None if unit is None else unit * ALIGN_BYTES

    def give(self, offset: int, nbytes: int) -> None:
        """Gives a run back."""
        self._runs.give(offset // ALIGN_BYTES, nbytes // ALIGN_BYTES)

    def close(self) -> None:
        unpin, self._unpin = self._unpin, None
        if unpin is not None:
            unpin()
        self._tensor = None
        # The mapping ends with its last view; its memory ends here.
        self._memory.madvise(mmap.MADV_REMOVE, 0, self.nbytes)
        os.close(self.fd)

    def check_integrity(self, frames: list[tuple[int, int]]) -> None:
        self._runs.check_integrity()
        end = 0
        gaps = [(start * ALIGN_BYTES, units * ALIGN_BYTES) for start, units in self._runs.gaps()]
        for offset, nbytes in sorted(frames + gaps):
            if offset != end:
                raise AssertionError(f"slab of {self.nbytes} B: run {offset}+{nbytes} after {end}")
            end = offset + nbytes
        if end != self.nbytes:
            raise AssertionError(f"slab of {self.nbytes} B: used + free = {end} B")


def _warn_pageable(nbytes: int, error: BaseException) -> None:
    warnings.warn(
        f"host frames: could not pin {format_bytes(nbytes)} of host memory ({error}); going on with pageable memory: "
        f"copies between host and device run at about a third of the speed and hold up the thread that starts them. "
        f"Raise the limit of locked memory (ulimit -l, or the container's memlock), or set host_memory lower.",
        RuntimeWarning,
        stacklevel=2,
    )


def _power_of_two_below(nbytes: int) -> int:
    """Returns the greatest power of two that is not above `nbytes` (which is positive)."""
    return 1 << (nbytes.bit_length() - 1)
