"""The least budget a model can train under, worked out from shapes alone, and which tensor is the reason.

What must be in the compute tier at once:

* always: buffers, what the tiers themselves hold, small tensors with their gradients and optimizer state, and room for
  the next gradient to arrive;
* in a forward: the parameters of the running modules, one inside another, and their lower-precision copies;
* in a backward: the same where a checkpointed layer is recomputed, beside the parameter of the waiting operation; or
  the sum that an arriving gradient is added to;
* in an update: the windows of one parameter (all of it, for an optimizer that needs whole tensors), and what the
  optimizer allocates for them.

Everything else can be evicted. The moments do not overlap, so the worst of them decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ptm_accel.memory.block import Block, Part
from ptm_accel.memory.transfer import round_up
from ptm_accel.memory.windows import window_elements
from ptm_accel.model.grouping import ONE_KERNEL, owned_by
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.units import format_bytes


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Needs of an optimizer for a parameter, in tensors of as many elements as the parameter.

    Attributes:
        state_tensors: what it keeps from step to step.
        scratch_tensors: what one step allocates beside them.
        whole: whether a parameter must be updated in one piece.
    """

    state_tensors: int = 2
    scratch_tensors: int = 0
    whole: bool = False


FUSED_ADAMW = OptimizerMemory()
"""Assumed until there is an optimizer."""

ANY_ADAMW = OptimizerMemory(scratch_tensors=3)
"""Named by refusals until there is an optimizer: enough for AdamW, fused or not."""

ANY_OPTIMIZER = OptimizerMemory(state_tensors=3, scratch_tensors=4, whole=True)
"""Most that optimizers are known to need."""

NO_OPTIMIZER = OptimizerMemory(state_tensors=0)
"""Least that any optimizer needs."""


@dataclass(frozen=True, slots=True)
class Floor:
    """Needs of a model in the compute tier.

    Attributes:
        total_bytes: the least budget: fixed + moving.
        fixed_bytes: what is there at all times.
        moving_bytes: what the worst moment needs beside it.
        states_bytes: parameters, gradients, optimizer state, masters and buffers together.
        away_bytes: the same without buffers: what may need room below. Small tensors do when a checkpoint is saved.
        whole_bytes: the budget under which nothing ever moves.
        reason: which tensor or phase decides.
        gathered_bytes: of what is fixed, room for whole blocks of sharded groups beside those in use.
    """

    total_bytes: int
    fixed_bytes: int
    moving_bytes: int
    states_bytes: int
    away_bytes: int
    whole_bytes: int
    reason: str
    gathered_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _StepNeed:
    """Bytes that one moment of a step needs, and the reason."""

    nbytes: int
    reason: str


def least_budget(
    model: nn.Module,
    slots: SlotTable,
    optimizer_memory: OptimizerMemory,
    *,
    masters: bool,
    window_bytes: int,
    held_bytes: int = 0,
    wholes: int = 0,
) -> Floor:
    """Works out the floor for training `model`.

    Args:
        model: the model.
        slots: its paged parameters.
        optimizer_memory: of the optimizer.
        masters: whether narrower parameters have fp32 masters.
        window_bytes: size of the optimizer's windows.
        held_bytes: what the tiers themselves hold of the budget.
        wholes: how many whole blocks of sharded groups stay beside those in use.
    """
    trainable = [s for s in slots if s.param.requires_grad]
    landing = max((s.value.nbytes for s in trainable), default=0)
    buffers = sum(b.nbytes for b in model.buffers()) + held_bytes
    small = sum(_states(s, optimizer_memory, masters) for s in slots if not s.group.movable)
    gathered = _gathered(slots, wholes)
    fixed = buffers + small + landing + gathered

    forward = _forward(model, slots)
    updates = [_update(t, optimizer_memory, masters, window_bytes) for t in trainable]
    worst_update = max(updates, key=lambda m: m.nbytes, default=_StepNeed(0, "nothing"))
    moments = [forward, _fused(model, slots), _recomputation(model, slots), _accumulation(trainable, masters)]
    moments.append(worst_update)
    worst = max(moments, key=lambda m: m.nbytes)
    away = sum(_states(s, optimizer_memory, masters) for s in slots)
    states = buffers + away
    whole = states + landing + gathered + max(forward.nbytes, worst_update.nbytes)
    return Floor(fixed + worst.nbytes, fixed, worst.nbytes, states, away, whole, worst.reason, gathered)


