"""Chooses among the plans of a pass the one that is simulated to take least."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ptm_accel.errors import ScheduleError
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.schedule.actions import Plan
from ptm_accel.schedule.plan import plan_pass
from ptm_accel.schedule.simulate import Simulation, simulate
from ptm_accel.schedule.trace import Item, Trace, Use
from ptm_accel.schedule.updates import spread_state, with_updates, with_updates_in_backward

_AHEAD_SHARES = (0.4, 0.25, 0.15, 0.1, 0.05)
"""The shares of the budget that may be held for what is not used yet: what they hold, state cannot stay in."""

_KEPT_SHARES = (0.0, 0.25, 0.4, 0.55, 0.7)
"""The shares of the budget that may be given to state that never leaves. What is kept until it is wanted next is wanted
in the order of the pass, and a byte of state that stays saves a load and a store while updates are carried out, which
is when the link is busiest; a gradient that stays saves its store while nothing else is moved.
"""

_AHEAD_UNKNOWN = 0.25
"""The one that is taken where the link has not been measured."""

_AS_GOOD = 1.01
"""Of plans whose times differ by less than this factor the one that holds most is taken: it makes up for what is not
foreseen.
"""

_WORTH_A_LOOK = 1.02
"""Plans that take longer than the best by more than this factor are not tried with another beginning."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan with what it is of.

    Attributes:
        trace: the pass, with the updates that are carried out beside it.
        plan: what to start when; None where none can be made.
        simulated: what it should come to; None where the link has not been measured.
    """

    trace: Trace
    plan: Plan | None
    simulated: Simulation | None


def choose_plan(
    recorded: Trace,
    *,
    capacity_bytes: int,
    updates: Mapping[str, Sequence[Item]],
    overwritten: Collection[str] = (),
    in_backward: bool = False,
    repeats: bool,
    rates: LinkRates | None,
    update_s: float,
) -> Choice:
    """The best plan for a pass.

    Args:
        recorded: the pass, without updates.
        capacity_bytes: the budget.
        updates: what the update of each parameter uses beside it, the gradient last; empty where none are carried out
            beside the pass.
        overwritten: parameters that their updates write without having read them.
        in_backward: whether updates follow their gradients, and not those of the pass before.
        repeats: whether the same pass follows it.
        rates: of the link between the compute tier and the home; None where they are not known.
        update_s: seconds of arithmetic for each byte of gradient that an update uses up.
    """

    def add(most_bytes: int) -> Trace:
        if not updates:
            return recorded
        place = with_updates_in_backward if in_backward else with_updates
        return place(recorded, updates, most_bytes=most_bytes, overwritten=overwritten)

    def choice(kept: float, share: float, again: bool) -> Choice:
        planned = _planned(recorded, add, capacity_bytes, share, kept, again, rates, update_s)
        return _with_the_rest(planned, updates, rates, update_s)

    ways = [
        (kept, share)
        for kept in (_KEPT_SHARES if updates and rates is not None else (0.0,))
        for share in ((_AHEAD_UNKNOWN,) if rates is None else _AHEAD_SHARES)
    ]
    choices = {way: [choice(*way, repeats)] for way in ways}
    times = [found.simulated.seconds for (found,) in choices.values() if found.simulated is not None]
    if repeats and times:
        # The other way to begin changes little: it is looked at only where that could make a plan the best.
        for way, found in choices.items():
            if found[0].simulated is not None and found[0].simulated.seconds <= min(times) * _WORTH_A_LOOK:
                found.append(choice(*way, False))
    every = [each for way in ways for each in choices[way]]
    times = [each.simulated.seconds for each in every if each.simulated is not None]
    if not times:
        return every[0]
    least = min(times) * _AS_GOOD
    return next(each for each in every if each.simulated is not None and each.simulated.seconds <= least)


def _planned(
    recorded: Trace,
    add_updates: Callable[[int], Trace],
    capacity_bytes: int,
    ahead_share: float,
    kept_share: float,
    repeats: bool,
    rates: LinkRates | None,
    update_s: float,
) -> Choice:
    kept_bytes = int(capacity_bytes * kept_share)
    ahead_bytes = int((capacity_bytes - kept_bytes) * ahead_share)
    ahead_bytes = max(ahead_bytes, 2 * max((item.nbytes for item in recorded.items), default=0))
    # Beside the update that is carried out there must be room for what the pass holds.
    trace = add_updates((capacity_bytes - kept_bytes - ahead_bytes) // 2)
    kept = spread_state(trace, kept_bytes)
    try:
        plan = plan_pass(
            trace, capacity_bytes=capacity_bytes, ahead_bytes=ahead_bytes, repeats=repeats, kept=frozenset(kept)
        )
    except ScheduleError:
        # What was held when the trace was made does not fit what there is now; paging on demand still may.
        return Choice(trace, None, None)
    if rates is None:
        return Choice(trace, plan, None)
    return Choice(trace, plan, simulate(trace, plan, rates, lambda gradient: gradient.nbytes * update_s))


def _with_the_rest(
    choice: Choice, updates: Mapping[str, Sequence[Item]], rates: LinkRates | None, update_s: float
) -> Choice:
    """A plan's simulation with the updates that there is no place for in it.

    They are carried out in parts, with little beside them. Left out, a plan that does less would seem to be faster.
    """
    if choice.simulated is None or rates is None:
        return choice
    items = choice.trace.items
    planned = {items[access.item].name for access in choice.trace.accesses if access.use is Use.CONSUME}
    rest = [used for used in updates.values() if used[-1].name not in planned]
    state_bytes = sum(item.nbytes for used in rest for item in used[:-1])
    spent_s = sum(used[-1].nbytes for used in rest) * update_s
    link_s = rates.seconds(state_bytes, state_bytes)
    simulated = replace(
        choice.simulated,
        seconds=choice.simulated.seconds + spent_s + link_s,
        update_s=choice.simulated.update_s + spent_s,
        load_stall_s=choice.simulated.load_stall_s + link_s,
        read_bytes=choice.simulated.read_bytes + state_bytes,
        written_bytes=choice.simulated.written_bytes + state_bytes,
    )
    return replace(choice, simulated=simulated)
