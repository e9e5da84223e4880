"""Records passes, makes plans for them, and decides when to record and plan anew.

The first pass of a kind (`ptm_accel.runtime.kinds`) is demand paged and recorded. When such a pass comes again, a plan
is made, and carried out from then on (`ptm_accel.runtime.following`). A plan is a hint: an access that the trace does
not have is demand paged. Where the model departs from its trace (routing), the next accesses are searched for a place
to rejoin it. If it departs too often the pass is recorded anew, ever more rarely where that does not help. Batches of
one kind may have any shapes: plans are for the largest so far.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace

from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.block import Block
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.timeline import Moment
from ptm_accel.runtime.clock import clock_of
from ptm_accel.runtime.executor import Executor
from ptm_accel.runtime.following import Following
from ptm_accel.runtime.kinds import Kind, PassKey
from ptm_accel.runtime.route import Ended, Route
from ptm_accel.schedule.choice import choose_plan
from ptm_accel.schedule.standing import describe
from ptm_accel.schedule.tally import Tally
from ptm_accel.schedule.trace import Item, Recorder
from ptm_accel.schedule.updates import GRAD_SUFFIX, GradientSums, UpdateTiming
from ptm_accel.schedule.watch import LinkUse, Watch, rates_as_seen
from ptm_accel.units import format_bytes

logger = logging.getLogger(__name__)

_DEPARTURES = 0.05
"""The share of accesses that may differ from the trace of the plan."""

_MOST_KINDS = 64
"""Most kinds of passes that are kept, the latest ones."""

_GROWTH = 1.25
"""A pass whose batch is larger by this factor than all before is planned for at once."""

_ALIKE = 0.95
"""A batch of this share of the largest should take the time that was foretold for that."""

_TOLERANCE = 0.2
"""Largest difference of a pass's measured time from the expected one, as a part of the latter."""

_CAPACITY_GRAIN = 64
"""A budget that has changed by less than one part in this many needs no other plan."""


