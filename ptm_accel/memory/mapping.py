"""Memory straight from the kernel: huge-page buffers, and private mappings of file pieces, as tensors.

The buffers are mapped and not allocated, for two reasons: the C library keeps freed blocks in its heap, where they
still count as resident; and direct disk transfers are several times faster on physically contiguous (huge) pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.memory.transfer import round_up
from ptm_accel.units import format_bytes

if TYPE_CHECKING:
    from ptm_accel.memory.budget import Reservation

HUGE_PAGE_BYTES = 2 << 20
"""Runs of at least this size are aligned to it and ask for huge pages."""

_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0
_PYBUF_WRITE = 0x200
_FAILED = ctypes.c_void_p(-1).value

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_view_from_memory = ctypes.pythonapi.PyMemoryView_FromMemory
_view_from_memory.restype = ctypes.py_object
_view_from_memory.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int]


class FilePiece(NamedTuple):
    """A run of bytes of an open file, at a multiple of the page size."""

    fd: int
    offset: int
    nbytes: int


class MappedRun:
    """An owned range of addresses.

    It is unmapped when the last reference to it has gone: those of its holders, and one of each tensor over it. So a
    tensor that outlives its holder costs memory, and never reads memory that is no longer mapped.

    Attributes:
        address: of the first byte.
        nbytes: the length.
    """

    __slots__ = ("__weakref__", "address", "nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self.address = address
        self.nbytes = nbytes
        # At exit the kernel unmaps, after the last thread that could still touch the bytes.
        weakref.finalize(self, _unmap, os.getpid(), address, nbytes).atexit = False

    def tensor(self) -> torch.Tensor:
        """Returns the bytes as a new 1-D `uint8` tensor, whose storage keeps the mapping alive."""
        array: Any = _array_type(self.nbytes).from_address(self.address)
        array.run = self
        return torch.frombuffer(array, dtype=torch.uint8)


def _unmap(process: int, address: int, nbytes: int) -> None:
    # A child made by `fork` may have something else at the addresses of memory that it was not given.
    if os.getpid() == process:
        _LIBC.munmap(address, nbytes)


def anonymous_run(nbytes: int, purpose: str) -> MappedRun:
    """Maps `nbytes` of fresh memory, aligned to huge pages and asking for them where it is large enough.

    A child made by `fork` is not given the memory (`MADV_DONTFORK`): pages that parent and child share are copied at
    the next write, and a direct transfer under way could end up in the wrong one of the two copies (see open(2)).

    Args:
        nbytes: a positive number of bytes.
        purpose: what they are for, for the message.

    Raises:
        BudgetError: the machine gives no more memory.
    """
    try:
        run = MappedRun(_map_anonymous(nbytes) if nbytes < HUGE_PAGE_BYTES else _map_aligned(nbytes), nbytes)
    except OSError as error:
        raise BudgetError(
            f"cannot map {format_bytes(nbytes)} of memory for {purpose}: {error.strerror}, although the budget of the "
            f"host allows it; set host_memory lower, to what this machine or container really has, or raise its "
            f"limits (ulimit -v, vm.overcommit_memory, vm.max_map_count)."
        ) from error
    _LIBC.madvise(run.address, run.nbytes, mmap.MADV_DONTFORK)
    if nbytes >= HUGE_PAGE_BYTES:
        # Advice only: a kernel without huge pages gives ordinary ones.
        _LIBC.madvise(run.address, run.nbytes, mmap.MADV_HUGEPAGE)
    return run


def private_run(pieces: Sequence[FilePiece]) -> MappedRun:
    """Maps pieces of files, one after the other, copy-on-write: reading costs no memory of our own.

    Args:
        pieces: at least one; their offsets and lengths are multiples of the page size.

    Raises:
        OSError: the kernel refuses a mapping.
    """
    nbytes = sum(piece.nbytes for piece in pieces)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    run = MappedRun(_map(None, nbytes, _PROT_NONE, flags, -1, 0), nbytes)
    address = run.address
    for piece in pieces:
        flags = mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
        _map(address, piece.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, piece.fd, piece.offset)
        address += piece.nbytes
    return run


def reserved_run(nbytes: int) -> MappedRun:
    """Maps addresses without memory: they tell tensors apart, and nothing can be read there.

    Args:
        nbytes: a positive number of bytes.

    Raises:
        OSError: the kernel refuses the mapping.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return MappedRun(_map(None, nbytes, _PROT_NONE, flags, -1, 0), nbytes)


