"""The least budget a model can train under, worked out from shapes alone, and which tensor is the reason.

A step needs, at its worst moment, in the compute tier:

* always: buffers, small tensors with their gradients and optimizer state, and room for the next gradient to arrive;
* in a forward: the parameters of one module and of those around it (and their lower-precision copies under autocast);
* in a backward: one parameter (and its copy), its gradient, and the sum it is added to;
* in an update: two batches of windows of parameter, gradient, master and optimizer state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ptm_accel.memory.transfer import round_up
from ptm_accel.model.slots import SlotTable
from ptm_accel.units import format_bytes

STATE_TENSORS = 2
"""Full-size state tensors assumed per parameter (AdamW's moments)."""


@dataclass(frozen=True, slots=True)
class Floor:
    """The least budget of the compute tier.

    Attributes:
        total_bytes: the figure.
        fixed_bytes: what is there at all times.
        moving_bytes: what the worst moment needs beside it.
        reason: which tensor or phase decides.
    """

    total_bytes: int
    fixed_bytes: int
    moving_bytes: int
    reason: str


def least_budget(
    model: nn.Module, slots: SlotTable, *, window_bytes: int, state_bytes_per_element: int, whole_updates: bool
) -> Floor:
    """Works out the floor for training `model`.

    Args:
        model: the model.
        slots: its paged parameters.
        window_bytes: the optimizer's window.
        state_bytes_per_element: optimizer state and master together, per parameter element.
        whole_updates: whether the optimizer needs whole tensors.
    """
    trainable = [s.value for s in slots if s.param.requires_grad]
    moving = [s.value for s in slots if s.value.movable]
    buffers = sum(round_up(b.nbytes) for b in model.buffers())
    small = 0
    for slot in slots:
        if not slot.value.movable:
            small += slot.value.slot_bytes
            if slot.param.requires_grad:
                small += (
                    round_up(slot.value.nbytes) + round_up(slot.value.numel * state_bytes_per_element) * 1 + 3 * 4096
                )
    landing = max((t.nbytes for t in trainable), default=0)
    fixed = buffers + small + landing

    forward, forward_name = _deepest_pins(model, slots)
    largest = max(moving, key=lambda t: t.slot_bytes, default=None)
    backward = 0
    if largest is not None:
        grads = max((t.slot_bytes for t in trainable if t.movable), default=0)
        backward = largest.slot_bytes * 3 // 2 + 2 * grads
    per_element = state_bytes_per_element + (8 if moving else 0)
    if whole_updates:
        biggest = max((t.numel for t in trainable), default=0)
        update = 2 * biggest * (per_element + 4)
    else:
        update = 3 * (window_bytes // 4) * (per_element + 4)
    worst = max(
        (forward * 3 // 2, f"the parameters that {forward_name} uses at once"),
        (backward, f"{largest.name if largest is not None else 'nothing'} and its gradient in backward"),
        (update, "the windows of the optimizer step"),
        key=lambda x: x[0],
    )
    moving_bytes = worst[0] + 16 * 4096
    reason = worst[1]
    if largest is not None:
        reason += f"; the largest tensor is {largest.name} ({format_bytes(largest.nbytes)})"
    return Floor(fixed + moving_bytes, fixed, moving_bytes, reason)


def _deepest_pins(model: nn.Module, slots: SlotTable) -> tuple[int, str]:
    """The most bytes that are pinned at once while modules run inside each other."""
    own: dict[str, int] = {}
    for name, module in model.named_modules():
        total = 0
        for param in dict.values(module._parameters):
            slot = slots.of(param)
            if slot is not None and slot.value.movable:
                total += slot.value.slot_bytes
        own[name] = total
    best, best_name = 0, "the model"
    for name in own:
        parts = name.split(".") if name else []
        chain = {".".join(parts[:i]) for i in range(len(parts) + 1)}
        total = sum(own.get(part, 0) for part in chain)
        if total > best:
            best, best_name = total, name or "the model itself"
    return best, best_name
