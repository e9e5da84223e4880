"""Lower-precision copies exactly where autocast would make them, without keeping them.

Under `torch.autocast`, an fp32 parameter read by a lower-precision op (a Linear weight) is cast, the copy is cached
until the outermost autocast region ends, and autograd saves it for backward: together nearly a second model in memory.
Here we make the copy at the same place, on the same autograd node, and free it when the module's forward returns;
backward casts it anew from the parameter. As in autocast, the op decides what is cast, not the parameter.

Autocast's cache has a second effect that must be kept for equal numbers: all uses of a parameter in one region share
one cast node, so their gradients are summed in the lower precision. The cache here keeps that node, and only swaps its
data, until torch clears its own; a region may lie within a forward, or around several. Where torch's cache is off
(`cache_enabled=False`), each use has a cast of its own.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._C import _len_torch_function_stack
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from ptm_accel.memory.block import placeholder
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.dispatch import unkept
from ptm_accel.memory.pool import Pool
from ptm_accel.model.addresses import CastSource, ExtentTable
from ptm_accel.model.away import AwayParameter, is_transformed, slot_of
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot

LOWER_PRECISION_OPS = frozenset(
    {F.linear, torch.addbmm, torch.Tensor.__matmul__, torch.Tensor.__rmatmul__}
    | {getattr(owner, op) for owner in (torch, torch.Tensor) for op in ("matmul", "mm", "bmm", "addmm", "baddbmm")}
    | {getattr(torch, f"{op}{n}d") for op in ("conv", "conv_transpose") for n in (1, 2, 3)}
)
"""Ops that autocast runs in lower precision on every backend (torch docs, "Autocast op reference").

Others (`einsum`, attention in one fused call) reach such an op inside torch; they are cast there, by autocast.
"""


CastKey = tuple[int, torch.dtype]
"""The identity of a parameter, and the dtype it is cast to."""


class _Node:
    """A cast of a parameter that all its uses in an autocast region share.

    Attributes:
        param: the parameter; kept, so that no other parameter gets its identity.
        copy: the tensor that the uses read; holds a placeholder except while a module uses it.
        filled: whether it holds its data.
    """

    __slots__ = ("copy", "filled", "param")

    def __init__(self, param: nn.Parameter, copy: torch.Tensor) -> None:
        self.param = param
        self.copy = copy
        self.filled = False


class _Cached(threading.local):
    """The cast nodes of the autocast region that runs in one thread."""

    def __init__(self, device: torch.device) -> None:
        self.nodes: dict[CastKey, _Node] = {}
        # Nodes that hold memory, by the running module that uses them; the innermost last.
        self.made: list[list[_Node]] = [[]]
        self.single: list[int] = []
        self._device = device
        self._probe: StorageWeakRef | None = None

    def region_goes_on(self) -> bool:
        """Returns whether the outermost autocast region of the last `begin_region` still lasts."""
        return self._probe is not None and not self._probe.expired()

    def begin_region(self) -> None:
        """Puts a probe into torch's cache, which torch clears when the outermost region ends, without a callback."""
        copies: list[StorageWeakRef] = []

        def see(saved: torch.Tensor) -> None:
            copies.append(StorageWeakRef(saved.untyped_storage()))

        # Modes and hooks of users must not see this.
        with _disable_current_modes(), torch._C.DisableTorchFunction(), saved_tensors_hooks(see, lambda saved: saved):
            ours = nn.Parameter(torch.ones(1, 1, device=self._device))
            torch.mm(ours, ours)
        self._probe = copies[0]


