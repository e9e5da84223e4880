"""Parameters of a model that is not on pages yet, in files: what is built or read never needs memory for all of it.

A script makes its whole model before anybody can put it on pages. Here each large parameter gets a mapped scratch file
for its storage as its module registers it. It stays an ordinary parameter with ordinary values: initialised, resized,
tied, given adapters and looked at as ever, by the same random numbers. The kernel writes such memory out when there is
need of room, and what comes onto pages leaves its file, whose blocks are then free.
"""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.units import format_bytes

_BEYOND_BYTES = 4096
"""Storages are longer than their tensors: so pages copy them, and never take a storage over that is a file."""


class ScratchParameters:
    """Gives parameters mapped files for storages.

    Args:
        folders: where; the one with most room is taken.
        limit_bytes: how much they may take in all.
        least_bytes: smaller parameters stay where they are.

    Attributes:
        held_bytes: what is in files now.
    """

    def __init__(self, folders: Sequence[Path], limit_bytes: int, least_bytes: int) -> None:
        self.held_bytes = 0
        self._folders = list(folders)
        self._limit_bytes = limit_bytes
        self._least_bytes = least_bytes

    def install(self) -> Callable[[], None]:
        """Has every parameter taken that a module registers from now on, in this process.

        Returns:
            what ends that.
        """
        cls: Any = nn.Module
        original = cls.register_parameter

        def register_parameter(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
            if param is not None:
                self.take(param)
            original(module, name, param)

        def remove() -> None:
            cls.register_parameter = original

        cls.register_parameter = register_parameter
        return remove

    def take(self, param: nn.Parameter) -> None:
        """Moves a parameter's values into a file, if they are large, in memory, and not in a file yet.

        Raises:
            BudgetError: the files would take more than they may.
            DiskError: the disk is full, or a file cannot be made.
        """
        if type(param) is not nn.Parameter or param.device.type != "cpu" or param.nbytes < self._least_bytes:
            return
        if param.layout != torch.strided or not param.is_contiguous() or is_in_a_file(param.data):
            return
        nbytes = param.nbytes
        if self.held_bytes + nbytes > self._limit_bytes:
            raise BudgetError(
                f"disk: the model's parameters need {format_bytes(self.held_bytes + nbytes)} of scratch files before "
                f"they are on pages, the limit is {format_bytes(self._limit_bytes)}; raise disk.limit."
            )
        storage = self._mapped(nbytes + _BEYOND_BYTES)
        data = torch.empty(0, dtype=param.dtype).set_(storage, 0, param.shape)  # type: ignore[call-overload]
        with torch.no_grad():
            data.copy_(param.data)
        self.held_bytes += nbytes
        weakref.finalize(storage, self._gone, nbytes)
        param.data = data

    def _gone(self, nbytes: int) -> None:
        self.held_bytes -= nbytes

    def _mapped(self, nbytes: int) -> Any:
        folder = max(self._folders, key=_free_bytes)
        try:
            descriptor, name = tempfile.mkstemp(prefix="ptm_accel-", suffix=".parameter", dir=folder)
        except OSError as error:
            raise DiskError(error.errno, f"disk: no scratch file can be made in {folder}", str(folder)) from error
        try:
            # A disk that is full is met here; at a write through the mapping the process would be killed.
            os.posix_fallocate(descriptor, 0, nbytes)
            storage: Any = torch.UntypedStorage.from_file(name, shared=True, nbytes=nbytes)
            return storage
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DiskError(
                error.errno, f"disk: {folder} has no room for {format_bytes(nbytes)}; free space, or set another", name
            ) from error
        finally:
            os.close(descriptor)
            os.unlink(name)


def is_in_a_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are mapped from a file, as those of a safetensors checkpoint are that were not cast."""
    address = tensor.data_ptr()
    with open("/proc/self/maps", encoding="ascii", errors="replace") as lines:
        for line in lines:
            addresses, _, _, _, inode, *_ = line.split(maxsplit=5)
            begin, end = (int(part, 16) for part in addresses.split("-"))
            if begin <= address < end:
                return inode.strip() != "0"
    return False


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
