"""The home under a device: pages in host frames, which overflow to a disk.

Only copies of the device touch a frame before the transfers on it have been waited for.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Budget, Tag
from ptm_accel.memory.copies import Chained, finish, joined, settle
from ptm_accel.memory.device import DeviceTier
from ptm_accel.memory.frame_pages import (
    FileHome,
    FrameHandle,
    FrameRun,
    Page,
    PageState,
    Runs,
    check_runs,
    merged,
    whole_runs,
)
from ptm_accel.memory.framed_pages import FramedPages
from ptm_accel.memory.frames import FramePool
from ptm_accel.memory.mapping import FilePiece, private_run
from ptm_accel.memory.transfer import Transfer, round_up


class HeldRun:
    """Bytes of a page that stay in their frame, to be changed in place once the transfers `awaited` have ended."""

    __slots__ = ("awaited", "octets", "page")

    def __init__(self, page: Page, octets: torch.Tensor, awaited: list[Transfer]) -> None:
        self.page = page
        self.octets = octets
        self.awaited = awaited


def _running(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    """Those that have not ended."""
    return tuple(each for each in transfers if not each.done()) if transfers else ()


class FrameHome(FramedPages):
    """A `Home` for a device; the handles are `FrameHandle`s. Thread-safe.

    Args:
        device: copies between blocks and frames; it must outlive this.
        frames: host frames, closed with this; their budget is the host tier's.
        disk: where pages go when the frames are full, if anywhere; closed with this.
    """

    def __init__(self, device: DeviceTier, frames: FramePool, disk: FileHome | None) -> None:
        super().__init__(frames, disk)
        self.device = device
        self._handles: dict[FrameHandle, None] = {}
        self._closed = False

    @property
    def budget(self) -> Budget:
        """Of the host's memory."""
        return self._frames.budget

    def new(self, nbytes: int, tag: Tag, name: str) -> FrameHandle:
        """Secures room for `nbytes` in frames, spilling the least recently used pages of others if need be.

        Raises:
            BudgetError: frames and disk together have no room.
            DiskError: spilling failed.
        """
        handle = FrameHandle(round_up(nbytes), tag, name)
        with self._lock:
            assert not self._closed and nbytes > 0, f"new({nbytes}, {name}), home closed: {self._closed}"
            self._admit(handle)
            self._handles[handle] = None
            try:
                for start in range(0, handle.nbytes, self._frames.frame_bytes):
                    size = min(self._frames.frame_bytes, handle.nbytes - start)
                    page = Page(handle, size, self._room(size, tag, name, admitting=True))
                    handle.pages.append(page)
                    self._framed[page] = None
            except BaseException:
                self.free(handle)
                raise
        return handle

    def free(self, handle: FrameHandle) -> None:
        """Gives frames and slots back, after the transfers on them, whose errors are raised elsewhere."""
        with self._lock:
            assert handle in self._handles, f"handle of {handle.name} freed twice"
            del self._handles[handle]
            pages, handle.pages, handle.runs = handle.pages, [], None
            for page in pages:
                settle(page.writes)
                settle(page.reads)
                if page.frame is not None:
                    del self._framed[page]
                    self._frames.give(page.frame)
            for page in pages:
                if page.slot is not None:
                    assert self._swap is not None
                    self._swap.disk.free(page.slot)

    def store(self, handle: FrameHandle, offset: int, source: torch.Tensor) -> Transfer:
        """Starts copying device bytes into frames; pages on disk get a frame first.

        Raises:
            BudgetError: no frame can be freed.
            DiskError: spilling failed, or reading the rest of a page that is stored to in part.
        """
        copies: list[Transfer] = []
        with self._lock:
            assert handle in self._handles, f"store to the freed handle of {handle.name}"
            try:
                if offset == 0 and source.numel() == handle.nbytes and (whole := whole_runs(handle)) is not None:
                    for page in handle.pages:
                        self._to_frame(page, whole=True)
                    self._store_runs(whole, source, copies)
                    return joined(copies)
                runs = Runs()
                for page, start, stop, at in handle.spans(offset, source.numel()):
                    if page.state is PageState.DISK:
                        # The room for it may come from a page that is to be stored to before it.
                        self._store_runs(runs.taken(), source, copies)
                    self._to_frame(page, whole=stop - start == page.nbytes)
                    runs.add(page, start, stop, at)
                self._store_runs(runs.taken(), source, copies)
            except BaseException:
                # The caller gets no transfer to wait for.
                settle(copies)
                raise
        return joined(copies)

    def load(self, handle: FrameHandle, offset: int, into: torch.Tensor) -> Transfer:
        """Starts copying frames to the device; pages on disk are read into a frame first, without blocking (`Chained`).

        Raises:
            BudgetError: no frame can be freed.
            DiskError: spilling failed.
        """
        copies: list[Transfer] = []
        with self._lock:
            assert handle in self._handles, f"load from the freed handle of {handle.name}"
            try:
                whole = self._whole(handle) if offset == 0 and into.numel() == handle.nbytes else None
                if whole is not None:
                    self._load_runs(whole, into, copies)
                    return joined(copies)
                runs = Runs()
                self._room_ahead(handle, offset, into.numel())
                for page, start, stop, at in handle.spans(offset, into.numel()):
                    self._look_at_ended(page)
                    if page.state is PageState.DISK:
                        self._load_runs(runs.taken(), into, copies)
                        self._read(page)
                    self._framed.move_to_end(page)
                    runs.add(page, start, stop, at)
                self._load_runs(runs.taken(), into, copies)
            except BaseException:
                settle(copies)
                raise
        return joined(copies)

    def snapshot(self, handle: FrameHandle) -> torch.Tensor:
        """The bytes as a private mapping of frames, and of files of the disk.

        While it is alive the pages stay where they are. So once snapshots hold half of the frames, pages are written to
        the disk first.

        Raises:
            DiskError: writing them failed, or a store to one had failed.
        """
        with self._lock:
            assert handle in self._handles, f"snapshot of the freed handle of {handle.name}"
            swap = self._swap
            pieces: list[FilePiece] = []
            framed = [page for page in handle.pages if page.frame is not None and page.may_leave()]
            if swap is not None and self._mapped_bytes(framed) > self._frames.budget.capacity_bytes // 2:
                with contextlib.suppress(BudgetError):
                    self._spill(framed, admitting=True)
            for page in handle.pages:
                if page.state is PageState.CLEAN and settle(page.writes) is not None:
                    self._to_disk(page)
                if page.state is PageState.DISK:
                    assert swap is not None
                    pieces += swap.disk.pieces(page.slot)
                    continue
                self._end_writes(page)
                assert page.frame is not None
                pieces.append(page.frame.piece)
            run = private_run(merged(pieces))
            handle.snapshots.append(weakref.ref(run))
            for page in handle.pages:
                if page.frame is not None:
                    page.mappings = (*page.mappings, weakref.ref(run))
            return run.tensor()

    @property
    def page_bytes(self) -> int:
        """The size of all pages of a handle but the last."""
        return self._frames.frame_bytes

    def hold(self, handle: FrameHandle, offset: int, nbytes: int) -> HeldRun:
        """Keeps bytes of one page in their frame until `let_go`; if they are on disk, reading them is started.

        Raises:
            BudgetError: no frame can be freed.
            DiskError: spilling failed, or a store to the page had failed.
        """
        with self._lock:
            assert handle in self._handles, f"hold of the freed handle of {handle.name}"
            ((page, start, stop, _),) = handle.spans(offset, nbytes)
            self._look_at_ended(page)
            if page.state is PageState.DISK:
                self._read(page)
            # Copies to the device that still read the page; their errors are raised by their own `wait`.
            settle(page.reads)
            page.reads = ()
            assert page.frame is not None
            self._framed.move_to_end(page)
            page.holds += 1
            return HeldRun(page, page.frame.view(start, stop), list(page.writes))

    def let_go(self, run: HeldRun, *, wrote: bool) -> None:
        """Ends a hold, after `HeldRun.awaited`; if it `wrote`, what the disk has of the page is out of date."""
        with self._lock:
            page = run.page
            assert page.holds > 0, f"{page.handle.name}: let go of more often than held"
            page.holds -= 1
            if wrote and page.state is PageState.CLEAN:
                # The read has ended well, or there would have been nothing to change.
                page.writes = ()
                self._drop_slot(page)

    def close(self) -> None:
        """Frees every handle after its transfers, then closes frames and disk. Idempotent."""
        with self._lock:
            for handle in list(self._handles):
                self.free(handle)
            self._closed = True
            self._frames.close()
            if self._swap is not None:
                self._swap.close()

    def check_integrity(self) -> None:
        """Raises `AssertionError` with the numbers unless states are right and pages hold the frames in use."""
        with self._lock:
            for handle in self._handles:
                for page in handle.pages:
                    page.check()
                check_runs(handle)
                if handle.nbytes != (size := sum(page.nbytes for page in handle.pages)):
                    raise AssertionError(f"{handle.name}: {handle.nbytes} B in pages of {size} B together")
            framed = {page for handle in self._handles for page in handle.pages if page.frame is not None}
            held = sum(page.nbytes for page in framed)
            if framed != set(self._framed) or held != self._frames.used_bytes:
                raise AssertionError(
                    f"frame home: {len(framed)} pages in frames ({held} B), {len(self._framed)} in the order of use, "
                    f"frames in use {self._frames.used_bytes} B"
                )
            self._frames.check_integrity()
            if self._swap is not None:
                self._swap.disk.check_integrity()

    def _whole(self, handle: FrameHandle) -> list[FrameRun] | None:
        """As `whole_runs`, for a load; transfers into the pages that have ended well are forgotten.

        Raises:
            DiskError: a store failed.
        """
        for page in handle.pages:
            self._look_at_ended(page)
            if page.frame is not None:
                self._framed.move_to_end(page)
        return whole_runs(handle)

    def _store_runs(self, runs: Iterable[FrameRun], source: torch.Tensor, copies: list[Transfer]) -> None:
        """Starts copying to the pages of some runs."""
        for run in runs:
            reads = list(dict.fromkeys(read for page in run.pages for read in self._running_reads(page)))
            copy = self.device.copy_out(run.octets, run.of(source), after=reads)
            copies.append(copy)
            alone = (copy,)
            for page in run.pages:
                page.writes = (*page.writes, copy) if page.writes else alone

    def _load_runs(self, runs: Iterable[FrameRun], into: torch.Tensor, copies: list[Transfer]) -> None:
        """Starts copying from the pages of some runs."""
        for run in runs:
            octets = run.of(into)
            writes = list(dict.fromkeys(write for page in run.pages for write in page.writes))
            copy: Transfer
            if all(map(self.device.is_own, writes)):
                copy = self.device.copy_in(octets, run.octets, after=writes)
            else:
                copy = Chained(writes, partial(self.device.copy_in, octets, run.octets))
            copies.append(copy)
            alone = (copy,)
            for page in run.pages:
                running = _running(page.reads)
                page.reads = (*running, copy) if running else alone

    def _running_reads(self, page: Page) -> Sequence[Transfer]:
        """The device copies that may still read a page's frame; the others have been waited for."""
        if page.reads:
            if not all(map(self.device.is_own, page.reads)):
                # Errors are for those who wait for them.
                settle(page.reads)
            page.reads = _running(page.reads)
        return page.reads

    def _look_at_ended(self, page: Page) -> None:
        """Forgets what has been written to a page's frame, unless that failed.

        Raises:
            DiskError: a store failed.
        """
        if page.writes and all(write.done() for write in page.writes):
            if settle(page.writes) is None:
                page.writes = ()
            elif page.state is PageState.CLEAN and not page.holds:
                # The read failed; the slot is still good.
                self._to_disk(page)
            else:
                finish(page.writes)
