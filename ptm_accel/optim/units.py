"""What an optimizer step goes over: parameters with their state, and windows of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ptm_accel.memory.budget import Reservation
from ptm_accel.memory.paged import PagedTensor, Part, Place
from ptm_accel.memory.transfer import Block, Transfer, round_up
from ptm_accel.memory.windows import Window
from ptm_accel.model.floor import Appetite, update_extra_bytes
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.slots import ParamSlot

Entry = tuple[int, "ParamState", GradSlot]
"""Group index, state and gradient of a parameter."""

Work = list[Entry]
"""What a step updates, in the optimizer's order."""


@dataclass(slots=True)
class ParamState:
    """What the optimizer keeps for one parameter.

    Attributes:
        slot: the parameter.
        paged: full-size tensors by the optimizer's own key.
        small: all the rest (step counts, factored moments).
        master: the fp32 master of a narrower parameter, where master weights are on.
        mastered: how many elements of the master, from the start, have been taken from the parameter.
        writes: how often the parameter may have been written from outside before the last update.
    """

    slot: ParamSlot
    paged: dict[str, Part] = field(default_factory=dict)
    small: dict[str, Any] = field(default_factory=dict)
    master: Part | None = None
    mastered: int = 0
    writes: int = field(init=False)

    def __post_init__(self) -> None:
        self.writes = self.slot.writes

    @property
    def differs(self) -> bool:
        """Whether the parameter may not be what its master rounds to; where it is not, that is taken from it anew."""
        return self.writes != self.slot.writes

    def agree(self) -> None:
        """The parameter is what its master rounds to."""
        self.writes = self.slot.writes

    @property
    def empty(self) -> bool:
        """Whether the optimizer has not met this parameter yet."""
        return not self.paged and not self.small

    @property
    def fresh(self) -> bool:
        """Whether an update has nothing to go by: what the optimizer keeps full-size is made in it."""
        return not self.paged and all(entry is None for entry in self.small.values())

    @property
    def overwritten(self) -> bool:
        """Whether an update writes all of the parameter and reads none of it: its master says all there is to say."""
        return self.master is not None and not self.differs and self.mastered >= self.slot.value.numel

    def tensors(self) -> list[Part]:
        """The parameter and what is kept for it on pages."""
        masters = [self.master] if self.master is not None else []
        return [self.slot.value, *masters, *self.paged.values()]

    @property
    def block_name(self) -> str:
        """The name of the block of the parameter's values, by which plans know it."""
        return self.slot.value.block.name

    def blocks(self) -> list[PagedTensor]:
        """The blocks that its tensors are parts of."""
        return [part.block for part in self.tensors()]

    @property
    def wide(self) -> Part:
        """What the optimizer updates: the master if there is one, else the parameter."""
        return self.master if self.master is not None else self.slot.value


@dataclass(slots=True)
class Unit:
    """A window of one parameter with everything its update reads and writes.

    Attributes:
        extra: the charge for what the optimizer allocates.
        space: the charge for windows of state that the optimizer will make.
        desk: memory for its gradient in fp32, with the charge for it; None where torch allocates that.
        occupied: room was made for the parameter, and what it holds until the update is not its value.
    """

    group: int
    state: ParamState
    grad: GradSlot
    start: int
    stop: int
    last: bool
    new: bool
    stays: bool = False
    windows: dict[str, Window] = field(default_factory=dict)
    extra: Reservation | None = None
    space: Reservation | None = None
    desk: tuple[Reservation, Block] | None = None
    occupied: bool = False

    def arrived(self) -> bool:
        """Whether nothing would have to be waited for to update it."""
        return all(transfer.done() for transfer in self.awaited())

    def awaited(self) -> list[Transfer]:
        """The transfers that its update would wait for."""
        transfers = [window.awaited for window in self.windows.values()]
        return [transfer for transfer in transfers if transfer is not None]

    def under_way(self) -> bool:
        """Whether all that it reads is there or on its way."""
        read = (tensor for key, tensor in self.involved().items() if key or not (self.stays and self.overwrites))
        return all(tensor.place is not Place.AWAY for tensor in read)

    @property
    def overwrites(self) -> bool:
        """Whether its update writes the whole parameter and reads none of it."""
        return self.whole and self.state.overwritten

    @property
    def whole(self) -> bool:
        """Whether this is all of the parameter."""
        return self.start == 0 and self.last

    def involved(self) -> dict[str, Part]:
        """The paged tensors that its update reads and writes, by the key of their window."""
        assert self.grad.value is not None
        named = {"": self.state.slot.value, "grad": self.grad.value}
        if self.state.master is not None:
            named["master"] = self.state.master
        if not self.new:
            named |= {f"state.{key}": tensor for key, tensor in self.state.paged.items()}
        return named

    @property
    def widened(self) -> bool:
        """Whether its gradient is narrower than what is updated."""
        assert self.grad.value is not None
        return self.state.master is not None and self.grad.value.dtype != self.state.wide.dtype

    def extra_bytes(self, appetite: Appetite, grain: int | None) -> int:
        """What torch allocates for its update.

        Args:
            appetite: of the optimizer.
            grain: how many elements of it are updated at a time at the most, which have a desk; None for all of them.
        """
        elements = self.stop - self.start
        if grain is not None and not self.new:
            elements = min(elements, grain)
        wide, widened = self.state.wide.dtype.itemsize, self.widened and grain is None
        return update_extra_bytes(appetite, elements, wide, new=self.new, widened=widened)

    def desk_bytes(self, grain: int | None) -> int:
        """What its gradient takes in fp32, where that is no matter of torch's.

        Args:
            grain: as for `extra_bytes`.
        """
        return 0 if grain is None or not self.widened else round_up(min(self.stop - self.start, grain) * 4)

    def space_bytes(self, appetite: Appetite) -> int:
        """What the windows of state that the optimizer will make take; a whole parameter's state needs none."""
        if not self.new or self.whole:
            return 0
        return appetite.state_tensors * round_up((self.stop - self.start) * self.state.wide.dtype.itemsize)


@dataclass(slots=True)
class Cursor:
    """How far a sweep has come.

    Attributes:
        work: what it goes over.
        index: the parameter it is at.
        start: the first of its elements that is in no window yet.
        new: whether the optimizer has not met the parameter before this step; of use once part of it has been met.
        stays: whether parameters are read right after their update, so that they are brought in whole if they can be;
            then nothing is waited for to open a window, unless it must be open now.
        sparing: whether what is read next is something else: parts of a parameter are opened one at a time, since what
            leaves for them would have to come back.
        sent_for: tells of a parameter, by name, that what its update needs will be sent for in time: until that has
            been done there is no use in opening windows of it.
    """

    work: Work
    index: int = 0
    start: int = 0
    new: bool = False
    stays: bool = False
    sparing: bool = False
    sent_for: Callable[[str], bool] = lambda name: False

    @property
    def begun(self) -> int:
        """How many parameters it is past or in the middle of."""
        return self.index + (self.start > 0)

    def advance(self, unit: Unit) -> None:
        """Goes on behind `unit`."""
        self.new = unit.new
        self.index, self.start = (self.index + 1, 0) if unit.last else (self.index, unit.stop)


def ordered(work: Work, order: dict[str, int]) -> Work:
    """`work` in the order in which a forward reads the parameters; those it does not read come last.

    Args:
        work: what is to be updated.
        order: the place of each parameter, by name.
    """
    last = len(order)
    return sorted(work, key=lambda entry: order.get(entry[1].block_name, last))
