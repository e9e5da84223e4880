"""Chooses among the plans of a pass the one that is simulated to take least."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ptm_accel.errors import ScheduleError
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.schedule.actions import Plan
from ptm_accel.schedule.placement import SHARES, behind, placed
from ptm_accel.schedule.plan import plan_pass
from ptm_accel.schedule.simulate import Simulation, simulate
from ptm_accel.schedule.trace import Item, Trace, Use
from ptm_accel.schedule.updates import (
    MORE_SUFFIX,
    final_gradients,
    spread_state,
    with_updates,
    with_updates_in_backward,
)

_AHEAD_SHARES = (0.4, 0.15, 0.05)
"""The shares of the budget that may be held for what is not used yet: what they hold, state cannot stay in."""

_KEPT_SHARES = (0.0, 0.25, 0.7)
"""The shares of the budget that may be given to state that never leaves. What is kept until it is wanted next is wanted
in the order of the pass, and a byte of state that stays saves a load and a store while updates are carried out, which
is when the link is busiest; a gradient that stays saves its store while nothing else is moved.

With five shares of each, plans of four models under four budgets were simulated to be 0.4% faster on average, and 4.5%
at most, for nearly three times the work.
"""

_AHEAD_UNKNOWN = 0.25
"""Share that is taken where the link has not been measured."""

_AS_GOOD = 1.01
"""Plans whose times differ by less than this factor count as equal: then what they hold ahead and move is looked at."""

_ENOUGH_AHEAD = 0.15
_ENOUGH_UPDATES = 2
"""Minimum prefetch headroom: 15% of the budget and two updates.

Under a small budget the share alone may be less than one update, and each would wait for what did not fit. Of equally
good plans with this headroom, the one that moves least is taken: a disk wears, and what is not moved cannot be late.
Where none has it, the plan with the most headroom is taken.
"""

_WORTH_THE_CPU = 1.02
"""Updates are carried out on the CPU where that is simulated to be faster by this factor."""


class BudgetSplit(NamedTuple):
    """Division of the budget.

    Attributes:
        kept_share: of the budget, for state that never leaves.
        ahead_share: of the rest, for what is not used yet.
    """

    kept_share: float
    ahead_share: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan with what it is of.

    Attributes:
        way: how it divides the budget.
        trace: the pass, with the updates that are carried out beside it.
        plan: what to start when; None where none can be made.
        simulated: what it should come to; None where the link has not been measured.
        on_host: the parameters whose updates are carried out on the CPU beside a device, by name.
    """

    way: BudgetSplit
    trace: Trace
    plan: Plan | None
    simulated: Simulation | None
    on_host: frozenset[str] = frozenset()

    @property
    def seconds(self) -> float:
        """Seconds that it should take; infinite where that is not known."""
        return math.inf if self.simulated is None else self.simulated.seconds

    @property
    def ahead_share(self) -> float:
        """The share of the whole budget for what is not used yet."""
        return self.way.ahead_share * (1 - self.way.kept_share)


def choose_plan(
    recorded: Trace,
    *,
    capacity_bytes: int,
    updates: Mapping[str, Sequence[Item]],
    overwritten: Collection[str] = (),
    in_backward: bool = False,
    repeats: bool,
    between_bytes: int = 0,
    more_follow: bool = False,
    rates: LinkRates | None,
    update_s: float,
    host_s: float | None = None,
) -> Choice:
    """Returns the best plan for a pass.

    Args:
        recorded: the pass, without updates.
        capacity_bytes: the budget.
        updates: what the update of each parameter uses beside it, the gradient last; empty where none are carried out
            beside the pass.
        overwritten: parameters that their updates write without having read them.
        in_backward: whether updates follow their gradients, and not those of the pass before.
        repeats: whether the same pass follows it.
        between_bytes: what the passes of other kinds that come before the next of this kind can make use of: state
            stays over them in what they leave of the budget, and no more.
        more_follow: whether the next pass adds to the gradients of this one, and no update comes between.
        rates: of the link between the compute tier and the backing store; None where they are not known.
        update_s: seconds of arithmetic for each byte of gradient that an update uses up.
        host_s: the same for updates on the CPU beside a device; None where there are none.
    """
    stays_bytes = max(capacity_bytes - between_bytes, 0)
    task = _Task(
        recorded,
        capacity_bytes,
        updates,
        overwritten,
        in_backward,
        repeats,
        stays_bytes,
        more_follow,
        rates,
        update_s,
        host_s,
    )
    if rates is None:
        return task.choice(BudgetSplit(0.0, _AHEAD_UNKNOWN), frozenset())
    on_host = task.best_on_host()
    kept_shares = _KEPT_SHARES if updates and stays_bytes else _KEPT_SHARES[:1]
    found = [task.choice(BudgetSplit(kept, ahead), on_host) for kept in kept_shares for ahead in _AHEAD_SHARES]
    least_s = min(each.seconds for each in found)
    good = [each for each in found if each.simulated and each.seconds <= least_s * _AS_GOOD]
    steady = [each for each in good if _holds_enough(each, updates)]
    if steady:
        return min(steady, key=_moved_bytes)
    return max(good, key=lambda each: each.ahead_share, default=found[0])


