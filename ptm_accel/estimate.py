"""Estimates the memory that a model will need, from shapes alone and from a pass over fake tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from ptm_accel.config import DEFAULT_PAGE_SIZE
from ptm_accel.memory.disk import bounce_bytes
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.model.addresses import ExtentTable
from ptm_accel.model.attach import check_model, small_bytes, take_parameters
from ptm_accel.model.floor import FUSED_ADAMW, OptimizerMemory, least_budget
from ptm_accel.model.forecast import ShapeSpec, forecast
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.runtime.executor import Executor
from ptm_accel.units import parse_bytes

_OPENED_PAGES = 4
"""The size of the memory that is opened to count; nothing is put into it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory to train a model, on the tier that computes (`device_memory`, or `host_memory` without a device).

    Attributes:
        parameters: how many; tied ones once.
        trainable: how many of them.
        states_bytes: parameters, gradients, optimizer state, masters and buffers.
        whole_bytes: the least budget under which nothing ever moves.
        least_bytes: the least budget that it can train under, with the bounce buffers of one disk folder; each further
            folder needs as much again, and with a device they are in host memory.
        reason: the tensor or phase that needs the least budget.
        below_bytes: what the tiers below must hold under the least budget.
        pass_bytes: the peak of batch and activations, which the budget of a device counts and that of a CPU does not;
            None if no batch was given.
    """

    parameters: int
    trainable: int
    states_bytes: int
    whole_bytes: int
    least_bytes: int
    reason: str
    below_bytes: int
    pass_bytes: int | None


def estimate(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor | ShapeSpec | object] | None = None,
    *,
    master_weights: bool = False,
    autocast_dtype: torch.dtype | None = None,
    optimizer_memory: OptimizerMemory = FUSED_ADAMW,
    page_size: str | int = DEFAULT_PAGE_SIZE,
) -> Estimate:
    """Works out what a model needs; it may be on the meta device, and is not changed.

    Args:
        model: the model, in the mode, with the frozen parameters and the checkpointing that it will train with.
        batch: its keyword arguments, of which only shapes count; None to leave activations out.
        master_weights: whether narrower parameters get fp32 masters.
        autocast_dtype: the dtype of `torch.autocast`; None without it.
        optimizer_memory: the needs of the optimizer; AdamW's by default.
        page_size: as in the configuration.

    Raises:
        UnsupportedError: the model cannot be put on pages; or a pass over it depends on values (`forecast`).
    """
    page_bytes = parse_bytes(page_size)
    check_model(model)
    memory = build_memory(Capacities(page_bytes=page_bytes, host_bytes=_OPENED_PAGES * page_bytes), torch.device("cpu"))
    slots = SlotTable()
    try:
        take_parameters(model, Executor(memory.pool), slots, ExtentTable(), small=small_bytes(page_bytes), paged={})
        floor = least_budget(model, slots, optimizer_memory, masters=master_weights, window_bytes=page_bytes)
        counted = [(slot.value.numel, slot.param.requires_grad) for slot in slots]
    finally:
        memory.close()
    pass_bytes = None if batch is None else forecast(model, batch, autocast_dtype=autocast_dtype)
    return Estimate(
        parameters=sum(count for count, _ in counted),
        trainable=sum(count for count, trained in counted if trained),
        states_bytes=floor.states_bytes,
        whole_bytes=floor.whole_bytes,
        least_bytes=floor.total_bytes + bounce_bytes(1, page_bytes),
        reason=floor.reason,
        below_bytes=floor.away_bytes,
        pass_bytes=pass_bytes,
    )
