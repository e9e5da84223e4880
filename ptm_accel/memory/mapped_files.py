"""Tensors whose bytes are in scratch files without names: ordinary to their users, written out where there is need."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.memory.mapping import forget_pages, view_at
from ptm_accel.memory.origin import Origin, Source, no_source
from ptm_accel.units import format_bytes

_charges: dict[int, _Charge] = {}
"""What the storages that there are now are charged with, by their identity."""


class MappedFiles:
    """Makes such tensors.

    Args:
        folders: where; the one with most room is taken.
        limit_bytes: how much they may take in all.

    Attributes:
        held_bytes: what is in files now, but for what a model on pages has a home for.
    """

    def __init__(self, folders: Sequence[Path], limit_bytes: int) -> None:
        self.held_bytes = 0
        self._folders = list(folders)
        self._limit_bytes = limit_bytes

    def copy_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy in a file.

        Raises:
            BudgetError: the files would take more than they may.
            DiskError: the disk is full, or a file cannot be made.
        """
        nbytes = tensor.nbytes
        if self.held_bytes + nbytes > self._limit_bytes:
            raise BudgetError(
                f"disk: {format_bytes(self.held_bytes + nbytes)} of scratch files are needed for what is not on pages, "
                f"the limit is {format_bytes(self._limit_bytes)}; raise disk.limit."
            )
        storage = self._mapped(tensor.detach().cpu().contiguous().resolve_conj().resolve_neg())
        octets: torch.Tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        copied = octets.view(tensor.dtype).view(tensor.shape)
        _charges[id(storage)] = charge = _Charge(self, nbytes)
        weakref.finalize(storage, _charges.pop, id(storage))
        weakref.finalize(storage, charge.release)
        return copied

    def _mapped(self, values: torch.Tensor) -> Any:
        nbytes = values.nbytes
        folder = max(self._folders, key=_free_bytes)
        try:
            descriptor, name = tempfile.mkstemp(prefix="ptm_accel-", suffix=".mapped", dir=folder)
        except OSError as error:
            raise DiskError(error.errno, f"disk: no scratch file can be made in {folder}", str(folder)) from error
        try:
            # A disk that is full is met here; at a write through the mapping the process would be killed.
            os.posix_fallocate(descriptor, 0, nbytes)
            # Written through the mapping, the file system would be asked anew for each page, at three times the cost.
            written = 0
            while written < nbytes:
                rest = view_at(values.data_ptr() + written, nbytes - written)
                written += os.pwrite(descriptor, rest, written)
            return torch.UntypedStorage.from_file(name, shared=True, nbytes=nbytes)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DiskError(
                error.errno, f"disk: {folder} has no room for {format_bytes(nbytes)}; free space, or set another", name
            ) from error
        finally:
            os.close(descriptor)
            os.unlink(name)


def is_scratch(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of these: what is written to it is written to the disk."""
    # A fake tensor has no address.
    return type(tensor) is torch.Tensor and id(tensor.untyped_storage()) in _charges


class _Charge:
    """What a file takes of a limit, until it is released."""

    __slots__ = ("_files", "_nbytes")

    def __init__(self, files: MappedFiles, nbytes: int) -> None:
        self._files = files
        self._nbytes = nbytes
        files.held_bytes += nbytes

    def release(self) -> None:
        self._files.held_bytes -= self._nbytes
        self._nbytes = 0


class _Kept(Source):
    """A tensor in a scratch file, read through its mapping: a model has more of them than a process may open files."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor: torch.Tensor | None = tensor

    def read(self, offset: int, into: memoryview) -> None:
        if self._tensor is None:
            raise no_source("a scratch file")
        address = self._tensor.data_ptr() + offset
        into[:] = view_at(address, len(into))
        # Mapped pages that were touched count as memory of this process.
        forget_pages(address, len(into))

    def abandon(self) -> None:
        self._tensor = None


def scratch_origin(tensor: torch.Tensor) -> Origin | None:
    """The file of a contiguous tensor, if it is one of these; it is charged no more, since there is a home for it."""
    if not is_scratch(tensor) or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        return None
    _charges[id(tensor.untyped_storage())].release()
    return Origin(_Kept(tensor.detach()), 0, tensor.nbytes)


def is_in_a_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are mapped from a file, as those of a safetensors checkpoint are that were not cast."""
    address = tensor.data_ptr()
    with open("/proc/self/maps", encoding="ascii", errors="replace", newline="\n") as lines:
        for line in lines:
            addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
            begin, end = (int(part, 16) for part in addresses.split("-"))
            if begin <= address < end:
                return inode.strip() != "0"
    return False


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
