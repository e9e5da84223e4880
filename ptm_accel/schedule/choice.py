"""Chooses among the plans of a pass the one that is simulated to take least."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ptm_accel.errors import ScheduleError
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.schedule.actions import Plan
from ptm_accel.schedule.placement import SHARES, placed, spread
from ptm_accel.schedule.plan import plan_pass
from ptm_accel.schedule.simulate import Simulation, simulate
from ptm_accel.schedule.trace import Item, Trace, Use
from ptm_accel.schedule.updates import final_gradients, spread_state, with_updates, with_updates_in_backward

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
"""Plans whose times differ by less than this factor count as equal: then what they hold ahead and move is looked at."""

_ENOUGH_AHEAD = 0.15
_ENOUGH_UPDATES = 2
"""The share held for what is not used yet, and how many updates it holds, that make up for what is not foreseen. (Under
a small budget the share alone may be less than one update: each would wait for what did not fit.) Of plans that are as
good and hold so much, the one that moves least is taken: a disk wears, and what is not moved cannot be late. Where
none does, it is the one that holds most.
"""

_WORTH_LESS_AHEAD = 1.03
"""Less is not held ahead than by the plan in use unless that is faster by more than this factor. A simulation errs by
more: a way that held less was chosen for being as good, and was seen to take a sixth longer (222M under 220 MiB).
"""

_WORTH_A_LOOK = 1.02
"""Plans that take longer than the best by more than this factor are not tried with another beginning."""

_MOST_LOOKS = 6
"""No more than so many of the best are: where all is hidden behind arithmetic, nearly all plans are as good."""


class Way(NamedTuple):
    """How the budget is divided.

    Attributes:
        kept_share: of the budget, for state that never leaves.
        ahead_share: of the rest, for what is not used yet.
    """

    kept_share: float
    ahead_share: float

    def neighbours(self) -> list[Way]:
        """Those with the next greater or smaller share of one of the two."""
        kept, ahead = _KEPT_SHARES.index(self.kept_share), _AHEAD_SHARES.index(self.ahead_share)
        beside = [Way(share, self.ahead_share) for share in _beside(_KEPT_SHARES, kept)]
        return beside + [Way(self.kept_share, share) for share in _beside(_AHEAD_SHARES, ahead)]


def _beside(shares: Sequence[float], index: int) -> list[float]:
    return [shares[at] for at in (index - 1, index + 1) if 0 <= at < len(shares)]


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan with what it is of.

    Attributes:
        way: how it divides the budget.
        trace: the pass, with the updates that are carried out beside it.
        plan: what to start when; None where none can be made.
        simulated: what it should come to; None where the link has not been measured.
        on_host: the parameters whose updates are carried out on the CPU beside a device, by name.
        least_s: the least that any plan of the pass was simulated to take, under this budget or a smaller one.
    """

    way: Way
    trace: Trace
    plan: Plan | None
    simulated: Simulation | None
    on_host: frozenset[str] = frozenset()
    least_s: float = math.inf

    @property
    def seconds(self) -> float:
        """What it should take; without end where that is not known."""
        return math.inf if self.simulated is None else self.simulated.seconds


