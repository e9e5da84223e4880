"""Assignments of a parameter's `data`, and what becomes of its values.

In torch the parameter gets other memory, and a view of what it had goes on showing that. Here the new values are
copied into the memory that the parameter has, unless somebody views it. Then they get new memory, and the old one
stays with its viewers, charged until the last of them has died.

In a group the parameter alone gets new memory, in a block of its own: views of the others stay what they are, and
code that keeps all values, one after another, keeps the memory of each group once. At the model's next forward the
parameter is back in the block of its group, unless that is still viewed. A block that is pinned gets new memory as a
whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import torch

from ptm_accel.errors import PagedModelError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.cut import Cut, can_be_cut
from ptm_accel.memory.windows import Windows
from ptm_accel.model.groups import ParamGroup
from ptm_accel.model.slots import ParamSlot


def assign(slot: ParamSlot, data: torch.Tensor, *, alone: bool = False) -> None:
    """Makes `data` the values of a parameter; it may have another shape (`resize_token_embeddings`).

    Args:
        slot: the parameter.
        data: the values.
        alone: whether it may leave its group's block, until `regroup`.

    Raises:
        PagedModelError: it is of another dtype or on another device; or a forward uses the values, and it is of another
            shape.
        BudgetError: no room for it, or for new values beside those that are viewed.
    """
    slot.check_data(data)
    if data.shape != slot.value.shape:
        _reshape(slot, data.detach())
        return
    with slot.pool.lock:
        with slot.executor.pin(slot.value) as values:
            same = _is_same(data, values)
            del values
        if same:
            # As after `p.data = p.data.mul_(2)`.
            slot.changed()
            return
        _leave_to_viewers(slot, alone=alone)
        with slot.executor.pin(slot.value, write=True) as values:
            values.copy_(data.detach())
        slot.generation += 1
        slot.changed()


def take_in(slots: Iterable[ParamSlot], *, alone: bool = False) -> None:
    """Takes over what user code has written to parameters whose values are resident, or assigned to their `data`.

    Args:
        slots: the parameters.
        alone: as for `assign`.

    Raises:
        PagedModelError: one cannot have the data that it was given; it has what it had before.
        BudgetError: there is no room for the data of one; it has what it had before.
    """
    # All have the data on their pages again before one is assigned: views of a block are told by their number.
    given = [(slot, data) for slot in slots if (data := _given(slot)) is not None]
    with ExitStack() as stack:
        # The others are taken in where one is refused.
        for slot, data in given:
            stack.callback(assign, slot, data, alone=alone)


def _given(slot: ParamSlot) -> torch.Tensor | None:
    """What a parameter was given; it has the data on its pages again, which counts as changed. None if nothing."""
    if slot.executor.pending_updates is not None:
        # Until then it has a placeholder.
        slot.executor.pending_updates.before_use(slot.value.block)
    given, values = slot.data, slot.resident()
    slot.changed()
    if _is_same(given, values):
        return None
    slot.bring_back()
    return given


def _is_same(data: torch.Tensor, values: torch.Tensor) -> bool:
    """Returns whether `data` is these very values, and no copy of them."""
    if data.data_ptr() != values.data_ptr() or (data.shape, data.dtype) != (values.shape, values.dtype):
        return False
    # What torch has yet to conjugate or to negate is other values.
    return data.is_contiguous() and not (data.is_conj() or data.is_neg())


def _leave_to_viewers(slot: ParamSlot, *, alone: bool) -> None:
    """Gives the values other memory if somebody views theirs; what is there is of no matter.

    Raises:
        BudgetError: no room for other memory.
    """
    executor, pool, value = slot.executor, slot.pool, slot.value
    if not value.block.viewed:
        return
    if value.alone or value.block.pins or slot.sharded or not alone:
        with executor.pin(value, write=True):
            pool.leave_to_viewers(value.block)
        return
    own = ParamGroup(slot.name, [value.shape], movable=slot.group.movable).part(0, "", Tag.PARAM, value.dtype, pool)
    try:
        executor.make(own.block)
    except BaseException:
        executor.forget(own)
        raise
    slot.move_to(own)


def regroup(slots: Iterable[ParamSlot]) -> list[ParamSlot]:
    """Moves values back into the blocks of their groups that nobody views any more, as far as there is room.

    Returns:
        the parameters whose values are still in a block of their own.
    """
    return [slot for slot in slots if slot.apart and not _is_back(slot)]


def _is_back(slot: ParamSlot) -> bool:
    """Moves values back into the block of their group, if nobody views it and there is room."""
    executor, pool, own, part, windows = slot.executor, slot.pool, slot.value, slot.group_part, Windows(slot.pool)
    with pool.lock, executor.aside():
        resident = own.place.resident and part.place.resident
        room = resident or pool.admission.available_bytes() >= 2 * own.block.slot_bytes
        if own.block.pins or part.block.pins or part.block.viewed or not room:
            return False
        # Not the whole block, if it is away.
        executor.update_first(part.block)
        window = windows.open(part, 0, part.numel, reads=False)
        try:
            with executor.pin(own) as values:
                windows.ready(window).copy_(values.view(-1))
        finally:
            windows.close(window, wrote=True)
        slot.move_to(part)
        executor.forget(own)
    return True


def _reshape(slot: ParamSlot, data: torch.Tensor) -> None:
    """Moves a parameter to a group of its own, with values of another shape."""
    value, executor, pool = slot.value, slot.executor, slot.pool
    if slot.on_pages:
        slot.accesses.let_go()
    if value.block.pins:
        raise PagedModelError(
            f"parameter {slot.name} of shape {tuple(value.shape)} was given data of shape {tuple(data.shape)} "
            "while it was in use. Change it between two forwards."
        )
    # Refused before the old values are dropped.
    pool.admission.reserve(data.nbytes, Tag.PARAM, slot.name).release()
    cuts, own = _cuts(slot, data), slot.own
    slot.give_up_part()
    executor.forget(own)
    slot.become_member(
        ParamGroup(slot.name, [data.shape], movable=slot.group.movable, cuts=cuts), data.shape, value.dtype
    )
    if slot.sharded:
        executor.make(slot.own.block).copy_(slot.owned(data))
        slot.leaving(pool.compute.device)
    else:
        executor.adopt(slot.value.block, data, copied=True)
    slot.generation += 1
    slot.changed()


def _cuts(slot: ParamSlot, data: torch.Tensor) -> list[Cut] | None:
    """What this rank is to own of a sharded parameter with other values; None for one that is not sharded.

    Raises:
        PagedModelError: they are too few for all ranks.
    """
    if not slot.sharded:
        return None
    before = slot.group.pieces[slot.member].cut
    if not can_be_cut(data.numel(), before.count):
        raise PagedModelError(
            f"parameter {slot.name} of shape {tuple(slot.value.shape)}, which is sharded over {before.count} ranks, "
            f"was given data of shape {tuple(data.shape)}, too few elements for each rank to have one. Change it "
            "before the model is put on pages."
        )
    return [Cut(data.numel(), before.count, before.rank)]
