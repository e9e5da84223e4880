"""All parameters of a model on pages, by identity and by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from ptm_accel.memory.block import Block
from ptm_accel.model.given_values import GivenValues
from ptm_accel.model.slots import ParamSlot


class SlotTable:
    """All slots of one model, by parameter identity and by name (every name a tied parameter has).

    Attributes:
        by_name: see above.
        given: copies of their values in state dictionaries.
    """

    def __init__(self) -> None:
        self.given = GivenValues()
        self._by_id: dict[int, ParamSlot] = {}
        self.by_name: dict[str, ParamSlot] = {}

    def put(self, name: str, slot: ParamSlot) -> None:
        """Adds a slot under its parameter and one of its names."""
        self._by_id[id(slot.param)] = slot
        self.by_name[name] = slot

    def become(self, other: SlotTable) -> None:
        """Takes over the slots of another table, their order and their names."""
        self._by_id = dict(other._by_id)
        self.by_name = dict(other.by_name)
        for name, slot in reversed(self.by_name.items()):
            slot.name = name
            if slot.group_part.alone:
                slot.group.rename(name)

    def remove(self, slot: ParamSlot) -> None:
        """Forgets a slot whose parameter has left the model."""
        self._by_id.pop(id(slot.param), None)
        for name in [n for n, s in self.by_name.items() if s is slot]:
            del self.by_name[name]

    def replace(self, params: dict[nn.Parameter, nn.Parameter]) -> None:
        """Gives slots another parameter object each; their order stays."""
        for slot in self._by_id.values():
            slot.param = params.get(slot.param, slot.param)
        self._by_id = {id(slot.param): slot for slot in self._by_id.values()}

    def of(self, param: torch.Tensor | None) -> ParamSlot | None:
        """The slot of a parameter, or None if it is not on pages."""
        slot = self._by_id.get(id(param))
        return slot if slot is not None and slot.param is param else None

    def blocks(self) -> list[Block]:
        """The blocks of all values, each once, in order."""
        return list(dict.fromkeys(slot.value.block for slot in self))

    def __iter__(self) -> Iterator[ParamSlot]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)
