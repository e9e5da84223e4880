"""Executes the plan of a pass: at each access, starts the loads and stores that the plan has there.

All of it runs in the thread that computes, between two operations, and never waits: the tiers' threads and streams make
the transfers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from contextlib import suppress
from typing import Protocol

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.timeline import Mark
from ptm_accel.runtime.clock import Clock
from ptm_accel.runtime.executor import Executor
from ptm_accel.runtime.kinds import StepSoFar
from ptm_accel.runtime.route import Route
from ptm_accel.schedule.actions import Move
from ptm_accel.schedule.trace import Recorder, Use
from ptm_accel.schedule.updates import UpdateTiming

_JOIN_WITHIN = 64
"""Accesses ahead that are searched where the next access is not the expected one."""

_MOST_AFTER = 16
"""A pass is aborted that has this many times the accesses of its forward (and `_FEW`): a backward with full
recomputation has a few times as many, and a pass has no end where only parts of the model are called."""
_FEW = 1000

_FOLLOWED = (Tag.PARAM, Tag.GRAD)


class Beside(Protocol):
    """Pending updates of an optimizer step, which run beside a pass."""

    @property
    def open_bytes(self) -> int:
        """Bytes it has pinned of tensors whose updates have accesses of their own in a plan."""
        ...

    def look(self) -> None:
        """Polls updates that run on other threads; never waits."""
        ...

    def awaits(self, tensor: Block) -> bool:
        """Returns whether a pending update uses the tensor."""
        ...

    def elsewhere(self, tensor: Block) -> bool:
        """Returns whether an update changes the tensor in its backing store, so that it cannot be prefetched yet."""
        ...


class Following:
    """A `ptm_accel.runtime.executor.Plan` that records each access, and executes the plan of a pass.

    Args:
        executor: serves accesses.
        clock: times them.

    Attributes:
        departures: number of accesses that differed from the trace.
        beside: pending updates.
        step: is told of backwards.
    """

    def __init__(self, executor: Executor, clock: Clock) -> None:
        self.departures = 0
        self.beside: Beside | None = None
        self.step = StepSoFar()
        self._executor = executor
        self._pool = executor.pool
        self._clock = clock
        self._tensors: dict[str, Block] = {}
        # The running pass.
        self._recorder: Recorder | None = None
        self._route: Route | None = None
        self._updates_when = UpdateTiming.APART
        self._position = 0
        self._strays = 0
        self._read: Block | None = None
        self._marks: list[Mark] = []
        self._most: int | None = None
        # Tensors to prefetch, each with the access it is for, and tensors to evict.
        self._coming: deque[tuple[int, Block]] = deque()
        self._going: deque[Block] = deque()
        # What is there, and the plan does not count on: what it wants last, or not at all, comes first.
        self._surplus: deque[Block] = deque()

    def forward_ended(self) -> None:
        """The whole model's forward has returned; limits the accesses that still belong to the pass."""
        if self._recorder is not None and self._most is None:
            # By layer, each micro-batch of a step adds to the same pass.
            self._most = _MOST_AFTER * self.step.at_once * len(self._recorder) + _FEW

    def give_up(self) -> None:
        """Aborts the pass without recording it: an exception ended it, or it has no end."""
        if self._recorder is not None:
            self._clock.give_up()
        self._recorder = self._route = self._most = self._read = None
        self._marks = []
        self._coming.clear()
        self._going.clear()
        self._surplus.clear()
        self._executor.plan = self._pool.next_use = None

    # ---- accesses --------------------------------------------------------------------------------------------

    def accessed(self, tensor: Block, *, write: bool) -> None:
        """See `Plan`."""
        if tensor.tag in _FOLLOWED and tensor.movable:
            if tensor is self._read and not write and tensor.place.resident:
                # Another parameter of the same group, with nothing in between.
                return
            self._read = tensor if tensor.tag is Tag.PARAM else None
            if self.beside is not None:
                self.beside.look()
            self._see(tensor, Use.WRITE if write else Use.READ)

    def awaited(self, tensor: Block) -> None:
        """See `Plan`: its load has begun, so prefetches may follow."""
        if tensor.tag in _FOLLOWED and tensor.movable and self._route is not None:
            self._prefetch(tensor)

    def next_use(self, tensor: Block) -> int:
        """Returns the access at which the plan wants a tensor next (`Pool.next_use`)."""
        assert self._route is not None
        return self._route.next_use(tensor.name, self._position)

    def created(self, tensor: Block) -> None:
        """See `Plan`."""
        if tensor.tag is Tag.GRAD and tensor.movable:
            self._read = None
            self._see(tensor, Use.CREATE)

    def _see(self, tensor: Block, use: Use) -> None:
        recorder = self._recorder
        assert recorder is not None
        if self._most is not None and len(recorder) >= self._most:
            self._clock.end()
            self._recorder = None
            self.give_up()
            return
        self._tensors[tensor.name] = tensor
        backward = torch._C._current_graph_task_id() != -1
        self.step.backward |= backward
        if recorder.writes:
            self._marks.append(self._clock.mark())
            held = self._held_bytes()
            last, parts = not self.step.more_follow(), tensor.parts
            recorder.record(
                tensor.name, tensor.slot_bytes, use, held_bytes=held, backward=backward, parts=parts, last=last
            )
        else:
            recorder.count()
        route = self._route
        if route is not None:
            self._follow(route, tensor)

    def _held_bytes(self) -> int:
        """Bytes that can neither be evicted nor are in the plan, which has open updates where they run."""
        pool = self._pool
        held = pool.budget.used_bytes - pool.eviction.nbytes - pool.admission.released.nbytes
        return held - (self.beside.open_bytes if self.beside is not None else 0)

    def _awaits(self, tensor: Block) -> bool:
        """Returns whether a pending update that runs within this backward uses the tensor."""
        beside, in_backward = self.beside, self._updates_when is UpdateTiming.BACKWARD
        return in_backward and beside is not None and beside.awaits(tensor)

    def _follow(self, route: Route, tensor: Block) -> None:
        """Finds the access in the trace, and starts the actions planned up to it."""
        first, places = self._position, route.places.get(tensor.name, ())
        place = bisect_left(places, first)
        at = places[place] if place < len(places) else route.count
        if at != first:
            self._strays += 1
            self.departures += 1
            if route.has_plan:
                self._note_surplus(route)
            if at >= min(route.count, first + _JOIN_WITHIN + 1):
                return
        self._position = at + 1
        for actions in route.starts[first : at + 1]:
            for move, name, due in actions:
                planned = self._tensors.get(name)
                if planned is not None and move is Move.LOAD:
                    self._ask_for(planned, due)
                elif planned is not None:
                    self._going.append(planned)
        self._evict(tensor)
        # A load that is waited for goes before all prefetches (see `awaited`).
        if tensor.place is not Place.AWAY:
            self._prefetch(tensor)

    # ---- transfers -------------------------------------------------------------------------------------------

    def _ask_for_absent(self, route: Route) -> None:
        """Prefetches what the plan expects to be resident at the start and is not: another kind of pass came before.

        Includes what is used first: no access of the plan comes before that.
        """
        asked = {tensor for _, tensor in self._coming}
        for name, due in (route.first | route.expected).items():
            tensor = self._tensors.get(name)
            if tensor is not None and tensor.place is Place.AWAY and tensor not in asked:
                self._ask_for(tensor, due)

    def _note_surplus(self, route: Route) -> None:
        """Finds what is there beside what the plan counts on: it leaves first where room is needed.

        As a pass begins that is what another kind of pass has left; after a departure it may be anything.
        """
        pool, expected = self._pool, route.expected if not self._strays else ()
        surplus = [tensor for tensor in pool.eviction.free() if tensor.owner is pool and tensor.name not in expected]
        self._surplus = deque(sorted(surplus, key=self.next_use, reverse=True))

    def _clear(self, nbytes: int, due: int) -> None:
        """Starts evictions of what the plan does not count on, and wants later than `due`, until `nbytes` come free."""
        pool, surplus = self._pool, self._surplus
        while surplus and nbytes > pool.admission.room_bytes:
            tensor = surplus[0]
            if self.next_use(tensor) <= due:
                # So are those behind it.
                break
            surplus.popleft()
            if tensor in pool.eviction and not pool.eviction.is_spared(tensor):
                # Where the backing store is full it stays.
                with suppress(BudgetError):
                    pool.admission.evict(tensor)

    def _ask_for(self, tensor: Block, due: int) -> None:
        """Puts a tensor into the queue of prefetches, in the order of uses."""
        self._coming.insert(bisect_right(self._coming, due, key=lambda coming: coming[0]), (due, tensor))

    def _evict(self, accessed: Block) -> None:
        """Starts planned evictions. A tensor in use, or with a pending update, is tried again at a later access."""
        for _ in range(len(self._going)):
            tensor = self._going.popleft()
            if tensor is accessed:
                continue
            if tensor.pins or self._awaits(tensor):
                self._going.append(tensor)
            elif tensor in self._pool.eviction and not self._pool.eviction.is_spared(tensor):
                # Where the backing store is full it stays, and a demand load that needs its room raises.
                with suppress(BudgetError):
                    self._pool.admission.evict(tensor)

    def _prefetch(self, accessed: Block | None = None) -> None:
        """Starts planned loads, in order, as far as there is room; the others are tried again at a later access."""
        passed: list[tuple[int, Block]] = []
        while self._coming:
            due, tensor = self._coming[0]
            if due < self._position and not self._awaits(tensor):
                # Too late: its next use is after those of the tensors behind it.
                self._coming.popleft()
                continue
            if self.beside is not None and self.beside.elsewhere(tensor):
                passed.append(self._coming.popleft())
                continue
            if tensor.place is Place.AWAY and tensor is not accessed and not self._send_for(tensor, due):
                break
            self._coming.popleft()
        self._coming.extendleft(reversed(passed))

    def _send_for(self, tensor: Block, due: int) -> bool:
        """Starts a load, if there is room now; makes room for all loads that are to begin now."""
        pool = self._pool
        if pool.prefetch(tensor):
            return True
        # Free memory of a card may lie in pieces: making a long one evicts what would have to come back.
        if not self._surplus or tensor.slot_bytes <= pool.budget.free_bytes:
            return False
        self._clear(sum(each.slot_bytes for _, each in self._coming if each.place is Place.AWAY), due)
        return pool.prefetch(tensor)