def _holds_enough(choice: Choice, updates: Mapping[str, Sequence[Item]]) -> bool:
    """Returns whether a plan holds so much ahead that what is not foreseen makes little difference."""
    assert choice.plan is not None
    planned = _planned_updates(choice.trace)
    sizes = [sum(item.nbytes for item in used) for used in updates.values() if used[-1].name in planned]
    if updates and not sizes:
        return False
    # Of the update that a byte is part of: a few that are large, or many that are small, are not what is waited for.
    usual_bytes = sum(size * size for size in sizes) / max(sum(sizes), 1)
    share = choice.ahead_share
    return share >= _ENOUGH_AHEAD and share * choice.plan.capacity_bytes >= _ENOUGH_UPDATES * usual_bytes


def _planned_updates(trace: Trace) -> set[str]:
    """Returns the gradients that updates use up within a pass, by name."""
    return {trace.items[access.item].name for access in trace.accesses if access.use is Use.CONSUME}


def _moved_bytes(choice: Choice) -> int:
    assert choice.simulated is not None
    return choice.simulated.read_bytes + choice.simulated.written_bytes


@dataclass(frozen=True, slots=True)
class _Task:
    """Task that a plan is chosen for; see `choose_plan`."""

    recorded: Trace
    capacity_bytes: int
    updates: Mapping[str, Sequence[Item]]
    overwritten: Collection[str]
    in_backward: bool
    repeats: bool
    stays_bytes: int
    more_follow: bool
    rates: LinkRates | None
    update_s: float
    host_s: float | None

    def best_on_host(self) -> frozenset[str]:
        """The parameters that are best updated on the CPU: none, unless that is faster by more than is noise."""
        nobody: frozenset[str] = frozenset()
        if self.host_s is None or not self.updates:
            return nobody
        updates = self.updates
        if self.in_backward:
            final = set(final_gradients(self.recorded).values())
            updates = {name: used for name, used in updates.items() if name in final}
        way = BudgetSplit(0.0, _AHEAD_UNKNOWN)
        found = {share: self.choice(way, behind(self.recorded, updates, share)) for share in SHARES}
        first = min(found, key=lambda share: found[share].seconds)
        for share in (first - SHARES[0] / 2, first + SHARES[0] / 2):
            if share < 1:
                found[share] = self.choice(way, behind(self.recorded, updates, share))
        best = min(found.values(), key=lambda each: each.seconds)
        return best.on_host if best.seconds * _WORTH_THE_CPU < self.choice(way, nobody).seconds else nobody

    def choice(self, way: BudgetSplit, on_host: frozenset[str]) -> Choice:
        """Makes one plan, with what it should come to."""
        kept_share, ahead_share = way
        updates = {name: used for name, used in self.updates.items() if name not in on_host}
        kept_bytes = int(self.capacity_bytes * kept_share)
        ahead_bytes = int((self.capacity_bytes - kept_bytes) * ahead_share)
        ahead_bytes = max(ahead_bytes, 2 * max((item.nbytes for item in self.recorded.items), default=0))
        # Beside the update that is carried out there must be room for what the pass holds.
        trace = self._with(updates, (self.capacity_bytes - kept_bytes - ahead_bytes) // 2)
        kept = frozenset(spread_state(trace, min(kept_bytes, self.stays_bytes)))
        state = frozenset(range(len(self.recorded.items), len(trace.items)))
        passing = state - kept if self.stays_bytes < self.capacity_bytes else frozenset()
        # What is added to sums in host memory goes there at once.
        passing |= {number for number, item in enumerate(trace.items) if item.name.endswith(MORE_SUFFIX)}
        host = placed(
            trace, self.updates, on_host, self.host_s or 0.0, in_backward=self.in_backward, ends_step=self.repeats
        )
        try:
            plan = plan_pass(
                trace,
                capacity_bytes=self.capacity_bytes,
                ahead_bytes=ahead_bytes,
                repeats=self.repeats,
                kept=kept,
                passing=passing,
                more_follow=self.more_follow,
                on_host=host,
            )
        except ScheduleError:
            # What was held when the trace was made does not fit what there is now; paging on demand still may.
            return Choice(way, trace, None, None)
        if self.rates is None:
            return Choice(way, trace, plan, None)
        simulated = simulate(trace, plan, self.rates, lambda gradient: gradient.nbytes * self.update_s, host)
        return Choice(way, trace, plan, self._with_the_rest(simulated, trace, updates, self.rates), on_host)

    def _with(self, updates: Mapping[str, Sequence[Item]], most_bytes: int) -> Trace:
        if not updates:
            return self.recorded
        place = with_updates_in_backward if self.in_backward else with_updates
        return place(self.recorded, updates, most_bytes=most_bytes, overwritten=self.overwritten)

    def _with_the_rest(
        self, simulated: Simulation, trace: Trace, updates: Mapping[str, Sequence[Item]], rates: LinkRates
    ) -> Simulation:
        """Returns a simulation with the updates that there is no place for in the plan.

        They are carried out in parts, with little beside them. Left out, a plan that does less would seem to be faster.
        """
        planned = _planned_updates(trace)
        rest = [used for used in updates.values() if used[-1].name not in planned]
        state_bytes = sum(item.nbytes for used in rest for item in used[:-1])
        gradient_bytes = sum(used[-1].nbytes for used in rest)
        spent_s = gradient_bytes * self.update_s
        link_s = rates.seconds(state_bytes + gradient_bytes, state_bytes)
        return replace(
            simulated,
            seconds=simulated.seconds + spent_s + link_s,
            update_s=simulated.update_s + spent_s,
            load_stall_s=simulated.load_stall_s + link_s,
            read_bytes=simulated.read_bytes + state_bytes + gradient_bytes,
            written_bytes=simulated.written_bytes + state_bytes,
        )
