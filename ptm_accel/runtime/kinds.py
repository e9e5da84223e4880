"""Kinds of passes: what is planned alike, whatever the shapes of the batches are."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from ptm_accel.schedule.updates import GradientSums, UpdateTiming

_MOST_OPEN = 2
"""From so many open graphs on, their number makes no other kind: code may evaluate without `torch.no_grad`."""


class Place(enum.Enum):
    """The place of a micro-batch in its optimizer step."""

    ONLY = "only"
    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"
    LATER = "later"
    """After the first, where nobody tells whether more follow."""


class Kind(NamedTuple):
    """What decides which parameters a pass uses, and in which order.

    Attributes:
        training: the model's mode.
        gradients: whether autograd records.
        trained: for each parameter, whether it is trained; disabling an adapter freezes it.
        place: of the micro-batch; None without gradients.
        open_graphs: forwards before this one, up to 2, whose backward has not begun.
        together: how many micro-batches the pass has, layer by layer; 0 where each has a pass of its own.
    """

    training: bool
    gradients: bool
    trained: bytes
    place: Place | None = None
    open_graphs: int = 0
    together: int = 0

    @property
    def evaluates(self) -> bool:
        """Whether the pass is no part of training."""
        return not self.training and not self.gradients

    @property
    def more_follow(self) -> bool:
        """Whether it is known that the next micro-batch adds to the gradients of the pass."""
        return self.place in (Place.FIRST, Place.MIDDLE)


class PassKey(NamedTuple):
    """What a plan is kept by.

    Attributes:
        kind: of the pass.
        sums: what its gradients meet.
        updates: when the updates run that concern it.
    """

    kind: Kind
    sums: GradientSums
    updates: UpdateTiming


class StepSoFar:
    """Counts the forwards since the last optimizer step, and so tells the kind of the next one.

    Attributes:
        more_follow: tells whether the step has more micro-batches than the next one; None where nobody knows.
        backward: whether a backward has begun since the last forward with gradients.
        goes_on: whether the next forward is a part of the pass that is under way.
    """

    def __init__(self) -> None:
        self.more_follow: Callable[[], bool | None] = lambda: None
        self.backward = False
        self._forwards = self._open = self._together = 0
        self._more = False
        self.goes_on = False

    @contextmanager
    def together(self, count: int, *, more: bool = False) -> Iterator[None]:
        """A context in which all forwards and backwards are one pass.

        Args:
            count: of micro-batches.
            more: whether the step has more of them after that.
        """
        self._together, self._more = count, more
        try:
            yield
        finally:
            self._together, self.goes_on = 0, False

    @property
    def at_once(self) -> int:
        """How many micro-batches the pass under way has."""
        return max(self._together, 1)

    def next(self, training: bool, gradients: bool, trained: bytes) -> Kind:
        """Returns the kind of a forward that begins, and counts it."""
        if self._together:
            # Whatever comes first: a reference without gradients may be computed before.
            self.goes_on = True
            place = self._place(self._more)
            self._forwards += 1
            return Kind(training, True, trained, place, 0, self._together)
        if self.backward:
            self.backward, self._open = False, 0
        kind = Kind(training, gradients, trained, self._place(self.more_follow()) if gradients else None, self._open)
        if gradients:
            self._forwards += 1
            self._open = min(self._open + 1, _MOST_OPEN)
        return kind

    def end(self) -> None:
        """Begins another step."""
        self.backward = False
        self._forwards = self._open = 0

    def _place(self, more: bool | None) -> Place:
        if more is None:
            return Place.LATER if self._forwards else Place.FIRST
        if self._forwards:
            return Place.MIDDLE if more else Place.LAST
        return Place.FIRST if more else Place.ONLY
