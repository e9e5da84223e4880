"""An ordinary copy of a model on pages: for averages of the weights, reference models, and code that owns its model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from ptm_accel.model.hooks import RootHook, no_hook
from ptm_accel.model.slot_table import SlotTable


def copy_off_pages(model: nn.Module, slots: SlotTable, hooks: Iterable[RemovableHandle]) -> nn.Module:
    """Returns a deep copy of a paged model whose parameters are in ordinary memory, beside the budgets.

    Weights that are tied in the model are tied in the copy, buffers are copied, and hooks of the user's are kept.
    The model itself is not disturbed: what is away is read from where it lies.

    Args:
        model: the model, or a part of it.
        slots: the parameters that are on pages.
        hooks: the hooks that put the model on pages; the copy does not have them.
    """
    memo: dict[int, Any] = {}
    for param in model.parameters():
        slot = slots.of(param)
        if slot is not None:
            memo[id(param)] = nn.Parameter(slot.copied(), requires_grad=param.requires_grad)
    for module in model.modules():  # of a wrapper, too: PEFT's has the model on pages in it
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, RootHook):
                memo[id(hook)] = no_hook
        if (own := vars(module).get("no_sync")) is not None:
            # Put there for scripts that expect what DDP has: it leads to all that trains the model.
            memo[id(own)] = nullcontext
    duplicate = copy.deepcopy(model, memo)
    ours = {handle.id for handle in hooks}
    for module in duplicate.modules():
        for name, table in vars(module).items():
            if "_hooks" in name and isinstance(table, dict):
                for number in ours.intersection(table):
                    del table[number]
    return duplicate
