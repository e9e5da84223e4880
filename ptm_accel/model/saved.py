"""Autograd saves an address, not bytes.

While a forward runs, a saved tensor that lies in a parameter's extent (or in a cast copy of one) is replaced by a
recipe: which parameter, and which view of it. Unpacking it in backward brings the parameter in again. Everything else
is saved as it would have been: by the hooks of whoever put some on before us (activation checkpointing, offloading of
activations to the CPU), or as it is. Autograd calls the innermost pair of hooks only, so ours hand on to theirs. Those
never see a parameter: a checkpoint would otherwise keep all parameters of a recomputed layer alive at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ptm_accel.errors import StaleGraphError
from ptm_accel.model.slots import CastSource, ExtentTable, ParamSlot

Hook = Callable[[Any], Any]
"""Packs a tensor into anything, or unpacks it again."""


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

    def make(self) -> torch.Tensor:
        """The view, with the parameter brought in.

        Raises:
            StaleGraphError: the parameter has been updated since.
        """
        source = self.source
        slot = source if isinstance(source, ParamSlot) else source.slot
        if slot.generation != self.generation:
            raise StaleGraphError(
                f"parameter {slot.name} was updated {slot.generation - self.generation} time(s) between a forward and "
                "its backward, so the gradient would be wrong. Call backward before optimizer.step()."
            )
        whole = slot.fetch().detach() if isinstance(source, ParamSlot) else source.make()
        if whole.dtype != self.dtype:
            whole = whole.view(-1).view(self.dtype)
        return whole.as_strided(self.shape, self.strides, self.offset)


class _Pack:
    """Replaces a saved parameter by its recipe, and hands everything else on."""

    def __init__(self, table: ExtentTable, other: Hook | None) -> None:
        self.table = table
        self._other = other

    def __call__(self, tensor: torch.Tensor) -> Any:
        if type(tensor) in self.table.kinds:
            source = self.table.find(tensor)
            if source is not None:
                return SavedView(source, tensor)
        # Detached: what is returned is kept by the node that saves it, and may be an output of that very node. That
        # would be a circle which nothing breaks if no backward comes.
        return tensor.detach() if self._other is None else self._other(tensor)


class _Unpack:
    """The other half of `_Pack`."""

    def __init__(self, other: Hook | None) -> None:
        self._other = other

    def __call__(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedView):
            return packed.make()
        unpacked: torch.Tensor = packed if self._other is None else self._other(packed)
        return unpacked


CALLED_BY_AUTOGRAD = (_Pack.__call__, _Unpack.__call__)
"""The functions that autograd calls in the middle of somebody's code."""


class SavedTensors:
    """Puts the hooks on.

    Args:
        table: finds the source of a storage.
    """

    def __init__(self, table: ExtentTable) -> None:
        self._table = table

    def cover(self) -> AbstractContextManager[Any] | None:
        """A context in which saved parameters become recipes; None where they already do, or where hooks are off."""
        autograd: Any = torch._C._autograd
        if not autograd._saved_tensors_hooks_is_enabled():
            return None
        others = autograd._top_saved_tensors_default_hooks(True)
        if others is None:
            return saved_tensors_hooks(_Pack(self._table, None), _Unpack(None))
        pack, unpack = others
        if isinstance(pack, _Pack) and pack.table is self._table:
            return None
        return saved_tensors_hooks(_Pack(self._table, pack), _Unpack(unpack))
