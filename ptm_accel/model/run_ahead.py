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
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ptm_accel.errors import BudgetError, ScheduleError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.paged import PagedTensor, Place
from ptm_accel.memory.pool import Pool
from ptm_accel.schedule.actions import Action, Move, Plan
from ptm_accel.schedule.plan import plan_pass
from ptm_accel.schedule.trace import Recorder, Trace, Use

_JOIN_WITHIN = 64
"""How many accesses ahead a place is searched for where the next one is not the expected one."""

_DEPARTURES = 0.05
"""The share of accesses that may differ from the trace before it is written down anew."""

_AHEAD_SHARE = 0.25
"""The share of the budget that may be held for what is not used yet."""

_CAPACITY_GRAIN = 64
"""A budget that has changed by less than this part of it (on a device it follows the tide) needs no other plan."""

_FOLLOWED = (Tag.PARAM, Tag.GRAD)


@dataclass(slots=True)
class Route:
    """What is known of one kind of pass.

    Attributes:
        trace: how it went.
        plan: what to start when; None where none can be made.
        capacity_bytes: the budget that the plan was made for.
        places: the accesses of each item, ascending, by the item's name.
    """

    trace: Trace
    plan: Plan | None
    capacity_bytes: int
    places: dict[str, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        items = self.trace.items
        for index, access in enumerate(self.trace.accesses):
            self.places.setdefault(items[access.item].name, []).append(index)

    def next_use(self, tensor: PagedTensor, position: int) -> int:
        """When a tensor is next wanted, from `position` on: an access of this pass, or a number beyond them.

        Gradients and optimizer state are wanted by the update, right after the pass; parameters by the pass after it.
        """
        count = len(self.trace.accesses)
        places = self.places.get(tensor.name)
        if places is None:
            return count
        at = bisect_left(places, position)
        if at < len(places):
            return places[at]
        return count if tensor.tag is Tag.GRAD else count + 1 + places[0]


class Beside(Protocol):
    """Work that goes on beside a pass: an optimizer step that is still under way."""

    def pump(self) -> None:
        """Does what can be done without waiting."""
        ...


class RunAhead:
    """The pool's adviser (`ptm_accel.memory.advice.Adviser`) while a model runs.

    Args:
        pool: whose accesses are followed.

    Attributes:
        enabled: whether plans are carried out; without them the pool pages on demand, with the same results.
        adds_up: tells whether there are gradients that the next ones will be added to.
        routes: what is known, by kind of pass.
        departures: accesses that were not where the trace had them, since the beginning.
        beside: is given its turn at each access.
    """

    def __init__(self, pool: Pool) -> None:
        self.enabled = True
        self.adds_up: Callable[[], bool] = lambda: False
        self.routes: dict[Hashable, Route] = {}
        self.departures = 0
        self.beside: Beside | None = None
        self._pool = pool
        self._tensors: dict[str, PagedTensor] = {}
        self._recorder: Recorder | None = None
        self._route: Route | None = None
        self._position = 0
        self._strays = 0
        self._coming: deque[PagedTensor] = deque()
        self._going: deque[PagedTensor] = deque()
        self._excluded_s = 0.0

    # ---- passes ----------------------------------------------------------------------------------------------

    def begin(self, kind: Hashable) -> None:
        """A forward begins; what was under way has ended.

        Args:
            kind: what its accesses depend on: mode and shapes.
        """
        self.end()
        if not self.enabled:
            return
        # Gradients that are there already are added to, and are not made.
        key = (kind, self.adds_up())
        capacity = self._pool.budget.capacity_bytes
        route = self.routes.get(key)
        if route is not None and abs(route.capacity_bytes - capacity) > capacity // _CAPACITY_GRAIN:
            route = self.routes[key] = self._planned(route.trace)
        self._recorder = Recorder(key, self._now_s())
        self._route, self._position, self._strays = route, 0, 0
        self._pool.adviser = self

    def end(self) -> None:
        """The pass has ended: its optimizer step begins, or another forward."""
        recorder, route = self._recorder, self._route
        self.give_up()
        if recorder is None:
            return
        departed = route is not None and self._strays > _DEPARTURES * len(route.trace.accesses)
        if len(recorder) and (route is None or departed):
            self.routes[recorder.key] = self._planned(recorder.finish(self._now_s()))

    def give_up(self) -> None:
        """The pass was torn down by an exception: what was seen of it says nothing."""
        self._recorder = self._route = None
        self._coming.clear()
        self._going.clear()
        self._pool.adviser = None

    def reading_order(self) -> dict[str, int] | None:
        """The place of each parameter in the newest training pass, by name; None if none is known."""
        for route in reversed(self.routes.values()):
            if any(access.backward for access in route.trace.accesses):
                return {name: places[0] for name, places in route.places.items()}
        return None

    def exclude(self, seconds: float) -> None:
        """Time that the thread has spent on something else than the pass."""
        self._excluded_s += seconds

    def _planned(self, trace: Trace) -> Route:
        capacity = self._pool.budget.capacity_bytes
        largest = max((item.nbytes for item in trace.items), default=0)
        ahead = max(int(capacity * _AHEAD_SHARE), 2 * largest)
        try:
            plan: Plan | None = plan_pass(trace, capacity_bytes=capacity, ahead_bytes=ahead)
        except ScheduleError:
            # What was held when the trace was made does not fit what there is now; paging on demand still may.
            plan = None
        return Route(trace, plan, capacity)

    def _now_s(self) -> float:
        return time.perf_counter() - self._pool.stats.stall_s - self._excluded_s

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
        return max(idle, key=lambda tensor: route.next_use(tensor, position), default=None)

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
        use = route.next_use(tensor, self._position)
        if use != self._position:
            self._strays += 1
            self.departures += 1
        if use - self._position > _JOIN_WITHIN or use >= len(route.trace.accesses):
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
            (self._coming if action.move is Move.LOAD else self._going).append(tensor)

    def _send_away(self, accessed: PagedTensor) -> None:
        """Starts what is to go. What is still in use has its turn at the next access."""
        for _ in range(len(self._going)):
            tensor = self._going.popleft()
            if tensor is accessed:
                continue
            if self._pool.is_idle(tensor):
                self._spare(tensor)
            elif tensor.pins:
                self._going.append(tensor)

    def _send_for(self, accessed: PagedTensor) -> None:
        """Starts what is to come, in order, as far as there is room."""
        while self._coming:
            tensor = self._coming[0]
            if tensor.place is Place.AWAY and tensor is not accessed and not self._pool.ahead.prefetch(tensor):
                self._make_way(tensor.slot_bytes)
                return
            self._coming.popleft()

    def _make_way(self, nbytes: int) -> None:
        """Lets what the pass does not use go, so that there will be room; memory comes free as the stores end."""
        pool, route = self._pool, self._route
        assert route is not None
        coming = pool.budget.free_bytes + pool.room.ending_bytes
        for tensor in pool.idle():
            if coming >= nbytes:
                return
            if tensor.name not in route.places:
                coming += tensor.slot_bytes
                if not self._spare(tensor):
                    return

    def _spare(self, tensor: PagedTensor) -> bool:
        try:
            self._pool.ahead.evict(tensor)
        except BudgetError:
            # The home is full: it stays, and whoever needs its room is told.
            return False
        return True
