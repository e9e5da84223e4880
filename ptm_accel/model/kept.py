"""Bytes that are kept of parameters from step to step, as their blocks will take them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ptm_accel.memory.transfer import round_up
from ptm_accel.model.floor import OptimizerMemory, wide_itemsize
from ptm_accel.model.slots import ParamSlot


@dataclass(frozen=True, slots=True)
class Kept:
    """Bytes of the states of parameters, padding included; of a sharded one those of the range that this rank owns.

    Attributes:
        parameters_bytes: their values.
        gradients_bytes: their gradients; with masters in fp32, as they are added up.
        masters_bytes: fp32 masters of narrower ones.
        optimizer_bytes: what the optimizer keeps beside them.
    """

    parameters_bytes: int
    gradients_bytes: int
    masters_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All of it."""
        return self.parameters_bytes + self.gradients_bytes + self.masters_bytes + self.optimizer_bytes


def kept_bytes(slots: Iterable[ParamSlot], optimizer_memory: OptimizerMemory, *, masters: bool) -> Kept:
    """Works out what is kept of parameters: for each block of values one like it for each role.

    Args:
        slots: they.
        optimizer_memory: of the optimizer.
        masters: whether narrower ones have fp32 masters.
    """
    slots = list(slots)
    trained = {slot.own.block: wide_itemsize(slot.own, masters) for slot in slots if slot.param.requires_grad}
    wide = {block: round_up(block.numel * itemsize) for block, itemsize in trained.items()}
    widened = sum(nbytes for block, nbytes in wide.items() if trained[block] > block.dtype.itemsize)
    values = sum(block.slot_bytes for block in {slot.own.block for slot in slots})
    return Kept(values, sum(wide.values()), widened, optimizer_memory.state_tensors * sum(wide.values()))
