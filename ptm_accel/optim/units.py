"""Parts of an optimizer step: parameters with their state, and windows of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ptm_accel.memory.block import Block, Part, Place
from ptm_accel.memory.budget import Reservation
from ptm_accel.memory.transfer import Buffer, Transfer, round_up
from ptm_accel.memory.windows import Window
from ptm_accel.model.floor import OptimizerMemory, copied_bytes, update_extra_bytes
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.slots import ParamSlot

Entry = tuple[int, "ParamState", GradSlot]
"""Group index, state and gradient of a parameter."""

Work = list[Entry]
"""Updates of a step, in the optimizer's order."""


@dataclass(slots=True)
class ParamState:
    """State that the optimizer keeps for one parameter.

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

    def doubt(self) -> None:
        """The parameter may not be what its master rounds to, as after both were loaded."""
        self.writes = -1

    def agree(self) -> None:
        """The parameter is what its master rounds to."""
        self.writes = self.slot.writes

    @property
    def fresh(self) -> bool:
        """Whether an update has nothing to go by: what the optimizer keeps full-size is made in it."""
        return not self.paged and all(entry is None for entry in self.small.values())

    @property
    def overwritten(self) -> bool:
        """Whether an update writes all of the parameter and reads none of it: its master says all there is to say."""
        return self.master is not None and not self.differs and self.mastered >= self.slot.own.numel

    def tensors(self) -> list[Part]:
        """Returns the parameter and what is kept for it on pages."""
        masters = [self.master] if self.master is not None else []
        return [self.slot.own, *masters, *self.paged.values()]

    @property
    def block_name(self) -> str:
        """The name of the block of the parameter's values, by which plans know it."""
        return self.slot.own.block.name

    def blocks(self) -> list[Block]:
        """Lists the blocks that its tensors are parts of."""
        return [part.block for part in self.tensors()]

    @property
    def wide(self) -> Part:
        """Tensor that the optimizer updates: the master if there is one, else the parameter."""
        return self.master if self.master is not None else self.slot.own


@dataclass(slots=True)
class Unit:
    """Elements that are updated at once: a window of one parameter, or all parameters of a group.

    Attributes:
        entries: the parameters; several only if they are all of a group.
        start, stop: which elements; of a group, all of its blocks'.
        last: whether nothing of the parameters is left behind it.
        new: whether the optimizer makes its state in it.
        stays: parameters are read right after their update (`Batches`).
        extra: the charge for what the optimizer allocates, but for the state that it will make.
        made: the charges for that state, of one tensor each, until it is on pages.
        space: the charge for windows that the state will be copied to.
        desk: memory for gradients in fp32, with the charge for it; None where torch allocates that.
        occupied: room was made for the values, and what is there until the update is not them.
        blocks: the blocks that its update reads and writes, by the key of the window.
        together: whether it is all parameters of a group.
        state: of the first parameter.
    """

    entries: list[Entry]
    start: int
    stop: int
    last: bool
    new: bool
    stays: bool = False
    windows: dict[str, Window] = field(default_factory=dict)
    extra: Reservation | None = None
    made: list[Reservation] = field(default_factory=list)
    space: Reservation | None = None
    desk: tuple[Reservation, Buffer] | None = None
    occupied: bool = False
    blocks: dict[str, Block] = field(init=False)
    together: bool = field(init=False)
    state: ParamState = field(init=False)

    def __post_init__(self) -> None:
        self.state = self.entries[0][1]
        self.blocks = {key: part.block for key, part in parts_of(self.entries[0], new=self.new).items()}
        self.together = len(self.entries) > 1

    def awaited(self) -> list[Transfer]:
        """Returns the transfers that its update would wait for."""
        transfers = [window.awaited for window in self.windows.values()]
        return [transfer for transfer in transfers if transfer is not None]

    def under_way(self) -> bool:
        """Returns whether all that it reads is there or on its way."""
        for key, block in self.blocks.items():
            if block.place is Place.AWAY and (key or not (self.stays and self.overwrites)):
                return False
        return True

    @property
    def overwrites(self) -> bool:
        """Whether its update writes the whole block of the values and reads none of it."""
        whole = self.together or (self.whole and self.state.slot.own.alone)
        return whole and all(state.overwritten for _, state, _ in self.entries)

    @property
    def whole(self) -> bool:
        """Whether this is all of its parameters."""
        return self.start == 0 and self.last

    def end(self) -> None:
        """Drops the gradients of its parameters, all of which are updated."""
        for _, state, grad in self.entries:
            grad.drop()
            state.agree()
            state.slot.generation += 1

    def involved(self) -> dict[str, Part] | dict[str, Block]:
        """Lists what its update reads and writes, by the key of the window: parts, or all blocks of a group."""
        return self.blocks if self.together else parts_of(self.entries[0], new=self.new)

    def extra_bytes(self, optimizer_memory: OptimizerMemory, grain: int | None) -> int:
        """Bytes that torch allocates for its update.

        Args:
            optimizer_memory: of the optimizer.
            grain: how many elements of it are updated at a time at the most, which have a desk; None for all of them.
        """
        elements = self.stop - self.start
        if grain is not None and not self.new:
            elements = min(elements, grain)
        wide, widened = self.state.wide.dtype.itemsize, is_widened(self.entries[0]) and grain is None
        return update_extra_bytes(optimizer_memory, elements, wide, widened=widened)

    def made_bytes(self, optimizer_memory: OptimizerMemory) -> list[int]:
        """Bytes that torch allocates for each tensor of the state that the optimizer will make."""
        return [round_up((self.stop - self.start) * self.state.wide.dtype.itemsize)] * (
            self.new * optimizer_memory.state_tensors
        )

    def desk_elements(self, grain: int | None) -> list[int]:
        """Elements of each gradient that are in fp32 at a time, where that is no matter of torch's.

        Args:
            grain: as for `extra_bytes`.
        """
        if grain is None or not is_widened(self.entries[0]):
            return []
        if not self.together:
            return [min(self.stop - self.start, grain)]
        return [min(state.slot.own.numel, grain) for _, state, _ in self.entries]

    def desk_bytes(self, grain: int | None) -> int:
        """Returns the bytes of `desk_elements`."""
        return round_up(sum(self.desk_elements(grain)) * 4)

    def space_bytes(self, optimizer_memory: OptimizerMemory) -> int:
        """Bytes of windows that the state is copied to, beside what is free once the optimizer is done."""
        part = self.state.slot.group_part
        if not self.new or (self.whole and (part.alone or not part.block.movable)):
            return 0
        return copied_bytes(optimizer_memory, self.stop - self.start, self.state.wide.dtype.itemsize, whole=self.whole)


