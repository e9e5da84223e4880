"""Dispatch modes of users in which our own operators must not be carried out."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.utils._python_dispatch import _disable_current_modes


def keeps_results() -> bool:
    """Whether a mode keeps results (selective checkpointing), by their number among those of the same operator."""
    modes = (torch._C._get_dispatch_stack_at(at) for at in range(torch._C._len_torch_dispatch_stack()))
    return any(type(mode).__module__ == "torch.utils.checkpoint" for mode in modes)


def unkept() -> AbstractContextManager[object]:
    """A context for operators that torch alone would not call, or not as often."""
    if torch._C._len_torch_dispatch_stack() and keeps_results():
        kept: AbstractContextManager[object] = _disable_current_modes()
        return kept
    return nullcontext()
