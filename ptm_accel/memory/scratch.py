"""One scratch file: private, without a name, grown with its blocks reserved, direct where the file system allows."""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ptm_accel.errors import DiskError
from ptm_accel.memory.mapping import MappedRun, anonymous_run, view_at
from ptm_accel.memory.transfer import ALIGN_BYTES, round_up
from ptm_accel.units import format_bytes

IN_MEMORY = ("tmpfs", "ramfs")
"""File systems that are memory and no disk."""
_REFUSED = (errno.EINVAL, errno.EOPNOTSUPP)
_STALLS_ALLOWED = 3
_MOUNTS = Path("/proc/self/mountinfo")
_OCTAL = re.compile(r"\\([0-7]{3})")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Direction(enum.Enum):
    """Direction in which bytes go."""

    READ = "read"
    WRITE = "write"


@dataclass(frozen=True, slots=True)
class Io:
    """The system calls that move and reserve bytes, as one value, so that a test can put failing ones in place."""

    preadv: Callable[[int, list[memoryview], int], int] = os.preadv
    pwritev: Callable[[int, list[memoryview], int], int] = os.pwritev
    fallocate: Callable[[int, int, int], None] = os.posix_fallocate


class ScratchFile:
    """An unlinked file of mode 0600 in a folder; nothing is left of it after a crash.

    Attributes:
        folder: where it lies.
        fd: its descriptor; -1 once closed.
        direct: whether transfers go past the page cache (`O_DIRECT`), and so must be aligned.
        size_bytes: its length.

    Raises:
        DiskError: the folder cannot be used.
    """

    def __init__(self, folder: Path, io: Io) -> None:
        self.folder = folder
        self.size_bytes = 0
        self.direct = False
        self._io = io
        self._file_system = file_system_of(folder)
        try:
            self.fd = _open_unlinked(folder)
        except OSError as error:
            raise _refusal(folder, error) from error
        try:
            self._choose_direct()
        except BaseException:
            self.close()
            raise

    def grow(self, least: int, wish: int) -> int:
        """Makes the file longer by `wish` bytes, or by `least` where that is all there is; returns by how much.

        Raises:
            DiskError: there is no room for `least` bytes.
        """
        try:
            self._extend(wish)
            return wish
        except OSError as error:
            if error.errno not in _FULL or least == wish:
                raise self._full(wish, error) from error
        try:
            self._extend(least)
        except OSError as error:
            raise self._full(least, error) from error
        return least

    def move(self, direction: Direction, address: int, offset: int, nbytes: int, bounce: MappedRun | None) -> None:
        """Moves bytes between memory and the file, whatever their alignment.

        A write that is not aligned reads the first and the last block and writes them back, so no other may touch
        these at the same time.

        Args:
            direction: which way.
            address: of the memory; the caller keeps it alive.
            offset: in the file.
            nbytes: how many.
            bounce: memory that holds the blocks touched; needed only if the file is direct.

        Raises:
            OSError: what the system said.
        """
        if not self.direct or (address | offset | nbytes) % ALIGN_BYTES == 0:
            self._move_all(direction, address, offset, nbytes)
            return
        assert bounce is not None, "a direct file and no bounce buffer"
        begin = offset // ALIGN_BYTES * ALIGN_BYTES
        end = round_up(offset + nbytes)
        inside = bounce.address + offset - begin
        if direction is Direction.READ:
            self._move_all(direction, bounce.address, begin, end - begin)
            ctypes.memmove(address, inside, nbytes)
            return
        last = end - ALIGN_BYTES
        if offset != begin:
            self._move_all(Direction.READ, bounce.address, begin, ALIGN_BYTES)
        if offset + nbytes != end:
            self._move_all(Direction.READ, bounce.address + last - begin, last, ALIGN_BYTES)
        ctypes.memmove(inside, address, nbytes)
        self._move_all(direction, bounce.address, begin, end - begin)

    def free_text(self) -> str:
        """Says how much is free on the file system, for messages."""
        try:
            status = os.fstatvfs(self.fd)
        except OSError as error:
            return f"free space unknown ({error.strerror})"
        return f"{format_bytes(status.f_bavail * status.f_frsize)} free on {self._file_system}"

    def close(self) -> None:
        """Closes the file; the file system frees its blocks once no mapping is left. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _move_all(self, direction: Direction, address: int, offset: int, nbytes: int) -> None:
        """Moves all bytes, whatever part of them each system call takes."""
        call = self._io.preadv if direction is Direction.READ else self._io.pwritev
        grain = ALIGN_BYTES if self.direct else 1
        moved = stalls = 0
        while moved < nbytes:
            rest = nbytes - moved
            try:
                taken = call(self.fd, [view_at(address + moved, rest)], offset + moved)
            except InterruptedError:
                continue
            # What a direct transfer leaves half done is done again: the next one must be aligned.
            step = taken if taken == rest else taken // grain * grain
            stalls = 0 if step else stalls + 1
            if stalls == _STALLS_ALLOWED:
                raise OSError(errno.EIO, f"only {moved} of {nbytes} bytes were moved, then none in {stalls} tries")
            moved += step

    def _extend(self, nbytes: int) -> None:
        try:
            self._io.fallocate(self.fd, self.size_bytes, nbytes)
        except OSError as error:
            # What was reserved before the disk was full would otherwise stay taken.
            os.ftruncate(self.fd, self.size_bytes)
            if error.errno not in _REFUSED:
                raise
            # A file system that cannot reserve; whether there is room then shows at the writes.
            os.ftruncate(self.fd, self.size_bytes + nbytes)
        self.size_bytes += nbytes

    def _full(self, nbytes: int, error: OSError) -> DiskError:
        text = (
            f"the scratch file in {self.folder} cannot grow by {format_bytes(nbytes)} to "
            f"{format_bytes(self.size_bytes + nbytes)}: {error.strerror}, {self.free_text()}; free space there, set "
            f"disk.limit lower, or set disk.paths to folders with more room."
        )
        return DiskError(error.errno, text, str(self.folder))

    def _choose_direct(self) -> None:
        if self._file_system in IN_MEMORY:
            self._warn(
                "which is memory and no disk: pages there take host memory that host_memory does not count; "
                "set disk.paths to a folder on a disk."
            )
            return
        flags = fcntl.fcntl(self.fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags | os.O_DIRECT)
            self._probe()
            self.direct = True
        except OSError as error:
            if error.errno not in _REFUSED:
                raise _refusal(self.folder, error) from error
            fcntl.fcntl(self.fd, fcntl.F_SETFL, flags)
            self._warn(
                "which refuses O_DIRECT: transfers go through the page cache, which is slower and takes memory; "
                "set disk.paths to a folder on a local disk (ext4, xfs)."
            )

    def _probe(self) -> None:
        """Some file systems take the flag and then refuse the transfers, or ask for more than our alignment."""
        run = anonymous_run(ALIGN_BYTES, "a test of the disk")
        view = [view_at(run.address, ALIGN_BYTES)]
        os.pwritev(self.fd, view, 0)
        os.preadv(self.fd, view, 0)
        os.ftruncate(self.fd, 0)

    def _warn(self, what: str) -> None:
        warnings.warn(f"ptm_accel: the disk path {self.folder} is on {self._file_system}, {what}", stacklevel=5)


def file_system_of(path: Path) -> str:
    """Returns the type of the file system that holds `path` (`ext4`, `tmpfs`, ...), or "an unknown file system"."""
    real = os.path.realpath(path)
    best, found = "", "an unknown file system"
    try:
        lines = os.fsdecode(_MOUNTS.read_bytes()).splitlines()
    except OSError:
        return found
    for line in lines:
        left, _, right = line.partition(" - ")
        # Blanks and backslashes are written as their octal numbers; all else is as it is.
        mount = _OCTAL.sub(lambda found: chr(int(found[1], 8)), left.split(" ")[4])
        inside = real == mount or real.startswith(mount.rstrip("/") + "/")
        if inside and len(mount) >= len(best):
            best, found = mount, right.split()[0]
    return found


def _open_unlinked(folder: Path) -> int:
    try:
        return os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
            raise
    # Mode 0600 and O_EXCL are what mkstemp does.
    fd, name = tempfile.mkstemp(prefix=".ptm-scratch-", dir=folder)
    os.unlink(name)
    return fd


def _refusal(folder: Path, error: OSError) -> DiskError:
    number = error.errno or errno.EIO
    text = (
        f"cannot use {folder} for a scratch file: {error.strerror} (errno {number}); set disk.paths to an existing, "
        f"writable folder on a disk."
    )
    return DiskError(number, text, str(folder))