def _states(slot: ParamSlot, optimizer_memory: OptimizerMemory, masters: bool) -> int:
    """Everything that is kept for one parameter."""
    value = slot.own
    if not slot.param.requires_grad:
        return value.slot_bytes
    wide = wide_itemsize(value, masters)
    total = value.slot_bytes + value.bytes_as(wide if masters else value.dtype.itemsize)
    total += optimizer_memory.state_tensors * value.bytes_as(wide)
    return total + (value.bytes_as(wide) if wide > value.dtype.itemsize else 0)


def wide_itemsize(value: Part, masters: bool) -> int:
    """Bytes per element of what the optimizer updates."""
    return max(value.dtype.itemsize, 4) if masters else value.dtype.itemsize


def _gathered(slots: SlotTable, wholes: int) -> int:
    """Bytes of whole blocks of sharded groups, beside those in use, and of their gradients.

    What this rank owns of a block is there while it is put together. As many gradients as groups of a layer come side
    by side, and one more is being reduced. Those of small parameters are kept until the end of a backward, and are then
    put together.
    """
    if not wholes:
        return 0
    sharded = [slot for slot in slots if slot.sharded]
    trained = [slot.value.block.slot_bytes for slot in sharded if slot.param.requires_grad]
    small = sum(slot.value.slot_bytes for slot in slots if not slot.sharded and slot.param.requires_grad)
    largest = max((slot.value.block.slot_bytes + slot.own.block.slot_bytes for slot in sharded), default=0)
    return wholes * (largest + max(trained, default=0)) + 2 * small


# ---- forwards --------------------------------------------------------------------------------------------------------