def choose_plan(
    recorded: Trace,
    *,
    capacity_bytes: int,
    updates: Mapping[str, Sequence[Item]],
    overwritten: Collection[str] = (),
    in_backward: bool = False,
    repeats: bool,
    between_bytes: int = 0,
    rates: LinkRates | None,
    update_s: float,
    host_s: float | None = None,
    near: Way | None = None,
    present: Way | None = None,
    less: Choice | None = None,
) -> Choice:
    """The best plan for a pass.

    To look at all ways of dividing the budget takes a while where tensors are many. Passes of one model under one
    budget have much in common: what was the best way for one of them is nearly that for the next.

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
        rates: of the link between the compute tier and the home; None where they are not known.
        update_s: seconds of arithmetic for each byte of gradient that an update uses up.
        host_s: the same for updates on the CPU beside a device; None where there are none.
        near: the way of a plan for a pass like this one: from there on a better one is looked for; None to look at all.
        present: the way of the plan that this one is to replace, under the same budget: where it holds more ahead and
            is nearly as good, it is kept.
        less: the choice for the same pass under a smaller budget. Its plan is good under this one, too: what is chosen
            takes no longer, but for what counts as equal; nor does it with one budget after another.
    """
    stays_bytes = max(capacity_bytes - between_bytes, 0)
    task = _Task(
        recorded, capacity_bytes, updates, overwritten, in_backward, repeats, stays_bytes, rates, update_s, host_s
    )
    ways = [
        Way(kept, share)
        for kept in (_KEPT_SHARES if updates and rates is not None and stays_bytes else (0.0,))
        for share in ((_AHEAD_UNKNOWN,) if rates is None else _AHEAD_SHARES)
    ]
    on_host = task.best_on_host(repeats)
    found = {} if near is None else task.climb(near, ways, on_host)
    if not any(each.simulated for each in found.values()):
        found = {way: found.get(way) or task.choice(way, repeats, on_host) for way in ways}
    # In one order, whatever they were found in: of those that are alike in all, the first is taken.
    every = [found[way] for way in ways if way in found]
    least = min(each.seconds for each in every)
    if repeats:
        # The other way to begin changes little: it is looked at only where that could make a plan the best.
        worth = [each for each in every if each.simulated and each.seconds <= least * _WORTH_A_LOOK]
        worth = sorted(worth, key=lambda each: each.seconds)[:_MOST_LOOKS]
        every += [task.choice(each.way, False, on_host) for each in worth]
        every.sort(key=lambda each: ways.index(each.way))
    smaller = task.again(less) if less is not None else []
    best = _best([*every, *smaller], less.least_s if smaller and less is not None else math.inf, updates)
    alike = [each for each in every if each.way == present and each.seconds <= best.seconds * _WORTH_LESS_AHEAD]
    if best.simulated is None or not alike or _ahead_share(alike[0]) <= _ahead_share(best):
        return best
    return replace(min(alike, key=lambda each: each.seconds), least_s=best.least_s)


def _best(choices: Sequence[Choice], least_s: float, updates: Mapping[str, Sequence[Item]]) -> Choice:
    """The best of them, where `least_s` was possible before."""
    least_s = min(least_s, *(each.seconds for each in choices))
    good = [each for each in choices if each.simulated and each.seconds <= least_s * _AS_GOOD]
    steady = [each for each in good if _holds_enough(each, updates)]
    best = min(steady, key=_moved_bytes) if steady else max(good, key=_ahead_share, default=choices[0])
    return replace(best, least_s=least_s)


def _holds_enough(choice: Choice, updates: Mapping[str, Sequence[Item]]) -> bool:
    """Whether a plan holds so much ahead that what is not foreseen makes little difference."""
    assert choice.plan is not None
    planned = _planned_updates(choice.trace)
    sizes = [sum(item.nbytes for item in used) for used in updates.values() if used[-1].name in planned]
    if updates and not sizes:
        return False
    # Of the update that a byte is part of: a few that are large, or many that are small, are not what is waited for.
    usual_bytes = sum(size * size for size in sizes) / max(sum(sizes), 1)
    share = _ahead_share(choice)
    return share >= _ENOUGH_AHEAD and share * choice.plan.capacity_bytes >= _ENOUGH_UPDATES * usual_bytes


def _ahead_share(choice: Choice) -> float:
    """The share of the whole budget for what is not used yet."""
    return choice.way.ahead_share * (1 - choice.way.kept_share)


def _planned_updates(trace: Trace) -> set[str]:
    """The gradients that updates use up within a pass, by name."""
    return {trace.items[access.item].name for access in trace.accesses if access.use is Use.CONSUME}


def _moved_bytes(choice: Choice) -> int:
    assert choice.simulated is not None
    return choice.simulated.read_bytes + choice.simulated.written_bytes


