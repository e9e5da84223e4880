"""The tide: device memory that is not ours rises and falls through a step, and pages take what it leaves.

Activations and workspaces come from the same allocator as our blocks, and nobody announces them. So the peak of what
is not charged to us is read before each charge and before each release: in between what is charged stays the same, so
that the difference is theirs. The most it came to in this step and the one before is kept free from then on. Until one
step has been seen, pages get the least they can work with, which leaves all other room to the first step's activations
(PatrickStar's warm-up, arXiv 2108.05818, does the same with a fixed share).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.budget import Budget
from ptm_accel.units import format_bytes

_MARGIN = 1.05
"""The allocator's blocks are rounded and fragmented; what was seen is kept free with this factor."""


class Tide:
    """Adjusts a device budget's capacity to what other memory leaves.

    Args:
        budget: the device budget; its capacity is changed.
        total_bytes: what pages and all other memory together may take (`device_memory`).
        least_bytes: the least that pages can work with.
        peak_bytes: gives the most memory that was allocated since it was last called, ours and others'.
    """

    def __init__(self, budget: Budget, total_bytes: int, least_bytes: int, peak_bytes: Callable[[], int]) -> None:
        self._budget = budget
        self.total_bytes = total_bytes
        self._least_bytes = least_bytes
        self._peak_bytes = peak_bytes
        self._this_step = 0
        self._last_step: int | None = None
        self._rising = False
        budget.capacity_bytes = min(total_bytes, least_bytes)
        budget.before_release = self._note
        self._part = 1.0
        self._beside: Sequence[Budget] = ()

    def need(self, least_bytes: int) -> None:
        """Pages need more than was known: an optimizer has been chosen."""
        self._least_bytes = min(self.total_bytes, least_bytes)
        self._budget.capacity_bytes = max(self._budget.capacity_bytes, self._least_bytes)

    def glance(self) -> bool:
        """Nothing is done at accesses that charge nothing: a card that is full says so."""
        return False

    def resize(self, total_bytes: int) -> None:
        """Another budget is given.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        self.total_bytes = total_bytes
        self._least_bytes = min(self._least_bytes, total_bytes)
        if self._last_step is None:
            self._budget.capacity_bytes = self._least_bytes
        else:
            self._set_capacity()

    def share(self, part: float, beside: Sequence[Budget]) -> None:
        """The device has pages of other models as well.

        Args:
            part: of the device's whole budget that is given here; so much of other memory is taken off it.
            beside: the budgets of the other models' pages, which are no part of the tide.
        """
        self._part, self._beside = part, beside

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
        pages = self._budget.used_bytes + sum(budget.used_bytes for budget in self._beside)
        foreign = int((self._peak_bytes() - pages) * self._part)
        if foreign > self._this_step:
            self._this_step = foreign
            self._rising = True

    def end_step(self) -> None:
        """Called after every optimizer step.

        Raises:
            DeviceBudgetError: other memory leaves less than the least that pages can work with.
        """
        self.sample()
        self._last_step, self._this_step = self._this_step, 0
        self._set_capacity()

    def _set_capacity(self) -> None:
        self._rising = False
        left = self.total_bytes - int(self.high_water_bytes * _MARGIN)
        if left < self._least_bytes:
            raise DeviceBudgetError(
                f"ptm_accel: the device is out of memory. activations and workspaces took "
                f"{format_bytes(self.high_water_bytes)} of {format_bytes(self.total_bytes)}, which leaves "
                f"{format_bytes(max(left, 0))} for pages, and they need {format_bytes(self._least_bytes)}; set "
                "device_memory higher, turn activation checkpointing on, or use a smaller batch."
            )
        self._budget.capacity_bytes = left
