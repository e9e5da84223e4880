"""Plans a pass from its trace: what leaves when (Belady), and how early what is needed can be sent for.

Two steps, both pure functions. First the pass is gone through with a part of the budget put aside (`ahead_bytes`):
where something does not fit, what is wanted last leaves (the optimum for loads of one size; PatrickStar's eviction by
next use). Then every load is moved as early as the part that was put aside admits, in the order of use. The same part
takes in gradients while the stores that make room for them are still under way.
"""

from __future__ import annotations

from bisect import insort

from ptm_accel.errors import ScheduleError
from ptm_accel.schedule.actions import Action, Move, Plan
from ptm_accel.schedule.trace import Trace, Use
from ptm_accel.units import format_bytes

_ROUNDS = 4
"""How often a pass is gone through, at most, for it to begin with what the one before leaves there."""


class _Residents:
    """The items that are in the compute tier, by when they are next wanted."""

    def __init__(self, trace: Trace, there: frozenset[int], first_use: dict[int, int]) -> None:
        self._sizes = [item.nbytes for item in trace.items]
        self._next: dict[int, int] = {}
        self._order: list[tuple[int, int]] = []
        self.used_bytes = 0
        for item in sorted(there):
            self.put(item, first_use[item])

    def __contains__(self, item: int) -> bool:
        return item in self._next

    def put(self, item: int, wanted: int) -> None:
        """The item is there, or has been used, and is wanted next at `wanted`."""
        if item in self._next:
            self._order.remove((self._next[item], item))
        else:
            self.used_bytes += self._sizes[item]
        self._next[item] = wanted
        insort(self._order, (wanted, item))

    def last_wanted(self) -> int:
        """The item that is wanted last; it leaves."""
        item = self._order[-1][1]
        self.remove(item)
        return item

    def remove(self, item: int) -> None:
        """The item is there no longer."""
        self._order.remove((self._next.pop(item), item))
        self.used_bytes -= self._sizes[item]

    def items(self) -> frozenset[int]:
        """All that are there."""
        return frozenset(self._next)


def plan_pass(trace: Trace, *, capacity_bytes: int, ahead_bytes: int = 0, repeats: bool = False) -> Plan:
    """The plan of a pass.

    Args:
        trace: the pass.
        capacity_bytes: the budget, `Access.held_bytes` included.
        ahead_bytes: the part of it that may be held for what is not used yet.
        repeats: the same pass follows: what its beginning needs may be sent for as this one ends.

    Raises:
        ScheduleError: a single access needs more than the budget.
    """
    created: set[int] = set()
    first_use: dict[int, int] = {}
    for index, access in enumerate(trace.accesses):
        if first_use.setdefault(access.item, index) == index and access.use is Use.CREATE:
            created.add(access.item)
        needed = access.held_bytes + trace.items[access.item].nbytes
        if needed > capacity_bytes:
            raise ScheduleError(
                f"access {index} ({trace.items[access.item].name}) needs {format_bytes(needed)} with what is held "
                f"beside it, and the budget is {format_bytes(capacity_bytes)}. Raise it, or page on demand."
            )
    after: frozenset[int] = frozenset()
    for _ in range(_ROUNDS):
        there = after - created
        leaving, loading, used, after = _go_through(trace, there, first_use, capacity_bytes, ahead_bytes)
        if after - created == there:
            break
    starts: list[list[Action]] = [[Action(Move.EVICT, item) for item in items] for items in leaving]
    coming: set[int] = set()
    # What the pass leaves there need not be sent for again as it ends.
    absent = frozenset(first_use) - after if repeats else frozenset()
    for index, item in _brought_forward(trace, loading, leaving, used, capacity_bytes, ahead_bytes, absent):
        starts[index].append(Action(Move.LOAD, item))
        if index < 0:
            coming.add(item)
    return Plan(trace.key, capacity_bytes, tuple(map(tuple, starts)), there, frozenset(coming))


def _go_through(
    trace: Trace, there: frozenset[int], first_use: dict[int, int], capacity_bytes: int, ahead_bytes: int
) -> tuple[list[list[int]], list[tuple[int, int]], list[int], frozenset[int]]:
    """One pass by Belady's rule.

    Returns:
        what leaves at each access; the loads as (access, item); the bytes in use at each access; what is there at the
        end.
    """
    residents = _Residents(trace, there, first_use)
    leaving: list[list[int]] = []
    loading: list[tuple[int, int]] = []
    used: list[int] = []
    for index, (access, wanted) in enumerate(zip(trace.accesses, trace.next_uses(), strict=True)):
        gone: list[int] = []
        size = trace.items[access.item].nbytes
        if access.item not in residents and access.use is not Use.CREATE:
            loading.append((index, access.item))
        # What is accessed is never the one to leave.
        residents.put(access.item, -1)
        room = max(capacity_bytes - ahead_bytes - access.held_bytes, size)
        while residents.used_bytes > room:
            gone.append(residents.last_wanted())
        residents.put(access.item, wanted)
        leaving.append(gone)
        used.append(residents.used_bytes)
        if access.use is Use.CONSUME:
            residents.remove(access.item)
    return leaving, loading, used, residents.items()


def _brought_forward(
    trace: Trace,
    loading: list[tuple[int, int]],
    leaving: list[list[int]],
    used: list[int],
    capacity_bytes: int,
    ahead_bytes: int,
    absent: frozenset[int],
) -> list[tuple[int, int]]:
    """Each load with the earliest access at which it can start; loads that cannot start before their access are left
    to the access itself. Those of `absent` items may start in the pass before: then it is counted from the end, and is
    below zero.
    """
    count = len(used)
    held = [access.held_bytes for access in trace.accesses]
    ahead = [0] * count
    left_at: dict[int, list[int]] = {}
    for index, items in enumerate(leaving):
        for item in items:
            left_at.setdefault(item, []).append(index)
    started: list[tuple[int, int]] = []
    earliest = 1 - count
    for index, item in loading:
        size = trace.items[item].nbytes
        # Not before it has left (in this pass or the one before), and not before the load that is needed sooner.
        left = [(at if at < index else at - count) + 1 for at in left_at.get(item, ())]
        bound = max([earliest, index - count + 1 if item in absent else 0, *left])
        begin = index
        while begin > bound:
            before = begin - 1
            fits = used[before] + ahead[before] + size <= capacity_bytes - held[before]
            if not fits or ahead[before] + size > ahead_bytes:
                break
            begin = before
        for at in range(begin, index):
            ahead[at] += size
        if begin < index:
            started.append((begin, item))
            earliest = begin
    return started
