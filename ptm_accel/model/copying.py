"""An ordinary copy of a model on pages: for averages of the weights, reference models, and code that owns its model."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ptm_accel.memory.pool import Pool
from ptm_accel.model.faults import FaultDict
from ptm_accel.model.slots import ParamSlot, SlotTable

_HOOK_TABLES = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_state_dict_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def copy_off_pages(model: nn.Module, slots: SlotTable, pool: Pool, hooks: Iterable[RemovableHandle]) -> nn.Module:
    """A deep copy of a paged model whose parameters are in ordinary memory, beside the budgets.

    Weights that are tied in the model are tied in the copy, buffers are copied, and hooks of the user's are kept.
    The model itself is not disturbed: what is away is read from where it lies.

    Args:
        model: the model, or a part of it.
        slots: the parameters that are on pages.
        pool: where they live.
        hooks: the hooks that put the model on pages; the copy does not have them.
    """
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module._parameters, FaultDict):
            memo[id(module._parameters)] = {
                name: copy_parameter(param, slots, pool, memo) for name, param in module._parameters.plain().items()
            }
    duplicate = copy.deepcopy(model, memo)
    ours = {handle.id for handle in hooks}
    for module in duplicate.modules():
        for table in _HOOK_TABLES:
            entries: dict[int, Any] = module.__dict__[table]
            for number in ours.intersection(entries):
                del entries[number]
    return duplicate


def copy_parameter(
    param: nn.Parameter | None, slots: SlotTable, pool: Pool, memo: dict[int, Any]
) -> nn.Parameter | None:
    """The copy of one parameter; `memo` makes it one object wherever the model has one object."""
    if param is None:
        return None
    if id(param) not in memo:
        slot = slots.of(param)
        if slot is None:
            return copy.deepcopy(param, memo)
        memo[id(param)] = nn.Parameter(values_of(slot, pool), requires_grad=param.requires_grad)
    made: nn.Parameter = memo[id(param)]
    return made


def values_of(slot: ParamSlot, pool: Pool) -> torch.Tensor:
    """A copy of a parameter's values in ordinary memory of the compute tier's device; moves nothing in or out."""
    with pool.lock:
        if pool.owed is not None:
            pool.owed.finish()
        slot.meet()
        extent = slot.value.extent
        # One that is on its way has an extent, and nothing in it yet.
        if extent is not None and slot.value.place.resident:
            return extent.tensor.detach().clone()
        values = pool.snapshot(slot.value)
        return values.to(pool.compute.device, copy=True).contiguous()
