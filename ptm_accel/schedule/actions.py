"""The moves of a plan: small values that print as text."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ptm_accel.schedule.trace import Trace


class Move(enum.Enum):
    """Direction in which a tensor moves."""

    LOAD = "load"
    """From the backing store into the compute tier."""
    EVICT = "evict"
    """Out of the compute tier; stored first if it is dirty."""


@dataclass(frozen=True, slots=True)
class Action:
    """A move that is started, and not waited for.

    Attributes:
        move: which way.
        item: what, as an index into `Trace.items`.
        due: for a load, the access that it is for; in the pass after this one it counts from the end of this. Once the
            access has passed there is no use in it any more.
    """

    move: Move
    item: int
    due: int = 0


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves to start at each access of a pass.

    Attributes:
        capacity_bytes: the budget it was made for.
        starts: for each access, what is started as it begins, in this order.
        resident: the items that are expected in the compute tier when the pass begins.
        coming: those whose loads the end of the pass before has started.
    """

    capacity_bytes: int
    starts: tuple[tuple[Action, ...], ...]
    resident: frozenset[int] = frozenset()
    coming: frozenset[int] = frozenset()

    def text(self, trace: Trace) -> str:
        """Writes one action a line: the access it starts at, the move, the tensor."""
        return "\n".join(
            f"{index} {action.move.value} {trace.items[action.item].name}"
            for index, actions in enumerate(self.starts)
            for action in actions
        )