def _held(params: Iterable[ParamSlot]) -> int:
    """Bytes of parameters that are pinned together, with their lower-precision copies under autocast."""
    slots = list(params)
    values = sum(block.slot_bytes for block in blocks_of(slots))
    return values + sum(s.value.nbytes // 2 for s in slots if s.value.dtype == torch.float32)


def blocks_of(params: Iterable[ParamSlot]) -> list[Block]:
    """Returns the blocks that hold the values of parameters and may leave the compute tier, each once."""
    return list(dict.fromkeys(slot.value.block for slot in params if slot.group.movable))


def _own(module: nn.Module, slots: SlotTable) -> dict[int, ParamSlot]:
    """Returns the parameters that a running module pins, by identity.

    One that has parameters of its own and modules with parameters under it may well compute with theirs itself, as
    state-space mixers and `nn.MultiheadAttention` do.
    """
    found: dict[int, ParamSlot] = {id(slot): slot for slot in owned_by(module, slots)}
    if found or not module._parameters:
        return found
    for each in (module, *module.children()):
        for param in each._parameters.values():
            if (slot := slots.of(param)) is not None:
                found[id(slot)] = slot
    return found


def _forward(model: nn.Module, slots: SlotTable, name: str = "") -> _StepNeed:
    """Returns the most that is pinned at once while modules run inside each other."""
    owns = {path: _own(module, slots) for path, module in model.named_modules()}
    best = _StepNeed(0, "the model")
    for path in owns:
        parts = path.split(".") if path else []
        together: dict[int, ParamSlot] = {}
        for depth in range(len(parts) + 1):
            together |= owns.get(".".join(parts[:depth]), {})
        nbytes = _held(together.values())
        if nbytes > best.nbytes:
            where = ".".join(part for part in (name, path) if part) or "the model itself"
            best = _StepNeed(nbytes, f"the parameters that {where} uses at once{_largest(together.values())}")
    return best


def _fused(model: nn.Module, slots: SlotTable) -> _StepNeed:
    """Returns the most that is pinned for a module that torch computes by one kernel where no gradients are wanted."""
    best = _StepNeed(0, "the model")
    for path, module in model.named_modules():
        if not isinstance(module, ONE_KERNEL):
            continue
        params = [slot for param in module.parameters() if (slot := slots.of(param)) is not None]
        parts = path.split(".")
        for depth in range(len(parts)):
            params += _own(model.get_submodule(".".join(parts[:depth])), slots).values()
        nbytes = sum(block.slot_bytes for block in blocks_of(params))
        if nbytes > best.nbytes:
            best = _StepNeed(nbytes, f"the parameters that {path} uses at once without gradients{_largest(params)}")
    return best


def _largest(params: Iterable[ParamSlot]) -> str:
    largest = max(params, key=lambda s: s.value.nbytes, default=None)
    return "" if largest is None else f"; the largest is {largest.name}, {format_bytes(largest.value.nbytes)}"


def _recomputation(model: nn.Module, slots: SlotTable) -> _StepNeed:
    """Returns the most that a layer's recomputation holds: its own forward, and the parameter of the waiting operation.

    A layer is a module with submodules in a list of modules: activation checkpointing works on those. The waiting
    parameter counts beside the layer's even if it is one of them: it may have been evicted while its view was held, and
    then be loaded once more.
    """
    best = _StepNeed(0, "the model")
    for name, container in model.named_modules():
        if not isinstance(container, (nn.ModuleList, nn.Sequential)):
            continue
        for index, layer in container.named_children():
            path = f"{name}.{index}" if name else index
            if not any(True for _ in layer.children()):
                continue
            again = _forward(layer, slots, path)
            asking = max((_held(_own(m, slots).values()) for m in layer.modules()), default=0)
            if again.nbytes + asking > best.nbytes:
                best = _StepNeed(again.nbytes + asking, f"{again.reason}, while {path} is recomputed")
    return best


# ---- gradients and updates -------------------------------------------------------------------------------------------


def _accumulation(trainable: list[ParamSlot], masters: bool) -> _StepNeed:
    """Returns the need of the sum that an arriving gradient is added to; the gradient itself has room held for it."""
    best = _StepNeed(0, "nothing")
    for slot in trainable:
        value, block = slot.own, slot.own.block
        if not slot.group.movable:
            continue
        nbytes = block.slot_bytes
        if wide_itemsize(value, masters) > value.dtype.itemsize:
            # The second gradient makes an fp32 sum out of the narrow first one.
            nbytes += round_up(block.numel * 4)
        if nbytes > best.nbytes:
            best = _StepNeed(nbytes, f"the gradient of {slot.name} ({format_bytes(value.nbytes)})")
    return best


def _update(slot: ParamSlot, optimizer_memory: OptimizerMemory, masters: bool, window_bytes: int) -> _StepNeed:
    """Returns the largest need of one parameter's update: that of its first, in which the state is made."""
    value = slot.own
    wide = wide_itemsize(value, masters)
    elements = value.numel
    if not optimizer_memory.whole:
        elements = min(elements, window_elements(window_bytes, wide))
    cut = elements < value.numel
    nbytes = update_extra_bytes(optimizer_memory, elements, wide, widened=wide > value.dtype.itemsize)
    nbytes += optimizer_memory.state_tensors * round_up(elements * wide)
    if slot.group.movable:
        nbytes += round_up(elements * value.dtype.itemsize)
        nbytes += round_up(elements * (wide if masters else value.dtype.itemsize))
        nbytes += round_up(elements * wide) if wide > value.dtype.itemsize else 0
        nbytes += (
            copied_bytes(optimizer_memory, elements, wide, whole=not cut) if cut or not slot.group_part.alone else 0
        )
    whole = "all of " if not cut else "a window of "
    return _StepNeed(nbytes, f"the update of {whole}{slot.name} ({format_bytes(value.nbytes)})")


def update_extra_bytes(optimizer_memory: OptimizerMemory, elements: int, wide: int, *, widened: bool) -> int:
    """Bytes that the optimizer allocates for a window, beside pages and the state that it makes.

    Args:
        optimizer_memory: of the optimizer.
        elements: of the window.
        wide: bytes per element of what it updates.
        widened: whether the gradient is copied to fp32 for it.
    """
    return round_up(optimizer_memory.scratch_tensors * elements * wide) + (round_up(elements * 4) if widened else 0)


def copied_bytes(optimizer_memory: OptimizerMemory, elements: int, wide: int, *, whole: bool) -> int:
    """Bytes of the windows that new state is copied to, beside what `update_extra_bytes` gives back before.

    Args:
        optimizer_memory: of the optimizer.
        elements: of the window.
        wide: bytes per element of the state.
        whole: whether the window is all of the parameter: its state is copied tensor by tensor.
    """
    one = round_up(elements * wide)
    if not whole:
        return optimizer_memory.state_tensors * one
    return (
        max(0, one - round_up(optimizer_memory.scratch_tensors * elements * wide))
        if optimizer_memory.state_tensors
        else 0
    )
