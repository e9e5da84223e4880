"""Refusals of lock-free updating (`ptm_accel.optim.lock_free`), and the host memory that it takes."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ptm_accel.errors import ConfigError, UnsupportedError
from ptm_accel.memory.block import Block
from ptm_accel.memory.budget import Tier
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.transfer import ALIGN_BYTES, round_up
from ptm_accel.model.floor import OptimizerMemory, update_extra_bytes, wide_itemsize
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.support import ELEMENTWISE, is_elementwise


def refuse_processes(*, several: bool) -> None:
    """Says that lock-free updating is for one process, if there are several.

    Raises:
        UnsupportedError: there are.
    """
    if several:
        raise UnsupportedError(
            "update: lock_free cannot keep several processes alike: each would apply gradients at other times. Train "
            "in one process, or set update to exact."
        )


def refuse_lock_free(optimizer: torch.optim.Optimizer, slots: Iterable[ParamSlot], pool: Pool) -> None:
    """Says what lock-free updating is not possible with.

    Raises:
        UnsupportedError: an optimizer that is not element-wise, fp16 parameters, or a device.
        ConfigError: no disk.
    """
    if not is_elementwise(optimizer):
        raise UnsupportedError(
            f"update: lock_free cannot be used with the optimizer {type(optimizer).__name__}, which is not known to be "
            f"element-wise. Use one of {', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}, or set update to "
            "exact."
        )
    halves = [slot.name for slot in slots if slot.param.requires_grad and slot.value.dtype == torch.float16]
    if halves:
        raise UnsupportedError(
            f"update: lock_free cannot train fp16 parameters ({halves[0]} and {len(halves) - 1} more), which need a "
            "gradient scaler. Load the model in bf16 or fp32, or set update to exact."
        )
    if pool.budget.tier is not Tier.HOST:
        raise UnsupportedError(
            f"update: lock_free is for training on a CPU so far, and this model computes on {pool.compute.device}. Set "
            "update to exact."
        )
    if pool.backing is None:
        raise ConfigError("update: lock_free keeps optimizer state on a disk, and there is none; set disk to a folder.")


def lock_free_bytes(slots: Iterable[ParamSlot], optimizer_memory: OptimizerMemory, *, masters: bool) -> int:
    """Host memory that lock-free updating takes beside the pages.

    Args:
        slots: the parameters that are trained.
        optimizer_memory: of the optimizer.
        masters: whether narrower parameters have fp32 masters.
    """
    blocks = {s.own.block: wide_itemsize(s.own, masters) for s in slots if s.group.movable}
    desk = max((desk_bytes(b, wide, optimizer_memory, masters=masters) for b, wide in blocks.items()), default=0)
    return desk + sum(waiting_bytes(block, wide) for block, wide in blocks.items())


def waiting_bytes(block: Block, wide: int) -> int:
    """Bytes of the sum and the published values of one block."""
    return round_up(block.numel * wide) + block.slot_bytes


def desk_bytes(block: Block, wide: int, optimizer_memory: OptimizerMemory, *, masters: bool) -> int:
    """Bytes that the updater has of one block, with what the optimizer allocates."""
    state = (optimizer_memory.state_tensors + masters) * round_up(block.numel * wide)
    return (
        ALIGN_BYTES
        + waiting_bytes(block, wide)
        + state
        + update_extra_bytes(optimizer_memory, block.numel, wide, widened=False)
    )