@dataclass(frozen=True, slots=True)
class _Task:
    """What a plan is to be chosen for; see `choose_plan`."""

    recorded: Trace
    capacity_bytes: int
    updates: Mapping[str, Sequence[Item]]
    overwritten: Collection[str]
    in_backward: bool
    ends_step: bool
    stays_bytes: int
    rates: LinkRates | None
    update_s: float
    host_s: float | None

    def best_on_host(self, repeats: bool) -> frozenset[str]:
        """The parameters that are best updated on the CPU: none, unless that is faster by more than is noise."""
        nobody: frozenset[str] = frozenset()
        if self.host_s is None or self.rates is None or not self.updates:
            return nobody
        updates = self.updates
        if self.in_backward:
            final = set(final_gradients(self.recorded).values())
            updates = {name: used for name, used in updates.items() if name in final}
        sets = [nobody, *(spread(self.recorded, updates, share) for share in SHARES)]
        found = [(self.choice(Way(0.0, _AHEAD_UNKNOWN), repeats, names), names) for names in sets]
        times = [(each.simulated.seconds, names) for each, names in found if each.simulated is not None]
        if not times:
            return nobody
        seconds, best = min(times, key=lambda pair: pair[0])
        alone = next((time for time, names in times if not names), None)
        return best if alone is None or seconds * _WORTH_A_LOOK < alone else nobody

    def again(self, less: Choice) -> list[Choice]:
        """What was chosen with less, as it would be now: it may have begun in either way."""
        if less.plan is None or less.plan.capacity_bytes >= self.capacity_bytes:
            return []
        fewer_bytes = self.capacity_bytes - less.plan.capacity_bytes
        stays_bytes = max(self.stays_bytes - fewer_bytes, 0)
        then = replace(self, capacity_bytes=less.plan.capacity_bytes, stays_bytes=stays_bytes)
        return [then.choice(less.way, begins, less.on_host) for begins in {self.ends_step, False}]

    def climb(self, near: Way, ways: Sequence[Way], on_host: frozenset[str]) -> dict[Way, Choice]:
        """Goes from one way to the best beside it, and on from there, as long as that is better; all that it met."""
        found: dict[Way, Choice] = {}
        here = near if near in ways else ways[0]
        while True:
            for way in [here, *here.neighbours()]:
                if way in ways and way not in found:
                    found[way] = self.choice(way, self.ends_step, on_host)
            best = min(found.values(), key=lambda each: each.seconds)
            if best.seconds >= found[here].seconds:
                return found
            here = best.way

    def choice(self, way: Way, repeats: bool, on_host: frozenset[str]) -> Choice:
        """One plan, with what it should come to."""
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
        host = placed(
            trace, self.updates, on_host, self.host_s or 0.0, in_backward=self.in_backward, ends_step=self.ends_step
        )
        try:
            plan = plan_pass(
                trace,
                capacity_bytes=self.capacity_bytes,
                ahead_bytes=ahead_bytes,
                repeats=repeats,
                kept=kept,
                passing=passing,
                on_host=host,
            )
        except ScheduleError:
            # What was held when the trace was made does not fit what there is now; paging on demand still may.
            return Choice(way, trace, None, None)
        if self.rates is None:
            return Choice(way, trace, plan, None)
        simulated = simulate(trace, plan, self.rates, lambda gradient: gradient.nbytes * self.update_s, host)
        return _with_the_rest(Choice(way, trace, plan, simulated, on_host), updates, self.rates, self.update_s)

    def _with(self, updates: Mapping[str, Sequence[Item]], most_bytes: int) -> Trace:
        if not updates:
            return self.recorded
        place = with_updates_in_backward if self.in_backward else with_updates
        return place(self.recorded, updates, most_bytes=most_bytes, overwritten=self.overwritten)


def _with_the_rest(
    choice: Choice, updates: Mapping[str, Sequence[Item]], rates: LinkRates | None, update_s: float
) -> Choice:
    """A plan's simulation with the updates that there is no place for in it.

    They are carried out in parts, with little beside them. Left out, a plan that does less would seem to be faster.
    """
    if choice.simulated is None or rates is None:
        return choice
    planned = _planned_updates(choice.trace)
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
