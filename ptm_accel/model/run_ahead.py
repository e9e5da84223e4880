"""Moves pages before they are needed: follows each pass by its trace, and starts what the plan says at each access.

The first pass of a kind (mode, shapes) is demand paged and written down; when such a pass comes again, a plan is made,
and carried out from then on.
A plan is a hint: whatever the model really reads is what it gets, and an access that the trace does not know is demand
paged. Where the model departs from its trace (routing, a last short batch) the next places are searched for a place to
join it again; where it departs too often the pass is written down anew, and ever rarer where that is of no use.

What is done at each access is in `ptm_accel.model.following`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.timeline import Moment
from ptm_accel.model.clock import clock_of
from ptm_accel.model.following import Following
from ptm_accel.model.gradients import Sums
from ptm_accel.model.route import Ended, Route
from ptm_accel.schedule.choice import Way, choose_plan
from ptm_accel.schedule.tally import Tally
from ptm_accel.schedule.trace import Item, Recorder, Trace
from ptm_accel.schedule.updates import GRAD_SUFFIX, Updates
from ptm_accel.schedule.watch import Backoff, LinkUse, rates_as_seen

_DEPARTURES = 0.05
"""The share of accesses that may differ from the trace before it is written down anew."""

_MOST_KINDS = 64
"""So many kinds of passes are remembered, the last ones that were seen: where rows are padded to the longest of their
batch, or a text is generated, nearly each pass is of another kind, and some of them never come again.
"""

_MANY_ACCESSES = 1000
"""From so many on (some 300 tensors), to look at all ways of dividing the budget takes seconds."""

_CAPACITY_GRAIN = 64
"""A budget that has changed by less than this part of it (on a device it follows the tide) needs no other plan."""


class RunAhead(Following):
    """The pool's adviser (`ptm_accel.memory.paged.Adviser`) while a model runs.

    Args:
        pool: whose accesses are followed.

    Attributes:
        enabled: whether plans are carried out; without them the pool pages on demand, with the same results.
        sums: tells what the gradients of the next pass will meet.
        in_backward: tells whether updates may begin during the next backward, and makes known what they use
            (`follow_updates`).
        routes: what is known, by kind of pass; the kind that was seen last comes last.
        rates: of the link between the compute tier and the home; None where they are not known.
        link_use: gives that link's totals; None where they are not known.
        host_s: seconds that an update on the CPU, beside a device, takes for each byte of its gradient; None where
            there is no device, or that is not known.
        on_host_possible: tells whether the optimizer can be run there.
        rated_update_s: seconds of an update for each byte of gradient, as long as none has been seen; 0 if not known.
        tally: what passes and updates of training have taken.
        evaluation: is told whether what is moved from now on is for an evaluation.
    """

    def __init__(self, pool: Pool) -> None:
        self.enabled = True
        self.sums: Callable[[], Sums] = lambda: Sums.NONE
        self.in_backward: Callable[[], bool] = lambda: False
        self.routes: dict[Hashable, Route] = {}
        self.rates: LinkRates | None = None
        self.link_use: Callable[[], LinkUse] | None = None
        self.host_s: float | None = None
        self.on_host_possible: Callable[[], bool] = lambda: False
        self.rated_update_s = 0.0
        self.tally = Tally()
        self.evaluation: Callable[[bool], None] = lambda evaluates: None
        super().__init__(pool, clock_of(pool, self.tally))
        self._updates: dict[str, list[Item]] = {}
        self._overwritten: Collection[str] = ()
        self._on_host: Collection[str] = ()
        # How the last plans divided the budget: those that follow need not look at all ways again.
        self._ways: dict[Updates, Way] = {}
        self._ended: deque[Ended] = deque()
        self._before: tuple[Tally, LinkUse | None] = (Tally(), None)
        self._passes_a_step = self._passes = 0
        self._evaluates = False

    # ---- passes ----------------------------------------------------------------------------------------------

    def begin(self, kind: Hashable, *, evaluates: bool = False) -> None:
        """A forward begins; what was under way has ended.

        Args:
            kind: what its accesses depend on: mode and shapes.
            evaluates: it is no part of training.
        """
        self.end()
        self._evaluates = evaluates
        # Updates that are still under way belong to the step before, beside whatever pass they are carried out.
        self.evaluation(evaluates and self.beside is None)
        if not self.enabled or self._pool.fits_on_card:
            return
        # Gradients that are there already are added to, and are not made; and updates may be under way.
        sums = self.sums()
        updates = self._when_updated(kind, sums)
        key = (kind, sums, updates)
        capacity = self._pool.share_bytes
        route = self.routes.get(key)
        if route is not None and self._needs_plan(route, capacity):
            watch = route.watch
            route = self._planned(route.recorded, updates=updates)
            route.watch = watch
        if route is not None:
            self._remember(key, route)
        if route is not None and route.watch.calm:
            self._before = replace(self.tally), self.link_use() if self.link_use is not None else None
        if route is not None and updates is not Updates.APART and route.trains:
            self._on_host = route.on_host
        self._updates_when = updates
        self._marks = [self._clock.begin()]
        self._recorder, self._most = Recorder(key, writes=not self._is_settled(route)), None
        self._route, self._position, self._strays = route, 0, 0
        self._wanted.clear()
        if route is not None:
            self._ask_for_absent(route)
        self._pool.adviser = self

    @staticmethod
    def _is_settled(route: Route | None) -> bool:
        """Whether nothing of a pass need be written down: to do so costs, beside a card, what its events cost."""
        return route is not None and route.plan is not None and route.simulated is not None and route.watch.settled

    def _needs_plan(self, route: Route, capacity_bytes: int) -> bool:
        """Whether there is no plan for this budget, or one that is too far from it for too long."""
        if not route.capacity_bytes:
            return True
        return route.watch.budget.calls(abs(route.capacity_bytes - capacity_bytes) > capacity_bytes // _CAPACITY_GRAIN)

    def _when_updated(self, kind: Hashable, sums: Sums) -> Updates:
        """When the updates that concern the next pass are carried out, if it is one of this kind."""
        otherwise = Updates.APART if self.beside is None else Updates.FORWARD
        known = (self.routes.get((kind, sums, updates)) for updates in reversed(Updates))
        alike = next((route for route in known if route is not None), None)
        if alike is None or not alike.final or not self.in_backward():
            return otherwise
        if alike.updates is not Updates.BACKWARD:
            self.routes[kind, sums, Updates.BACKWARD] = self._planned(alike.recorded, updates=Updates.BACKWARD)
        return Updates.BACKWARD

    def end(self) -> None:
        """The pass has ended, if there is one."""
        recorder, route = self._recorder, self._route
        # What the next pass begins with may have been sent for in vain yet.
        count = len(route.trace.accesses) if route is not None else 0
        coming = deque((due - count, tensor) for due, tensor in self._coming if due >= count or self._awaits(tensor))
        if recorder is not None:
            self._passes += not self._evaluates
            marks = [*self._marks, self._clock.end()]
            self._ended.append(Ended(recorder, route, self._updates_when, self._strays, marks, self._evaluates))
            self._recorder = None
        self.give_up()
        self._coming = coming
        while self._ended and (moments := self._clock.read(self._ended[0].marks)) is not None:
            self._learn(self._ended.popleft(), moments)

    def _learn(self, ended: Ended, moments: Sequence[Moment]) -> None:
        """The times of a pass are known: it is counted, and planned anew where that is called for."""
        recorder, route = ended.recorder, ended.route
        took_s = moments[-1].total_s - moments[0].total_s
        if not ended.evaluates:
            self._count(route, took_s, moments[-1].compute_s - moments[0].compute_s)
        warm = route is not None and route.watch.warm
        # Another plan may have been made since it ended.
        known = self.routes.get(recorder.key) is route
        if not len(recorder) or not known or (route is not None and not self._is_off(route, took_s, ended)):
            return
        trace = recorder.finish([moment.compute_s for moment in moments])
        if route is None:
            # A plan takes a while to make, and is made when such a pass comes again.
            self._remember(recorder.key, Route(trace, None, 0, trace, ended.updates))
            return
        self._look_at_link()
        newer = self._planned(trace, updates=ended.updates, again=warm, present=route)
        newer.watch = route.watch
        self._remember(recorder.key, newer)

    def _remember(self, key: Hashable, route: Route) -> None:
        """Keeps what is known of a kind of pass that has just been seen, and forgets what was seen longest ago."""
        self.routes.pop(key, None)
        self.routes[key] = route
        while len(self.routes) > _MOST_KINDS:
            del self.routes[next(iter(self.routes))]

    def _is_off(self, route: Route, took_s: float, ended: Ended) -> bool:
        """Whether the pass that has ended calls for a new plan: it was another one, or took another time."""
        foretold, watch = route.simulated, route.watch
        written = ended.recorder.writes
        late = foretold is not None and watch.departs(foretold.seconds, took_s, written=written)
        watch.strayed = ended.strays > _DEPARTURES * route.rank[-1]
        if watch.strayed and not written:
            # There is nothing to make a plan from; if the next one strays as well, there is.
            return False
        return watch.accesses.calls(watch.strayed) or late

    def _look_at_link(self) -> None:
        before = self._before[1]
        if self.rates is not None and self.link_use is not None and before is not None:
            self.rates = rates_as_seen(self.rates, before, self.link_use())

    def end_step(self) -> None:
        """The passes of a step have ended: its update begins."""
        self.end()
        self._evaluates = False
        self.evaluation(False)
        self._passes_a_step, self._passes = self._passes, 0
        if self.enabled:
            self._clock.begin_update()

    def _count(self, route: Route | None, took_s: float, compute_s: float) -> None:
        """Adds a pass to the tally."""
        tally = self.tally
        tally.passes += 1
        tally.passes_s += took_s
        tally.compute_s += compute_s
        if route is not None and route.simulated is not None:
            tally.foretold += 1
            tally.foretold_s += route.simulated.seconds
            tally.foretold_took_s += took_s

    def resized(self) -> None:
        """The share has another size, which is no tide that may turn: plans are made anew for it at once."""
        self._ways.clear()
        for route in self.routes.values():
            route.watch.budget = Backoff()

    def forget(self) -> None:
        """The model has other parameters than before: what was seen of its passes is of no use."""
        self.give_up()
        self.routes.clear()
        self._ways.clear()
        self._ended.clear()
        self._tensors.clear()
        self._updates, self._overwritten, self._on_host = {}, (), ()

    def reading_order(self) -> dict[str, int] | None:
        """The place of each parameter in the newest training pass, by name; None if none is known."""
        for route in reversed(self.routes.values()):
            if route.trains:
                return {name: places[0] for name, places in route.places.items()}
        return None

    def follow_updates(
        self,
        used: Mapping[str, Sequence[PagedTensor]],
        gradient_bytes: Mapping[str, int],
        overwritten: Collection[str],
    ) -> None:
        """Updates are carried out beside passes, in an order that their traces tell.

        Args:
            used: what the update of each parameter uses beside it and its gradient, by the parameter's name.
            gradient_bytes: what the extent of its gradient takes.
            overwritten: the parameters that are written without being read.
        """
        self._overwritten = overwritten
        before, self._updates = self._updates, {}
        for name, tensors in used.items():
            sizes = [(t.name, t.slot_bytes) for t in tensors] + [(f"{name}{GRAD_SUFFIX}", gradient_bytes[name])]
            known = before.get(name)
            # Nearly always what it was at the step before.
            if known is None or sizes != [(item.name, item.nbytes) for item in known]:
                known = [Item(*size) for size in sizes]
            self._updates[name] = known
        for tensors in used.values():
            self._tensors.update((tensor.name, tensor) for tensor in tensors)

    def updates_ended(self, updated: Collection[str]) -> None:
        """The updates that were carried out beside passes are done, or given up.

        Args:
            updated: the parameters that have been updated, but for those on the CPU beside a device.
        """
        self.beside = None
        self.evaluation(self._evaluates)
        self.tally.updated_bytes += sum(self._updates[name][-1].nbytes for name in updated if name in self._updates)

    @property
    def updates(self) -> Mapping[str, Sequence[Item]]:
        """What the update of each parameter uses beside it, by the parameter's name; the gradient last."""
        return self._updates

    @property
    def overwritten(self) -> Collection[str]:
        """The parameters that those write without having read them."""
        return self._overwritten

    def exclude(self, seconds: float) -> None:
        """Time that the thread has spent on updates, waiting left out."""
        self._clock.exclude(seconds, beside=self.beside is not None)

    def spent_on_host(self, seconds: float) -> None:
        """Time that updates on the CPU have taken, beside a device."""
        self.tally.host_s += seconds

    def sends_for(self, parameter: str) -> bool:
        """Whether the plan that is being carried out brings in what the update of a parameter needs."""
        route = self._route
        return route is not None and route.plan is not None and parameter in route.updated

    def updates_on_host(self, parameter: str) -> bool:
        """Whether the newest plan of a training pass has the update of a parameter on the CPU, beside a device."""
        return parameter in self._on_host

    @property
    def final_gradients(self) -> Collection[str]:
        """The parameters of this pass that may be updated as soon as their gradients arrive, by name."""
        route = self._route
        return route.final if route is not None and route.updates is Updates.BACKWARD else ()

    def _planned(
        self, recorded: Trace, *, updates: Updates, again: bool = False, present: Route | None = None
    ) -> Route:
        """A plan for a pass.

        Args:
            recorded: it, without updates.
            updates: when they are carried out.
            again: there is one for the same budget that was made with memory warm: what is best is not far from that.
            present: what is known of such passes now.
        """
        capacity = self._pool.share_bytes
        # The same pass under another budget: more of it must not make for a slower plan.
        before = (known for known in self.routes.values() if known.recorded is recorded and known.updates is updates)
        # The next pass is of another kind where several make a step, and only the first has updates beside it.
        alone = updates is not Updates.FORWARD or self._passes_a_step == 1
        choice = choose_plan(
            recorded,
            capacity_bytes=capacity,
            updates={} if updates is Updates.APART else self._updates,
            overwritten=self._overwritten,
            in_backward=updates is Updates.BACKWARD,
            repeats=alone,
            between_bytes=0 if alone else self._bytes_apart(),
            rates=self.rates,
            update_s=self.tally.update_s_per_byte(self._before[0]) or self.rated_update_s,
            host_s=self.host_s if self.on_host_possible() else None,
            near=self._ways.get(updates) if again or len(recorded.accesses) > _MANY_ACCESSES else None,
            present=present.way if present is not None and present.capacity_bytes == capacity else None,
            less=next((known.choice for known in before), None),
        )
        if choice.simulated is not None:
            self._ways[updates] = choice.way
        return Route(
            choice.trace,
            choice.plan,
            capacity,
            recorded,
            updates,
            choice.simulated,
            choice.on_host,
            choice.way,
            choice.least_s,
        )

    def _bytes_apart(self) -> int:
        """What a pass of training without updates can make use of, as far as is known."""
        apart = (route.recorded for route in self.routes.values() if route.trains and route.updates is Updates.APART)
        return max((trace.most_bytes for trace in apart), default=0)
