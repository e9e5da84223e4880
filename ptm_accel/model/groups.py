"""Groups: parameters that are moved together, with their gradients and optimizer state.

For each role (values, gradients, a master, each state of the optimizer) a group has one block, in which every member
has its part at the same place. PatrickStar's chunks and FSDP2's `FSDPParamGroup` are the same idea.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ptm_accel.memory.block import PART_ALIGN, Block, Part
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.transfer import round_up

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool


_ALIGN = 64
"""Parts of a block begin at multiples of this many elements, or numbers would depend on where they do."""


class ParamGroup:
    """Parameters of one module, one after another in blocks of the same layout.

    Args:
        name: of the module, or of the only parameter.
        shapes: of the members, in order.
        movable: whether the blocks may leave the compute tier.

    Attributes:
        name, shapes, movable: see above.
        starts: the first element of each member.
        numel: elements of a block.
    """

    def __init__(self, name: str, shapes: list[torch.Size], *, movable: bool) -> None:
        self.name = name
        self.shapes = shapes
        self.movable = movable
        self.starts: list[int] = []
        end = 0
        for shape in shapes:
            # What never leaves is never moved in parts.
            self.starts.append(round_up(end, PART_ALIGN if movable else _ALIGN))
            end = self.starts[-1] + shape.numel()
        self.numel = end
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

    def rename(self, name: str) -> None:
        """Gives the group, and the block of its values, another name."""
        self.name = name
        for block, _ in self._blocks.values():
            if block.tag is Tag.PARAM:
                block.name = name
