"""The C library's allocator: what it holds, and how long it keeps what is freed."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import NamedTuple, Protocol

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_GIVE_BACK_BYTES = 128 << 10
"""What glibc itself begins with, before it raises it to the size of freed blocks, up to 32 MiB."""
_KEEP_BYTES = 4 << 20
"""Larger blocks leave larger holes, and are fewer."""
_KEEP_LARGE_BYTES = 32 << 20
"""The most that glibc lets be set, and what it comes to by itself where large blocks are freed; most gradients are
smaller. That the system clears memory anew for each of them, page by page, was seen to take a fifth of a short step.
"""
_TRIM_BYTES = 2 * _KEEP_LARGE_BYTES
"""What glibc comes to by itself with that."""
_NEVER_BYTES = (1 << 31) - 1
_PASSED_BYTES = 16 << 20
"""After so many bytes of copies what they leave free is given back."""
_START_OF_HEAP = 46
"""Which field of `/proc/self/stat` that is, see proc(5); the first is 0."""


class HeapUse(NamedTuple):
    """What the C library has of the system, in bytes.

    Attributes:
        held: in its heaps, holes included, or mapped each by itself.
        live: of that, what is handed out.
    """

    held: int
    live: int


class Heap(Protocol):
    """The C library's allocator."""

    @property
    def tells_resident(self) -> bool:
        """Whether it can be known what is resident (`resident`, `anonymous`)."""
        ...

    def use(self) -> HeapUse:
        """What it has now."""
        ...

    def end(self) -> int:
        """The address at which its main heap ends; takes no time to tell."""
        ...

    def resident(self) -> int:
        """How many bytes of what it holds take memory; holes that have been given back do not."""
        ...

    def anonymous(self) -> int:
        """How many bytes of memory that is no file's the process takes, whoever it is for; quicker to tell."""
        ...

    def give_back(self) -> None:
        """Has blocks given back to the system as they are freed, and those that are kept at once."""
        ...

    def keep(self, *, large: bool) -> None:
        """Has blocks kept as they are freed.

        Args:
            large: nearly all of them; else those alone that leave small holes.
        """
        ...

    def let_be(self) -> None:
        """Has the library go on as it does by itself in a process that trains; what is free now is given back."""
        ...

    def trim(self) -> None:
        """Gives back what is free now, once; what is freed later is kept or given back as before."""
        ...


class _MallInfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks")
    ] + [("keepcost", ctypes.c_size_t)]


class Glibc:
    """The GNU C library's `malloc`.

    Attributes:
        tells: whether it says what it holds (2.33 and later).
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None)
        self._libc.sbrk.restype = ctypes.c_size_t
        self._libc.sbrk.argtypes = [ctypes.c_ssize_t]
        self._libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
        self._begin = _start_of_heap()
        self.tells = hasattr(self._libc, "mallinfo2")
        if self.tells:
            self._libc.mallinfo2.restype = _MallInfo

    @staticmethod
    def found() -> bool:
        """Whether this process has it."""
        return all(hasattr(ctypes.CDLL(None), name) for name in ("mallopt", "malloc_trim"))

    @property
    def tells_resident(self) -> bool:
        """See `Heap`."""
        return self.tells and self._begin is not None

    def use(self) -> HeapUse:
        """See `Heap`."""
        info = self._libc.mallinfo2()
        return HeapUse(held=info.arena + info.hblkhd, live=info.uordblks + info.hblkhd)

    def end(self) -> int:
        """See `Heap`."""
        address: int = self._libc.sbrk(0)
        return address

    def resident(self) -> int:
        """See `Heap`. Of the main heap the kernel tells; all else counts as resident."""
        assert self._begin is not None
        begin = self._begin // mmap.PAGESIZE * mmap.PAGESIZE
        pages = max(-(-(self.end() - begin) // mmap.PAGESIZE), 0)
        there = bytearray(pages)
        held = self.use().held
        if not pages or self._libc.mincore(begin, pages * mmap.PAGESIZE, (ctypes.c_char * pages).from_buffer(there)):
            return held
        return there.count(1) * mmap.PAGESIZE + max(held - pages * mmap.PAGESIZE, 0)

    def anonymous(self) -> int:
        """See `Heap`."""
        statm = os.open("/proc/self/statm", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _, resident, of_files = os.read(statm, 128).split()[:3]
        finally:
            os.close(statm)
        return (int(resident) - int(of_files)) * mmap.PAGESIZE

    def give_back(self) -> None:
        """See `Heap`."""
        self._set(_GIVE_BACK_BYTES, _GIVE_BACK_BYTES)
        self._libc.malloc_trim(0)

    def keep(self, *, large: bool) -> None:
        """See `Heap`."""
        self._set(_KEEP_LARGE_BYTES if large else _KEEP_BYTES, _NEVER_BYTES)

    def let_be(self) -> None:
        """See `Heap`."""
        self._set(_KEEP_LARGE_BYTES, _TRIM_BYTES)
        self._libc.malloc_trim(0)

    def trim(self) -> None:
        """See `Heap`."""
        self._libc.malloc_trim(0)

    def _set(self, mapped_from: int, trimmed_from: int) -> None:
        self._libc.mallopt(_M_MMAP_THRESHOLD, mapped_from)
        self._libc.mallopt(_M_TRIM_THRESHOLD, trimmed_from)


def _start_of_heap() -> int | None:
    """The address at which the main heap begins; None where the system does not tell."""
    try:
        # The name of the program comes in brackets, and may have any character in it.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        begin = int(fields[_START_OF_HEAP - 2])
    except (OSError, ValueError, IndexError):
        return None
    return begin or None


class Trimmer:
    """Gives back what tensors that were made only to be copied elsewhere leave free, now and then.

    The C library keeps such blocks beside every budget: of a checkpoint that is cast or fused as it is read, up to all.

    Args:
        heap: the allocator; where it is another than glibc's, nothing is done.
        every_bytes: of such tensors, after which it is done.
    """

    def __init__(self, heap: Glibc | None = None, every_bytes: int = _PASSED_BYTES) -> None:
        self._heap = heap or (Glibc() if Glibc.found() else None)
        self._every_bytes = every_bytes
        self._passed_bytes = 0

    def passed(self, nbytes: int) -> None:
        """So many bytes were copied, and are free or will be before the next are."""
        self._passed_bytes += nbytes
        if self._passed_bytes > self._every_bytes and self._heap is not None:
            self._passed_bytes = 0
            self._heap.trim()
