"""State dictionaries of a paged model hold real values, and loading one writes to pages.

`nn.Module.state_dict` reads `_parameters.items()`, which gives placeholders; a hook on each module replaces them by
snapshots: live aliases of what is resident, private mappings of what is on disk. So `save_pretrained` and everything
else downstream of `state_dict` works unchanged and costs no memory beyond the budgets.
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

from ptm_accel.memory.pin import Pin
from ptm_accel.memory.pool import Pool
from ptm_accel.model.hooks import Hook
from ptm_accel.model.residency import Residency
from ptm_accel.model.slots import ParamSlot, SlotTable


class StateDictHooks:
    """The hooks that make `state_dict` and `load_state_dict` of a paged model right.

    Args:
        pool: where the parameters live.
        slots: the model's parameters.
        residency: told that loading writes.
    """

    def __init__(self, pool: Pool, slots: SlotTable, residency: Residency) -> None:
        self._pool = pool
        self._slots = slots
        self._residency = residency
        self._handles: list[RemovableHandle] = []
        self._covered: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]] = weakref.WeakKeyDictionary()
        residency.covered = self._cover
        self._tied: dict[int, Callable[[], torch.Tensor | None]] = {}
        """What was given last for each parameter that has several names; no more than a memory of it."""
        self._loading: dict[int, list[Pin]] = {}
        self._filling = True
        self.loaded: Callable[[], None] = _nothing
        """Called when parameters have been loaded into."""
        self.given: Callable[[], None] = _nothing
        """Called when values of parameters have been given."""

    def install(self, model: nn.Module) -> None:
        """Puts the hooks on every module that owns parameters."""
        names = Counter(id(slot) for slot in self._slots.by_name.values())
        self._tied = {number: _nothing for number, count in names.items() if count > 1}
        for module in model.modules():
            if module._parameters:
                self._handles += self._hook(module)

    def _hook(self, module: nn.Module) -> list[RemovableHandle]:
        return [
            module.register_state_dict_post_hook(self._fill()),
            module.register_load_state_dict_pre_hook(self._begin_load()),
            module.register_load_state_dict_post_hook(self._end_load()),
        ]

    def _cover(self, module: nn.Module) -> None:
        """As `install`, of one more module, which has parameters that others have too."""
        self._covered[module] = self._hook(module)

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self.hooks:
            handle.remove()
        self._handles.clear()
        self._covered.clear()

    def abort(self) -> None:
        """Ends a `load_state_dict` that an exception has torn down in the middle."""
        for pins in self._loading.values():
            for pin in pins:
                pin.release()
        self._loading.clear()

    @contextmanager
    def names_only(self) -> Iterator[None]:
        """While it lasts, state dictionaries have no values: for code that only wants names, shapes and dtypes.

        They hold no views of what is resident either, which would keep it from moving away.
        """
        before, self._filling = self._filling, False
        try:
            yield
        finally:
            self._filling = before

    @property
    def hooks(self) -> tuple[RemovableHandle, ...]:
        """The hooks that are on the model's modules."""
        return (*self._handles, *(handle for handles in self._covered.values() for handle in handles))

    def _fill(self) -> Callable[..., None]:
        def fill(module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
            for name, param in dict.items(module._parameters):
                key = prefix + name
                slot = self._slots.of(param)
                if slot is None or key not in state_dict:
                    continue
                if self._filling:
                    state_dict[key] = self._snapshot(slot, state_dict)
                else:
                    state_dict[key] = torch.empty(slot.value.shape, dtype=slot.value.dtype, device="meta")
            if self._filling:
                # Not before: an update that is waited for here may fail.
                self.given()

        return Hook(fill)

    def _snapshot(self, slot: ParamSlot, state_dict: dict[str, Any]) -> torch.Tensor:
        """The values of one parameter; under all names of a tied one, the same tensor, by which savers know it is."""
        # It may have come to have several names.
        known = self._tied.get(id(slot), _nothing if self._covered else None)
        given = known() if known is not None else None
        if given is not None and any(value is given for value in state_dict.values()):
            return given
        slot.meet()
        values = _alone(self._pool.snapshot(slot.value))
        if known is not None:
            self._tied[id(slot)] = weakref.ref(values)
        return values

    def _begin_load(self) -> Callable[..., None]:
        def begin(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
            pins = self._loading.setdefault(id(module), [])
            # A hook of somebody else's after this one may give the tensors other names.
            hooks = [getattr(hook, "hook", hook) for hook in module._load_state_dict_pre_hooks.values()]
            renamed = not all(isinstance(hook, Hook) for hook in hooks)
            for name, param in dict.items(module._parameters):
                slot = self._slots.of(param)
                if slot is not None and (renamed or prefix + name in state_dict):
                    slot.meet()
                    pins.append(self._pool.pin(slot.value, write=True))

        return Hook(begin)

    def _end_load(self) -> Callable[..., None]:
        def end(module: nn.Module, incompatible_keys: Any) -> None:
            pins = self._loading.pop(id(module), [])
            for pin in pins:
                pin.release()
            if pins:
                self.loaded()

        return Hook(end)


def _nothing() -> None:
    """Stands for a reference that has died, and for nobody to tell."""


def _alone(values: torch.Tensor) -> torch.Tensor:
    """The same bytes as a storage that ends where they end: safetensors takes others for pieces of something larger."""
    if values.untyped_storage().nbytes() == values.nbytes or not values.is_contiguous():
        return values
    alone: torch.Tensor = torch.utils.dlpack.from_dlpack(values)
    return alone
