"""The pools over the same tiers: the share of each, and whose tensors are evicted.

Models of one process that compute on one device share its budgets, backing store and order of eviction, and have a pool
each. A model may use whatever is free; its plans count on its share, and tensors of the pool that is furthest beyond
its share are evicted first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ptm_accel.memory.block import Block
from ptm_accel.memory.budget import Budget


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one model needs of the tiers.

    Attributes:
        name: of the model, for messages.
        least_bytes: the least budget of the compute tier.
        whole_bytes: with so much of the compute tier nothing of it ever moves; 0 if that is not known.
        known_bytes: the same, without the state of an optimizer that there is not yet.
        away_bytes: what the tiers below hold of it where it does not fit; without such state, too.
    """

    name: str = ""
    least_bytes: int = 0
    whole_bytes: int = 0
    known_bytes: int = 0
    away_bytes: int = 0


class Holder(Protocol):
    """Work that is still to be done with a pool's blocks, and holds memory for it."""

    def give_way(self) -> bool:
        """Does some of it, to free memory; False if there is none."""
        ...

    def give_up(self) -> None:
        """Drops all of it: the pool closes."""
        ...


class Tenant(Protocol):
    """A pool over the tiers."""

    need: Need
    holder: Holder | None
    next_use: Callable[[Block], int] | None

    def tensors(self) -> Iterator[Block]:
        """All living paged tensors."""
        ...


class Tenants:
    """The open pools that share a compute tier."""

    def __init__(self, budget: Budget) -> None:
        self.pools: list[Tenant] = []
        self._budget = budget

    @property
    def least_bytes(self) -> int:
        """The least budget of all models together."""
        return sum(pool.need.least_bytes for pool in self.pools)

    @property
    def whole_bytes(self) -> int:
        """With so much nothing ever moves; 0 where that is not known."""
        return sum(pool.need.whole_bytes for pool in self.pools)

    def share_bytes(self, pool: Tenant) -> int:
        """The least of a model, and of the rest a part in proportion to what it could use."""
        capacity = self._budget.capacity_bytes
        if len(self.pools) == 1:
            return capacity
        spare, wish = max(capacity - self.least_bytes, 0), self.whole_bytes - self.least_bytes
        more = pool.need.whole_bytes - pool.need.least_bytes
        return pool.need.least_bytes + spare * more // max(wish, spare, 1)

    def giver(self, idle: Iterable[Block]) -> tuple[Tenant | None, Iterable[Block]]:
        """The pool that is furthest beyond its share, and its part of `idle`, in the same order."""
        if len(self.pools) == 1:
            return self.pools[0], idle
        parts = {pool: [tensor for tensor in idle if tensor.owner is pool] for pool in self.pools}
        beyond = {
            pool: sum(tensor.slot_bytes for tensor in part) - self.share_bytes(pool)
            for pool, part in parts.items()
            if part
        }
        giver = max(beyond, key=lambda pool: beyond[pool], default=None)
        return giver, () if giver is None else parts[giver]

    @property
    def next_use(self) -> Callable[[Block], int] | None:
        """Tells when a tensor is wanted next, by the plan of the only model; None without one."""
        return self.pools[0].next_use if len(self.pools) == 1 else None

    def pinned(self) -> list[Block]:
        """The pinned tensors of all models."""
        return [tensor for pool in self.pools for tensor in pool.tensors() if tensor.pins]

    def give_way(self) -> bool:
        """Makes a pending update of one of the models that holds memory; False if there is none."""
        return any(pool.holder is not None and pool.holder.give_way() for pool in self.pools)
