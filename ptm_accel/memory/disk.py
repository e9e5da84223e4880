"""The disk tier: a backing store for bytes in scratch files, striped over one or several paths."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.memory.budget import Budget, Reservation, Tag, Tier
from ptm_accel.memory.copies import settle
from ptm_accel.memory.diskio import DiskSlot, DiskTransfer, Lanes, needs_bounce
from ptm_accel.memory.mapping import FilePiece, private_run
from ptm_accel.memory.own_threads import do_elsewhere_if_own
from ptm_accel.memory.scratch import Direction, Io, ScratchFile
from ptm_accel.memory.slots import StripedSlots
from ptm_accel.memory.transfer import ALIGN_BYTES, Transfer, round_up
from ptm_accel.memory.verified import verify_mapped
from ptm_accel.units import format_bytes, format_least

GRAIN_BYTES = max(ALIGN_BYTES, mmap.PAGESIZE)
"""Slots are multiples of this: of what direct transfers ask for, and of what can be mapped."""

IO_THREADS_PER_PATH = 2
"""Transfers at the same time on each path, each with a bounce buffer of its own."""


def bounce_bytes(paths: int, block_bytes: int, io_threads_per_path: int = IO_THREADS_PER_PATH) -> int:
    """Host memory of the bounce buffers of a disk tier, for `paths` that are read past the page cache."""
    return paths * io_threads_per_path * block_bytes


def _refuse_buffers_beyond(host: Budget, buffers_bytes: int, block_bytes: int) -> None:
    if buffers_bytes > host.capacity_bytes:
        raise BudgetError(
            f"host_memory is {format_bytes(host.capacity_bytes)}, less than the bounce buffers of disk alone take "
            f"({format_bytes(buffers_bytes)}, {buffers_bytes // block_bytes} pages of {format_bytes(block_bytes)}). "
            f"Set host_memory higher than {format_least(buffers_bytes)}, or lower page_size."
        )


class DiskTier:
    """Keeps bytes in scratch files (see `BackingStore`); the handles are `DiskSlot`s.

    Unaligned offsets, lengths and tensors go through bounce buffers. Once a transfer and its retry have failed, every
    later call but `free` and `close` raises that error.

    Args:
        paths: one folder for each scratch file; the best is one for each drive.
        budget: of the disk tier; the limit of all files together.
        io_threads_per_path: transfers at the same time on each path.
        block_bytes: the greatest transfer, and what is dealt to a path at a time; a multiple of `GRAIN_BYTES`.
        weights: the speed of each path; equal by default.
        staging: the host budget that bounce buffers are charged to.
        verifies: whether what is read is compared with the CRC of what was written.
        io: the system calls, for tests.

    Raises:
        DiskError: a path cannot be used.
        BudgetError: no room for the bounce buffers.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        budget: Budget,
        io_threads_per_path: int = IO_THREADS_PER_PATH,
        block_bytes: int = 4 << 20,
        weights: Sequence[float] | None = None,
        staging: Budget | None = None,
        io: Io | None = None,
        *,
        verifies: bool = False,
    ) -> None:
        weights = [1.0] * len(paths) if weights is None else weights
        assert paths and len(weights) == len(paths) and min(weights) > 0, f"weights {weights} for paths {paths}"
        assert block_bytes > 0 and block_bytes % GRAIN_BYTES == 0, f"block of {block_bytes} bytes"
        assert io_threads_per_path > 0 and budget.tier is Tier.DISK
        io = io or Io()
        self.budget = budget
        self._live: set[DiskSlot] = set()
        self._staging: Reservation | None = None
        with ExitStack() as undo:
            self._files: list[ScratchFile] = []
            for path in paths:
                self._files.append(ScratchFile(path, io))
                undo.callback(self._files[-1].close)
            bounced = sum(needs_bounce(file, verifies=verifies) for file in self._files)
            buffers_bytes = bounce_bytes(bounced, block_bytes, io_threads_per_path)
            if staging is not None and buffers_bytes:
                _refuse_buffers_beyond(staging, buffers_bytes, block_bytes)
                self._staging = staging.reserve(buffers_bytes, Tag.STAGING, "the bounce buffers of the disk tier")
                undo.callback(self._staging.release)
            self._lanes = Lanes(self._files, io_threads_per_path, block_bytes, verifies=verifies)
            undo.pop_all()
        self._slots = StripedSlots(weights, block_bytes, self._limit_bytes, self._grow)
        # Garbage collection and the end of the process end the threads, too.
        self._shut = weakref.finalize(self, do_elsewhere_if_own, self._lanes.close)

    @property
    def bytes_read(self) -> int:
        """Bytes that loads have moved so far."""
        return self._lanes.bytes_read

    @property
    def bytes_written(self) -> int:
        """Bytes that stores have moved so far."""
        return self._lanes.bytes_written

    @property
    def busy_s(self) -> float:
        """Seconds in which something was being moved so far."""
        return self._lanes.busy_s

    @property
    def direct(self) -> bool:
        """Whether all transfers go past the page cache."""
        return all(file.direct for file in self._files)

    @property
    def closed(self) -> bool:
        """Whether nothing can be started any more."""
        return not self._shut.alive

    def new(self, nbytes: int, tag: Tag, name: str) -> DiskSlot:
        """Charges and reserves room for `nbytes`, rounded up; contents undefined.

        Raises:
            BudgetError: no room under the budget.
            DiskError: no room on the disk, or the tier has failed.
        """
        assert nbytes > 0, f"slot of {nbytes} bytes for {name}"
        self._lanes.require_open(f"reserving room for {name}")
        nbytes = round_up(nbytes, GRAIN_BYTES)
        reservation = self.budget.reserve(nbytes, tag, name)
        try:
            with self._lanes.lock:
                slot = DiskSlot(name, nbytes, self._slots.allocate(nbytes), reservation)
                self._live.add(slot)
        except BaseException:
            reservation.release()
            raise
        return slot

    def free(self, handle: DiskSlot) -> None:
        """Gives the room back, after any transfer still running on it. Nothing happens after `close`.

        Raises:
            DiskError: a transfer cannot end any more.
        """
        self._lanes.wait_until(lambda: not handle.running, f"the transfers of {handle.name}")
        with self._lanes.lock:
            assert handle in self._live or self.closed, f"slot of {handle.name} freed twice"
            if handle in self._live:
                self._drop(handle)

    def store(self, handle: DiskSlot, offset: int, source: torch.Tensor) -> DiskTransfer:
        """Starts copying `source` to the handle's bytes from `offset` on; it must not change until that is done.

        Raises:
            DiskError: the tier is closed, or has failed.
        """
        return self._start(Direction.WRITE, handle, offset, source)

    def load(self, handle: DiskSlot, offset: int, into: torch.Tensor, behind: Sequence[Transfer] = ()) -> DiskTransfer:
        """Starts copying the handle's bytes from `offset` on into `into`; see `BackingStore.load`.

        Raises:
            DiskError: the tier is closed, or has failed.
        """
        own = [each for each in behind if isinstance(each, DiskTransfer) and self.is_own(each)]
        settle([each for each in behind if each not in own])
        return self._start(Direction.READ, handle, offset, into, own)

    def is_own(self, transfer: Transfer) -> bool:
        """Whether a load can come behind a transfer that uses its memory, without anybody waiting for that."""
        return isinstance(transfer, DiskTransfer) and transfer.is_of(self._lanes)

    def snapshot(self, handle: DiskSlot) -> torch.Tensor:
        """The bytes as a 1-D `uint8` tensor over a private mapping; writing to it changes neither file nor slot.

        See `BackingStore.snapshot`; it may outlive `close`.

        Raises:
            DiskError: the tier is closed, or has failed, or the file cannot be mapped.
        """
        with self._lanes.lock:
            pieces = self.pieces(handle)
            try:
                run = private_run(pieces)
            except OSError as error:
                raise self._unmappable(handle, error) from error
            if handle.held():
                handle.snapshots.append(weakref.ref(run))
            else:
                handle.snapshots = [weakref.ref(run)]
            return run.tensor()

    def copy(self, handle: DiskSlot, into: DiskSlot) -> None:
        """See `BackingStore.copy`.

        Raises:
            DiskError: as by `snapshot` and `store`.
        """
        self.store(into, 0, self.snapshot(handle)).wait()

    def pieces(self, handle: DiskSlot) -> list[FilePiece]:
        """Lists where the bytes lie in the scratch files, in order, once its transfers have ended; for mapping them.

        Raises:
            DiskError: the tier is closed, or has failed.
        """
        self._lanes.wait_until(lambda: not handle.running, f"the transfers of {handle.name}")
        with self._lanes.lock:
            self._lanes.require_open(f"snapshot of {handle.name}")
            self._check(handle, 0, handle.nbytes)
            if self._lanes.verifies:
                self._verify(handle)
            return [FilePiece(self._files[path].fd, offset, nbytes) for path, offset, nbytes in handle.segments]

    def close(self) -> None:
        """Ends the threads after all running transfers, closes the files and gives all charges back. Idempotent."""
        self._shut()
        if self._lanes.inherited:
            return
        with self._lanes.lock:
            for slot in list(self._live):
                self._drop(slot)
            staging, self._staging = self._staging, None
        if staging is not None:
            staging.release()

    def check_integrity(self) -> None:
        """Raises `AssertionError` with the numbers if free + used is not the length of the files."""
        with self._lanes.lock:
            self._slots.check_integrity()
            self.budget.check_integrity()
            held = sum(slot.nbytes for slot in self._live)
            charged = sum(slot.reservation.nbytes for slot in self._live if slot.reservation.live)
            sizes = [file.size_bytes for file in self._files] == [file.size for file in self._slots.files]
            if not (held == charged == self._slots.used_bytes and sizes):
                raise AssertionError(
                    f"disk tier: slots hold {held}, charged {charged}, used in files {self._slots.used_bytes} of "
                    f"{self._slots.size_bytes}, lengths agree: {sizes}"
                )

    def _start(
        self,
        direction: Direction,
        handle: DiskSlot,
        offset: int,
        buffer: torch.Tensor,
        behind: Sequence[DiskTransfer] = (),
    ) -> DiskTransfer:
        flat = buffer.dtype is torch.uint8 and buffer.dim() == 1 and buffer.is_contiguous()
        assert flat and buffer.is_cpu, f"{buffer.dtype} {tuple(buffer.shape)} on {buffer.device}"
        self._lanes.require_open(f"{direction.value} of {handle.name}")
        self._check(handle, offset, buffer.numel())
        transfer = DiskTransfer(self._lanes, handle, direction, offset, buffer)
        if not transfer.done():
            self._lanes.submit(transfer, behind)
        return transfer

    def _check(self, handle: DiskSlot, offset: int, nbytes: int) -> None:
        assert handle in self._live, f"slot of {handle.name} was freed, or is of another tier"
        inside = 0 <= offset <= offset + nbytes <= handle.nbytes
        assert inside, f"[{offset}, {offset + nbytes}) of {handle.name}, which has {handle.nbytes} bytes"

    def _verify(self, handle: DiskSlot) -> None:
        """Compares all of a slot with its CRCs: nobody does when a mapping of it is read."""
        for unit, _ in handle.units(0, handle.nbytes, self._lanes.block_bytes):
            file = self._files[unit.path]
            try:
                verify_mapped(file, unit, handle.sums)
            except OSError as error:
                raise DiskError(
                    error.errno,
                    f"snapshot of {handle.name} failed: {format_bytes(unit.nbytes)} at offset {unit.offset} of the "
                    f"scratch file in {file.folder}: {error.strerror} (errno {error.errno}); set disk.paths to a "
                    "folder on a sound disk, and start again from the last checkpoint.",
                    str(file.folder),
                ) from error

    def _drop(self, slot: DiskSlot) -> None:
        self._live.discard(slot)
        # Room before charge: the next charge relies on the room.
        self._slots.free(slot.segments)
        slot.reservation.release()

    def _limit_bytes(self) -> int:
        return self.budget.capacity_bytes // GRAIN_BYTES * GRAIN_BYTES

    def _grow(self, path: int, least: int, wish: int) -> int:
        return self._files[path].grow(least, wish)

    def _unmappable(self, handle: DiskSlot, error: OSError) -> DiskError:
        folder = str(self._files[handle.segments[0].path].folder)
        text = (
            f"cannot map {handle.name}, {handle.nbytes} bytes in {len(handle.segments)} pieces, from the scratch file "
            f"in {folder}: {error.strerror} (errno {error.errno}); set disk.paths to a folder on a local disk, or "
            f"raise vm.max_map_count."
        )
        return DiskError(error.errno, text, folder)
