"""Plans a pass from its trace: what leaves when (Belady), and how early each load can begin.

Two steps, both pure functions. First the pass is gone through with a part of the budget put aside (`ahead_bytes`):
where something does not fit, what is wanted last leaves (the optimum for loads of one size; PatrickStar's eviction by
next use). Then every load is moved as early as the part that was put aside admits, in the order of use. The same part
takes in gradients while the stores that make room for them are still under way.
"""

from __future__ import annotations

from bisect import bisect_left
from heapq import heappop, heappush

from ptm_accel.errors import ScheduleError
from ptm_accel.schedule.actions import Action, Move, Plan
from ptm_accel.schedule.placement import NONE_ON_HOST, Placement
from ptm_accel.schedule.trace import Trace, Use
from ptm_accel.units import format_bytes

_ROUNDS = 4
"""Most times that a pass is gone through, so that it begins with what the one before leaves there."""

_NOW = -1
"""Next use of what is being used now: sooner than all else."""


class _Residents:
    """Items in the compute tier, by their next use."""

    def __init__(
        self, trace: Trace, there: frozenset[int], first_use: dict[int, int], kept: frozenset[int] = frozenset()
    ) -> None:
        self._sizes = [item.nbytes for item in trace.items]
        self._kept = kept
        self._next: dict[int, int] = {}
        # The one that is wanted last comes first, of several the highest. What is not what `_next` says is out of date.
        self._order: list[tuple[int, int]] = []
        self.used_bytes = 0
        for item in sorted(there):
            self.use(item)
            self.put(item, first_use[item])

    def __contains__(self, item: int) -> bool:
        return item in self._next

    def use(self, item: int) -> None:
        """The item is there, and is used now: it cannot be the one to leave."""
        if item not in self._next:
            self.used_bytes += self._sizes[item]
        self._next[item] = _NOW

    def put(self, item: int, wanted: int) -> None:
        """The item has been used, and is wanted next at `wanted`."""
        self._next[item] = wanted
        if item not in self._kept:
            heappush(self._order, (-wanted, -item))

    def last_wanted(self) -> int:
        """Returns the item that is wanted last; it leaves."""
        while True:
            wanted, item = heappop(self._order)
            if self._next.get(-item) == -wanted:
                self.remove(-item)
                return -item

    def remove(self, item: int) -> None:
        """The item is there no longer."""
        del self._next[item]
        self.used_bytes -= self._sizes[item]

    def items(self) -> frozenset[int]:
        """Returns all that are there."""
        return frozenset(self._next)


def plan_pass(
    trace: Trace,
    *,
    capacity_bytes: int,
    ahead_bytes: int = 0,
    repeats: bool = False,
    kept: frozenset[int] = frozenset(),
    passing: frozenset[int] = frozenset(),
    more_follow: bool = False,
    on_host: Placement = NONE_ON_HOST,
) -> Plan:
    """Plans a pass.

    Args:
        trace: the pass.
        capacity_bytes: the budget, `Access.held_bytes` included.
        ahead_bytes: the part of it that may be held for what is not used yet.
        repeats: the same pass follows: what its beginning needs may be loaded as this one ends.
        kept: items that never leave.
        passing: items that other passes, before the next of this kind, leave no room for: not there when it begins,
            and gone when it has used them for the last time.
        more_follow: the next pass adds to the gradients that this one makes.
        on_host: what is updated on the CPU beside a device: its gradients leave as they arrive, and it comes anew.

    Raises:
        ScheduleError: a single access needs more than the budget, or than what is kept leaves of it.
    """
    created: set[int] = set()
    first_use: dict[int, int] = {}
    kept_bytes = sum(trace.items[item].nbytes for item in kept)
    for index, access in enumerate(trace.accesses):
        if first_use.setdefault(access.item, index) == index and access.use is Use.CREATE:
            created.add(access.item)
        needed = access.held_bytes + kept_bytes + (0 if access.item in kept else trace.items[access.item].nbytes)
        if needed > capacity_bytes:
            raise ScheduleError(
                f"access {index} ({trace.items[access.item].name}) needs {format_bytes(needed)} with the other bytes "
                f"in use, and the budget is {format_bytes(capacity_bytes)}. Raise it, or page on demand."
            )
    after = kept
    never_there = created | passing | on_host.seconds.keys()
    next_uses = trace.next_uses(more_follow=more_follow)
    for _ in range(_ROUNDS):
        there = after - never_there
        leaving, loading, used, after = _go_through(
            trace, next_uses, there, first_use, kept, passing, capacity_bytes, ahead_bytes, on_host
        )
        if after - never_there == there:
            break
    starts: list[list[Action]] = [[Action(Move.EVICT, item) for item in items] for items in leaving]
    coming: set[int] = set()
    # What the pass leaves there need not be loaded again as it ends.
    absent = frozenset(first_use) - after if repeats else frozenset()
    # Nor can it be while its update is still to be done.
    absent -= frozenset() if on_host.in_backward else on_host.seconds.keys()
    for begin, due, item in _brought_forward(trace, loading, leaving, used, capacity_bytes, ahead_bytes, absent):
        starts[begin].append(Action(Move.LOAD, item, due if begin >= 0 else due + len(starts)))
        if begin < 0:
            coming.add(item)
    return Plan(capacity_bytes, tuple(map(tuple, starts)), there, frozenset(coming))


