"""Parameters of a model that is not on pages yet, in files: what is built or read never needs memory for all of it.

A script makes its whole model before anybody can put it on pages. Here each large parameter gets a mapped scratch file
for its storage as its module registers it. It stays an ordinary parameter with ordinary values: initialised, resized,
tied, given adapters and looked at as ever, by the same random numbers. The kernel writes such memory out when there is
need of room, and what comes onto pages leaves its file, whose blocks are then free.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ptm_accel.memory.malloc import set_kept_blocks
from ptm_accel.memory.mapped_files import MappedFiles, is_in_a_file


class ScratchParameters:
    """Gives parameters mapped files for storages.

    Args:
        files: makes them.
        least_bytes: smaller parameters stay where they are.
    """

    def __init__(self, files: MappedFiles, least_bytes: int) -> None:
        self._files = files
        self._least_bytes = least_bytes
        # Tensors that are only read to be copied into files are given back as they are freed.
        set_kept_blocks(large=False)

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
        if param.layout == torch.strided and param.is_contiguous() and not is_in_a_file(param.data):
            param.data = self._files.copy_of(param.data)
