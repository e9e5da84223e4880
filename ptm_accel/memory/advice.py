"""Who has a say in what the pool does: who knows what comes next, and who has promised to do something first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from ptm_accel.memory.paged import PagedTensor


class Adviser(Protocol):
    """Who follows the accesses, and knows which tensor can best be spared. Called with the pool's lock held."""

    def accessed(self, tensor: PagedTensor, *, write: bool) -> None:
        """The tensor is about to be used; it may not be there yet."""
        ...

    def awaited(self, tensor: PagedTensor) -> None:
        """The tensor was not there; the load that its user waits for has begun."""
        ...

    def created(self, tensor: PagedTensor) -> None:
        """The tensor has come into being, with bytes of somebody else's."""
        ...

    def victim(self, idle: Iterable[PagedTensor]) -> PagedTensor | None:
        """Which of `idle` (least recently used first) to move away; None if it has no opinion."""
        ...


class Owed(Protocol):
    """Work on tensors that has been promised and not been done yet. Called with the pool's lock held."""

    def before_use(self, tensor: PagedTensor) -> None:
        """Somebody is about to look at the tensor: what is owed to it comes first."""
        ...

    def elsewhere(self, tensor: PagedTensor) -> bool:
        """Whether the tensor is being changed in its home: what is there must not be brought in yet."""
        ...

    def finish(self) -> None:
        """Does all of it now."""
        ...

    def give_way(self) -> bool:
        """There is no room but what this holds: does a part of it, and lets go of that; False if there is none."""
        ...

    def give_up(self) -> None:
        """The pool is about to close: lets go of everything."""
        ...
