"""`save_pretrained` of models whose experts are fused: what is taken apart for the file lies in files meanwhile.

transformers saves experts one by one, as they were before it fused them, and takes all of them apart before it writes
the first. Of a model on pages that would be most of the model in memory; so the pieces that it makes get scratch files.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from transformers import modeling_utils

from ptm_accel.checkpoint.outlines import Outlines
from ptm_accel.engine import Engine, engine_of
from ptm_accel.memory.mapping import copy_in_file
from ptm_accel.model.attach import small_bytes

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
        # Copies of outlines take no memory.
        outlined = isinstance(_get_current_dispatch_mode(), Outlines)
        in_memory = engine is None or not engine.config.disk_paths or outlined
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
        return copy_in_file(made, self._folders, "a model's experts while it is saved")
