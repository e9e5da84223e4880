"""Models of one process that were given the same dials share them: a budget is the process's, not each model's.

A reference model beside the one that is trained, or a critic, would otherwise take the budgets once more. The compute
tier is divided so that each model has the least that it can train under, and of the rest as much as it could make use
of, in proportion; where all fits, all of it fits still. Models that were given other dials have budgets of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Tier
from ptm_accel.memory.device import CudaTier
from ptm_accel.memory.tide import Tide
from ptm_accel.model.floor import Floor
from ptm_accel.paged_model import PagedModel
from ptm_accel.sizing import dial_of
from ptm_accel.units import format_bytes

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Need:
    """What one model can do with of a tier, in bytes.

    Attributes:
        least: below this it cannot train.
        whole: beyond this it has no use for more.
    """

    least: int
    whole: int


def divide(capacity_bytes: int, needs: Sequence[Need]) -> list[int] | None:
    """Divides a budget among models.

    Args:
        capacity_bytes: the budget.
        needs: of each model.

    Returns:
        the bytes of each, together no more than the budget; None if it is less than they need at the least.
    """
    least, whole = sum(need.least for need in needs), sum(need.whole for need in needs)
    if least > capacity_bytes:
        return None
    if whole <= capacity_bytes:
        spare = capacity_bytes - whole
        return [need.whole + spare * need.whole // max(whole, 1) for need in needs]
    spare = capacity_bytes - least
    return [need.least + spare * (need.whole - need.least) // (whole - least) for need in needs]


def share(model: PagedModel, floor: Floor, others: Sequence[PagedModel]) -> None:
    """Divides the dials that a model was given among it and the others in this process that were given the same.

    Args:
        model: the one that comes, or that needs another share now; it may have nothing on its pages yet.
        floor: what it needs.
        others: models of this process that are on pages with the same dials.

    Raises:
        BudgetError: the budget is less than they need together; nothing has been changed then.
    """
    if not model.memory.dials:
        return
    parties = [model, *(other for other in others if other is not model)]
    floors = [floor, *(party.floor for party in parties[1:])]
    compute = model.pool.budget.tier
    dials = {tier: max(party.memory.dials[tier] for party in parties) for tier in model.memory.budgets}
    needs = [_compute_need(party, floor) for party, floor in zip(parties, floors, strict=True)]
    shares = [dials[compute]] if len(parties) == 1 else divide(dials[compute], needs)
    if shares is None:
        raise _too_little(parties, needs, dials[compute])
    divided = [{compute: nbytes} for nbytes in shares]
    for tier in dials.keys() - {compute}:
        below = [_need_below(party, floor, tier) for party, floor in zip(parties, floors, strict=True)]
        parted = [dials[tier]] if len(parties) == 1 else divide(dials[tier], below)
        for parts, nbytes in zip(divided, parted or [need.least for need in below], strict=True):
            parts[tier] = nbytes
    _resize(parties, divided)
    for party, nbytes in zip(parties, shares, strict=True):
        if isinstance(party.pool.compute, CudaTier) and isinstance(party.pool.room.tide, Tide):
            party.pool.compute.limit(dials[compute])
            beside = [other.pool.budget for other in parties if other is not party]
            party.pool.room.tide.share(nbytes / dials[compute], beside)


def _resize(parties: Sequence[PagedModel], divided: Sequence[Mapping[Tier, int]]) -> None:
    """Gives all of them their parts, or, where somebody cannot give way, none of them."""
    undo: list[tuple[PagedModel, dict[Tier, int]]] = []
    changed = [
        (party, parts)
        for party, parts in zip(parties, divided, strict=True)
        if any(party.memory.capacity_bytes(tier) != nbytes for tier, nbytes in parts.items())
    ]
    # Those who give come before those who take.
    compute = parties[0].pool.budget.tier
    changed.sort(key=lambda pair: pair[1][compute] - pair[0].memory.capacity_bytes(compute))
    try:
        for party, parts in changed:
            before = {tier: party.memory.capacity_bytes(tier) for tier in parts}
            party.resize(parts)
            undo.append((party, before))
    except BaseException:
        for party, before in reversed(undo):
            party.resize(before)
        raise
    if changed and len(parties) > 1:
        named = ", ".join(
            f"{type(party.model).__name__} {format_bytes(parts[compute])}"
            for party, parts in zip(parties, divided, strict=True)
        )
        logger.info("%d models share %s: %s.", len(parties), dial_of(parties[0].memory), named)


def _compute_need(party: PagedModel, floor: Floor) -> Need:
    whole = floor.whole_bytes
    if party.evaluates:
        whole = min(whole, floor.fixed_bytes + sum(slot.value.slot_bytes for slot in party.slots))
    if party.pool.home is None:
        # Nothing of it can be moved away.
        return Need(max(floor.total_bytes, whole), max(floor.total_bytes, whole))
    return Need(floor.total_bytes, max(floor.total_bytes, whole))


def _need_below(party: PagedModel, floor: Floor, tier: Tier) -> Need:
    """What a tier below the compute tier is asked for: what lies there and cannot go lower, up to all states."""
    lowest = tier is Tier.DISK or Tier.DISK not in party.memory.budgets
    used = party.memory.budgets[tier].used_bytes if lowest else 0
    return Need(used, max(used, floor.states_bytes))


def _too_little(parties: Sequence[PagedModel], needs: Sequence[Need], capacity_bytes: int) -> BudgetError:
    dial, least = dial_of(parties[0].memory), sum(need.least for need in needs)
    named = ", ".join(
        f"{type(party.model).__name__} {format_bytes(need.least)}" for party, need in zip(parties, needs, strict=True)
    )
    return BudgetError(
        f"{dial} is {format_bytes(capacity_bytes)} for all models of this process that have these dials, and "
        f"{len(parties)} of them cannot train under less than {format_bytes(least)} together ({named}). Set {dial} "
        f"to at least {least} bytes, or take a model that is not used any more off its pages: "
        "engine_of(model).detach()."
    )
