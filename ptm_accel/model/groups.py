"""Groups: parameters that are moved together, with their gradients and optimizer state.

For each role (values, gradients, a master, each state of the optimizer) a group has one block, in which every member
has its part at the same place. PatrickStar's chunks and FSDP2's `FSDPParamGroup` are the same idea.

Of a group that is sharded (ZeRO) these blocks have the ranges of its members that this rank owns. A block of another
layout has the whole members while they are used: it is gathered from all ranks, and never stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ptm_accel.memory.block import PART_ALIGN, Block, Part, Place
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.cut import Cut
from ptm_accel.memory.transfer import Source, round_up

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool


_ALIGN = 64
"""Parts of a block begin at multiples of this many elements, or numbers would depend on where they do."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One member of a sharded group.

    Attributes:
        cut: what this rank owns of it.
        start: its first element in a whole block, where `cut.padded` elements are its.
        own_start: the first of the elements that this rank owns, in a block of those.
    """

    cut: Cut
    start: int
    own_start: int


@dataclass(frozen=True, slots=True)
class Share:
    """The handle of a whole block.

    Attributes:
        own: the block of the values that this rank owns.
        pieces: the members.
    """

    own: Block
    pieces: Sequence[Piece]


class ParamGroup:
    """Parameters of one module, one after another in blocks of the same layout.

    Args:
        name: of the module, or of the only parameter.
        shapes: of the members, in order.
        movable: whether the blocks may leave the compute tier.
        cuts: what this rank owns of each member, if the group is sharded.

    Attributes:
        name, movable: see above.
        shapes: of the members; of a sharded group those of what this rank owns.
        starts: the first element of each member.
        numel: elements of a block.
        pieces: the members of a sharded group; empty for another.
        whole_numel: elements of a whole block of a sharded group.
    """

    def __init__(
        self, name: str, shapes: list[torch.Size], *, movable: bool, cuts: Sequence[Cut] | None = None
    ) -> None:
        self.name = name
        self.shapes = shapes if cuts is None else [torch.Size([cut.length]) for cut in cuts]
        self.movable = movable
        self.starts: list[int] = []
        end = 0
        for shape in self.shapes:
            # What never leaves is never moved in parts.
            self.starts.append(round_up(end, PART_ALIGN if movable else _ALIGN))
            end = self.starts[-1] + shape.numel()
        self.numel = end
        self.pieces: list[Piece] = []
        end = 0
        for cut, own_start in zip(cuts or (), self.starts, strict=cuts is not None):
            self.pieces.append(Piece(cut, end, own_start))
            end = round_up(end + cut.padded, PART_ALIGN)
        self.whole_numel = end
        self._whole: tuple[Block, set[int]] | None = None
        self._blocks: dict[tuple[str, torch.dtype], tuple[Block, set[int]]] = {}

    def part(self, member: int, role: str, tag: Tag, dtype: torch.dtype, pool: Pool, *, fill: float = 0.0) -> Part:
        """A new part for one member: of the newest block of its role and type that has it free, or else of a new block.

        Args:
            member: its number.
            role: what follows the group's name in the block's name.
            tag: what the block is charged as.
            dtype: of the elements.
            pool: where a new block is made.
            fill: what the elements of the part are at first, if nothing of its block has been written.
        """
        block, used = self._blocks.get((role, dtype), (None, set()))
        if block is None or not used or member in used or block.fill != fill:
            shape = self.shapes[0] if len(self.shapes) == 1 else torch.Size([self.numel])
            block = pool.create(f"{self.name}{role}", tag, shape, dtype, fill=fill, movable=self.movable)
            block.parts = len(self.shapes)
            used = set()
            self._blocks[role, dtype] = block, used
        used.add(member)
        return Part(block, self.starts[member], self.shapes[member], member, used)

    def whole_part(self, member: int, shape: torch.Size, own: Block, pool: Pool, backing: Source) -> Part:
        """The part of one member of the block that has whole members.

        Args:
            member: its number.
            shape: of the parameter.
            own: the block of the values that this rank owns.
            pool: where the block is made.
            backing: gathers it.
        """
        if self._whole is None or not self._whole[1] or member in self._whole[1]:
            block = pool.create(
                f"{self.name} (whole)", Tag.PARAM, torch.Size([self.whole_numel]), own.dtype, movable=False
            )
            block.parts = len(self.shapes)
            block.backing, block.handle, block.stored_bytes = backing, Share(own, self.pieces), block.slot_bytes
            block.become(Place.AWAY)
            self._whole = block, set()
        block, used = self._whole
        used.add(member)
        return Part(block, self.pieces[member].start, shape, member, used)

    def rename(self, name: str) -> None:
        """Gives the group, and the block of its values, another name."""
        self.name = name
        for block, _ in self._blocks.values():
            if block.tag is Tag.PARAM:
                block.name = name