def _go_through(
    trace: Trace,
    next_uses: list[int],
    there: frozenset[int],
    first_use: dict[int, int],
    kept: frozenset[int],
    passing: frozenset[int],
    capacity_bytes: int,
    ahead_bytes: int,
    on_host: Placement,
) -> tuple[list[list[int]], list[tuple[int, int]], list[int], frozenset[int]]:
    """Goes through one pass by Belady's rule.

    Returns:
        what leaves at each access; the loads as (access, item); the bytes in use at each access; what is there at the
        end.
    """
    residents = _Residents(trace, there, first_use, kept)
    kept_bytes = sum(trace.items[item].nbytes for item in kept)
    leaving: list[list[int]] = []
    loading: list[tuple[int, int]] = []
    used: list[int] = []
    done_with: list[int] = []
    free_bytes, made_anew = capacity_bytes - ahead_bytes, trace.made_anew
    for index, (access, wanted) in enumerate(zip(trace.accesses, next_uses, strict=True)):
        gone: list[int] = []
        for item in done_with:
            if item in residents:
                residents.remove(item)
                gone.append(item)
        item = access.item
        last = wanted >= len(trace.accesses)
        done_with = [item] if wanted >= made_anew or (last and item in passing) else []
        if last and item in on_host.gradients:
            done_with = [item, *([on_host.gradients[item]] if on_host.in_backward else [])]
        if item not in residents and access.use is not Use.CREATE:
            loading.append((index, item))
        residents.use(item)
        room = free_bytes - access.held_bytes
        if residents.used_bytes > room:
            room = max(room, kept_bytes + (0 if item in kept else trace.items[item].nbytes))
            while residents.used_bytes > room:
                gone.append(residents.last_wanted())
        residents.put(item, wanted)
        leaving.append(gone)
        used.append(residents.used_bytes)
        if access.use is Use.CONSUME:
            residents.remove(item)
    return leaving, loading, used, residents.items()


def _brought_forward(
    trace: Trace,
    loading: list[tuple[int, int]],
    leaving: list[list[int]],
    used: list[int],
    capacity_bytes: int,
    ahead_bytes: int,
    absent: frozenset[int],
) -> list[tuple[int, int, int]]:
    """Lists each load as (the earliest access at which it can start, the access it is for, the item).

    Loads that cannot start before their access are left to the access itself. Those of `absent` items may start in the
    pass before: then the first is counted from the end, and is below zero.
    """
    count = len(used)
    headroom = _Headroom(trace, used, capacity_bytes, ahead_bytes)
    left_at: dict[int, list[int]] = {}
    for index, items in enumerate(leaving):
        for item in items:
            left_at.setdefault(item, []).append(index)
    begins: list[int] = []
    earliest = 0
    for index, item in loading:
        # Not before it has left, and not before the load that is needed sooner.
        left = [at + 1 for at in left_at.get(item, ()) if at < index]
        begin = headroom.put(item, index, max([earliest, *left]))
        begins.append(begin)
        earliest = begin if begin < index else earliest
    # What the next pass begins with comes after all that this one still needs.
    for place, (index, item) in enumerate(loading):
        if begins[place] > 0 or item not in absent:
            break
        left = [at + 1 for at in left_at.get(item, ()) if at >= index]
        begin = headroom.put(item, count, max([earliest, index + 1, *left]))
        begins[place] = begin - count
        earliest = begin if begins[place] < index else earliest
    return [(begin, index, item) for begin, (index, item) in zip(begins, loading, strict=True) if begin < index]


class _Headroom:
    """Bytes of the budget for what is not used yet, over the accesses of a pass.

    Loads reserve headroom in order; starts and ends never decrease. We keep the free bytes per access and a running
    total, so each reservation is one binary search.

    Args:
        trace: the pass.
        used: the bytes that are in use at each access.
        capacity_bytes: the budget.
        ahead_bytes: the part of it.
    """

    def __init__(self, trace: Trace, used: list[int], capacity_bytes: int, ahead_bytes: int) -> None:
        self._sizes = [item.nbytes for item in trace.items]
        pairs = zip(trace.accesses, used, strict=True)
        self._free = [min(capacity_bytes - access.held_bytes - taken, ahead_bytes) for access, taken in pairs]
        self._taken = self._end = 0
        # The accesses so far that have less room than all behind them, with what is remembered of them: both ascend.
        self._least: list[int] = []
        self._least_free: list[int] = []

    def put(self, item: int, end: int, bound: int) -> int:
        """Takes room for an item from as early as there is any, up to `end`.

        Args:
            item: which one.
            end: where room for it is needed no more, or is taken already; not before that of the last item.
            bound: the earliest; not before where an item has begun.

        Returns:
            where it begins; `end` if there is no room right before that.
        """
        for at in range(self._end, end):
            free = self._free[at] + self._taken
            while self._least_free and self._least_free[-1] >= free:
                self._least.pop()
                self._least_free.pop()
            self._least.append(at)
            self._least_free.append(free)
        self._end = end
        # The last access where there is less room than the item takes: what follows has more, so it is one of these.
        full = bisect_left(self._least_free, self._sizes[item] + self._taken)
        begin = min(max(bound, self._least[full - 1] + 1 if full else 0), end)
        if begin < end:
            self._taken += self._sizes[item]
        return begin
