"""The share of a device that pages leave to activations and workspaces.

What the allocator has reserved beside the slabs of pages is read before charges, and its high-water mark plus a margin
is kept free; pages get the rest. Training and evaluation have a mark each. In the first step, and in one whose batch is
larger than all before it, pages get the least they can work with (as in PatrickStar's warm-up, arXiv 2108.05818).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.budget import Budget
from ptm_accel.memory.card_memory import CardMemory
from ptm_accel.units import format_bytes

MARGIN = 1.125
"""The high-water mark is kept free with this factor: the same operations may need more in another order."""

_RISE = 1.03
"""Below this factor the mark is not raised."""

_LOOK_EVERY_S, _LOOK_WITHIN_S = 1e-3, 1e-2
_LOOK_SHARE = 0.01
"""Reading the allocator's figures takes at most this share of the time, within the bounds above."""

Shapes = tuple[tuple[int, ...], ...]
"""Shapes of the tensors that a forward is given."""


class ActivationReserve:
    """Adjusts a device budget's capacity to what other memory leaves.

    Args:
        budget: the device budget; its capacity is changed.
        total_bytes: what pages and all other memory may take together (`device_memory`).
        least_bytes: the least that pages can work with.
        card: the card's memory.
        pinned_bytes: what cannot leave now; pages work with the least beside that.

    Attributes:
        warming: whether pages have the least, since no whole step of this size has been seen.
    """

    def __init__(
        self,
        budget: Budget,
        total_bytes: int,
        least_bytes: int,
        card: CardMemory,
        pinned_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        self.total_bytes = total_bytes
        self.warming = True
        self._budget = budget
        self._wanted_bytes = least_bytes
        self._card = card
        self._pinned_bytes = pinned_bytes
        # By phase: whether a pass evaluates.
        self._marks = {False: 0, True: 0}
        self._largest = {False: [-1.0] * 3, True: [-1.0] * 3}
        self._evaluates = False
        # Whether the end of an optimizer step ends the warm-up; otherwise the next pass does.
        self._in_step = False
        self._loose_bytes = self._lent_bytes = self._left_bytes = 0
        self._look_at_s = 0.0
        self._give_least()

    @property
    def least_bytes(self) -> int:
        """Least bytes that pages can work with."""
        return min(self.total_bytes, self._wanted_bytes)

    @property
    def trained_bytes(self) -> int:
        """Most bytes reserved beside pages so far in training."""
        return self._marks[False]

    @property
    def high_water_bytes(self) -> int:
        """Most bytes reserved beside pages so far, in training or in evaluation."""
        return self._marks[self._evaluates]

    def need(self, least_bytes: int) -> None:
        """Changes the least that pages can work with, once the optimizer is known."""
        self._wanted_bytes = least_bytes
        if self._budget.capacity_bytes < self.least_bytes:
            self._give_least()

    def begin_pass(self, shapes: Shapes, *, evaluates: bool) -> None:
        """A forward begins; one that `evaluates` keeps nothing for a backward, and no optimizer step follows it.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        self.sample()
        size, factor = size_of(shapes), MARGIN if evaluates else 1.0
        if self._is_known(size, factor, evaluates=False):
            # A batch that was trained on needs no more where it is evaluated.
            self._begin_known(evaluates=False)
        elif evaluates and self._is_known(size, factor, evaluates=True):
            self._begin_known(evaluates=True)
        else:
            self._largest[evaluates] = [max(*both) for both in zip(size, self._largest[evaluates], strict=True)]
            # An evaluation in the middle of a step that is new does not end it.
            self._in_step = not evaluates or (self.warming and self._in_step)
            self.warming = True
            self._turn(evaluates=not self._in_step)
            self._give_least()

    def knows(self, shapes: Shapes, *, evaluates: bool) -> bool:
        """Returns whether a batch is no larger than those before it, so that what it takes has been seen."""
        size, factor = size_of(shapes), MARGIN if evaluates else 1.0
        trained = self._is_known(size, factor, evaluates=False)
        return trained or (evaluates and self._is_known(size, factor, evaluates=True))

    def _is_known(self, size: Sequence[float], factor: float, *, evaluates: bool) -> bool:
        """Whether a batch is no larger than those before it; text that is generated grows by a token each time."""
        return all(one <= factor * most for one, most in zip(size, self._largest[evaluates], strict=True))

    def _begin_known(self, *, evaluates: bool) -> None:
        turned = self._turn(evaluates=evaluates)
        if (turned and not self.warming) or (self.warming and not self._in_step):
            self._set_capacity()

    def _turn(self, *, evaluates: bool) -> bool:
        """Turns from training to evaluation, or back: gives back what is reserved for the other."""
        if evaluates == self._evaluates:
            return False
        self._evaluates = evaluates
        self._card.trim()
        self._note()
        return True

    def look(self) -> None:
        """Called before every reservation and read: `sample`, unless that was just done."""
        now_s = time.perf_counter()
        if now_s >= self._look_at_s:
            self.sample()
            done_s = time.perf_counter()
            spared_s = min((done_s - now_s) / _LOOK_SHARE, _LOOK_WITHIN_S)
            self._look_at_s = done_s + max(_LOOK_EVERY_S, spared_s)

    def sample(self) -> None:
        """Raises the high-water mark to what is reserved beside pages now."""
        if self._note() and not self.warming:
            self._set_capacity()

    def expect(self, nbytes: int) -> None:
        """Raises the mark of training to what a pass will have reserved beside pages, as if that had been seen."""
        if nbytes > self._marks[False]:
            self._marks[False] = nbytes
            if not self.warming:
                self._set_capacity()

    def end_step(self) -> None:
        """Called after every optimizer step."""
        self._note()
        self._set_capacity()

    def lend(self, nbytes: int) -> None:
        """Leaves `nbytes` of what is charged for torch to allocate, whenever it likes: slabs leave that free."""
        self._lent_bytes = nbytes
        self._confine(self._left_bytes)

    def _note(self) -> bool:
        """Returns whether the high-water mark has risen."""
        # What is charged and lies in no block of ours.
        loose = self._budget.used_bytes - self._card.live_bytes - self._lent_bytes
        self._loose_bytes = max(self._loose_bytes, loose)
        beside = self._card.beside_bytes() - self._lent_bytes
        if beside <= self.high_water_bytes * _RISE:
            return False
        self._marks[self._evaluates] = beside
        return True

    def _set_capacity(self) -> None:
        self.warming = self._in_step = False
        left = self.total_bytes - int(self.high_water_bytes * MARGIN)
        # What is charged and is torch's to allocate is in the mark already.
        pages = min(left + self._loose_bytes, self.total_bytes)
        if pages < self.least_bytes:
            raise DeviceBudgetError(
                f"ptm_accel: the device is out of memory. activations and workspaces took "
                f"{format_bytes(self.high_water_bytes)} of {format_bytes(self.total_bytes)}, which leaves "
                f"{format_bytes(max(left, 0))} for pages, and they need {format_bytes(self.least_bytes)}; set "
                "device_memory higher, turn activation checkpointing on, or use a smaller batch."
            )
        self._budget.capacity_bytes = pages
        self._confine(left)

    def _give_least(self) -> None:
        # A graph from plain mode may have pinned more than the least.
        given = min(self.total_bytes, self.least_bytes + self._pinned_bytes())
        self._budget.capacity_bytes = given
        self._confine(given)

    def _confine(self, left_bytes: int) -> None:
        self._left_bytes = left_bytes
        self._card.confine(max(left_bytes - self._lent_bytes, 0))


def size_of(shapes: Shapes) -> Sequence[float]:
    """Sizes a batch: elements, longest dimension, and the geometric mean of both (for attention's squares)."""
    numel, longest = sum(map(math.prod, shapes)), max((size for shape in shapes for size in shape), default=0)
    return numel, longest, math.sqrt(numel * longest)