def view_at(address: int, nbytes: int) -> memoryview:
    """Returns a writable view of memory that the caller keeps alive."""
    view: memoryview = _view_from_memory(address, nbytes, _PYBUF_WRITE)
    return view


@lru_cache(maxsize=4096)
def _array_type(nbytes: int) -> Any:
    # Kept, since a new ctypes array type costs more than a mapping, and is garbage only the collector finds.
    return ctypes.c_uint8 * nbytes


def _map(address: int | None, nbytes: int, protection: int, flags: int, fd: int, offset: int) -> int:
    mapped: int | None = _LIBC.mmap(address, nbytes, protection, flags, fd, offset)
    if mapped is None or mapped == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return mapped


def _map_anonymous(nbytes: int) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    return _map(None, nbytes, protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)


def _map_aligned(nbytes: int) -> int:
    """Maps more and trims both ends. Without the trim a huge page could reach beyond the bytes that are charged."""
    nbytes = round_up(nbytes, mmap.PAGESIZE)
    mapped = _map_anonymous(nbytes + HUGE_PAGE_BYTES)
    start = round_up(mapped, HUGE_PAGE_BYTES)
    if start > mapped:
        _LIBC.munmap(mapped, start - mapped)
    tail = mapped + HUGE_PAGE_BYTES - start
    if tail:
        _LIBC.munmap(start + nbytes, tail)
    return start


def mapped_copies(
    tensor: torch.Tensor, count: int, folder: Path | None = None, held: Reservation | None = None
) -> list[torch.Tensor]:
    """A copy of a tensor, mapped several times at different addresses: it takes room once, as long as one is alive.

    Args:
        tensor: in host memory.
        count: how often; a write to one of them is not seen in the others, and costs memory.
        folder: where it lies on disk; None for memory.
        held: the charge for it, which ends with the last of them.

    Raises:
        BudgetError: the machine gives no more memory.
        DiskError: the disk is full.
    """
    octets = tensor.contiguous().view(-1).view(torch.uint8)
    nbytes = round_up(octets.numel(), mmap.PAGESIZE)
    left = [count]

    def gone() -> None:
        left[0] -= 1
        if held is not None and held.live and not left[0]:
            held.release()

    try:
        with _unnamed(folder) as file:
            file.write(view_at(octets.data_ptr(), octets.numel()))
            file.truncate(nbytes)
            runs = [private_run([FilePiece(file.fileno(), 0, nbytes)]) for _ in range(count)]
    except OSError as error:
        if held is not None:
            held.release()
        if folder is not None:
            text = (
                f"disk: {folder} has no room for {format_bytes(nbytes)} of weights: {error.strerror}; free space there"
            )
            raise DiskError(error.errno, text) from error
        raise BudgetError(
            f"cannot copy {format_bytes(nbytes)} of weights: {error.strerror}; set host_memory lower, to what this "
            "machine or container really has."
        ) from error
    for run in runs:
        weakref.finalize(run, gone).atexit = False
    return [run.tensor()[: octets.numel()].view(tensor.dtype).view(tensor.shape) for run in runs]


def _unnamed(folder: Path | None) -> Any:
    """Returns a file without a name, in a folder or in memory."""
    if folder is not None:
        return tempfile.TemporaryFile(dir=folder)
    return open(os.memfd_create("ptm_accel copy", os.MFD_CLOEXEC), "wb")


def copy_in_file(tensor: torch.Tensor, folders: Sequence[Path], what: str) -> torch.Tensor:
    """Copies a contiguous tensor into a file without a name, in the folder with most room; returns it mapped.

    Args:
        tensor: of any device.
        folders: at least one.
        what: is copied, for the message.

    Raises:
        DiskError: the disk is full.
    """
    folder, nbytes = max(folders, key=lambda folder: shutil.disk_usage(folder).free), tensor.nbytes
    descriptor, name = tempfile.mkstemp(prefix="ptm_accel-", suffix=".mapped", dir=folder)
    try:
        # A disk that is full is met here; at a write through the mapping the process would be killed.
        os.posix_fallocate(descriptor, 0, nbytes)
        storage: Any = torch.UntypedStorage.from_file(name, shared=True, nbytes=nbytes)
    except OSError as error:
        text = f"disk: {folder} has no room for {format_bytes(nbytes)} of {what}"
        raise DiskError(error.errno, f"{text}; free space, or add a folder", name) from error
    finally:
        os.close(descriptor)
        os.unlink(name)
    octets: torch.Tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    return octets.view(tensor.dtype).view(tensor.shape).copy_(tensor)
