"""Carries a plan out on paper: discrete events on a line of compute and a link whose transfers queue in order.

Each direction has a queue of its own. What the two share of the link (`LinkRates.shared`), a transfer takes of the
other direction's time as well: nothing on a duplex link, all where they can only take turns.

It follows what `ptm_accel.runtime.run_ahead` does at each access: what is to leave leaves (what is dirty is stored
first, and its memory is free when the store has ended), what is to come is sent for as soon as there is room, in
order, and an access waits for what has not arrived. Updates that follow their gradients, in backward, are waited for by
nobody until too many gradients have piled up. What is updated on the CPU beside a device is updated in order, when its
gradient has gone there, and can be sent for when that is done. The pass is repeated until it begins as it ends; the
last time is reported.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from ptm_accel.hardware.profile import LinkRates
from ptm_accel.schedule.actions import Move, Plan
from ptm_accel.schedule.placement import NONE_ON_HOST, Placement
from ptm_accel.schedule.trace import Access, Item, Trace, Use
from ptm_accel.schedule.updates import LAG

_ROUNDS = 3
"""Times that the pass is gone through; the first begins with an idle link, and clean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Result for one pass with the updates in it.

    Attributes:
        seconds: how long it took.
        compute_s: of that, arithmetic of the pass.
        update_s: of that, arithmetic of updates.
        load_stall_s: of that, waiting for something to arrive.
        room_stall_s: of that, waiting for room, until stores had ended.
        read_bytes: bytes that came in.
        written_bytes: bytes that went out.
        peak_bytes: the most that was there at once, what is held beside the items included.
    """

    seconds: float
    compute_s: float
    update_s: float
    load_stall_s: float
    room_stall_s: float
    read_bytes: int
    written_bytes: int
    peak_bytes: int


def simulate(
    trace: Trace,
    plan: Plan,
    rates: LinkRates,
    update_s: Callable[[Item], float] = lambda item: 0.0,
    on_host: Placement = NONE_ON_HOST,
) -> Simulation:
    """Simulates the pass, carried out by its plan.

    Args:
        trace: the pass, with the updates that are carried out beside it.
        plan: made from it.
        rates: of the link.
        update_s: seconds of arithmetic that the update takes which uses a gradient up, by the gradient.
        on_host: what is updated on the CPU beside a device.
    """
    run = _SimulatedPass(trace, plan, rates, update_s, on_host)
    before = run.totals()
    for _ in range(_ROUNDS):
        before = run.totals()
        run.go_through()
    after = run.totals()
    seconds, load_stall_s, room_stall_s, update, read, written = (b - a for a, b in zip(before, after, strict=True))
    return Simulation(
        seconds=seconds,
        compute_s=trace.compute_s,
        update_s=update,
        load_stall_s=load_stall_s,
        room_stall_s=room_stall_s,
        read_bytes=int(read),
        written_bytes=int(written),
        peak_bytes=run.peak_bytes,
    )


@dataclass(slots=True)
class _Waiting:
    """An update in backward that has not been carried out yet.

    Attributes:
        items: what it reads and writes, the gradient included.
        gradient: what it uses up.
        made: the parameter, if it is written without having been read.
    """

    items: set[int]
    gradient: int = -1
    made: int | None = None


class _SimulatedPass:
    """The state of the machine on paper."""

    def __init__(
        self, trace: Trace, plan: Plan, rates: LinkRates, update_s: Callable[[Item], float], on_host: Placement
    ) -> None:
        self._trace = trace
        self._plan = plan
        self._rates = rates
        self._update_s = update_s
        self._now = 0.0
        self._reader = self._writer = 0.0
        # What a transfer takes of the other direction's time: all of it where the two can only take turns.
        self._shared = rates.shared
        self._arrival = dict.fromkeys(plan.resident | plan.coming, 0.0)
        self._dirty: set[int] = set()
        self._used = sum(trace.items[item].nbytes for item in self._arrival)
        # When memory comes free, in order, since stores end in order.
        self._leaving: deque[tuple[float, int]] = deque()
        self._stored: dict[int, float] = {}
        # What has been sent for: the access that it is for, and the item.
        self._coming: deque[tuple[int, int]] = deque()
        self._load_stall = self._room_stall = self._update = self._read = self._written = 0.0
        self._updated = False
        # Updates that follow their gradients; the last is being gathered as long as it has no gradient.
        self._waiting: deque[_Waiting] = deque()
        self._piled_bytes = 0
        # How many of them use each item, and what leaves when none does any more.
        self._awaited: Counter[int] = Counter()
        self._going: list[int] = []
        self._lag_bytes = plan.capacity_bytes // LAG
        first = {access.item: access.use for access in reversed(trace.accesses)}
        self._made = {item for item, use in first.items() if use is Use.CREATE}
        # When the CPU has done what it has to do, and when each of the parameters that it updates can be sent for.
        self._on_host = on_host
        self._host = 0.0
        self._ready: dict[int, float] = {}
        self.peak_bytes = 0

    def totals(self) -> tuple[float, ...]:
        """Running totals: seconds, stalls, updates, bytes."""
        return self._now, self._load_stall, self._room_stall, self._update, self._read, self._written

    def go_through(self) -> None:
        """Goes through one pass."""
        if not self._on_host.in_backward:
            gradients = {item: gradient for gradient, item in self._on_host.gradients.items()}
            for item in self._on_host.seconds:
                self._update_on_host(item, self._stored.get(gradients.get(item, -1), 0.0))
        self._now += self._trace.lead_s
        for index, (access, actions) in enumerate(zip(self._trace.accesses, self._plan.starts, strict=True)):
            for action in actions:
                if action.move is Move.LOAD:
                    self._coming.append((action.due, action.item))
                elif action.item in self._awaited:
                    self._going.append(action.item)
                else:
                    self._evict(action.item)
            if access.update and access.backward:
                self._gather(access)
            else:
                self._access(access)
                if self._waiting:
                    self._catch_up(access.held_bytes)
            if self._coming:
                self._send(access.held_bytes, index)
            self._now += access.compute_s
        self._catch_up(self._trace.accesses[-1].held_bytes if self._trace.accesses else 0)
        count = len(self._trace.accesses)
        self._coming = deque((due - count, item) for due, item in self._coming if due >= count or item in self._awaited)
        for item in self._on_host.gradients:
            self._evict(item)
        # What the pass has brought into being is used up by an update after it.
        for item in (self._made & self._arrival.keys()) - self._awaited.keys():
            del self._arrival[item]
            self._dirty.discard(item)
            self._used -= self._trace.items[item].nbytes

    def _update_on_host(self, item: int, gradient_s: float) -> None:
        """The CPU updates a parameter when its gradient has come; what the compute tier has of that is out of date."""
        self._host = self._ready[item] = max(self._host, self._now, gradient_s) + self._on_host.seconds[item]
        if self._arrival.pop(item, None) is not None:
            self._used -= self._trace.items[item].nbytes

    def _gather(self, access: Access) -> None:
        if access.use is Use.CREATE:
            self._waiting[-1].made = access.item
            return
        if not self._waiting or self._waiting[-1].gradient >= 0:
            self._waiting.append(_Waiting(set()))
        if access.item not in self._waiting[-1].items:
            self._waiting[-1].items.add(access.item)
            self._awaited[access.item] += 1
        if access.use is Use.CONSUME:
            self._waiting[-1].gradient = access.item
            self._piled_bytes += self._trace.items[access.item].nbytes

    def _send_away(self) -> None:
        """An update has been carried out: what was to leave, and it used, does."""
        going, self._going = self._going, []
        for item in going:
            if item in self._awaited:
                self._going.append(item)
            else:
                self._evict(item)

    def _catch_up(self, held_bytes: int, needed_bytes: int = 0) -> None:
        """Carries out the updates whose turn it is.

        They are waited for only if too many gradients have piled up, or if what they hold is needed (`needed_bytes`).
        """
        sizes = self._trace.items
        while self._waiting and self._waiting[0].gradient >= 0:
            update = self._waiting[0]
            must = self._piled_bytes > max(self._lag_bytes, 2 * sizes[update.gradient].nbytes)
            must = must or self._room(held_bytes) < needed_bytes
            for item in update.items - self._arrival.keys():
                if must:
                    self._wait_for_room(sizes[item].nbytes, held_bytes)
                elif self._room(held_bytes) < sizes[item].nbytes:
                    return
                self._load(item)
            arrives = max(self._arrival[item] for item in update.items)
            if arrives > self._now:
                if not must:
                    return
                self._load_stall += arrives - self._now
                self._now = arrives
            self._carry_out(self._waiting.popleft(), held_bytes)
            self._send_away()

    def _carry_out(self, update: _Waiting, held_bytes: int) -> None:
        self._piled_bytes -= self._trace.items[update.gradient].nbytes
        for item in update.items:
            self._awaited[item] -= 1
            if not self._awaited[item]:
                del self._awaited[item]
        if update.made is not None:
            if update.made not in self._arrival:
                self._take(update.made, self._now)
            self._dirty.add(update.made)
        self._dirty |= update.items
        self.peak_bytes = max(self.peak_bytes, self._used + held_bytes)
        self._use_up(update.gradient)

    def _use_up(self, gradient: int) -> None:
        spent = self._update_s(self._trace.items[gradient])
        self._update += spent
        self._now += spent
        self._dirty.discard(gradient)
        del self._arrival[gradient]
        self._used -= self._trace.items[gradient].nbytes

    def _room(self, held_bytes: int) -> int:
        while self._leaving and self._leaving[0][0] <= self._now:
            self._used -= self._leaving.popleft()[1]
        return self._plan.capacity_bytes - held_bytes - self._used

    def _access(self, access: Access) -> None:
        item = access.item
        if item in self._arrival:
            if self._leaving:
                self._wait_for_room(0, access.held_bytes)
        else:
            nbytes = self._trace.items[item].nbytes
            self._catch_up(access.held_bytes, nbytes)
            self._wait_for_room(nbytes, access.held_bytes)
            if access.use is Use.CREATE:
                self._take(item, self._now)
            else:
                self._load(item)
        arrives = self._arrival[item]
        if arrives > self._now:
            self._load_stall += arrives - self._now
            self._now = arrives
        if access.use is not Use.READ or access.update or self._updated:
            self._dirty.add(item)
        self._updated = False
        if self._used + access.held_bytes > self.peak_bytes:
            self.peak_bytes = self._used + access.held_bytes
        if access.use is Use.CONSUME:
            self._use_up(item)
            # The parameter that the update writes is read next.
            self._updated = True

    def _wait_for_room(self, nbytes: int, held_bytes: int) -> None:
        while self._room(held_bytes) < nbytes and self._leaving:
            ends = self._leaving[0][0]
            self._room_stall += ends - self._now
            self._now = ends

    def _take(self, item: int, arrives: float) -> None:
        self._arrival[item] = arrives
        self._used += self._trace.items[item].nbytes

    def _send(self, held_bytes: int, index: int) -> None:
        passed: list[tuple[int, int]] = []
        while self._coming:
            due, item = self._coming[0]
            if item not in self._arrival and (due > index or item in self._awaited):
                if self._ready.get(item, 0.0) > self._now:
                    passed.append(self._coming.popleft())
                    continue
                if self._room(held_bytes) < self._trace.items[item].nbytes:
                    break
                self._load(item)
            self._coming.popleft()
        self._coming.extendleft(reversed(passed))

    def _load(self, item: int) -> None:
        nbytes = self._trace.items[item].nbytes
        # What is on its way out must be there first.
        begin = max(self._now, self._reader, self._stored.get(item, 0.0), self._ready.get(item, 0.0))
        seconds = nbytes / self._rates.read_bytes_s
        self._reader = begin + seconds
        self._writer = max(self._now, self._writer) + self._shared * seconds
        self._read += nbytes
        self._take(item, self._reader)

    def _evict(self, item: int) -> None:
        if item not in self._arrival:
            return
        nbytes = self._trace.items[item].nbytes
        del self._arrival[item]
        if item not in self._dirty:
            self._used -= nbytes
            return
        self._dirty.discard(item)
        seconds = nbytes / self._rates.write_bytes_s
        self._writer = max(self._now, self._writer) + seconds
        self._reader = max(self._now, self._reader) + self._shared * seconds
        self._written += nbytes
        self._stored[item] = self._writer
        self._leaving.append((self._writer, nbytes))
        if self._on_host.in_backward and item in self._on_host.gradients:
            self._update_on_host(self._on_host.gradients[item], self._writer)
