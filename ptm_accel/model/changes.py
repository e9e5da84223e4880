"""Changes of a model since it was put on pages: wrapped, given adapters or another head, resized, merged."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.transfer import Source
from ptm_accel.model.addresses import ExtentTable
from ptm_accel.model.attach import take_parameters
from ptm_accel.model.grouping import Sharding
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor

Outline = tuple[tuple[str, int, torch.Size, torch.dtype], ...]
"""The parameters of a model under all their names, in order: name, identity, shape, type."""


def outline(model: nn.Module) -> Outline:
    """Describes a model as it is now; between equal outlines nothing has to be done."""
    named = model.named_parameters(remove_duplicate=False)
    return tuple((name, id(param), param.shape, param.dtype) for name, param in named)


@dataclass(frozen=True, slots=True)
class Changes:
    """Work to be done about a model that has changed.

    Attributes:
        slots: its parameters, in its order and under all their names; those that are new have blank pages.
        new: the slots of parameters that were not on pages before.
        gone: the slots of parameters that it no longer has.
    """

    slots: SlotTable
    new: list[ParamSlot]
    gone: list[ParamSlot]


def changes_of(
    model: nn.Module,
    known: SlotTable,
    executor: Executor,
    table: ExtentTable,
    *,
    small: int,
    group_bytes: int = 0,
    sharding: Sharding | None = None,
    backing: Source | None = None,
) -> Changes:
    """Compares a model with what is on pages; changes neither.

    Args:
        model: the model, or what wraps or replaces it now.
        known: the parameters that are on pages.
        executor: serves accesses.
        table: for new slots.
        small: parameters below this many bytes never leave the compute tier.
        group_bytes: the most that the values of a group of several new parameters take.
        sharding: the ranks that new parameters are sharded over, if they are.
        backing: gathers them then.
    """
    slots = SlotTable()
    sizes = {"small": small, "group_bytes": group_bytes}
    new = take_parameters(
        model, executor, slots, table, **sizes, paged={}, known=known, sharding=sharding, backing=backing
    )
    return Changes(slots, new, [slot for slot in known if slots.of(slot.param) is None])


def refuse_changes(changes: Changes, model: nn.Module, before: nn.Module, other: nn.Module | None) -> None:
    """Refuses what a model on pages cannot become.

    Args:
        changes: what is to be done.
        model: what it is to become.
        before: the model as it was put on pages.
        other: another model on pages, of which `model` has parts.

    Raises:
        UnsupportedError: `model` has parts of two models on pages, or is only a part of one.
    """
    kind, before_kind = type(model).__name__, type(before).__name__
    if other is not None:
        raise UnsupportedError(
            f"parts of this {kind} are on pages of two models ({before_kind} and {type(other).__name__}). Call "
            "`engine_of(...).detach()` for one of them first."
        )
    there = {id(param) for param in before.parameters()}
    left = [slot.name for slot in changes.gone if id(slot.param) in there]
    if model is not before and left:
        raise UnsupportedError(
            f"this {kind} is a part of a {before_kind} that is on pages and has {len(left)} more parameters, such as "
            f"{left[0]}. Pass that model, or call `engine_of(...).detach()` first."
        )