class CastCache:
    """Makes, shares and drops cast copies of paged parameters.

    Args:
        pool: where parameters live; the copies are charged to it as `Tag.CAST`.
        slots: the model's parameters.
        table: learns where the copies lie, so that saving one for backward saves a recipe.
    """

    def __init__(self, pool: Pool, slots: SlotTable, table: ExtentTable) -> None:
        self._pool = pool
        self._slots = slots
        self._table = table
        self._cached = _Cached(pool.compute.device)
        # Computed here, outside of users' modes.
        _keeps_gradients()

    def cast(self, tensor: Any, dtype: torch.dtype) -> Any:
        """`tensor`, or its copy in `dtype` if it is fp32 and lies in a paged parameter."""
        if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
            return tensor
        if type(tensor) is AwayParameter:
            # Read by the forward of another module.
            slot = slot_of(tensor)
            assert isinstance(slot, ParamSlot)
            with slot.accesses.values(slot, changes=False):
                return self.cast(tensor, dtype)
        source = self._table.find(tensor)
        if not isinstance(source, ParamSlot):
            return tensor
        # Where autocast's cache is off, each use has its own cast, and gradients are summed in fp32.
        cached = torch.is_autocast_cache_enabled() and not torch.is_inference_mode_enabled()
        if tensor is source.param and tensor.requires_grad and cached:
            if torch.is_grad_enabled():
                return self._shared(source, dtype)
            if _keeps_gradients():
                # `matmul` folds batches, or not, by whether a weight requires gradients, and so do our numbers.
                with torch.enable_grad():
                    return self._shared(source, dtype)
        copy = self._copy(tensor, source, dtype)
        self._cached.single.append(self._table.address(copy))
        return copy

    def enter(self) -> None:
        """Called when a module's forward begins; copies made from now on belong to it."""
        self._cached.made.append([])

    def leave(self) -> None:
        """Called when the module has returned; frees its copies and keeps their nodes."""
        for node in self._cached.made.pop():
            copy, node.filled = node.copy, False
            self._table.remove(copy)
            with unkept() if torch._C._len_torch_dispatch_stack() else nullcontext():
                copy.data = placeholder(copy.shape, copy.dtype, copy.device)

    def end(self) -> None:
        """Called when the outermost forward has returned; forgets nodes unless the autocast region goes on."""
        cached = self._cached
        if not cached.region_goes_on():
            cached.nodes.clear()
        cached.single = self._table.sweep(cached.single)

    def _shared(self, slot: ParamSlot, dtype: torch.dtype) -> torch.Tensor:
        cached = self._cached
        if not cached.region_goes_on():
            # Running modules may still use nodes of the previous region: `made` keeps those.
            cached.nodes.clear()
            cached.begin_region()
        key = (id(slot.param), dtype)
        node = cached.nodes.get(key)
        if node is None:
            node = cached.nodes[key] = _Node(slot.param, self._copy(slot.param, slot, dtype))
        elif not node.filled:
            # Autocast has its own copy still.
            with torch.no_grad(), unkept():
                node.copy.data = self._copy(slot.param, slot, dtype)
        if not node.filled:
            node.filled = True
            cached.made[-1].append(node)
        return node.copy

    def _copy(self, tensor: torch.Tensor, slot: ParamSlot, dtype: torch.dtype) -> torch.Tensor:
        source = CastSource(slot, tensor, dtype)
        with self._pool.admission.charged(tensor.numel() * dtype.itemsize, Tag.CAST, slot.name) as keep:
            copy = tensor.to(dtype)
            keep(copy)
        self._table.add(copy, source)
        return copy


class Casting(TorchFunctionMode):
    """Active while a module that owns parameters runs under autocast."""

    def __init__(self, casts: CastCache, device: torch.device) -> None:
        super().__init__()
        self._casts = casts
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Read for each op: models switch autocast off around parts of their forwards.
        # Tensors under `torch.func` transforms have no storage to look up; autocast casts them itself.
        if func in LOWER_PRECISION_OPS and not is_transformed() and (dtype := autocast_dtype(self._device)) is not None:
            args = tuple(self._casts.cast(a, dtype) for a in args)
            kwargs = {k: self._casts.cast(v, dtype) for k, v in kwargs.items()}
        return func(*args, **kwargs)


class Suspended:
    """Takes a running `Casting` off the stack of function modes until `resume`."""

    def __init__(self, casting: Casting) -> None:
        self._casting = casting
        above = []
        while (mode := _pop_mode()) is not casting:
            above.append(mode)
        self._below = _len_torch_function_stack()
        for mode in reversed(above):
            _push_mode(mode)

    def resume(self) -> None:
        """Puts it back where it was; modes of users that were above it may have ended by now."""
        above = [_pop_mode() for _ in range(_len_torch_function_stack() - self._below)]
        _push_mode(self._casting)
        for mode in reversed(above):
            _push_mode(mode)


@cache
def _keeps_gradients() -> bool:
    """Whether what torch has cast where gradients are off is of use where they are on; older ones did not see to it."""
    ones = torch.ones(1, 1, device="cpu")
    weight = torch.nn.Parameter(ones.clone())
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            F.linear(ones, weight)
        with torch.enable_grad():
            return F.linear(ones, weight).requires_grad


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Returns the lower precision that is in force on `device`, or None outside autocast."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)
