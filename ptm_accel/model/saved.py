"""Autograd saves an address, not bytes.

While a forward runs, a saved tensor that lies in a parameter's extent (or in a cast copy of one) is replaced by a
recipe: which parameter, and which view of it. Unpacking it in backward brings the parameter in again. Everything else
is saved as it is.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ptm_accel.errors import StaleGraphError
from ptm_accel.memory.pool import Pool
from ptm_accel.model.slots import CastSource, ExtentTable, ParamSlot


class SavedView:
    """A view of a paged parameter, or of a cast of it, that backward will need."""

    __slots__ = ("dtype", "generation", "offset", "shape", "source", "strides")

    def __init__(self, source: ParamSlot | CastSource, view: torch.Tensor) -> None:
        slot = source if isinstance(source, ParamSlot) else source.slot
        self.source = source
        self.shape = view.shape
        self.strides = view.stride()
        self.dtype = view.dtype
        self.offset = view.storage_offset()
        self.generation = slot.generation


class SavedTensors:
    """The pack and unpack pair.

    Args:
        pool: where parameters live.
        table: finds the source of a storage.
    """

    def __init__(self, pool: Pool, table: ExtentTable) -> None:
        self.pool = pool
        self._table = table

    def hooks(self) -> AbstractContextManager[Any]:
        """A context in which saved parameters become recipes."""
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: torch.Tensor) -> Any:
        # Subclasses (fake tensors while something is being traced, quantised ones) have no storage to ask for.
        if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
            return tensor
        source = self._table.find(tensor)
        return tensor if source is None else SavedView(source, tensor)

    def _unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, torch.Tensor):
            return packed
        view: SavedView = packed
        source = view.source
        slot = source if isinstance(source, ParamSlot) else source.slot
        if slot.generation != view.generation:
            raise StaleGraphError(
                f"parameter {slot.name} was updated {slot.generation - view.generation} time(s) between a forward and "
                "its backward, so the gradient would be wrong. Call backward before optimizer.step()."
            )
        whole = slot.fetch().detach() if isinstance(source, ParamSlot) else source.make()
        if whole.dtype != view.dtype:
            whole = whole.view(-1).view(view.dtype)
        return whole.as_strided(view.shape, view.strides, view.offset)
