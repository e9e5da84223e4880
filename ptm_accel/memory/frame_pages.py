"""The pages of a `HostStore`, their states, and how they lie in memory. Plain records: the backing store changes
them.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ptm_accel.memory.budget import Tag
from ptm_accel.memory.frames import Frame
from ptm_accel.memory.mapping import FilePiece, MappedRun
from ptm_accel.memory.transfer import ALIGN_BYTES, BackingStore, Transfer


class FileStore(BackingStore, Protocol):
    """A backing store in files, which says where its bytes lie, so that they are mapped beside others."""

    def pieces(self, handle: Any) -> Sequence[FilePiece]:
        """Returns the handle's bytes as runs of files, in order. All stores have ended before."""
        ...


class PageState(enum.Enum):
    """Place of a page's bytes.

    ```
    new:   -> BLANK                             (a page that waits always has a place: a frame or a slot)
    store: BLANK, FRAME, CLEAN, DISK -> FRAME   (DISK takes a frame, CLEAN and DISK drop the slot)
    load:  DISK -> CLEAN                        (takes a frame and starts reading; the slot stays good)
    spill: FRAME -> DISK                        (takes a slot, writes, gives the frame back)
           BLANK -> DISK                        (the same, with nothing to write)
           CLEAN -> DISK                        (gives the frame back; so does a read that fails)
    ```
    A CLEAN page drops its slot, and is a FRAME, when another page needs the room on disk, and when the host has changed
    it in place.
    """

    BLANK = "blank"
    """In a frame that nothing was stored to yet."""
    FRAME = "frame"
    """In a frame only."""
    CLEAN = "clean"
    """In a slot, and the same bytes in a frame, or on their way into it."""
    DISK = "disk"
    """In a slot only."""


class Page:
    """At most a frame's worth of a handle.

    Transfers are in tuples, which pages that move together share: lists would be so many that Python's garbage
    collector runs again and again.

    Attributes:
        frame: the frame, unless the state is DISK.
        slot: the handle of the disk, if the state is CLEAN or DISK.
        writes: transfers into the frame that are not known to have ended well.
        reads: device copies from the frame, likewise.
        mappings: snapshots that map the frame and may still be alive.
        holds: how many `HeldRun`s keep the frame.
        key: names it from step to step: a gradient gets a new handle in each.
        due: number of its next use, as foretold by `FrameOrder`.
    """

    __slots__ = ("due", "frame", "handle", "holds", "key", "mappings", "nbytes", "reads", "slot", "state", "writes")

    def __init__(self, handle: FrameHandle, nbytes: int, frame: Frame) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.state = PageState.BLANK
        self.frame: Frame | None = frame
        self.slot: Any = None
        self.writes: tuple[Transfer, ...] = ()
        self.reads: tuple[Transfer, ...] = ()
        self.mappings: tuple[weakref.ref[MappedRun], ...] = ()
        self.holds = 0
        self.key = (handle.name, len(handle.pages))
        self.due = 0

    def may_leave(self) -> bool:
        """Returns whether its frame can be given to another page."""
        return not self.holds and not self.mapped()

    def mapped(self) -> bool:
        """Returns whether a snapshot of the frame is alive, so that the page must keep it."""
        if self.mappings:
            self.mappings = tuple(ref for ref in self.mappings if ref() is not None)
        return bool(self.mappings)

    def check(self) -> None:
        """Raises `AssertionError` if the state and the places differ."""
        framed, slotted = self.state is not PageState.DISK, self.state in (PageState.CLEAN, PageState.DISK)
        if (self.frame is not None) != framed or (self.slot is not None) != slotted:
            raise AssertionError(
                f"{self.handle.name}: page of {self.nbytes} B is {self.state.value}, its frame is {self.frame}, "
                f"its slot {self.slot}"
            )


