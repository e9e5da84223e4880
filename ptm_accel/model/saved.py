"""Saved-tensor hooks: autograd saves a reference to a parameter, not its bytes.

While a forward runs, and in each torch function on a parameter outside of all forwards, a saved tensor that lies in a
parameter's buffer (or in a cast copy of one) is replaced by a `SavedView`: which parameter, and which view of it.
Unpacking it in backward loads the parameter again. Other tensors go to the hooks that were active before ours
(activation checkpointing, offloading of activations), or are saved as they are: autograd calls the innermost pair of
hooks only. Those other hooks never get a parameter, of which a checkpoint would keep all of a recomputed layer; but for
those of a group, which is in memory as a whole until the backward of its layer has been carried out.

A checkpoint counts what a forward saves, and its recomputation has to save as many tensors, though our hooks may have
been put on or removed since (`ptm_accel.plain_mode`). So a checkpoint's hook is called with each parameter too. What it
returns in the forward is dropped, and then it keeps nothing in the recomputation.

Autograd does not check tensors for in-place changes where there are hooks, so the check is done here, by the same
version counter. A changed parameter is refused under hooks of others too, since a `SavedView` does not keep the old
values; except under activation checkpointing, which computes with the present ones.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ptm_accel.errors import StaleGraphError
from ptm_accel.model.addresses import CastSource, ExtentTable
from ptm_accel.model.away import AwayParameter, bare
from ptm_accel.model.slots import ParamSlot

Hook = Callable[[Any], Any]
"""Packs a tensor into anything, or unpacks it again."""

_AUTOGRAD: Any = torch._C._autograd
_CHECKPOINTING = "torch.utils.checkpoint"
"""Module that defines the hooks of activation checkpointing."""


SavedTensor = tuple[torch.Tensor, int]
"""Any other tensor that backward will need, and its version; no object of ours, of which a pass would make hundreds."""


def look(saved: SavedTensor) -> torch.Tensor:
    """Returns the tensor.

    Raises:
        StaleGraphError: it has been changed in place since.
    """
    tensor, version = saved
    if tensor._version != version:
        raise StaleGraphError(
            f"a tensor of shape {tuple(tensor.shape)} and {tensor.dtype} that backward needs has been modified by an "
            f"inplace operation: it is at version {tensor._version}, and was at version {version} when it was saved. "
            "Use an operation there that is not in place, or change a clone()."
        )
    return tensor


class SavedView:
    """A view of a paged parameter, or of a cast of it, that backward will need.

    Args:
        source: what it is a view of.
        view: the view.
        checked: whether a change in place to it is an error.
    """

    __slots__ = ("_counter", "_lazy", "_version", "dtype", "generation", "offset", "shape", "source", "strides")

    def __init__(self, source: ParamSlot | CastSource, view: torch.Tensor, *, checked: bool) -> None:
        slot = source if isinstance(source, ParamSlot) else source.slot
        self.source = source
        self.shape = view.shape
        self.strides = view.stride()
        self.dtype = view.dtype
        self.offset = source.offset_of(view) if source is slot else view.storage_offset()
        self.generation = slot.generation
        # Lazily conjugated or negated views have the same bytes.
        self._lazy = view.is_conj(), view.is_neg()
        self._counter: torch.Tensor | None = None
        if checked and isinstance(source, CastSource):
            # The copy is made anew from the parameter's values.
            self._counter, self._version = slot.param, source.version
        elif checked:
            # Shares the version counter of the view (`weight.data` has its own) and holds no bytes.
            self._counter, self._version = view.detach(), view._version
            self._counter.data = view.new_empty(0)

    def make(self) -> torch.Tensor:
        """Loads the parameter and makes the view.

        Raises:
            StaleGraphError: the parameter has been updated since, or changed in place.
        """
        source = self.source
        slot = source if isinstance(source, ParamSlot) else source.slot
        task, pool = torch._C._current_graph_task_id(), slot.pool
        begin = time.perf_counter() - pool.stats.elsewhere_s
        if task != -1 and task not in pool.calls.tasks:
            pool.calls.begin_backward(pool)
        if self._counter is not None and self._counter._version != self._version:
            raise StaleGraphError(
                f"parameter {slot.name} of shape {tuple(slot.value.shape)} has been modified by an inplace operation "
                f"between a forward and its backward, which needs it: it is at version {self._counter._version}, and "
                f"was at version {self._version} when it was saved. Change it before the forward or after backward."
            )
        whole = slot.fetch().detach() if isinstance(source, ParamSlot) else source.make()
        # After the load, which runs a pending update.
        if slot.generation != self.generation:
            raise StaleGraphError(
                f"parameter {slot.name} was updated {slot.generation - self.generation} time(s) between a forward and "
                "its backward, so the gradient would be wrong. Call backward before optimizer.step()."
            )
        if whole.dtype != self.dtype:
            whole = whole.view(-1).view(self.dtype)
        view = whole.as_strided(self.shape, self.strides, whole.storage_offset() + self.offset)
        conjugated, negated = self._lazy
        if conjugated:
            view = view.conj()
        if negated:
            view = torch._neg_view(view)
        spent = time.perf_counter() - pool.stats.elsewhere_s - begin
        pool.stats.own_s += spent
        pool.stats.elsewhere_s += spent
        return view


def _is_checkpointing(hook: Hook | None) -> bool:
    return getattr(hook, "__module__", None) == _CHECKPOINTING


class _Pack:
    """Replaces a saved parameter by a `SavedView`, and passes other tensors on."""

    def __init__(self, table: ExtentTable, other: Hook | None) -> None:
        # Weak: graphs may outlive the model.
        self._known = weakref.ref(table)
        self.recomputed: bool = other.recomputed if isinstance(other, _Pack) else _is_checkpointing(other)
        self._other = other

    def covers(self, table: ExtentTable) -> bool:
        """Returns whether parameters in `table` are replaced by this hook, or by one that it passes tensors on to."""
        return self._known() is table or (isinstance(self._other, _Pack) and self._other.covers(table))

    def __call__(self, tensor: torch.Tensor) -> Any:
        packed: Any = None
        other, table, kind, source = self._other, self._known(), type(tensor), None
        if table is None:
            return (tensor.detach(), tensor._version) if other is None else other(tensor)
        stats = table.stats
        begin = time.perf_counter() - stats.elsewhere_s
        if kind is AwayParameter:
            # Saved by a custom autograd function.
            with bare():
                source = table.find(tensor)
        elif (
            kind in table.kinds
            and tensor.layout is torch.strided
            # Most are activations, of which nothing is known.
            and tensor.untyped_storage().data_ptr() in table.addresses
        ):
            source = table.find(tensor)
        if source is not None:
            if self.recomputed and other is not None:
                # To be counted; what comes of it is dropped.
                other(tensor)
            with bare():
                packed = SavedView(source, tensor, checked=not self.recomputed)
        elif other is None:
            # Detached: a node that saves its own output would be a reference cycle.
            packed = tensor.detach(), tensor._version
        spent = time.perf_counter() - stats.elsewhere_s - begin
        stats.own_s += spent
        stats.elsewhere_s += spent
        return packed if packed is not None or other is None else other(tensor)


class _Unpack:
    """The other half of `_Pack`."""

    def __init__(self, other: Hook | None) -> None:
        self._other = other

    def __call__(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, SavedView):
            return packed.make()
        if self._other is not None:
            unpacked: torch.Tensor = self._other(packed)
            return unpacked
        tensor, version = packed
        return tensor if tensor._version == version else look(packed)


CALLED_BY_AUTOGRAD = (_Pack.__call__, _Unpack.__call__)
"""Functions that autograd calls in the middle of user code."""


class SavedTensors:
    """Puts the hooks on.

    Args:
        table: finds the source of a storage.
    """

    def __init__(self, table: ExtentTable) -> None:
        self._table = table

    def cover(self, *, together: bool = False) -> AbstractContextManager[Any] | None:
        """The hooks as a context; None where they are active already, or hooks are disabled.

        Args:
            together: whether the parameters are a group, which stays until the backward of its layer has been carried
                out: then hooks of checkpointing may keep it.
        """
        if not _AUTOGRAD._saved_tensors_hooks_is_enabled():
            return None
        others = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if others is None:
            return saved_tensors_hooks(_Pack(self._table, None), _Unpack(None))
        pack, unpack = others
        if (together and _is_checkpointing(pack)) or (isinstance(pack, _Pack) and pack.covers(self._table)):
            return None
        return saved_tensors_hooks(_Pack(self._table, pack), _Unpack(unpack))

    @property
    def on_top(self) -> bool:
        """Whether our hooks are the innermost, or those of checkpointing, of which a group needs none of ours."""
        hooks = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if hooks is None:
            return False
        return _is_checkpointing(hooks[0]) or (type(hooks[0]) is _Pack and hooks[0].covers(self._table))

    @property
    def checkpointed(self) -> bool:
        """Whether hooks of checkpointing are the innermost: those of a forward, or of its recomputation."""
        hooks = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        return hooks is not None and _is_checkpointing(hooks[0])

    def cover_others(self) -> None:
        """Replaces hooks that user code has put on since by ours around them, before a parameter is used.

        Otherwise they would save the parameter, and find a placeholder in backward. Hooks of checkpointing save nothing
        and need no replacement.
        """
        others = _AUTOGRAD._top_saved_tensors_default_hooks(True)
        if others is None:
            return
        pack, unpack = others
        if (isinstance(pack, _Pack) and pack.covers(self._table)) or _is_checkpointing(pack):
            return
        _AUTOGRAD._pop_saved_tensors_default_hooks()
        _AUTOGRAD._push_saved_tensors_default_hooks(_Pack(self._table, pack), _Unpack(unpack))
