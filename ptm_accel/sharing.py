"""Models of one process that were given the same dials share them: a budget is the process's, not each model's.

A reference model beside the one that is trained, or a critic, would otherwise take the budgets once more. The compute
tier is divided so that each model has the least that it can train under, and of the rest as much as it could make use
of, in proportion; where all fits, all of it fits still. So is host memory between a device and a disk. What is the last
tier of all is not divided, since nothing can be moved out of it: who comes first is served there, up to what all have
in common. Models that were given other dials, or compute elsewhere, have budgets of their own.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ptm_accel.config import PTMConfig
from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Common, Tag, Tier
from ptm_accel.memory.device import CudaTier
from ptm_accel.memory.frame_home import FrameHome
from ptm_accel.memory.setup import Memory
from ptm_accel.memory.tide import Tide
from ptm_accel.model.floor import Floor
from ptm_accel.sizing import dial_of, with_adamw
from ptm_accel.units import format_bytes

logger = logging.getLogger(__name__)

_FRAMES = 16
"""How many pages a model needs of host memory that is between a device and a disk, to get anything through."""

_parties: weakref.WeakSet[Party] = weakref.WeakSet()


@dataclass(frozen=True, slots=True)
class Need:
    """What one model can do with of a tier, in bytes.

    Attributes:
        least: below this it cannot train.
        whole: beyond this it has no use for more.
    """

    least: int
    whole: int


@dataclass(frozen=True, slots=True)
class Claim:
    """What one model asks of the tiers.

    Attributes:
        name: of the model, for messages.
        compute: of the compute tier.
        states_bytes: what must be somewhere at all times, as far as is known.
        fixed_bytes: what of it is always in the compute tier.
        page_bytes: its pages.
        expected_bytes: the least of the compute tier with the optimizer that is expected, where there is none yet.
    """

    name: str
    compute: Need
    states_bytes: int
    fixed_bytes: int
    page_bytes: int
    expected_bytes: int = 0


class Party:
    """A model that has a part of dials. Known from before its first page is filled until its memory is closed.

    Args:
        memory: where its pages are.
        asked: the dials.

    Attributes:
        claim: what it asks for; None before that is known.
        stale: whether somebody has left since the dials were divided.
        resize: gives its tiers other capacities.
    """

    def __init__(self, memory: Memory, asked: PTMConfig) -> None:
        self.memory = memory
        self.asked = asked
        self.claim: Claim | None = None
        self.stale = False
        self.resize: Callable[[Mapping[Tier, int]], None] = memory.resize
        memory.when_closed = self._left
        _parties.add(self)

    def _left(self) -> None:
        # The garbage collector may call this in the middle of anything: the others see to it at their next step.
        for other in self.others():
            other.stale = True

    def others(self) -> list[Party]:
        """Those that have the other parts."""
        where = self.memory.pool.compute.device
        return [
            party
            for party in list(_parties)
            if party is not self
            and party.claim is not None
            and not party.memory.closed
            and party.asked == self.asked
            and party.memory.pool.compute.device == where
        ]


def party_of(memory: Memory, asked: PTMConfig) -> Party | None:
    """Whoever has pages in `memory`, if its budgets are dials that others may have been given as well."""
    if not memory.dials:
        return None
    known = next((party for party in list(_parties) if party.memory is memory), None)
    return known or Party(memory, asked)


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


def claim_of(
    name: str,
    floor: Floor,
    states: Floor,
    memory: Memory,
    *,
    expected_bytes: int,
    page_bytes: int,
    evaluated_bytes: int,
) -> Claim:
    """What a model asks for.

    Args:
        name: of the model.
        floor: what it needs, with the optimizer that it has or is expected to have, if there is room for that.
        states: what it needs as far as is known: without states of an optimizer that it does not have yet.
        memory: where it is.
        expected_bytes: the least that it needs with the optimizer that it has or is expected to have.
        page_bytes: its pages.
        evaluated_bytes: its parameters, if it is only evaluated; else 0.
    """
    whole, kept = floor.whole_bytes, states.states_bytes
    if evaluated_bytes:
        kept = min(kept, states.fixed_bytes + evaluated_bytes)
        whole = min(whole, floor.fixed_bytes + evaluated_bytes)
    least = floor.total_bytes
    if memory.pool.home is None:
        # Nothing of it can be moved away.
        least = max(least, min(whole, states.whole_bytes))
    need = Need(least, max(least, whole))
    return Claim(name, need, kept, floor.fixed_bytes, page_bytes, max(least, expected_bytes))


def share(party: Party, claim: Claim) -> None:
    """Divides the dials among a model and the others that were given the same.

    Args:
        party: who comes, or needs another part now.
        claim: what it asks for.

    Raises:
        BudgetError: the budgets are less than they need together; nothing has been changed then.
    """
    before, party.claim = party.claim, claim
    parties = [party, *party.others()]
    try:
        parts = _parts(parties)
        _refuse_homeless(parties, parts)
        _resize(parties, parts)
    except BaseException:
        party.claim = before
        raise
    for each in parties:
        each.stale = False


def _claims(parties: Sequence[Party]) -> list[Claim]:
    claims = [party.claim for party in parties]
    return [claim for claim in claims if claim is not None]


def _dials(parties: Sequence[Party]) -> dict[Tier, int]:
    tiers = parties[0].memory.budgets
    return {tier: max(party.memory.dials[tier] for party in parties) for tier in tiers}


def _last(tiers: Mapping[Tier, int], compute: Tier) -> Tier | None:
    """The tier below all others; None where there is none below the compute tier."""
    below = tiers.keys() - {compute}
    return (Tier.DISK if Tier.DISK in below else Tier.HOST) if below else None


def _parts(parties: Sequence[Party]) -> list[dict[Tier, int]]:
    """The capacity of each tier for each of them."""
    dials, claims = _dials(parties), _claims(parties)
    compute = parties[0].memory.pool.budget.tier
    divided = [dict(dials) for _ in parties]
    if len(parties) == 1:
        return divided
    needs = {compute: [claim.compute for claim in claims]}
    for tier in dials.keys() - {compute, _last(dials, compute)}:
        needs[tier] = [_middle_need(party, claim) for party, claim in zip(parties, claims, strict=True)]
    for tier, asked in needs.items():
        shares = divide(dials[tier], asked)
        if shares is None:
            raise _too_little(parties, tier, asked, dials[tier])
        for parts, nbytes in zip(divided, shares, strict=True):
            parts[tier] = nbytes
    return divided


def _middle_need(party: Party, claim: Claim) -> Need:
    staging = party.memory.budgets[Tier.HOST].used_by_tag().get(Tag.STAGING, 0)
    home = party.memory.pool.home
    frame_bytes = home.page_bytes if isinstance(home, FrameHome) else claim.page_bytes
    least = staging + _FRAMES * frame_bytes
    return Need(least, max(least, claim.states_bytes))


def _refuse_homeless(parties: Sequence[Party], parts: Sequence[Mapping[Tier, int]]) -> None:
    """Refuses tiers that cannot hold all states of all models together (of one alone, others say more)."""
    dials, claims = _dials(parties), _claims(parties)
    compute = parties[0].memory.pool.budget.tier
    if len(parties) == 1 or _last(dials, compute) is None:
        return
    below = sum(nbytes for tier, nbytes in dials.items() if tier is not compute)
    away = [
        claim.states_bytes - claim.fixed_bytes
        for claim, part in zip(claims, parts, strict=True)
        if claim.compute.whole > part[compute]
    ]
    if sum(away) > below:
        named = ", ".join(f"{claim.name} {format_bytes(claim.states_bytes)}" for claim in claims)
        raise BudgetError(
            f"the states of {len(parties)} models of this process that share these dials are more than the tiers below "
            f"{dial_of(parties[0].memory)} hold, {format_bytes(below)} ({named}). Raise "
            f"{'the limit of disk, or add a path' if Tier.DISK in dials else 'host_memory, or set disk'}."
        )


def _resize(parties: Sequence[Party], parts: Sequence[dict[Tier, int]]) -> None:
    """Gives all of them their parts, or, where somebody cannot give way, none of them."""
    compute = parties[0].memory.pool.budget.tier
    changed = [
        (party, part)
        for party, part in zip(parties, parts, strict=True)
        if any(party.memory.capacity_bytes(tier) != nbytes for tier, nbytes in part.items())
    ]
    # Those who give come before those who take.
    changed.sort(key=lambda pair: pair[1][compute] - pair[0].memory.capacity_bytes(compute))
    done: list[tuple[Party, dict[Tier, int]]] = []
    try:
        for party, part in changed:
            before = {tier: party.memory.capacity_bytes(tier) for tier in part}
            party.resize(part)
            done.append((party, before))
    except BaseException:
        for party, before in reversed(done):
            party.resize(before)
        raise
    _join(parties)
    if changed and len(parties) > 1:
        named = ", ".join(
            f"{claim.name} {format_bytes(part[compute])}" for claim, part in zip(_claims(parties), parts, strict=True)
        )
        logger.info("%d models share %s: %s.", len(parties), dial_of(parties[0].memory), named)


def _join(parties: Sequence[Party]) -> None:
    """Has the parts of what is not divided counted together: the last tier, and other memory of a card."""
    dials = _dials(parties)
    for party in parties:
        # Derived from a machine that others were already on, they may be less; who is left has all of them.
        party.memory.dials = dials
    compute = parties[0].memory.pool.budget.tier
    last = _last(dials, compute)
    if last is not None:
        common = Common(dials[last]) if len(parties) > 1 else None
        for party in parties:
            party.memory.budgets[last].join(common)
    tides = [party.memory.pool.room.tide for party in parties]
    on_card = [tide for tide in tides if isinstance(tide, Tide)]
    for tide in on_card:
        tide.join(dials[compute], [other for other in on_card if other is not tide])
    card = parties[0].memory.pool.compute
    if on_card and isinstance(card, CudaTier) and parties[0].asked.device_memory is not None:
        card.limit(dials[compute])


def _too_little(parties: Sequence[Party], tier: Tier, needs: Sequence[Need], capacity_bytes: int) -> BudgetError:
    dial = dial_of(parties[0].memory) if tier is parties[0].memory.pool.budget.tier else "host_memory"
    least, more = sum(need.least for need in needs), ""
    if tier is parties[0].memory.pool.budget.tier:
        expected = sum(claim.expected_bytes for claim in _claims(parties))
        more = with_adamw(expected) if expected > least else ""
    named = ", ".join(
        f"{claim.name} {format_bytes(need.least)}" for claim, need in zip(_claims(parties), needs, strict=True)
    )
    return BudgetError(
        f"{dial} is {format_bytes(capacity_bytes)} for all models of this process that have these dials, and "
        f"{len(parties)} of them cannot train under less than {format_bytes(least)} together ({named}). Set {dial} "
        f"to at least {least} bytes{more}, or take a model that is not used any more off its pages: "
        "engine_of(model).detach()."
    )
