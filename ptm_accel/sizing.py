"""Says no before the first step: budgets that a model cannot train under, with the figures and the option to set."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from ptm_accel.config import ResolvedConfig
from ptm_accel.errors import BudgetError
from ptm_accel.machine import available_bytes
from ptm_accel.memory.block import Block, Part
from ptm_accel.memory.budget import Tag, Tier
from ptm_accel.memory.disk import bounce_bytes
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.setup import Memory
from ptm_accel.memory.swap_space import SPARES
from ptm_accel.model.floor import Floor
from ptm_accel.model.slots import ParamSlot
from ptm_accel.units import format_bytes, format_least

logger = logging.getLogger(__name__)


def option_of(memory: Memory) -> str:
    """Returns the name of the option that sets the compute tier's budget."""
    return "device_memory" if memory.pool.budget.tier is Tier.DEVICE else "host_memory"


def refuse_short(memory: Memory, floor: Floor, states: Floor, expected: Floor, page_bytes: int) -> None:
    """Refuses budgets under which a model cannot train, beside the other models that share them.

    The error names every tier that is short of `expected`, so that budgets of the figures named are not refused again.

    Args:
        memory: the tiers.
        floor: what the compute tier is checked against.
        states: what the tiers below are checked against: known states, so without those of a missing optimizer.
        expected: figures are named for this: the optimizer, or AdamW while there is none.
        page_bytes: of a page.

    Raises:
        BudgetError: with a figure for each tier that is short, and the tensor that is the reason.
    """
    capacity, backing = memory.pool.admission.limit_bytes, memory.pool.backing
    others = [other.pool.need for other in memory.others]
    known = floor.total_bytes + sum(need.least_bytes for need in others)
    if capacity >= known and _missing_bytes(memory, states) <= 0:
        return
    option, errors = option_of(memory), []
    least = known - floor.total_bytes + expected.total_bytes
    if capacity < least and backing is not None:
        named = [(need.name, need.least_bytes) for need in others]
        errors.append(
            f"{option} is {format_bytes(capacity)}, but this model cannot train under less than "
            f"{format_least(expected.total_bytes)} ({format_bytes(expected.fixed_bytes)} at all times, "
            f"{format_bytes(expected.moving_bytes)} for {expected.reason}){_beside(named)}. Set {option} to at least "
            f"{format_least(least)}{_with_adamw(least, known)}{_or_detach(named)}."
        )
    missing = _missing_bytes(memory, expected)
    taken = format_bytes(expected.states_bytes)
    if missing > 0 and backing is None:
        named = [(need.name, need.known_bytes) for need in others]
        least += bounce_bytes(1, page_bytes)
        with_disk = f" and {option} to at least {format_least(least)}" if capacity < least else ""
        errors.append(
            f"{option} is {format_bytes(capacity)} and the states of this model take {taken}, "
            f"{format_bytes(capacity + missing)} with what a step needs beside them{_beside(named)}, with no tier "
            f"below for what does not fit. Set disk to a directory on an SSD{with_disk}, or {option} to at least "
            f"{format_least(capacity + missing)}"
            f"{_with_adamw(capacity + missing, capacity + _missing_bytes(memory, states))}{_or_detach(named)}."
        )
    elif missing > 0:
        named = [(need.name, need.away_bytes) for need in others]
        below = {tier: b.capacity_bytes for tier, b in memory.budgets.items() if tier is not memory.pool.budget.tier}
        tiers = ", ".join(f"{tier.value} {format_bytes(n)}" for tier, n in below.items())
        errors.append(
            f"the states of this model take {taken}{_beside(named)}, more than {option} ({format_bytes(capacity)}), "
            f"and the tiers below hold too little of them ({tiers}). "
            f"{'Raise the limit of disk, or add a path,' if Tier.DISK in below else 'Set disk, or raise host_memory'} "
            f"by at least {format_least(missing)}{_with_adamw(missing, _missing_bytes(memory, states))}"
            f"{_or_detach(named)}."
        )
    raise BudgetError(" ".join(errors))


def _missing_bytes(memory: Memory, floor: Floor) -> int:
    """By how much the tiers are too small to hold all states together.

    Without a tier below, all of it has to fit into the compute tier. With one, the tiers below must hold all that may
    leave the compute tier: a tensor keeps its place there as long as it lives.
    """
    capacity, backing = memory.pool.admission.limit_bytes, memory.pool.backing
    others = [other.pool.need for other in memory.others]
    whole = max(floor.total_bytes, floor.whole_bytes) + sum(need.known_bytes for need in others)
    if backing is None:
        return whole - capacity
    if capacity >= whole:
        return 0
    below = [budget for tier, budget in memory.budgets.items() if tier is not memory.pool.budget.tier]
    held = sum(budget.used_by_tag().get(Tag.STAGING, 0) for budget in below if budget.tier is Tier.HOST)
    if isinstance(backing, HostStore) and memory.disk is not None:
        held += SPARES * backing.page_bytes
    away = floor.away_bytes + sum(need.away_bytes for need in others)
    return away + held - sum(budget.capacity_bytes for budget in below)


def _beside(others: list[tuple[str, int]]) -> str:
    """Names the other models, with the bytes of each; nothing where there are none."""
    named = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in others)
    return f", beside other models of this process that share it ({named})" if others else ""


def _or_detach(others: list[tuple[str, int]]) -> str:
    return ", or take a model that is not used any more off its pages: engine_of(model).detach()" if others else ""


def _with_adamw(expected_bytes: int, known_bytes: int) -> str:
    """Names the lower figure of an optimizer without state, before there is an optimizer."""
    if expected_bytes == known_bytes:
        return ""
    return f" (with AdamW; an optimizer without state needs {format_least(max(known_bytes, 0))})"


def refuse_gathering(memory: Memory, blocks: Iterable[Block]) -> None:
    """Refuses to have tensors in the compute tier all at once that it cannot hold, before the first of them comes.

    Raises:
        BudgetError: with the figures and what to do.
    """
    sizes = [block.slot_bytes for block in blocks]
    capacity, option = memory.pool.admission.limit_bytes, option_of(memory)
    if sum(sizes) > capacity:
        raise BudgetError(
            f"ptm_accel.gathered: the {len(sizes)} tensors take {format_bytes(sum(sizes))} together, and {option} is "
            f"{format_bytes(capacity)}. Gather a part at a time, such as ptm_accel.gathered(model.lm_head), or raise "
            f"{option}."
        )


def refuse_oversized_model(memory: Memory, values: Iterable[Part]) -> None:
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
        # What is resident is copied, one after another, before its block is given back.
        asked = sum(value.nbytes for value in values if not value.place.resident)
        asked += max((value.block.nbytes for value in values if value.place.resident), default=0)
        free = available_bytes() if pool.budget.tier is Tier.HOST else asked
    if asked > free:
        raise BudgetError(
            f"the model cannot be taken off its pages: {format_bytes(asked)} more of memory are needed for it and "
            f"{format_bytes(free)} are free. Save it with model.save_pretrained(...) instead."
        )


def idle_fits_below(memory: Memory) -> bool:
    """Returns whether all that may leave the compute tier would have room below; not while other models work there."""
    if memory.others:
        return False
    pool = memory.pool
    below = (budget for tier, budget in memory.budgets.items() if tier is not pool.budget.tier)
    return pool.eviction.nbytes <= sum(budget.free_bytes for budget in below)


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