def parts_of(entry: Entry, *, new: bool = False) -> dict[str, Part]:
    """Lists what the update of one parameter reads and writes, by the key of its window.

    Args:
        entry: the parameter.
        new: the optimizer makes its state.
    """
    _, state, grad = entry
    assert grad.value is not None
    named = {"": state.slot.own, "grad": grad.value}
    if state.master is not None:
        named["master"] = state.master
    if not new:
        named |= {f"state.{key}": part for key, part in state.paged.items()}
    return named


def blocks_of(entry: Entry) -> list[Block]:
    """Lists the blocks that the update of one parameter uses."""
    return [part.block for part in parts_of(entry).values()]


def count_pending(pending_updates: dict[Block, int], entry: Entry) -> None:
    """Counts one more update that is still to be done for each block that it uses."""
    for part in parts_of(entry).values():
        pending_updates[part.block] = pending_updates.get(part.block, 0) + 1


def uncount_pending(pending_updates: dict[Block, int], unit: Unit) -> None:
    """Takes back what `count_pending` has counted for the parameters of a unit."""
    for block in unit.blocks.values():
        pending_updates[block] -= len(unit.entries)
        if not pending_updates[block]:
            del pending_updates[block]


def is_widened(entry: Entry) -> bool:
    """Returns whether a gradient is narrower than what is updated."""
    _, state, grad = entry
    assert grad.value is not None
    return state.master is not None and grad.value.dtype != state.master.dtype


def by_block(work: Work) -> Work:
    """`work` with the parameters of a group next to each other."""
    blocks: dict[Block, Work] = {}
    for entry in work:
        blocks.setdefault(entry[1].slot.own.block, []).append(entry)
    return [entry for entries in blocks.values() for entry in entries]


def group_at(work: Work, index: int) -> list[Entry]:
    """The entries from `index` on, if they are all parameters of a group and nothing of it is still to be made."""
    first = work[index]
    block = first[1].slot.own.block
    if block.parts == 1 or index + block.parts > len(work):
        return []
    entries = work[index : index + block.parts]
    if any(state.slot.own.block is not block or state.fresh for _, state, _ in entries):
        return []
    blocks = [{key: part.block for key, part in parts_of(entry).items()} for entry in entries]
    return entries if all(each == blocks[0] for each in blocks) else []


def ordered(work: Work, order: dict[str, int]) -> Work:
    """`work` in the order in which a forward reads the parameters; those it does not read come last.

    Args:
        work: what is to be updated.
        order: the place of each parameter, by name.
    """
    last = len(order)
    return sorted(work, key=lambda entry: order.get(entry[1].block_name, last))
