"""The tide: device memory that is not ours rises and falls through a step, and pages take what it leaves.

Activations and workspaces come from the same allocator as our blocks, and nobody announces them. So the peak of what
is not charged to us is read before each charge and before each release: in between what is charged stays the same, so
that the difference is theirs. The most it came to in this step and the one before is kept free from then on. Until one
step has been seen, pages get the least they can work with, which leaves all other room to the first step's activations
(PatrickStar's warm-up, arXiv 2108.05818, does the same with a fixed share).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.budget import Budget
from ptm_accel.units import format_bytes

_MARGIN = 1.05
"""The allocator's blocks are rounded and fragmented; what was seen is kept free with this factor."""


class Tide:
    """Adjusts a device budget's capacity to what other memory leaves.

    Args:
        budget: the device budget; its capacity is changed.
        total_bytes: what pages and their part of all other memory may take together (`device_memory`).
        least_bytes: the least that pages can work with.
        peak_bytes: gives the most memory that was allocated since it was last called, ours and others'.
        follows: there are no optimizer steps of its own: those of other models on the card count.
    """

    def __init__(
        self,
        budget: Budget,
        total_bytes: int,
        least_bytes: int,
        peak_bytes: Callable[[], int],
        *,
        follows: bool = False,
    ) -> None:
        self._budget = budget
        self.total_bytes = total_bytes
        self._wanted_bytes = least_bytes
        self._peak_bytes = peak_bytes
        self._this_step = 0
        self._last_step: int | None = None
        self._rising = False
        self._follows = follows
        self._card_bytes = total_bytes
        self._beside: weakref.WeakSet[Tide] = weakref.WeakSet()
        budget.capacity_bytes = self._least_bytes
        budget.before_release = self._note

    @property
    def _least_bytes(self) -> int:
        return min(self.total_bytes, self._wanted_bytes)

    def need(self, least_bytes: int) -> None:
        """Pages need more than was known: an optimizer has been chosen."""
        self._wanted_bytes = least_bytes
        self._budget.capacity_bytes = max(self._budget.capacity_bytes, self._least_bytes)

    def glance(self) -> bool:
        """Called in forwards: where all pages are there already, a pass charges nothing, and other memory still grows.

        Asking the allocator takes a while, and where pages have less than half there is nothing to ask for.

        Returns:
            whether the capacity is lower than before, and what is too much is to be moved away.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        if self._last_step is None or 2 * self._budget.used_bytes < self.total_bytes:
            return False
        before = self._budget.capacity_bytes
        self.sample()
        return self._budget.capacity_bytes < before

    def resize(self, total_bytes: int) -> None:
        """Another budget is given.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        if not self._beside:
            self._card_bytes = total_bytes
        self.total_bytes = total_bytes
        if self._last_step is None:
            self._budget.capacity_bytes = self._least_bytes
        else:
            self._set_capacity()

    def join(self, card_bytes: int, beside: Iterable[Tide]) -> None:
        """There are pages of other models on the card, or none any more.

        Other memory is taken off each model's part in proportion, so off all of them together once.

        Args:
            card_bytes: what all of them were given together.
            beside: the others.
        """
        self._card_bytes = card_bytes
        self._beside = weakref.WeakSet(beside)

    def give_way(self) -> bool:
        """Other memory cannot be asked for room: False."""
        return False

    @property
    def high_water_bytes(self) -> int:
        """The most that other memory took in this step and the one before."""
        return max(self._this_step, self._last_step or 0)

    def sample(self) -> None:
        """Called before every reservation: notes how high the tide was since the last charge or release.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        self._note()
        if self._last_step is not None and self._this_step > self._last_step and self._rising:
            self._set_capacity()

    def _note(self) -> None:
        # The allocator has one peak for the card, and reading it begins a new one: all who are on it learn of it now.
        tides = (self, *self._beside)
        foreign = self._peak_bytes() - sum(tide._budget.used_bytes for tide in tides)
        for tide in tides:
            if foreign > tide._this_step:
                tide._this_step = foreign
                tide._rising = True

    def end_step(self) -> None:
        """Called after every optimizer step.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        self.sample()
        for tide in (self, *(other for other in self._beside if other._follows)):
            tide._last_step, tide._this_step = tide._this_step, 0
            tide._set_capacity()

    def _set_capacity(self) -> None:
        self._rising = False
        left = self.total_bytes - int(self.high_water_bytes * _MARGIN * self.total_bytes / max(self._card_bytes, 1))
        if left < self._least_bytes:
            raise DeviceBudgetError(
                f"ptm_accel: the device is out of memory. activations and workspaces took "
                f"{format_bytes(self.high_water_bytes)} of {format_bytes(self._card_bytes)}, which leaves "
                f"{format_bytes(max(left, 0))} for pages, and they need {format_bytes(self._least_bytes)}; set "
                "device_memory higher, turn activation checkpointing on, or use a smaller batch."
            )
        self._budget.capacity_bytes = left