class FrameRun(NamedTuple):
    """Parts of pages that follow one another, in a tensor and in memory.

    Attributes:
        pages: whose parts they are, in order.
        octets: their bytes in host memory.
        at: where they begin in what is moved.
    """

    pages: list[Page]
    octets: torch.Tensor
    at: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns the same bytes of what is moved."""
        nbytes = self.octets.numel()
        return tensor if nbytes == tensor.numel() else tensor[self.at : self.at + nbytes]


class FrameHandle:
    """Names a run of bytes in a `HostStore`.

    Attributes:
        pages: in order; all of the same size but the last.
        runs: how all of them lie in memory, once known; None again when a page changes its frame.
        snapshots: the mappings given out that may still be alive.
    """

    __slots__ = ("name", "nbytes", "pages", "runs", "snapshots", "tag")

    def __init__(self, nbytes: int, tag: Tag, name: str) -> None:
        self.nbytes = nbytes
        self.tag = tag
        self.name = name
        self.pages: list[Page] = []
        self.runs: list[FrameRun] | None = None
        self.snapshots: list[weakref.ref[MappedRun]] = []

    def held(self) -> bool:
        """Whether a snapshot is alive, so that slots must stay what they are (for frames, see `Page.mapped`)."""
        self.snapshots = [ref for ref in self.snapshots if ref() is not None]
        return bool(self.snapshots)

    def spans(self, offset: int, nbytes: int) -> Iterator[tuple[Page, int, int, int]]:
        """Yields the pages that a range touches, as (page, start in the page, stop in the page, start in the range)."""
        assert nbytes > 0 and nbytes % ALIGN_BYTES == 0 and offset % ALIGN_BYTES == 0, (self.name, offset, nbytes)
        assert offset >= 0 and offset + nbytes <= self.nbytes, (self.name, offset, nbytes, self.nbytes)
        page_bytes = self.pages[0].nbytes
        at = 0
        while at < nbytes:
            index, start = divmod(offset + at, page_bytes)
            stop = min(start + nbytes - at, self.pages[index].nbytes)
            yield self.pages[index], start, stop, at
            at += stop - start


class Runs:
    """Parts of pages, to be moved by one copy where their frames adjoin: starting a copy takes the host long."""

    def __init__(self) -> None:
        self._parts: list[tuple[Page, int, int, int]] = []

    def add(self, page: Page, start: int, stop: int, at: int) -> None:
        """Bytes [start, stop) of a page in a frame; they are those from `at` on of what is moved."""
        self._parts.append((page, start, stop, at))

    def taken(self) -> list[FrameRun]:
        """Returns the parts so far as runs; there are no parts then."""
        parts, self._parts = self._parts, []
        runs: list[FrameRun] = []
        while parts:
            count = 1
            while count < len(parts) and adjoin(parts[count - 1][0], parts[count][0]):
                count += 1
            run, parts = parts[:count], parts[count:]
            (first, start, _, at), (_, begin, stop, after) = run[0], run[-1]
            nbytes = after + stop - begin - at
            assert first.frame is not None
            runs.append(FrameRun([page for page, *_ in run], first.frame.view(start, start + nbytes), at))
        return runs


def adjoin(page: Page, following: Page) -> bool:
    """Returns whether two pages are one after another in memory, and neither has to wait for a read of its own."""
    if _is_being_read(page) or _is_being_read(following):
        return False
    return page.frame is not None and following.frame is not None and page.frame.is_followed_by(following.frame)


def _is_being_read(page: Page) -> bool:
    """Returns whether a page is being read from the disk."""
    return page.state is PageState.CLEAN and bool(page.writes)


def whole_runs(handle: FrameHandle) -> list[FrameRun] | None:
    """Returns the runs of memory of all pages of a handle; None where one is on disk, or being read.

    The answer is kept until a page moves.
    """
    for page in handle.pages:
        if page.state is PageState.DISK or _is_being_read(page):
            return None
    if handle.runs is None:
        runs = Runs()
        for part in handle.spans(0, handle.nbytes):
            runs.add(*part)
        handle.runs = runs.taken()
    return handle.runs


def check_runs(handle: FrameHandle) -> None:
    """Raises `AssertionError` unless `FrameHandle.runs` is right."""
    for run in handle.runs or ():
        address = run.octets.data_ptr()
        for page in run.pages:
            if page.frame is None or page.frame.view(0, page.nbytes).data_ptr() != address:
                raise AssertionError(f"{handle.name}: a page of {page.nbytes} B does not lie where it is copied from")
            address += page.nbytes


def merged(pieces: Sequence[FilePiece]) -> list[FilePiece]:
    """Joins pieces that adjoin in one file: the number of mappings of a process is limited."""
    joined: list[FilePiece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if last is not None and last.fd == piece.fd and last.offset + last.nbytes == piece.offset:
            joined[-1] = FilePiece(last.fd, last.offset, last.nbytes + piece.nbytes)
        else:
            joined.append(piece)
    return joined
