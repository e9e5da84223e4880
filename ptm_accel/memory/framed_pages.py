"""Pages in host frames that overflow to a disk: their states, and the room for them.

Only the methods under "changes of state" change the state of a page. A page always has a frame or a slot on disk: so
`HostStore.new` makes room or refuses, and a later `store` or `load` needs no more room in sum. A frame that it needs
comes from the page that `FrameOrder` has leave first.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from typing import Any

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.copies import finish, raise_first, settle
from ptm_accel.memory.frame_order import FrameOrder
from ptm_accel.memory.frame_pages import FileStore, FrameHandle, Page, PageState
from ptm_accel.memory.frames import Frame, FramePool
from ptm_accel.memory.swap_space import SwapSpace
from ptm_accel.memory.transfer import Transfer
from ptm_accel.units import format_bytes


class FramedPages:
    """Pages with a frame or a slot each. Thread-safe."""

    def __init__(self, frames: FramePool, disk: FileStore | None) -> None:
        self._frames = frames
        self._swap = None if disk is None else SwapSpace(disk, frames.frame_bytes)
        # Pages that have a frame.
        self._framed = FrameOrder()
        # Frames that nobody wants any more, with the transfers that still use them.
        self._ending: deque[tuple[Frame, Sequence[Transfer]]] = deque()
        self._lock = threading.RLock()

    def _give_ended(self, *, wait: bool = False) -> bool:
        """Gives frames back whose last transfers have ended; returns whether it did.

        Args:
            wait: for those of the oldest.
        """
        given = False
        while self._ending and ((wait and not given) or all(each.done() for each in self._ending[0][1])):
            frame, copies = self._ending.popleft()
            settle(copies)
            self._frames.give(frame)
            given = True
        return given

    def make_room(self, nbytes: int) -> int:
        """Spills pages until others can charge `nbytes` of the host budget; returns how many they can then.

        Raises:
            DiskError: spilling failed.
        """
        with self._lock:
            while self._frames.room_bytes < nbytes and self._give_ended(wait=True):
                pass
            with contextlib.suppress(BudgetError):
                while self._frames.room_bytes < nbytes and (victims := self._victims(nbytes)):
                    self._spill(victims, admitting=True)
            return self._frames.room_bytes

    def _mapped_bytes(self, more: Sequence[Page] = ()) -> int:
        """Bytes of frames that living snapshots map, and of those that one more would."""
        return sum(page.nbytes for page in (*more, *(page for page in self._framed if page.mapped())))

    # ---- changes of state --------------------------------------------------------------------------------------

    def _to_frame(self, page: Page, *, whole: bool) -> Frame:
        """Makes a frame the only place of a page that is to be stored to; copies to the device may still read it."""
        if page.state is PageState.DISK and whole:
            self._framed_clean(page, self._room(page.nbytes, page.handle.tag, page.handle.name))
        elif page.state is PageState.DISK:
            self._read(page)
        if page.state is PageState.CLEAN:
            # Until its read has ended well, only the slot is good.
            if whole:
                settle(page.writes)
            else:
                self._end_writes(page)
            page.writes = ()
            self._drop_slot(page)
        # Copies from the device run in the order they are started, so those still running need not be waited for.
        if page.writes:
            page.writes = tuple(w for w in page.writes if not w.done() or (not whole and settle([w]) is not None))
        page.state = PageState.FRAME
        self._framed.use(page)
        assert page.frame is not None
        return page.frame

    def _read(self, page: Page) -> None:
        """Starts reading a page that is on disk into a frame: DISK -> CLEAN."""
        assert self._swap is not None and page.state is PageState.DISK
        frame = self._room(page.nbytes, page.handle.tag, page.handle.name)
        try:
            read = self._swap.disk.load(page.slot, 0, frame.view(0, page.nbytes))
        except BaseException:
            self._frames.give(frame)
            raise
        self._framed_clean(page, frame)
        page.writes = (read,)

    def _framed_clean(self, page: Page, frame: Frame) -> None:
        page.frame, page.state, page.handle.runs = frame, PageState.CLEAN, None
        self._framed.add(page)

    def _to_disk(self, page: Page) -> None:
        """Leaves a page with its slot alone: BLANK, FRAME (written), CLEAN -> DISK."""
        settle(page.reads)
        assert page.frame is not None and page.slot is not None
        frame, page.frame, page.handle.runs = page.frame, None, None
        page.reads, page.writes = (), ()
        page.state = PageState.DISK
        self._framed.remove(page)
        self._frames.give(frame)

    def _drop_slot(self, page: Page) -> None:
        """Leaves a page, whose read has ended, with its frame alone: CLEAN -> FRAME."""
        assert self._swap is not None and page.state is PageState.CLEAN
        slot, page.slot = page.slot, None
        page.state = PageState.FRAME
        self._swap.disk.free(slot)

    def _spill(self, victims: Sequence[Page], *, admitting: bool = False) -> None:
        """Moves pages to disk: starts all writes, then waits for them. What fails stays in its frame."""
        assert self._swap is not None
        writing: list[tuple[Page, Any, Transfer]] = []
        failures: list[BaseException] = []
        for page in victims:
            try:
                started = self._leave(page, admitting)
            except BaseException as caught:
                failures.append(caught)
                break
            if started is not None:
                writing.append((page, *started))
        for page, slot, write in writing:
            try:
                write.wait()
            except BaseException as caught:
                failures.insert(0, caught)
                self._swap.disk.free(slot)
            else:
                page.slot = slot
                self._to_disk(page)
        raise_first(failures)

    def _leave(self, page: Page, admitting: bool) -> tuple[Any, Transfer] | None:
        """Lets a page leave its frame; returns the slot and the write that must end first, if there is one."""
        assert self._swap is not None
        if page.frame is None:
            # Its read has failed, as `_drop_clean` has found for another victim.
            return None
        if page.state is PageState.CLEAN:
            # Its read may fail; the slot is good all the same.
            settle(page.writes)
            self._to_disk(page)
            return None
        self._end_writes(page)
        slot = self._slot(page, admitting)
        if page.state is PageState.BLANK:
            page.slot = slot
            self._to_disk(page)
            return None
        return slot, self._swap.write(slot, page.frame.view(0, page.nbytes))

    def _end_writes(self, page: Page) -> None:
        """Waits for what is being written to a page's frame, and raises its error."""
        try:
            finish(page.writes)
        except Exception:
            if page.state is PageState.CLEAN:
                self._to_disk(page)
            raise
        page.writes = ()

    def _admit(self, handle: FrameHandle) -> None:
        """Refuses a handle that would leave no room for exchanging pages."""
        if self._swap is None:
            return
        while (refusal := self._swap.refill()) is not None and self._drop_clean():
            pass
        while refusal is not None and self._is_short(handle) and self._give_ended(wait=True):
            pass
        if refusal is not None and self._is_short(handle):
            raise self._no_room(handle.nbytes, handle.name, refusal) from refusal

    def _is_short(self, handle: FrameHandle) -> bool:
        assert self._swap is not None
        return self._frames.budget.free_bytes < handle.nbytes + self._swap.missing_bytes

    def _room(self, nbytes: int, tag: Tag, name: str, *, admitting: bool = False) -> Frame:
        """Returns a frame, freed by spilling if need be; refuses if there is none."""
        self._give_ended()
        moves = 0
        while True:
            try:
                return self._frames.take(nbytes, tag, name)
            except BudgetError as refusal:
                if self._give_ended(wait=True):
                    continue
                victims = self._victims(nbytes)
                if not victims:
                    raise self._no_room(nbytes, name, refusal) from refusal
                framed = len(self._framed)
                try:
                    self._spill(victims, admitting=admitting)
                except BudgetError as full:
                    if len(self._framed) < framed:
                        continue
                    # Pages could move back and forth between places that are too small.
                    moves += 1
                    if moves > framed or not (self._free_a_slab() or self._free_a_place()):
                        raise self._no_room(nbytes, name, full) from full

    def _free_a_slab(self) -> bool:
        """Moves the pages of one slab into gaps of others; False if there is none whose pages fit there."""
        pages = {page.frame: page for page in self._framed if page.frame is not None}
        for group in self._frames.by_use(pages):
            if not all(pages[frame].may_leave() for frame in group):
                continue
            with contextlib.suppress(BudgetError):
                for frame in group:
                    page = pages[frame]
                    self._move(page, self._frames.take(page.nbytes, page.handle.tag, page.handle.name, beside=frame))
                return True
        return False

    def _free_a_place(self) -> bool:
        """Moves what is left of tensors out of the place of one whole page; False if there is none where that works."""
        pages = {page.frame: page for page in self._framed if page.frame is not None}
        for group in self._frames.by_page(pages):
            if not all(pages[frame].may_leave() and frame.nbytes < self._frames.frame_bytes for frame in group):
                continue
            refused: list[Frame] = []
            try:
                for frame in group:
                    page = pages[frame]
                    place = self._frames.take(page.nbytes, page.handle.tag, page.handle.name)
                    while self._frames.is_beside(place, frame):
                        refused.append(place)
                        place = self._frames.take(page.nbytes, page.handle.tag, page.handle.name)
                    self._move(page, place)
            except BudgetError:
                continue
            finally:
                for place in refused:
                    self._frames.give(place)
            return True
        return False

    def _move(self, page: Page, place: Frame) -> None:
        """Moves a page to another frame."""
        frame = page.frame
        assert frame is not None
        self._end_writes(page)
        settle(page.reads)
        place.view(0, page.nbytes).copy_(frame.view(0, page.nbytes))
        page.frame, page.reads, page.handle.runs = place, (), None
        self._frames.give(frame)

    def _room_ahead(self, handle: FrameHandle, offset: int, nbytes: int) -> None:
        """Frees in one go, with parallel writes, what the pages of a load that are on disk will need."""
        if self._swap is None:
            return
        missing = sum(p.nbytes for p, *_ in handle.spans(offset, nbytes) if p.state is PageState.DISK)
        while missing > self._frames.budget.free_bytes and self._give_ended(wait=True):
            pass
        if missing > self._frames.budget.free_bytes and (victims := self._victims(missing, handle)):
            try:
                self._spill(victims)
            except BudgetError:
                # Page by page less room is needed at a time.
                return

    def _victims(self, nbytes: int, keep: FrameHandle | None = None) -> list[Page]:
        """Returns the pages that leave first whose frames make `nbytes` free; none if all together do not."""
        if self._swap is None:
            return []
        # Free bytes may lie in runs that are too short: then one more page, at least, has to go.
        missing = max(nbytes - self._frames.budget.free_bytes, 1)
        self._framed.learns = True
        victims: list[Page] = []
        for page in self._framed.leaving(keep):
            victims.append(page)
            missing -= page.nbytes
            if missing <= 0:
                return victims
        return []

    def _slot(self, page: Page, admitting: bool) -> Any:
        """Returns a slot for a page: free room, else that of a clean page, else what is set aside for exchanges."""
        assert self._swap is not None
        while True:
            try:
                return self._swap.disk.new(page.nbytes, page.handle.tag, page.handle.name)
            except BudgetError:
                if self._drop_clean():
                    continue
                if admitting:
                    raise
                return self._swap.take_spare(page.nbytes, page.handle.tag, page.handle.name)

    def _drop_clean(self) -> bool:
        """Frees the slot of the clean page used last, which has a frame as well; False if there is none."""
        for page in reversed(self._framed):
            if page.state is PageState.CLEAN and not page.handle.held() and not page.holds:
                if settle(page.writes) is not None:
                    self._to_disk(page)
                else:
                    page.writes = ()
                    self._drop_slot(page)
                return True
        return False

    def _no_room(self, nbytes: int, name: str, refusal: BudgetError) -> BudgetError:
        budget = self._frames.budget
        held = self._mapped_bytes()
        disk = "there is no disk tier" if self._swap is None else "nothing more can be moved to the disk"
        return BudgetError(
            f"host frames: cannot place {format_bytes(nbytes)} for {name}: {format_bytes(budget.used_bytes)} of "
            f"{format_bytes(budget.capacity_bytes)} host memory are in use, {format_bytes(self._frames.used_bytes)} "
            f"of it by pages ({format_bytes(held)} of them held by snapshots, such as a state dict that is kept), and "
            f"{disk}; set host_memory or disk higher. ({refusal})"
        )
