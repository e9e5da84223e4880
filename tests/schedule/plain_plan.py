"""The two structures that a plan is made with, in the plain and slow way: the oracle for those of `schedule.plan`."""

from __future__ import annotations

from ptm_accel.schedule.trace import Trace


class PlainResidents:
    """As `ptm_accel.schedule.plan._Residents`; looks at all items that are there for the one that is wanted last."""

    def __init__(
        self, trace: Trace, there: frozenset[int], first_use: dict[int, int], kept: frozenset[int] = frozenset()
    ) -> None:
        self._sizes = [item.nbytes for item in trace.items]
        self._kept = kept
        self._next = {item: first_use[item] for item in there}

    def __contains__(self, item: int) -> bool:
        return item in self._next

    @property
    def used_bytes(self) -> int:
        return sum(self._sizes[item] for item in self._next)

    def use(self, item: int) -> None:
        self._next[item] = -1

    def put(self, item: int, wanted: int) -> None:
        self._next[item] = wanted

    def last_wanted(self) -> int:
        item = max(self._next.keys() - self._kept, key=lambda item: (self._next[item], item))
        self.remove(item)
        return item

    def remove(self, item: int) -> None:
        del self._next[item]

    def items(self) -> frozenset[int]:
        return frozenset(self._next)


class PlainHeadroom:
    """As `ptm_accel.schedule.plan._Headroom`; keeps what is free at each access, and goes from one to the next."""

    def __init__(self, trace: Trace, used: list[int], capacity_bytes: int, ahead_bytes: int) -> None:
        self._sizes = [item.nbytes for item in trace.items]
        pairs = zip(trace.accesses, used, strict=True)
        self._free = [min(capacity_bytes - access.held_bytes - taken, ahead_bytes) for access, taken in pairs]

    def put(self, item: int, end: int, bound: int) -> int:
        size, begin = self._sizes[item], end
        while begin > bound and self._free[begin - 1] >= size:
            begin -= 1
        for at in range(begin, end):
            self._free[at] -= size
        return begin
