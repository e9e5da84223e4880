"""The tide: device memory that is not ours rises and falls through a step, and pages take what it leaves.

Activations and workspaces come from the same allocator as our slabs, and nobody announces them. So what the allocator
has reserved beside the slabs is read before each charge. What the allocator keeps for its next requests is in it, and
so are the pieces that are of no use: the most it came to is what steps like those before will do with, however their
requests fall. Pages get the rest. It is kept apart for evaluation, which may take more or less than training.

Until one step has been seen, pages get the least they can work with, which leaves all other room to the first step's
activations (PatrickStar's warm-up, arXiv 2108.05818, does the same with a fixed share). So they do again where a batch
is larger than all before it: what it takes is not known either.
"""

from __future__ import annotations

import time
from typing import Protocol

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.budget import Budget
from ptm_accel.units import format_bytes

MARGIN = 1.125
"""What was seen is kept free with this factor: the same operations need more where they are interleaved otherwise."""

_RISE = 1.03
"""Pages make way for what rises by more than this factor; for less there is the margin."""

_LOOK_EVERY_S = 1e-3
"""What is reserved changes as new shapes come, and there are thousands of reservations in a step."""

_LOOK_SHARE = 0.01
_LOOK_WITHIN_S = 1e-2
"""The part of the time that may be spent on asking for it, once a step has come to no more than those before it; and
however long it once took, it is asked for again within the latter.
"""

_MOST_KINDS = 32
"""How many kinds of batches are kept of which none is larger than another one in all its dimensions."""

Shapes = tuple[tuple[int, ...], ...]
"""Those of the tensors that a forward is given."""


class Card(Protocol):
    """A card's memory, as the tide sees it."""

    @property
    def live_bytes(self) -> int:
        """Bytes in blocks of these pages."""
        ...

    def beside_bytes(self) -> int:
        """Bytes that are reserved on the card and that no pages hold."""
        ...

    def confine(self, nbytes: int) -> None:
        """What these pages hold may take so much together."""
        ...

    def trim(self) -> None:
        """What nobody uses is no longer reserved."""
        ...


