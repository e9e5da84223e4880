"""`save_pretrained` of models whose experts are fused: what is taken apart for the file lies in files meanwhile.

transformers saves experts one by one, as they were before it fused them, and takes all of them apart before it writes
the first. Of a model on pages that would be most of the model in memory; so the pieces that it makes get scratch files.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import modeling_utils

from ptm_accel.engine import Engine, engine_of
from ptm_accel.memory.mapped_files import MappedFiles
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
        in_memory = engine is None or not engine.config.disk_paths
        with nullcontext() if in_memory or engine is None else _IntoFiles(engine):
            found: dict[str, torch.Tensor] = original(model, state_dict)
        return found

    setattr(revert_weight_conversion, _MARK, True)
    names["revert_weight_conversion"] = revert_weight_conversion


class _IntoFiles(TorchDispatchMode):
    """Puts what operations make into files, one result at a time."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        config = engine.config
        assert config.disk_limit_bytes is not None
        self._files = MappedFiles(config.disk_paths, config.disk_limit_bytes)
        self._least_bytes = small_bytes(config.page_bytes)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        results = func._schema.returns
        # A result that is a view takes nothing.
        if len(results) != 1 or results[0].alias_info is not None or not isinstance(made, torch.Tensor):
            return made
        return self._files.copy_of(made) if made.nbytes >= self._least_bytes and made.is_contiguous() else made
