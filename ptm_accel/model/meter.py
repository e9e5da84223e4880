"""What operations take, reckoned from their shapes: time, and memory that lives until its last tensor dies."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop

aten: Any = torch.ops.aten

_NOT_TOUCHED = frozenset(
    {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach}
)
"""Operations that move no bytes."""

_GATHERS = frozenset({aten.embedding, aten.index_select, aten.index, aten.gather})
"""Operations that read as much of their inputs as they give back."""

_BF16_ONLY = frozenset({aten._grouped_mm.default})
"""Operations whose rule for fake tensors takes bf16 only, although their kernels take other types."""


def _grouped_mm_flop(a: torch.Tensor, b: torch.Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Each row is multiplied once; with two matrices the groups are cut out of the inner dimension."""
    return 2 * a.shape[-2] * a.shape[-1] * b.shape[-1] * (a.shape[0] if a.dim() == 3 else 1)


_MORE_FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: sdpa_flop,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: sdpa_backward_flop,
    aten._grouped_mm: _grouped_mm_flop,
}
"""What torch's own table lacks."""


class Meter(TorchDispatchMode):
    """Sees every operation: reckons how long it takes, and follows the storages it makes until they die.

    Args:
        flops_s: floating-point operations per second; None counts arithmetic as free.
        bytes_s: bytes per second that operations read and write; None counts them as free.

    Attributes:
        seconds: what the operations so far take.
        alive_bytes: in storages that live now.
    """

    def __init__(self, flops_s: float | None, bytes_s: float | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seconds = 0.0
        self.alive_bytes = 0
        self._flops_s = flops_s
        self._bytes_s = bytes_s
        self._peak_bytes = 0
        self._known: dict[int, tuple[weakref.ref[Any], int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = _grouped_mm(func, *args, **kwargs) if func in _BF16_ONLY else func(*args, **kwargs)
        self.add(tree_leaves(result))
        if self._flops_s is not None or self._bytes_s is not None:
            self.seconds += self._seconds(func, args, kwargs, result)
        return result

    def add(self, values: Iterable[Any]) -> None:
        """Counts the storages of those `values` that are tensors, as long as they live."""
        for value in values:
            if isinstance(value, torch.Tensor) and storage_key(value) not in self._known:
                self._follow(value, value.untyped_storage().nbytes())
        self._peak_bytes = max(self._peak_bytes, self.alive_bytes)

    def leave_out(self, values: Iterable[torch.Tensor | None]) -> None:
        """Counts the storages of `values` no more: they are on pages, or counted by somebody else."""
        for value in values:
            if value is not None:
                self.alive_bytes -= self._known.pop(storage_key(value), (None, 0))[1]
                self._follow(value, 0)

    def take_peak(self) -> int:
        """The most that was alive since the last call."""
        peak, self._peak_bytes = self._peak_bytes, self.alive_bytes
        return peak

    def _follow(self, tensor: torch.Tensor, nbytes: int) -> None:
        key = storage_key(tensor)

        def died(ref: weakref.ref[Any]) -> None:
            known = self._known.get(key)
            # The same address may be another storage's by now.
            if known is not None and known[0] is ref:
                del self._known[key]
                self.alive_bytes -= known[1]

        self._known[key] = weakref.ref(tensor.untyped_storage(), died), nbytes
        self.alive_bytes += nbytes

    def _seconds(self, func: Any, args: Any, kwargs: Any, result: Any) -> float:
        """The time for the arithmetic or that for the bytes, whichever is longer."""
        packet = func._overloadpacket
        seconds = 0.0
        if self._flops_s is not None:
            formula = flop_registry.get(packet) or _MORE_FLOPS.get(packet)
            if formula is not None:
                seconds = formula(*args, **kwargs, out_val=result) / self._flops_s
        if self._bytes_s is not None and packet not in _NOT_TOUCHED:
            seconds = max(seconds, _touched_bytes(func, args, kwargs, result) / self._bytes_s)
        return seconds


def _grouped_mm(func: Any, a: torch.Tensor, b: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The result's shape, asked for in the only type that torch's rule for fake tensors knows (kernels know more)."""
    out: torch.Tensor = func(a.bfloat16(), b.bfloat16(), *args, **{**kwargs, "out_dtype": None})
    return out.to(kwargs.get("out_dtype") or a.dtype)


def _touched_bytes(func: Any, args: Any, kwargs: Any, result: Any) -> int:
    """What an operation reads and writes."""
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
    made = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    storages = {storage_key(t) for t in given}
    if not func._schema.is_mutable and all(storage_key(t) in storages for t in made):
        return 0  # A view, or a question.
    written = sum(_extent_bytes(t) for t in made)
    reads = (_extent_bytes(t) for t in given)
    if func._overloadpacket in _GATHERS:
        reads = (min(nbytes, written) for nbytes in reads)
    return written + sum(reads)


def storage_key(tensor: torch.Tensor) -> int:
    """Tells a living storage from all others."""
    address: int = tensor.untyped_storage()._cdata
    return address


def _extent_bytes(tensor: torch.Tensor) -> int:
    """What of memory a tensor spans; less than its elements where it is expanded."""
    return min(tensor.numel() * tensor.itemsize, tensor.untyped_storage().nbytes())
