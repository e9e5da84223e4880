"""Values that state dictionaries have been given: copies, of which a write must reach the parameter.

In plain torch the tensors of `state_dict()` are the model's own. Those of a parameter that is away are mapped from its
backing store. Torch counts writes to them, and the model's next use takes over what was written.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.errors import PagedModelError
from ptm_accel.model.slots import ParamSlot


@dataclass(slots=True, eq=False)
class _Given:
    """One value.

    Attributes:
        slot: of its parameter.
        values: until the model's next use, also where nobody else keeps it: what was written is still there.
        counter: an empty tensor with the same version counter.
        version: of the value when it was last the same as the parameter.
        of: what the parameter was then.
    """

    slot: ParamSlot
    values: torch.Tensor | None
    counter: torch.Tensor = field(init=False)
    version: int = field(init=False)
    of: tuple[int, int] = field(init=False)
    _storage: StorageWeakRef = field(init=False)
    _lies: tuple[Any, ...] = field(init=False)

    def __post_init__(self) -> None:
        assert self.values is not None
        self._storage = StorageWeakRef(self.values.untyped_storage())
        self._lies = self.values.storage_offset(), self.values.shape, self.values.stride()
        self.counter = self.values.detach()
        self.counter.data = torch.empty(0, dtype=self.values.dtype)
        self.agree()

    def agree(self) -> None:
        """The value is the same as the parameter."""
        self.version = self.counter._version
        self.of = self.slot.generation, self.slot.writes

    def living(self) -> torch.Tensor | None:
        """Returns the value, if there is still one."""
        if self.values is not None:
            return self.values
        storage: Any = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        if storage is None:
            return None
        made = torch.empty(0, dtype=self.counter.dtype)
        return made.set_(storage, *self._lies)


class GivenValues:
    """Values that state dictionaries of one model have been given.

    Attributes:
        by_slot: the values, by their parameter; empty if there are none, which costs uses of the model nothing.
    """

    def __init__(self) -> None:
        self.by_slot: dict[ParamSlot, list[_Given]] = {}

    def note(self, slot: ParamSlot, values: torch.Tensor) -> None:
        """A state dictionary is given a copy of a parameter's values."""
        given = self.by_slot.setdefault(slot, [])
        # One more, for `model.state_dict()[name].copy_(f(model.state_dict()[name]))`.
        for each in given[:-1]:
            each.values = None
        given.append(_Given(slot, values))

    def take_over_all(self) -> None:
        """Writes to the parameters what was written to the values.

        Raises:
            PagedModelError: a parameter has changed as well.
        """
        if self.by_slot and torch._C._current_graph_task_id() == -1:
            for slot in list(self.by_slot):
                self.take_over(slot)

    def take_over(self, slot: ParamSlot, *, lets_go: bool = True) -> None:
        """Takes over the given values of one parameter.

        Args:
            slot: the parameter.
            lets_go: values that nobody else keeps are dropped.
        """
        for each in list(self.by_slot.get(slot, ())):
            written, values = each.counter._version - each.version, each.living()
            if written:
                # An update of it may be pending.
                slot.fetch()
            if written and (values is None or each.of != (slot.generation, slot.writes)):
                # Said once.
                self._forget(each)
                raise PagedModelError(
                    f"a write to a value of state_dict() cannot reach the model ({written} time(s)): the value is a "
                    f"copy of {slot.name}, which has changed since then, or it was dropped before the model was used "
                    "again. Call `state_dict()` anew before writing, or write to the parameter "
                    "(`param.data.copy_(...)`)."
                )
            if values is None:
                self._forget(each)
            elif written:
                slot.write(values.detach())
                # A master follows.
                slot.changed()
                each.agree()
            if lets_go:
                each.values = None

    def _forget(self, each: _Given) -> None:
        given = self.by_slot[each.slot]
        given.remove(each)
        if not given:
            del self.by_slot[each.slot]
