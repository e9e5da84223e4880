"""What is read of a checkpoint only to be cast or fused counts as memory of this process no longer than it takes.

safetensors hands out tensors that are mapped from the file. Their pages stay mapped once they were read, as many as the
checkpoint has, until the kernel is short of memory: no harm, but they count in what is seen as the process's memory,
and are the last that the kernel takes back. They stay in the page cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ptm_accel.memory.mapped_files import are_in_files
from ptm_accel.memory.mapping import forget_whole_pages

MATERIALIZE = "_materialize_copy"
"""The function of `transformers.core_model_loading` that reads one tensor of a file, and casts it."""
SET = "set_param_for_module"
"""The one that puts into the model what has become of it."""


def forget_what_is_read(module: ModuleType) -> None:
    """Has pages forgotten of whatever this process reads from now on.

    Args:
        module: `transformers.core_model_loading`; of one that reads in another way, nothing is forgotten.
    """
    if hasattr(module, MATERIALIZE) and hasattr(module, SET):
        forgetting = Forgetting()
        setattr(module, MATERIALIZE, forgetting.materialize(getattr(module, MATERIALIZE)))
        setattr(module, SET, forgetting.set_param(getattr(module, SET)))


class Forgetting:
    """Makes the two functions of transformers' loader that see what is read, and what has become of it.

    Nobody but the loader has the tensors between the two, so nobody has written to them: pages of the file are all that
    is forgotten.

    Args:
        all_is_copied: whether what goes into the model is never what was read, mapped as it is.
    """

    def __init__(self, *, all_is_copied: bool = False) -> None:
        self._all_is_copied = all_is_copied
        self._read = _Read()

    def materialize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the function that reads a tensor."""

        def materialize(found: Any, *args: Any, **kwargs: Any) -> Any:
            # A tensor is somebody's own, as those of a `state_dict=` are; of a file it is one of its slices.
            if not isinstance(found, torch.Tensor):
                found = found[...]
                self._read.sources.append(found)
            return original(found, *args, **kwargs)

        return materialize

    def set_param(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the function that puts into the model what was made of the tensors that were read before it."""

        def set_param(model: Any, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
            sources, self._read.sources = self._read.sources, []
            result = original(model, name, value, *args, **kwargs)
            gone = [source for source in sources if self._all_is_copied or not _share_memory(source, value)]
            for source, mapped in zip(gone, are_in_files(gone) if gone else (), strict=True):
                if mapped:
                    forget_whole_pages(source.data_ptr(), source.nbytes)
            return result

        return set_param


def _share_memory(source: torch.Tensor, value: Any) -> bool:
    """Whether what goes into the model is what was read, as it is."""
    return isinstance(value, torch.Tensor) and source.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


class _Read(threading.local):
    def __init__(self) -> None:
        self.sources: list[torch.Tensor] = []
