"""`save_pretrained` of models whose experts are fused: what is taken apart for the file lies in files meanwhile.

transformers saves experts one by one, as they were before it fused them, and takes all of them apart before it writes
the first. Of a model on pages that would be most of the model in memory; so the pieces that it makes get scratch files.
"""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_utils

from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import DiskError
from ptm_accel.model.attach import small_bytes
from ptm_accel.units import format_bytes

_MARK = "_of_ptm_accel"


def install() -> None:
    """Exchanges the function that takes weights apart; models that are not on pages are treated as ever."""
    names: dict[str, Any] = vars(modeling_utils)
    original = names["revert_weight_conversion"]
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def revert_weight_conversion(model: Any, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        engine = engine_of(model)
        in_memory = engine is None or not engine.config.disk_paths
        with nullcontext() if in_memory or engine is None else _IntoFiles(engine):
            found: dict[str, torch.Tensor] = original(model, state_dict)
        return found

    setattr(revert_weight_conversion, _MARK, True)
    names["revert_weight_conversion"] = revert_weight_conversion


class _IntoFiles(TorchDispatchMode):
    """Puts what operations make into scratch files, one result at a time."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._folders = engine.config.disk_paths
        self._least_bytes = small_bytes(engine.config.page_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not isinstance(made, torch.Tensor) or made.nbytes < self._least_bytes or not made.is_contiguous():
            return made
        # A result that is a view takes nothing; the schema does not tell: `contiguous` makes one or not.
        storage = made.untyped_storage().data_ptr()
        if any(isinstance(arg, torch.Tensor) and arg.untyped_storage().data_ptr() == storage for arg in args):
            return made
        return copy_in_file(made, self._folders)


def copy_in_file(tensor: torch.Tensor, folders: Sequence[Path]) -> torch.Tensor:
    """A copy of a contiguous tensor that is mapped from a file without a name, in the folder with most room.

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
        text = f"disk: {folder} has no room for {format_bytes(nbytes)} of a model's experts while it is saved"
        raise DiskError(error.errno, f"{text}; free space, or add a folder", name) from error
    finally:
        os.close(descriptor)
        os.unlink(name)
    octets: torch.Tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
    return octets.view(tensor.dtype).view(tensor.shape).copy_(tensor)
