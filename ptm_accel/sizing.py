"""Says no before the first step: budgets that a model cannot train under, with the figures and the dial to set."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from ptm_accel.config import ResolvedConfig
from ptm_accel.errors import BudgetError
from ptm_accel.machine import available_bytes
from ptm_accel.memory.budget import Tier
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.setup import Memory
from ptm_accel.memory.tenants import Need
from ptm_accel.model.floor import Floor
from ptm_accel.model.slots import ParamSlot
from ptm_accel.units import format_bytes

logger = logging.getLogger(__name__)


def dial_of(memory: Memory) -> str:
    """The dial that sets the compute tier's budget."""
    return "device_memory" if memory.pool.budget.tier is Tier.DEVICE else "host_memory"


def refuse_below(memory: Memory, floor: Floor, expected: Floor) -> None:
    """Refuses a budget of the compute tier below the floor, and what other models that share it need at the least.

    Args:
        memory: the tiers.
        floor: what is refused where it does not fit: as far as is known, so with any optimizer before there is one.
        expected: with the optimizer that is expected, AdamW, so that nobody sets a figure and is refused once more.

    Raises:
        BudgetError: with the figure to set and the tensor that is the reason.
    """
    capacity, dial = memory.pool.room.limit_bytes, dial_of(memory)
    others = [(need.name, need.least_bytes) for need in _others(memory)]
    least = floor.total_bytes + sum(nbytes for _, nbytes in others)
    if capacity < least:
        missing = expected.total_bytes - floor.total_bytes
        more = with_adamw(least + missing) if missing > 0 else ""
        raise BudgetError(
            f"{dial} is {format_bytes(capacity)}, but this model cannot train under less than "
            f"{format_bytes(floor.total_bytes)} ({format_bytes(floor.fixed_bytes)} at all times, "
            f"{format_bytes(floor.moving_bytes)} for {floor.reason}){_beside(others)}. Set {dial} to at least "
            f"{least} bytes{more}{_or_detach(others)}."
        )


def refuse_homeless(memory: Memory, floor: Floor, expected: Floor) -> None:
    """Refuses tiers that cannot hold all states of the model and of others that share them together.

    Args:
        memory: the tiers.
        floor: what is refused where it does not fit: the states that are known, so without those of an optimizer that
            there is not yet.
        expected: with the optimizer that is expected, AdamW, so that nobody sets a figure and is refused once more.

    Raises:
        BudgetError: with the figures and the dial to set.
    """
    capacity, dial = memory.pool.room.limit_bytes, dial_of(memory)
    others = _others(memory)
    whole = floor.whole_bytes + sum(need.known_bytes for need in others)
    if capacity >= whole:
        return
    states, unknown = format_bytes(floor.states_bytes), expected.states_bytes - floor.states_bytes
    if memory.pool.home is None:
        named = [(need.name, need.known_bytes) for need in others]
        more = with_adamw(whole - floor.whole_bytes + expected.whole_bytes) if unknown else ""
        raise BudgetError(
            f"{dial} is {format_bytes(capacity)} and the states of this model take {states}, "
            f"{format_bytes(floor.whole_bytes)} with what a step needs beside them{_beside(named)}, with no tier below "
            f"for what does not fit. Set disk to a directory on an SSD, or {dial} to at least {whole} bytes{more}"
            f"{_or_detach(named)}."
        )
    below = {tier: b.capacity_bytes for tier, b in memory.budgets.items() if tier is not memory.pool.budget.tier}
    away = [(need.name, need.away_bytes) for need in others]
    missing = floor.states_bytes - floor.fixed_bytes + sum(nbytes for _, nbytes in away) - sum(below.values())
    if missing > 0:
        tiers = ", ".join(f"{tier.value} {format_bytes(n)}" for tier, n in below.items())
        more = with_adamw(missing + unknown) if unknown else ""
        raise BudgetError(
            f"the states of this model take {states}{_beside(away)}, more than {dial} ({format_bytes(capacity)}), and "
            f"the tiers below hold too little of them ({tiers}). "
            f"{'Raise the limit of disk, or add a path,' if Tier.DISK in below else 'Set disk, or raise host_memory'} "
            f"by at least {missing} bytes{more}{_or_detach(away)}."
        )


def _others(memory: Memory) -> list[Need]:
    """What the other models need that share the tiers."""
    return [other.pool.need for other in memory.others]


def _beside(others: list[tuple[str, int]]) -> str:
    """Names the other models, with the bytes of each; nothing where there are none."""
    named = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in others)
    return f", beside other models of this process that share it ({named})" if others else ""


def _or_detach(others: list[tuple[str, int]]) -> str:
    return ", or take a model that is not used any more off its pages: engine_of(model).detach()" if others else ""


def with_adamw(nbytes: int) -> str:
    """Before there is an optimizer, the figure that is most likely to be enough: who sets it is refused only once."""
    return f" ({nbytes} with AdamW's state, which is not counted yet)"


def refuse_gathering(memory: Memory, values: Iterable[PagedTensor]) -> None:
    """Refuses to have tensors in the compute tier all at once that it cannot hold, before the first of them comes.

    Raises:
        BudgetError: with the figures and what to do.
    """
    sizes = [value.slot_bytes for value in values]
    capacity, dial = memory.pool.room.limit_bytes, dial_of(memory)
    if sum(sizes) > capacity:
        raise BudgetError(
            f"ptm_accel.gathered: the {len(sizes)} tensors take {format_bytes(sum(sizes))} together, and {dial} is "
            f"{format_bytes(capacity)}. Gather a part at a time, such as ptm_accel.gathered(model.lm_head), or raise "
            f"{dial}."
        )


def refuse_oversized_model(memory: Memory, values: Iterable[PagedTensor]) -> None:
    """Refuses to take a model off its pages that the memory of the compute device cannot hold.

    Args:
        memory: its tiers.
        values: its parameters, and the gradients that there are.

    Raises:
        BudgetError: with the figures.
    """
    pool = memory.pool
    values = list(values)
    if pool.card is not None:
        # What is resident leaves first, if it can, and all slabs with it.
        asked = sum(value.nbytes for value in values)
        free = pool.card.free_bytes() + (pool.card.held_bytes if idle_fits_below(memory) else 0)
    else:
        # What is resident is copied, one after another, before its pages are given back.
        asked = sum(value.nbytes for value in values if not value.place.resident)
        asked += max((value.nbytes for value in values if value.place.resident), default=0)
        free = available_bytes() if pool.budget.tier is Tier.HOST else asked
    if asked > free:
        raise BudgetError(
            f"the model cannot be taken off its pages: {format_bytes(asked)} more of memory are needed for it and "
            f"{format_bytes(free)} are free. Save it with model.save_pretrained(...) instead."
        )


def idle_fits_below(memory: Memory) -> bool:
    """Whether all that may leave the compute tier would have room below; not while other models work there."""
    if memory.others:
        return False
    pool = memory.pool
    below = (budget for tier, budget in memory.budgets.items() if tier is not pool.budget.tier)
    return pool.idle_bytes <= sum(budget.free_bytes for budget in below)


def hint_about_masters(trainable: list[ParamSlot], config: ResolvedConfig) -> None:
    """Says, once per model, that narrow parameters are updated in their own precision unless there are masters."""
    narrow = [s for s in trainable if s.value.dtype in (torch.bfloat16, torch.float16)]
    if narrow and config.master_weights is None:
        logger.info(
            "%d of %d trainable parameters are %s and are updated in it, as without ptm_accel; "
            "master_weights: fp32 keeps small updates from being rounded away.",
            len(narrow),
            len(trainable),
            narrow[0].value.dtype,
        )
