"""What is read of a checkpoint only to be cast or fused counts as memory of this process no longer than it takes.

safetensors hands out tensors that are mapped from the file. Their pages stay mapped once they were read, as many as the
checkpoint has, until the kernel is short of memory: no harm, but they count in what is seen as the process's memory,
and are the last that the kernel takes back. They stay in the page cache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ptm_accel.memory.mapping import forget_unwritten

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

    What is cast has been copied at once; what is fused, when the result is put into the model.

    Args:
        all_is_copied: whether what is put into the model is copied as a rule, so that nothing need stay mapped for it.
            (Forgotten pages that are wanted again are read from the file.)
    """

    def __init__(self, *, all_is_copied: bool = False) -> None:
        self._all_is_copied = all_is_copied
        self._waiting = _Waiting()

    def materialize(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the function that reads a tensor."""

        @wraps(original)
        def materialize(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(tensor, torch.Tensor):
                # It is in memory already.
                return original(tensor, *args, **kwargs)
            source = tensor[...]
            value = original(source, *args, **kwargs)
            if _is_apart(value, source):
                forget_unwritten(source.data_ptr(), source.nbytes)
            else:
                self._waiting.sources.append(source)
            return value

        return materialize

    def set_param(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Makes the function that puts into the model what was made of the tensors that were read before it."""

        @wraps(original)
        def set_param(model: Any, target_name: str, param_value: Any, *args: Any, **kwargs: Any) -> Any:
            sources, self._waiting.sources = self._waiting.sources, []
            result = original(model, target_name, param_value, *args, **kwargs)
            for source in sources:
                if self._all_is_copied or _is_apart(param_value, source):
                    forget_unwritten(source.data_ptr(), source.nbytes)
            return result

        return set_param


def _is_apart(value: Any, source: torch.Tensor) -> bool:
    """Whether a value is certainly no view of what was read, nor holds it: other tensors may have it inside."""
    if type(value) not in (torch.Tensor, nn.Parameter) or source.device.type != "cpu":
        return False
    if value.device != source.device:
        return True
    here, there = (tensor.untyped_storage().data_ptr() for tensor in (value, source))
    return bool(here != there)


class _Waiting(threading.local):
    """What this thread has read, and put nowhere yet."""

    def __init__(self) -> None:
        self.sources: list[torch.Tensor] = []
