"""The backing store under a device: pages in host frames, which overflow to a disk.

Only copies of the device touch a frame before the transfers on it have been waited for.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import pairwise

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Budget, Tag
from ptm_accel.memory.copies import Chained, finish, joined, settle
from ptm_accel.memory.device import DeviceTier
from ptm_accel.memory.frame_pages import (
    FileStore,
    FrameHandle,
    FrameRun,
    Page,
    PageState,
    Runs,
    adjoin,
    check_runs,
    merged,
    whole_runs,
)
from ptm_accel.memory.framed_pages import FramedPages
from ptm_accel.memory.frames import FramePool
from ptm_accel.memory.host_sums import HostSum
from ptm_accel.memory.mapping import FilePiece, private_run
from ptm_accel.memory.own_threads import Worker
from ptm_accel.memory.transfer import Transfer, round_up


class HeldRun:
    """Bytes of pages that stay in their frames, to be changed in place after `wait`.

    Args:
        pages: hold them, one after another in memory.
        octets: the bytes.
        written: transfers that write the pages.
        read: transfers that read them, whose errors are raised elsewhere.
    """

    __slots__ = ("_read", "_written", "octets", "pages")

    def __init__(
        self, pages: Sequence[Page], octets: torch.Tensor, written: Sequence[Transfer], read: Sequence[Transfer]
    ) -> None:
        self.pages = pages
        self.octets = octets
        self._written = written
        self._read = read

    def wait(self) -> None:
        """Waits for the transfers on the pages; raises the first error of those that write them."""
        for transfer in self._written:
            transfer.wait()
        settle(self._read)


def _running(transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
    """Returns the transfers that have not ended."""
    return tuple(each for each in transfers if not each.done()) if transfers else ()


class HostStore(FramedPages):
    """A `BackingStore` for a device; the handles are `FrameHandle`s. Thread-safe.

    Args:
        device: copies between blocks and frames; it must outlive this.
        frames: host frames, closed with this; their budget is the host tier's.
        disk: where pages go when the frames are full, if anywhere; closed with this.
    """

    def __init__(self, device: DeviceTier, frames: FramePool, disk: FileStore | None) -> None:
        super().__init__(frames, disk)
        self.device = device
        self._handles: dict[FrameHandle, None] = {}
        self._adder = Worker("ptm_accel sums")
        self._closed = False

    @property
    def budget(self) -> Budget:
        """Budget of the host's memory."""
        return self._frames.budget

    def new(self, nbytes: int, tag: Tag, name: str) -> FrameHandle:
        """Secures room for `nbytes` in frames, spilling pages of others if need be (`FrameOrder`).

        Raises:
            BudgetError: frames and disk together have no room.
            DiskError: spilling failed.
        """
        handle = FrameHandle(round_up(nbytes), tag, name)
        with self._lock:
            assert not self._closed and nbytes > 0, f"new({nbytes}, {name}), store closed: {self._closed}"
            self._admit(handle)
            self._handles[handle] = None
            try:
                for start in range(0, handle.nbytes, self._frames.frame_bytes):
                    size = min(self._frames.frame_bytes, handle.nbytes - start)
                    page = Page(handle, size, self._room(size, tag, name, admitting=True))
                    handle.pages.append(page)
                    self._framed.add(page)
            except BaseException:
                self.free(handle)
                raise
        return handle

    def free(self, handle: FrameHandle) -> None:
        """Gives frames and slots back, after the transfers on them, whose errors are raised elsewhere.

        Nobody waits here for those on frames.
        """
        with self._lock:
            assert handle in self._handles, f"handle of {handle.name} freed twice"
            del self._handles[handle]
            pages, handle.pages, handle.runs = handle.pages, [], None
            for page in pages:
                running = [each for each in (*page.writes, *page.reads) if not each.done()]
                if page.frame is None:
                    settle(running)
                    continue
                self._framed.remove(page)
                if running:
                    # The thread goes on: the frame is free as soon as they have ended.
                    self._ending.append((page.frame, running))
                else:
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

    def load(self, handle: FrameHandle, offset: int, into: torch.Tensor, behind: Sequence[Transfer] = ()) -> Transfer:
        """Starts copying frames to the device; pages on disk are read into a frame first, without blocking (`Chained`).

        See `BackingStore.load`.

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
                    self._load_runs(whole, into, copies, behind)
                    return joined(copies)
                runs = Runs()
                self._room_ahead(handle, offset, into.numel())
                for page, start, stop, at in handle.spans(offset, into.numel()):
                    self._look_at_ended(page)
                    if page.state is PageState.DISK:
                        self._load_runs(runs.taken(), into, copies, behind)
                        self._read(page)
                    self._framed.use(page)
                    runs.add(page, start, stop, at)
                self._load_runs(runs.taken(), into, copies, behind)
            except BaseException:
                settle(copies)
                raise
        return joined(copies)

    def snapshot(self, handle: FrameHandle) -> torch.Tensor:
        """Returns the bytes as a private mapping of frames, and of files of the disk.

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

    def copy(self, handle: FrameHandle, into: FrameHandle) -> None:
        """See `BackingStore.copy`.

        Raises:
            BudgetError: no frame can be freed.
            DiskError: spilling failed, or a store to `handle` had failed.
        """
        with self._lock:
            octets = self.snapshot(handle)
            for page, _, stop, at in into.spans(0, handle.nbytes):
                self._to_frame(page, whole=True).view(0, stop).copy_(octets[at : at + stop])

    def end_step(self, model: object) -> None:
        """A step of a model has ended, which the next one repeats: pages leave by their next use from then on."""
        with self._lock:
            self._framed.end_step(model)

    @property
    def page_bytes(self) -> int:
        """The size of all pages of a handle but the last."""
        return self._frames.frame_bytes

    def reach(self, handle: FrameHandle, offset: int) -> int:
        """Counts the adjoining bytes from `offset` on in host memory; of a page on disk, those of it."""
        with self._lock:
            if (runs := whole_runs(handle)) is not None:
                return next(run.at + run.octets.numel() for run in reversed(runs) if run.at <= offset) - offset
            index, start = divmod(offset, handle.pages[0].nbytes)
            nbytes = handle.pages[index].nbytes
            for page, following in pairwise(handle.pages[index:]):
                if not adjoin(page, following):
                    break
                nbytes += following.nbytes
            return nbytes - start

    def hold(self, handle: FrameHandle, offset: int, nbytes: int) -> HeldRun:
        """Keeps bytes within `reach` in their frames until `let_go`; if they are on disk, reading them is started.

        Raises:
            BudgetError: no frame can be freed.
            DiskError: spilling failed, or a store to a page had failed.
        """
        with self._lock:
            assert handle in self._handles, f"hold of the freed handle of {handle.name}"
            spans = list(handle.spans(offset, nbytes))
            pages = [page for page, *_ in spans]
            for page in pages:
                self._look_at_ended(page)
                if page.state is PageState.DISK:
                    assert len(pages) == 1, f"{handle.name}: a hold of {nbytes} B beyond its reach"
                    self._read(page)
            written: dict[Transfer, None] = {}
            read: dict[Transfer, None] = {}
            for page in pages:
                self._framed.use(page)
                page.holds += 1
                page.reads = _running(page.reads)
                written |= dict.fromkeys(page.writes)
                read |= dict.fromkeys(page.reads)
            assert pages[0].frame is not None
            start = spans[0][1]
            return HeldRun(pages, pages[0].frame.view(start, start + nbytes), list(written), list(read))

    def let_go(self, run: HeldRun, *, wrote: bool) -> None:
        """Ends a hold, after `HeldRun.wait`; if it `wrote`, what the disk has of the page is out of date."""
        with self._lock:
            for page in run.pages:
                assert page.holds > 0, f"{page.handle.name}: let go of more often than held"
                page.holds -= 1
                if wrote and page.state is PageState.CLEAN:
                    # The read has ended well, or there would have been nothing to change.
                    page.writes = ()
                    self._drop_slot(page)

    def is_framed(self, handle: FrameHandle) -> bool:
        """Returns whether all of it is in host memory, and nowhere else."""
        with self._lock:
            return all(page.state is PageState.FRAME for page in handle.pages)

    def add(
        self,
        total: FrameHandle,
        total_dtype: torch.dtype,
        more: FrameHandle,
        more_dtype: torch.dtype,
        parts: Iterable[tuple[int, int]],
    ) -> Transfer | None:
        """Has the CPU add elements of one handle to those of another; later transfers of either come after that.

        Args:
            total: the sums.
            total_dtype: of their elements.
            more: what is added.
            more_dtype: of its elements.
            parts: which ones, of both: the first element, and where they end.

        Returns:
            the addition; None where one of them is not in host memory alone.
        """
        with self._lock:
            if not (self.is_framed(total) and self.is_framed(more)):
                return None
            pieces: list[tuple[torch.Tensor, torch.Tensor]] = []
            for start, stop in parts:
                while start < stop:
                    into = self._reached(total, total_dtype, start, stop)
                    source = self._reached(more, more_dtype, start, stop)
                    count = min(into.numel(), source.numel())
                    pieces.append((into[:count], source[:count]))
                    start += count
            writes = [write for page in (*total.pages, *more.pages) for write in page.writes]
            reads = [read for page in total.pages for read in page.reads]
            added = HostSum(pieces, list(dict.fromkeys(writes)), list(dict.fromkeys(reads)))
            self._adder.submit(added)
            for page in total.pages:
                page.writes = (*_running(page.writes), added)
            for page in more.pages:
                page.reads = (*_running(page.reads), added)
            return added

    def _reached(self, handle: FrameHandle, dtype: torch.dtype, start: int, stop: int) -> torch.Tensor:
        """Returns the elements from `start` on, up to `stop` or where they go on elsewhere in memory."""
        index, offset = divmod(start * dtype.itemsize, handle.pages[0].nbytes)
        frame = handle.pages[index].frame
        assert frame is not None
        nbytes = min(self.reach(handle, start * dtype.itemsize), (stop - start) * dtype.itemsize)
        return frame.view(offset, offset + nbytes).view(dtype)

    def close(self) -> None:
        """Frees every handle after its transfers, then closes frames and disk. Idempotent."""
        with self._lock:
            for handle in list(self._handles):
                self.free(handle)
            while self._give_ended(wait=True):
                pass
            self._adder.close()
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
            held = sum(page.nbytes for page in framed) + sum(frame.nbytes for frame, _ in self._ending)
            if framed != set(self._framed) or held != self._frames.used_bytes:
                raise AssertionError(
                    f"host store: {len(framed)} pages in frames ({held} B), {len(self._framed)} in the order of use, "
                    f"frames in use {self._frames.used_bytes} B"
                )
            self._frames.check_integrity()
            if self._swap is not None:
                self._swap.disk.check_integrity()

    def _whole(self, handle: FrameHandle) -> list[FrameRun] | None:
        """Returns `whole_runs`, for a load; transfers into the pages that have ended well are forgotten.

        Raises:
            DiskError: a store failed.
        """
        for page in handle.pages:
            self._look_at_ended(page)
        runs = whole_runs(handle)
        if runs is not None:
            for page in handle.pages:
                self._framed.use(page)
        return runs

    def _store_runs(self, runs: Iterable[FrameRun], source: torch.Tensor, copies: list[Transfer]) -> None:
        """Starts copying to the pages of some runs."""
        for run in runs:
            # No copy of the device comes after those by itself.
            settle([write for page in run.pages for write in page.writes if isinstance(write, HostSum)])
            reads = list(dict.fromkeys(read for page in run.pages for read in self._running_reads(page)))
            copy = self.device.copy_out(run.octets, run.of(source), after=reads)
            copies.append(copy)
            alone = (copy,)
            for page in run.pages:
                page.writes = (*page.writes, copy) if page.writes else alone

    def _load_runs(
        self, runs: Iterable[FrameRun], into: torch.Tensor, copies: list[Transfer], behind: Sequence[Transfer]
    ) -> None:
        """Starts copying from the pages of some runs."""
        for run in runs:
            octets = run.of(into)
            writes = list(dict.fromkeys(write for page in run.pages for write in page.writes))
            copy: Transfer
            if all(map(self.device.is_own, writes)):
                copy = self.device.copy_in(octets, run.octets, after=writes, behind=behind)
            else:
                copy = Chained(writes, partial(self.device.copy_in, octets, run.octets, behind=behind))
            copies.append(copy)
            alone = (copy,)
            for page in run.pages:
                running = _running(page.reads)
                page.reads = (*running, copy) if running else alone

    def _running_reads(self, page: Page) -> Sequence[Transfer]:
        """Returns the device copies that may still read a page's frame; the others have been waited for."""
        if page.reads:
            page.reads = tuple(read.begun if isinstance(read, Chained) else read for read in page.reads)
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