class RunAhead(Following):
    """The executor's plan (`ptm_accel.runtime.executor.Plan`) while a model runs.

    Args:
        executor: serves accesses.

    Attributes:
        enabled: whether plans are carried out; without them the pool pages on demand, with the same results.
        sums: tells what the gradients of the next pass will meet.
        in_backward: tells whether updates may begin during the next backward, and makes known what they use
            (`follow_updates`).
        routes: what is known, by kind of pass; the kind that was seen last comes last.
        rates: of the link between the compute tier and the backing store; None where they are not known.
        link_use: gives that link's totals; None where they are not known.
        host_s: seconds that an update on the CPU, beside a device, takes for each byte of its gradient; None where
            there is no device, or that is not known.
        on_host_possible: tells whether the optimizer can be run there.
        rated_update_s: seconds of an update for each byte of gradient, as long as none has been seen; 0 if not known.
        tally: what passes and updates of training have taken.
        evaluation: called with whether transfers from now on are for an evaluation.
        updates: what the update of each parameter uses beside it, by the parameter's name; the gradient last.
        overwritten: the parameters that updates write without reading them.
        step: tells the kinds of passes.
    """

    def __init__(self, executor: Executor) -> None:
        self.enabled = True
        self.sums: Callable[[], GradientSums] = lambda: GradientSums.NONE
        self.in_backward: Callable[[], bool] = lambda: False
        self.routes: dict[Hashable, Route] = {}
        self.rates: LinkRates | None = None
        self.link_use: Callable[[], LinkUse] | None = None
        self.host_s: float | None = None
        self.on_host_possible: Callable[[], bool] = lambda: False
        self.rated_update_s = 0.0
        self.tally = Tally()
        self.evaluation: Callable[[bool], None] = lambda evaluates: None
        super().__init__(executor, clock_of(executor.pool, self.tally))
        self._elements = 0
        self.updates: dict[str, list[Item]] = {}
        self.overwritten: Collection[str] = ()
        self._on_host: Collection[str] = ()
        self._ended: deque[Ended] = deque()
        self._before: tuple[Tally, LinkUse | None] = (Tally(), None)
        self._key: Hashable = None
        self._evaluates = False
        self._told = ""

    # ---- passes ----------------------------------------------------------------------------------------------

    def begin(self, kind: Kind, *, elements: int = 0) -> None:
        """Called when a pass begins; ends the one before.

        Args:
            kind: of the pass.
            elements: of its batch.
        """
        # What is done before the pass is no part of it.
        with self._executor.own_work():
            found = self._prepare(kind, elements)
        if found is None:
            return
        key, route = found
        self._marks = [self._clock.begin()]
        # Nothing of a settled pass need be recorded: beside a device, that costs its events.
        writes = route is None or not route.watch.settled or self._outgrows(route, elements)
        self._recorder, self._most = Recorder(key, writes=writes), None
        self._route, self._position, self._strays = route, 0, 0
        self._executor.plan = self
        if route is not None and route.has_plan:
            self._pool.next_use = self.next_use
            self._ask_for_absent(route)
            self._note_surplus(route)
            self._prefetch()

    def _prepare(self, kind: Kind, elements: int) -> tuple[PassKey, Route | None] | None:
        """Ends the pass before, and finds or makes the plan of the next one.

        Returns:
            its key, and what is known of it; None where passes are not planned.
        """
        self.end()
        self._evaluates, self._elements = kind.evaluates, elements
        # Pending updates belong to the step before, whatever pass they run beside.
        self.evaluation(kind.evaluates and self.beside is None)
        if not self.enabled or self._pool.fits_on_card:
            return None
        sums = self.sums()
        updates = self._when_updated(kind, sums)
        key = PassKey(kind, sums, updates)
        repeats, self._key = key == self._key, key
        route = self.routes.get(key)
        if route is not None:
            route.watch.came(repeats)
            if not route.capacity_bytes:
                route = self._planned(route, updates, route.watch)
            self._remember(key, route)
            if not route.watch.off:
                self._before = replace(self.tally), self.link_use() if self.link_use is not None else None
            if updates is not UpdateTiming.APART and route.trains and route.choice is not None:
                self._on_host = route.choice.on_host
        self._updates_when = updates
        return key, route

    def _outgrows(self, route: Route, elements: int) -> bool:
        """Whether a batch is so large that the plan is not for such ones."""
        return elements > _GROWTH * route.elements

    def _when_updated(self, kind: Kind, sums: GradientSums) -> UpdateTiming:
        """When updates run that concern the next pass, if it is one of this kind."""
        otherwise = UpdateTiming.APART if self.beside is None else UpdateTiming.FORWARD
        known = (self.routes.get(PassKey(kind, sums, updates)) for updates in reversed(UpdateTiming))
        alike = next((route for route in known if route is not None), None)
        if alike is None or not alike.final or not self.in_backward():
            return otherwise
        if alike.updates is not UpdateTiming.BACKWARD:
            self.routes[PassKey(kind, sums, UpdateTiming.BACKWARD)] = self._planned(alike, UpdateTiming.BACKWARD)
        return UpdateTiming.BACKWARD

    def end(self) -> None:
        """Ends the pass, if there is one."""
        recorder, route = self._recorder, self._route
        # Loads for the next pass that had no room yet are kept.
        count = route.count if route is not None else 0
        coming = deque((due - count, tensor) for due, tensor in self._coming if due >= count or self._awaits(tensor))
        if recorder is not None:
            marks = [*self._marks, self._clock.end()]
            ended = Ended(recorder, route, self._updates_when, self._strays, marks, self._evaluates, self._elements)
            self._ended.append(ended)
            self._recorder = None
        self.give_up()
        self._coming = coming
        while self._ended and (moments := self._clock.read(self._ended[0].marks)) is not None:
            self._learn(self._ended.popleft(), moments)

    def _learn(self, ended: Ended, moments: Sequence[Moment]) -> None:
        """Counts a pass whose times are known, and plans it anew where needed."""
        recorder, route = ended.recorder, ended.route
        took_s = moments[-1].total_s - moments[0].total_s
        if not ended.evaluates:
            self._count(route, moments[0], moments[-1])
        # Another plan may have been made since it ended.
        known = self.routes.get(recorder.key) is route
        if not len(recorder) or not known:
            return
        if route is not None:
            grown = recorder.writes and self._outgrows(route, ended.elements)
            if not route.watch.calls(self._is_off(route, took_s, ended), recorded=recorder.writes) and not grown:
                return
        trace = recorder.finish([moment.compute_s for moment in moments])
        if route is None:
            # The plan is made when such a pass comes again: making it takes a while.
            self._remember(recorder.key, Route(trace, ended.updates, elements=ended.elements))
            return
        before = self._before[1]
        if self.rates is not None and self.link_use is not None and before is not None:
            self.rates = rates_as_seen(self.rates, before, self.link_use())
        largest = max(ended.elements, route.elements)
        if ended.elements:
            trace = trace.slowed(largest / ended.elements)
        seen = Route(trace, ended.updates, elements=largest)
        self._remember(recorder.key, self._planned(seen, ended.updates, route.watch))

    def _remember(self, key: Hashable, route: Route) -> None:
        """Keeps a route as the latest, and forgets the one that was used longest ago."""
        self.routes.pop(key, None)
        self.routes[key] = route
        while len(self.routes) > _MOST_KINDS:
            del self.routes[next(iter(self.routes))]

    def _is_off(self, route: Route, took_s: float, ended: Ended) -> bool:
        """Returns whether a pass was another than its plan was made for: in its accesses, its time or its budget."""
        foretold_s, capacity = route.foretold_s, self._pool.share_bytes
        late = foretold_s is not None and abs(took_s - foretold_s) > _TOLERANCE * foretold_s
        late = late and ended.elements >= _ALIKE * route.elements
        resized = abs(route.capacity_bytes - capacity) > capacity // _CAPACITY_GRAIN
        return late or resized or ended.strays > _DEPARTURES * route.count

    def end_step(self) -> None:
        """The passes of a step have ended: its update begins."""
        self.end()
        self.step.end()
        self._evaluates = False
        self.evaluation(False)
        if isinstance(self._pool.backing, HostStore):
            self._pool.backing.end_step(self)
        if self.enabled:
            self._clock.begin_update()

    def _count(self, route: Route | None, first: Moment, last: Moment) -> None:
        """Adds a pass to the tally."""
        tally, took_s = self.tally, last.total_s - first.total_s
        tally.passes += 1
        tally.passes_s += took_s
        tally.compute_s += last.compute_s - first.compute_s
        tally.own_s += last.own_s - first.own_s
        if route is not None and route.foretold_s is not None:
            tally.foretold += 1
            tally.foretold_s += route.foretold_s
            tally.foretold_took_s += took_s

    def resized(self) -> None:
        """Called when the budget has another size for good: plans are made anew at once."""
        for route in self.routes.values():
            route.capacity_bytes = 0

    def forget(self) -> None:
        """Forgets all passes, since the model has other parameters now."""
        self.give_up()
        self.routes.clear()
        self._ended.clear()
        self._tensors.clear()
        self.updates, self.overwritten, self._on_host = {}, (), ()

    def reading_order(self) -> dict[str, int] | None:
        """Returns the place of each parameter in the newest training pass, by name; None if none is known."""
        for route in reversed(self.routes.values()):
            if route.trains:
                return {name: places[0] for name, places in route.places.items()}
        return None

    def follow_updates(
        self,
        used: Mapping[str, Sequence[Block]],
        gradient_bytes: Mapping[str, int],
        overwritten: Collection[str],
    ) -> None:
        """Notes what updates use that run beside passes.

        Args:
            used: what the update of each parameter uses beside it and its gradient, by the parameter's name.
            gradient_bytes: the bytes of its gradient's buffer.
            overwritten: the parameters that are written without being read.
        """
        self.overwritten = overwritten
        before, self.updates = self.updates, {}
        for name, tensors in used.items():
            sizes = [(t.name, t.slot_bytes) for t in tensors] + [(f"{name}{GRAD_SUFFIX}", gradient_bytes[name])]
            known = before.get(name)
            # Nearly always the same as at the step before.
            if known is None or sizes != [(item.name, item.nbytes) for item in known]:
                known = [Item(*size) for size in sizes]
            self.updates[name] = known
        for tensors in used.values():
            self._tensors.update((tensor.name, tensor) for tensor in tensors)

    def updates_ended(self, updated: Collection[str]) -> None:
        """Called when updates beside passes are complete or aborted.

        Args:
            updated: the parameters that have been updated, but for those on the CPU beside a device.
        """
        self.beside = None
        self.evaluation(self._evaluates)
        self.tally.updated_bytes += sum(self.updates[name][-1].nbytes for name in updated if name in self.updates)

    def exclude(self, seconds: float) -> None:
        """Counts seconds that the thread has spent on updates, without waiting."""
        self._clock.exclude(seconds, beside=self.beside is not None)

    def spent_on_host(self, seconds: float) -> None:
        """Counts seconds of updates on the CPU beside a device."""
        self.tally.host_s += seconds

    def sends_for(self, parameter: str) -> bool:
        """Returns whether the running plan loads what the update of a parameter needs."""
        route = self._route
        return route is not None and parameter in route.updated

    def updates_on_host(self, parameter: str) -> bool:
        """Whether the newest plan of a training pass has the update of a parameter on the CPU, beside a device."""
        return parameter in self._on_host

    @property
    def final_gradients(self) -> Collection[str]:
        """Names of the parameters that may be updated in this pass as soon as their gradients arrive."""
        route = self._route
        return route.final if route is not None and route.updates is UpdateTiming.BACKWARD else ()

    def _planned(self, known: Route, updates: UpdateTiming, watch: Watch | None = None) -> Route:
        """Plans a pass.

        Args:
            known: what is known of it.
            updates: when updates run.
            watch: that of the route which this one replaces.
        """
        recorded = known.recorded
        key = recorded.key
        assert isinstance(key, PassKey)
        capacity = self._pool.share_bytes
        watch = Watch() if watch is None else watch
        # Where several passes make a step, or evaluate, only the first has updates beside it.
        alone = updates is not UpdateTiming.FORWARD or watch.repeats
        choice = choose_plan(
            recorded,
            capacity_bytes=capacity,
            updates={} if updates is UpdateTiming.APART else self.updates,
            overwritten=self.overwritten,
            in_backward=updates is UpdateTiming.BACKWARD,
            repeats=alone,
            between_bytes=0 if alone else self._bytes_apart(),
            # Below a device the CPU adds to sums where they are; elsewhere a sum that leaves has to come back for that.
            more_follow=key.kind.more_follow and isinstance(self._pool.backing, HostStore),
            rates=self.rates,
            update_s=self.tally.update_s_per_byte(self._before[0]) or self.rated_update_s,
            host_s=self.host_s if self.on_host_possible() else None,
        )
        route = Route(recorded, updates, choice, capacity, watch, known.elements)
        text = describe(choice, recorded) if route.trains else None
        if text is not None and text != self._told:
            self._told = text
            logger.info("a pass under %s: %s.", format_bytes(capacity), text)
        return route

    def _bytes_apart(self) -> int:
        """Returns the most bytes that a training pass without updates can use, as far as is known."""
        apart = (
            route.recorded for route in self.routes.values() if route.trains and route.updates is UpdateTiming.APART
        )
        return max((trace.most_bytes for trace in apart), default=0)