class Tide:
    """Adjusts a device budget's capacity to what other memory leaves.

    Args:
        budget: the device budget; its capacity is changed.
        total_bytes: what pages and all other memory may take together (`device_memory`).
        least_bytes: the least that pages can work with.
        card: the card's memory.
    """

    def __init__(self, budget: Budget, total_bytes: int, least_bytes: int, card: Card) -> None:
        self._budget = budget
        self.total_bytes = total_bytes
        self._wanted_bytes = least_bytes
        self._card = card
        self._most = {False: 0, True: 0}
        self._kept_free_for = {False: 0, True: 0}
        self._evaluates = False
        self._loose_bytes = 0
        self._look_at_s = 0.0
        # Whether the last step has come to no more than those before it, and whether this one has so far.
        self._steady = self._risen = False
        self._warming = True
        self._rising = False
        self._evaluating = False
        self._seen: list[tuple[Shapes, bool]] = []
        self._give(self._least_bytes)

    @property
    def _least_bytes(self) -> int:
        return min(self.total_bytes, self._wanted_bytes)

    @property
    def warming(self) -> bool:
        """Whether pages have the least, since what goes on beside them has not been seen whole."""
        return self._warming

    def need(self, least_bytes: int) -> None:
        """Pages need more than was known: an optimizer has been chosen."""
        self._wanted_bytes = least_bytes
        if self._budget.capacity_bytes < self._least_bytes:
            self._give(self._least_bytes)

    def begin_pass(self, shapes: Shapes, *, evaluates: bool) -> bool:
        """A forward begins.

        Args:
            shapes: of what it is given.
            evaluates: it keeps nothing for a backward: nobody will say when it has ended, but for the next that begins.

        Returns:
            whether the capacity is lower than before, and what is too much is to be moved away.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        before = self._budget.capacity_bytes
        self.sample()
        known = [trained for seen, trained in self._seen if _is_within(shapes, seen, evaluates)]
        if any(known) or (evaluates and known):
            # Such a batch was trained on, or such a one evaluated, which needs less.
            self._turn(evaluates=not any(known))
            if self._warming and self._evaluating:
                self._set_capacity()
        else:
            # A step that trains is seen whole when it ends; a pass that evaluates, when the next one begins.
            self._evaluating = evaluates and (self._evaluating or not self._warming or not self._seen)
            others = [entry for entry in self._seen if not (_is_within(entry[0], shapes, False) and not evaluates)]
            self._seen = [*others, (shapes, not evaluates)][-_MOST_KINDS:]
            self._warming = True
            self._steady, self._risen = False, True
            self._turn(evaluates=self._evaluating)
            self._give(self._least_bytes)
        return self._budget.capacity_bytes < before

    def _turn(self, *, evaluates: bool) -> None:
        """From training to evaluation, or back: what the one has left reserved is not for the other to count."""
        if evaluates != self._evaluates:
            self._evaluates = evaluates
            self._card.trim()
            self._most[evaluates] = max(self._most[evaluates], self._card.beside_bytes())
            if not self._warming:
                self._set_capacity()

    def glance(self) -> bool:
        """Called in forwards: where all pages are there already, a pass charges nothing, and other memory still grows.

        Asking the allocator takes a while, and where pages have less than half there is nothing to ask for.

        Returns:
            whether the capacity is lower than before, and what is too much is to be moved away.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        if self._warming or 2 * self._budget.used_bytes < self.total_bytes:
            return False
        before = self._budget.capacity_bytes
        self.look()
        return self._budget.capacity_bytes < before

    @property
    def high_water_bytes(self) -> int:
        """The most that was reserved beside pages so far, in training or in evaluation."""
        return self._most[self._evaluates]

    def look(self) -> None:
        """Called before every reservation: `sample`, unless that was just done. Asking the allocator takes a while.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        now_s = time.perf_counter()
        if now_s >= self._look_at_s:
            self.sample()
            done_s = time.perf_counter()
            spared_s = min((done_s - now_s) / _LOOK_SHARE, _LOOK_WITHIN_S) if self._steady else 0.0
            self._look_at_s = done_s + max(_LOOK_EVERY_S, spared_s)

    def sample(self) -> None:
        """Notes how high the tide is.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        beside = self._card.beside_bytes()
        # What is charged and lies in no block of ours.
        self._loose_bytes = max(self._loose_bytes, self._budget.used_bytes - self._card.live_bytes)
        if beside > self.high_water_bytes:
            self._most[self._evaluates] = beside
            self._rising = self._risen = True
            self._steady = False
        if self._rising and not self._warming:
            self._set_capacity()

    def end_step(self) -> None:
        """Called after every optimizer step.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        self.sample()
        self._steady, self._risen = not self._risen, False
        self._set_capacity()

    def _set_capacity(self) -> None:
        self._rising = self._warming = self._evaluating = False
        most = self._kept_free_for[self._evaluates]
        if self.high_water_bytes > most * _RISE:
            most = self._kept_free_for[self._evaluates] = self.high_water_bytes
        left = self.total_bytes - int(most * MARGIN)
        # What is charged and is torch's to allocate is in what was seen of it already.
        pages = min(left + self._loose_bytes, self.total_bytes)
        if pages < self._least_bytes:
            raise DeviceBudgetError(
                f"ptm_accel: the device is out of memory. activations and workspaces took "
                f"{format_bytes(self.high_water_bytes)} of {format_bytes(self.total_bytes)}, which leaves "
                f"{format_bytes(max(left, 0))} for pages, and they need {format_bytes(self._least_bytes)}; set "
                "device_memory higher, turn activation checkpointing on, or use a smaller batch."
            )
        self._budget.capacity_bytes = pages
        self._card.confine(max(left, 0))

    def _give(self, nbytes: int) -> None:
        self._budget.capacity_bytes = nbytes
        self._card.confine(nbytes)


def _is_within(shapes: Shapes, seen: Shapes, roughly: bool) -> bool:
    """Whether a batch is in no dimension larger than another one; or by no more than what `MARGIN` allows for.

    Where text is generated each forward is given a token more than the one before.
    """
    factor = MARGIN if roughly else 1.0
    return len(shapes) == len(seen) and all(
        len(one) == len(other) and all(size <= factor * most for size, most in zip(one, other, strict=True))
        for one, other in zip(shapes, seen, strict=True)
    )
