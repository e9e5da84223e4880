"""Groups of parameters that are moved together: those of one repeated block of the model, such as a decoder layer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ptm_accel.memory.block import PART_ALIGN
from ptm_accel.memory.cut import Cut, can_be_cut
from ptm_accel.memory.transfer import round_up
from ptm_accel.model.groups import ParamGroup
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot

ONE_KERNEL = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules that torch may compute by one kernel where no gradients are wanted (its fast path), from all parameters under
them at once."""

MOST_GROUP_BYTES = 256 << 20
"""Most bytes that the values of a group take (PatrickStar: larger chunks gain nothing more on the link)."""

_OF_BUDGET = 16
"""A group takes at most this part of the budget, so that some fit beside one another while others are on their way."""


def group_sizes(capacity_bytes: int) -> tuple[int, ...]:
    """Returns the largest groups to be tried for a budget of the compute tier, in bytes."""
    most = min(MOST_GROUP_BYTES, capacity_bytes // _OF_BUDGET)
    return most, most // 4


@dataclass(frozen=True, slots=True)
class Sharding:
    """The ranks that parameters are sharded over.

    Attributes:
        rank: which one this is.
        count: how many there are.
    """

    rank: int
    count: int

    def cut(self, param: torch.Tensor) -> Cut:
        """Returns the range of a parameter that this rank owns."""
        return Cut(param.numel(), self.count, self.rank)


def _moves(param: torch.Tensor, small: int, sharding: Sharding | None) -> bool:
    """Whether a parameter may leave the compute tier; one that cannot be cut is on every rank as a whole."""
    large = param.numel() * param.dtype.itemsize >= small
    return large and (sharding is None or can_be_cut(param.numel(), sharding.count))


def _group(name: str, params: Sequence[torch.Tensor], small: int, sharding: Sharding | None) -> ParamGroup:
    moves = _moves(params[0], small, sharding)
    cuts = [sharding.cut(param) for param in params] if moves and sharding is not None else None
    return ParamGroup(name, [param.shape for param in params], movable=moves, cuts=cuts)


def group_of(name: str, like: torch.Tensor, *, small: int, sharding: Sharding | None = None) -> ParamGroup:
    """Returns a group of one parameter like `like`; one of less than `small` bytes never leaves the compute tier."""
    return _group(name, [like], small, sharding)


def groups_of(
    model: nn.Module,
    params: Sequence[nn.Parameter],
    *,
    small: int,
    group_bytes: int,
    sharding: Sharding | None = None,
) -> dict[nn.Parameter, tuple[ParamGroup, int]]:
    """Divides parameters into groups.

    A group has parameters of one repeated block, of one dtype, all trained or all frozen, all small or none. What is
    large, shared by several blocks, or outside of them is a group of its own.

    Args:
        model: the model.
        params: parameters of it.
        small: parameters below this many bytes never leave the compute tier.
        group_bytes: the most that the values of a group of several parameters take.
        sharding: the ranks that they are sharded over, if they are.

    Returns:
        the group and the number within it, by parameter.
    """
    blocks = _blocks_of(model)
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    together: dict[Any, list[nn.Parameter]] = {}
    for param in params:
        # Ranks may use different experts of one layer, and all gather the same blocks: the outermost block counts.
        found = {_block(name, blocks, outermost=sharding is not None) for name in names[param]}
        single = len(found) > 1 or None in found
        moves = _moves(param, small, sharding)
        key = (id(param),) if single else (found.pop(), param.dtype, param.requires_grad, moves)
        together.setdefault(key, []).append(param)
    made: dict[nn.Parameter, tuple[ParamGroup, int]] = {}
    count: Counter[str] = Counter()
    for (block, *_), members in together.items():
        for part in _cut(members, group_bytes):
            if len(part) == 1:
                made[part[0]] = _group(names[part[0]][0], part, small, sharding), 0
                continue
            count[block] += 1
            name = f"{block}[{count[block]}]"
            group = _group(name, part, small, sharding)
            made |= {param: (group, member) for member, param in enumerate(part)}
    return made


def owned_by(module: nn.Module, slots: SlotTable) -> list[ParamSlot]:
    """Returns the parameters under a module whose movable ones are a group of several; none for another module."""
    found = [slot for param in module.parameters() if (slot := slots.of(param)) is not None]
    moved = [slot for slot in found if slot.group.movable]
    blocks = {slot.value.block for slot in moved}
    return found if len(blocks) == 1 and len(moved) == blocks.pop().parts > 1 else []


def _blocks_of(model: nn.Module) -> set[str]:
    """The paths of the repeated blocks: modules in a list, or in a sequence where there is no list around them."""
    lists = {name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    sequences = {name for name, module in model.named_modules() if isinstance(module, nn.Sequential)}
    blocks = set()
    for name, _ in model.named_modules():
        parent = name.rpartition(".")[0]
        within = any(name.startswith(f"{other}.") for other in lists)
        if name and (parent in lists or (parent in sequences and not within)):
            blocks.add(name)
    return blocks


def _block(name: str, blocks: set[str], *, outermost: bool) -> str | None:
    """Returns the innermost, or the outermost, block that a parameter belongs to."""
    path, found = name.rpartition(".")[0], None
    while path and (outermost or found is None):
        found = path if path in blocks else found
        path = path.rpartition(".")[0]
    return found


def _cut(members: list[nn.Parameter], group_bytes: int) -> list[list[nn.Parameter]]:
    """Parts of a block's parameters of at most `group_bytes` each."""
    parts: list[list[nn.Parameter]] = []
    held = 0
    for param in members:
        nbytes = round_up(param.numel(), PART_ALIGN) * param.dtype.itemsize
        if not parts or held + nbytes > group_bytes:
            parts.append([])
            held = 0
        parts[-1].append(param)
        held += nbytes
    return parts
