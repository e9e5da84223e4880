"""Moves pages before they are needed: follows each pass by its trace, and starts what the plan says at each access.

The first pass of a kind (mode, shapes) is demand paged and written down; from then on a plan for it is carried out.
A plan is a hint: whatever the model really reads is what it gets, and an access that the trace does not know is demand
paged. Where the model departs from its trace (routing, a last short batch) the next places are searched for a place to
join it again; where it departs too often the pass is written down anew.

Everything here runs in the thread that computes, between two operations, and never waits: the moves themselves are
made by the tiers' own threads and streams.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.paged import PagedTensor, Place
from ptm_accel.memory.pool import Pool
from ptm_accel.model.gradients import Sums
from ptm_accel.model.route import Route
from ptm_accel.schedule.actions import Action, Move
from ptm_accel.schedule.choice import choose_plan
from ptm_accel.schedule.tally import Tally
from ptm_accel.schedule.trace import Item, Recorder, Trace, Use
from ptm_accel.schedule.updates import GRAD_SUFFIX, Updates
from ptm_accel.schedule.watch import LinkUse, rates_as_seen

_JOIN_WITHIN = 64
"""How many accesses ahead a place is searched for where the next one is not the expected one."""

_DEPARTURES = 0.05
"""The share of accesses that may differ from the trace before it is written down anew."""

_CAPACITY_GRAIN = 64
"""A budget that has changed by less than this part of it (on a device it follows the tide) needs no other plan."""

_FOLLOWED = (Tag.PARAM, Tag.GRAD)


class Beside(Protocol):
    """Work that goes on beside a pass: an optimizer step that is still under way."""

    def pump(self) -> None:
        """Does what can be done without waiting."""
        ...

    def awaits(self, tensor: PagedTensor) -> bool:
        """Whether it still has a use for the tensor."""
        ...


class RunAhead:
    """The pool's adviser (`ptm_accel.memory.advice.Adviser`) while a model runs.

    Args:
        pool: whose accesses are followed.

    Attributes:
        enabled: whether plans are carried out; without them the pool pages on demand, with the same results.
        sums: tells what the gradients of the next pass will meet.
        in_backward: tells whether updates may begin during the next backward, and makes known what they use
            (`follow_updates`).
        routes: what is known, by kind of pass.
        departures: accesses that were not where the trace had them, since the beginning.
        beside: is given its turn at each access.
        rates: of the link between the compute tier and the home; None where they are not known.
        link_use: gives that link's totals; None where they are not known.
        tally: what passes and updates have taken.
    """

    def __init__(self, pool: Pool) -> None:
        self.enabled = True
        self.sums: Callable[[], Sums] = lambda: Sums.NONE
        self.in_backward: Callable[[], bool] = lambda: False
        self.routes: dict[Hashable, Route] = {}
        self.departures = 0
        self.beside: Beside | None = None
        self.rates: LinkRates | None = None
        self.link_use: Callable[[], LinkUse] | None = None
        self.tally = Tally()
        self._pool = pool
        self._tensors: dict[str, PagedTensor] = {}
        self._updates: dict[str, list[Item]] = {}
        self._overwritten: Collection[str] = ()
        self._recorder: Recorder | None = None
        self._route: Route | None = None
        self._position = 0
        self._strays = 0
        # What is to be sent for, with the access that it is for.
        self._coming: deque[tuple[int, PagedTensor]] = deque()
        self._going: deque[PagedTensor] = deque()
        self._updates_when = Updates.APART
        self._began_s = 0.0
        self._before: tuple[Tally, LinkUse | None] = (Tally(), None)
        self._passes_a_step = self._passes = 0

    # ---- passes ----------------------------------------------------------------------------------------------

    def begin(self, kind: Hashable) -> None:
        """A forward begins; what was under way has ended.

        Args:
            kind: what its accesses depend on: mode and shapes.
        """
        self.end()
        if not self.enabled:
            return
        # Gradients that are there already are added to, and are not made; and updates may be under way.
        sums = self.sums()
        updates = self._when_updated(kind, sums)
        key = (kind, sums, updates)
        capacity = self._pool.budget.capacity_bytes
        route = self.routes.get(key)
        if route is not None and abs(route.capacity_bytes - capacity) > capacity // _CAPACITY_GRAIN:
            watch = route.watch
            route = self.routes[key] = self._planned(route.recorded, updates=updates)
            route.watch = watch
        if route is not None and route.watch.calm:
            self._before = replace(self.tally), self.link_use() if self.link_use is not None else None
        self._updates_when = updates
        self._began_s = time.perf_counter()
        self._recorder = Recorder(key, self._now_s())
        self._route, self._position, self._strays = route, 0, 0
        self._pool.adviser = self

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
        self.give_up()
        self._coming = coming
        if recorder is None:
            return
        took_s = self._count(recorder, route)
        if not len(recorder) or (route is not None and not self._is_off(route, took_s)):
            return
        trace = recorder.finish(self._now_s())
        if route is not None:
            self._look_at_link()
        newer = self.routes[recorder.key] = self._planned(trace, updates=self._updates_when)
        if route is not None:
            newer.watch = route.watch

    def _is_off(self, route: Route, took_s: float) -> bool:
        """Whether the pass that has ended calls for a new plan: it was another one, or took another time."""
        foretold = route.simulated
        late = foretold is not None and route.watch.departs(foretold.seconds, took_s)
        return late or self._strays > _DEPARTURES * route.rank[-1]

    def _look_at_link(self) -> None:
        before = self._before[1]
        if self.rates is not None and self.link_use is not None and before is not None:
            self.rates = rates_as_seen(self.rates, before, self.link_use())

    def end_step(self) -> None:
        """The passes of a step have ended: its update begins."""
        self.end()
        self._passes_a_step, self._passes = self._passes, 0

    def _count(self, recorder: Recorder, route: Route | None) -> float:
        """Adds the pass that has ended to the tally; returns the seconds it took."""
        tally, took_s = self.tally, time.perf_counter() - self._began_s
        tally.passes += 1
        self._passes += 1
        tally.passes_s += took_s
        tally.compute_s += self._now_s() - recorder.began_s
        if route is not None and route.simulated is not None:
            tally.foretold += 1
            tally.foretold_s += route.simulated.seconds
            tally.foretold_took_s += took_s
        return took_s

    def give_up(self) -> None:
        """The pass was torn down by an exception: what was seen of it says nothing."""
        self._recorder = self._route = None
        self._coming.clear()
        self._going.clear()
        self._pool.adviser = None

    def forget(self) -> None:
        """The model has other parameters than before: what was seen of its passes is of no use."""
        self.give_up()
        self.routes.clear()
        self._tensors.clear()
        self._updates, self._overwritten = {}, ()

    def reading_order(self) -> dict[str, int] | None:
        """The place of each parameter in the newest training pass, by name; None if none is known."""
        for route in reversed(self.routes.values()):
            if any(access.backward for access in route.trace.accesses):
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
        self._updates = {
            name: [*(Item(t.name, t.slot_bytes) for t in tensors), Item(f"{name}{GRAD_SUFFIX}", gradient_bytes[name])]
            for name, tensors in used.items()
        }
        for tensors in used.values():
            self._tensors.update((tensor.name, tensor) for tensor in tensors)

    def updates_ended(self) -> None:
        """The updates that were carried out beside passes are done."""
        self.beside = None
        self.tally.updated_bytes += sum(items[-1].nbytes for items in self._updates.values())

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
        self.tally.update_s += seconds
        if self.beside is not None:
            self.tally.beside_s += seconds

    def sends_for(self, parameter: str) -> bool:
        """Whether the plan that is being carried out brings in what the update of a parameter needs."""
        route = self._route
        return route is not None and route.plan is not None and parameter in route.updated

    @property
    def final_gradients(self) -> Collection[str]:
        """The parameters of this pass that may be updated as soon as their gradients arrive, by name."""
        route = self._route
        return route.final if route is not None and route.updates is Updates.BACKWARD else ()

    def _planned(self, recorded: Trace, *, updates: Updates) -> Route:
        capacity = self._pool.budget.capacity_bytes
        choice = choose_plan(
            recorded,
            capacity_bytes=capacity,
            updates={} if updates is Updates.APART else self._updates,
            overwritten=self._overwritten,
            in_backward=updates is Updates.BACKWARD,
            # The next pass is of another kind where several make a step, and only the first has updates beside it.
            repeats=updates is not Updates.FORWARD or self._passes_a_step == 1,
            rates=self.rates,
            update_s=self.tally.update_s_per_byte(self._before[0]),
        )
        return Route(choice.trace, choice.plan, capacity, recorded, updates, choice.simulated)

    def _now_s(self) -> float:
        return time.perf_counter() - self._pool.stats.stall_s - self.tally.update_s

    # ---- accesses --------------------------------------------------------------------------------------------

    def accessed(self, tensor: PagedTensor, *, write: bool) -> None:
        """See `Adviser`."""
        if tensor.tag in _FOLLOWED and tensor.movable:
            self._see(tensor, Use.WRITE if write else Use.READ)
            if self.beside is not None and tensor.place is not Place.AWAY:
                self.beside.pump()

    def created(self, tensor: PagedTensor) -> None:
        """See `Adviser`."""
        if tensor.tag is Tag.GRAD and tensor.movable:
            self._see(tensor, Use.CREATE)

    def victim(self, idle: Iterable[PagedTensor]) -> PagedTensor | None:
        """See `Adviser`: what is wanted last, by the trace."""
        route, position = self._route, self._position
        if route is None:
            return None
        # Of two that are wanted at the same time the one that need not be stored.
        return max(idle, key=lambda t: (self._next_use(route, t, position), t.place is not Place.DIRTY), default=None)

    def _next_use(self, route: Route, tensor: PagedTensor, position: int) -> int:
        # An update whose turn it was waits for what it uses; nothing is wanted sooner.
        return position if self._awaits(tensor) else route.next_use(tensor, position)

    def _awaits(self, tensor: PagedTensor) -> bool:
        """Whether an update that follows its gradient, in this pass, has still to be carried out with the tensor."""
        beside, in_backward = self.beside, self._updates_when is Updates.BACKWARD
        return in_backward and beside is not None and beside.awaits(tensor)

    def _see(self, tensor: PagedTensor, use: Use) -> None:
        recorder = self._recorder
        assert recorder is not None
        self._tensors[tensor.name] = tensor
        budget = self._pool.budget
        recorder.record(
            tensor.name,
            tensor.slot_bytes,
            use,
            now_s=self._now_s(),
            held_bytes=budget.used_bytes - self._pool.idle_bytes - self._pool.room.leaving_bytes,
            backward=torch._C._current_graph_task_id() != -1,
        )
        route = self._route
        if route is not None:
            self._follow(route, tensor)

    def _follow(self, route: Route, tensor: PagedTensor) -> None:
        """Finds the access in the trace, and starts what the plan has for it and for those that were skipped."""
        use = route.next_own(tensor, self._position)
        if use != route.due(self._position):
            self._strays += 1
            self.departures += 1
        if use >= len(route.trace.accesses) or route.rank[use] - route.rank[self._position] > _JOIN_WITHIN:
            return
        first, self._position = self._position, use + 1
        if route.plan is None:
            return
        for index in range(first, use + 1):
            for action in route.plan.starts[index]:
                self._take_up(route, action)
        self._send_away(tensor)
        # What must be waited for comes first: nothing is sent for before it.
        if tensor.place is not Place.AWAY:
            self._send_for(tensor)

    # ---- moves -----------------------------------------------------------------------------------------------

    def _take_up(self, route: Route, action: Action) -> None:
        tensor = self._tensors.get(route.trace.items[action.item].name)
        if tensor is not None:
            if action.move is Move.LOAD:
                self._coming.append((action.due, tensor))
            else:
                self._going.append(tensor)

    def _send_away(self, accessed: PagedTensor) -> None:
        """Starts what is to go. What is still in use, or waits for its update, has its turn at a later access."""
        for _ in range(len(self._going)):
            tensor = self._going.popleft()
            if tensor is accessed:
                continue
            if tensor.pins or self._awaits(tensor):
                self._going.append(tensor)
            elif tensor in self._pool.shelf and not self._pool.shelf.is_on_loan(tensor):
                self._spare(tensor)

    def _send_for(self, accessed: PagedTensor) -> None:
        """Starts what is to come, in order, as far as there is room."""
        while self._coming:
            due, tensor = self._coming[0]
            if due < self._position and not self._awaits(tensor):
                # It was late, and is wanted only after all that is sent for behind it.
                self._coming.popleft()
                continue
            if tensor.place is Place.AWAY and tensor is not accessed and not self._pool.ahead.prefetch(tensor):
                self._make_way(tensor, accessed)
                return
            self._coming.popleft()

    def _make_way(self, coming: PagedTensor, accessed: PagedTensor) -> None:
        """Lets what is wanted after `coming` go, so that there will be room; memory comes free as the stores end."""
        pool, route = self._pool, self._route
        assert route is not None
        wanted = self._next_use(route, coming, self._position)
        free = pool.budget.free_bytes + pool.room.ending_bytes
        while free < coming.slot_bytes:
            spared = self.victim(tensor for tensor in pool.shelf.free() if tensor is not accessed)
            if spared is None or self._next_use(route, spared, self._position) <= wanted:
                return
            free += spared.slot_bytes
            if not self._spare(spared):
                return

    def _spare(self, tensor: PagedTensor) -> bool:
        try:
            self._pool.ahead.evict(tensor)
        except BudgetError:
            # The home is full: it stays, and whoever needs its room is told.
            return False
        return True
