"""State dictionaries of a paged model hold real values, without loading them into the compute tier.

A hook on each module replaces the placeholders in its state dictionary by snapshots: live aliases of what is resident
and stays, private mappings of what is elsewhere. So `save_pretrained` costs no memory beyond the budgets.
`load_state_dict` needs no hook: it copies into one parameter after the other.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ptm_accel.memory.block import alone
from ptm_accel.memory.calls import Call
from ptm_accel.model.hooks import Hook
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor


class StateDictHooks:
    """Hooks that make `state_dict` of a paged model right.

    Args:
        executor: serves accesses.
        slots: the model's parameters.

    Attributes:
        given: called after a module's values have been put into a state dictionary.
        modules: the modules that have the hooks.
    """

    def __init__(self, executor: Executor, slots: SlotTable) -> None:
        self._executor = executor
        self._pool = executor.pool
        self._slots = slots
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._handles: list[RemovableHandle] = []
        self._tied: dict[int, Callable[[], torch.Tensor | None]] = {}
        """The last snapshot of each parameter that has several names."""
        self._filling = True
        self._sharded_as: Callable[[ParamSlot], torch.Tensor] | None = None
        self.given: Callable[[], None] = _nothing

    def install(self, model: nn.Module) -> None:
        """Puts the hooks on every module that owns parameters."""
        names = Counter(id(slot) for slot in self._slots.by_name.values())
        self._tied = {number: _nothing for number, count in names.items() if count > 1}
        for module in model.modules():
            if module._parameters:
                self.modules.add(module)
                self._handles.append(module.register_state_dict_post_hook(Hook(self._fill, self._pool.stats)))

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.modules.clear()

    @contextmanager
    def names_only(self) -> Iterator[None]:
        """A context in which state dictionaries hold meta tensors, for code that reads names, shapes and dtypes."""
        before, self._filling = self._filling, False
        try:
            yield
        finally:
            self._filling = before

    @contextmanager
    def sharded_as(self, make: Callable[[ParamSlot], torch.Tensor]) -> Iterator[None]:
        """A context in which state dictionaries hold something else for parameters that are sharded over ranks.

        Args:
            make: returns it, of the same shape and dtype; called once for each parameter.
        """
        made: dict[ParamSlot, torch.Tensor] = {}

        def once(slot: ParamSlot) -> torch.Tensor:
            if slot not in made:
                made[slot] = make(slot)
            return made[slot]

        before, self._sharded_as = self._sharded_as, once
        try:
            yield
        finally:
            self._sharded_as = before

    @property
    def hooks(self) -> tuple[RemovableHandle, ...]:
        """Hooks on the model's modules."""
        return tuple(self._handles)

    def _fill(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        # The values are used outside of inference mode, too.
        with self._pool.calls.during(Call.ACCESS, self._pool), torch.inference_mode(False):
            self._put_values(module, state_dict, prefix)
            if self._filling:
                # Last: a pending update that the snapshot waits for may fail.
                self.given()

    def _put_values(self, module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
        for name, param in module._parameters.items():
            key = prefix + name
            slot = self._slots.of(param)
            if slot is None or key not in state_dict:
                continue
            if self._filling and slot.sharded and self._sharded_as is not None:
                state_dict[key] = self._sharded_as(slot)
            elif self._filling:
                state_dict[key] = self._snapshot(slot, state_dict)
            else:
                state_dict[key] = torch.empty(slot.value.shape, dtype=slot.value.dtype, device="meta")

    def _snapshot(self, slot: ParamSlot, state_dict: dict[str, Any]) -> torch.Tensor:
        """The values of one parameter; a tied parameter has the same tensor under all names, as savers expect."""
        known = self._tied.get(id(slot))
        given = known() if known is not None else None
        if given is not None and any(value is given for value in state_dict.values()):
            return given
        self._slots.given.take_over(slot, lets_go=False)
        values = alone(self._executor.snapshot(slot.value))
        if slot.value.block.extent is not None and values.data_ptr() == slot.address:
            # A write to it is a write to the model, as in plain torch.
            slot.changed()
        else:
            self._slots.given.note(slot, values)
        if known is not None:
            self._tied[id(slot)] = weakref.ref(values)
        return values


def _nothing() -> None:
    """A dead reference, and a callback that does nothing."""
