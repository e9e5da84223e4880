"""Writes to parameters that torch does not count: `self.weight.data.clamp_(...)` in a forward.

What is changed in place raises the version of its tensor, and when it leaves it is seen by that what has to be kept. A
write through `.data` does not. So the values are summed before and after, in those modules alone whose code, or that of
whose hooks, names `data` at all.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from functools import cached_property, partial, partialmethod
from types import CodeType
from typing import Any

import torch
from torch import nn

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_PIECE_ELEMENTS = 1 << 20
"""How many elements are summed at a time; each takes sixteen bytes while it is."""
_FACTOR = 6364136223846793005
"""An odd number, with which the sums of earlier pieces are multiplied, so that their order counts."""

_LEFT_OUT = ("torch.", "transformers.modeling_utils", "peft.")
"""Modules whose classes name `data` in other places than forwards."""

_by_class: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


def names_data(module: nn.Module) -> bool:
    """Whether the code of a module's class, or of the hooks that it has by now, reads an attribute called `data`.

    Left out are the classes of torch and peft, and the base of those of transformers: no forward of theirs writes so.
    """
    cls = type(module)
    if cls not in _by_class:
        _by_class[cls] = any(_names_data(function) for function in _functions_of(cls))
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    hooks = [hook for kind in kinds for hook in kind.values()]
    return _by_class[cls] or any(map(_names_data, (*hooks, module.__dict__.get("forward"))))


def _functions_of(cls: type) -> Iterator[Any]:
    for base in cls.__mro__:
        if base is not object and not base.__module__.startswith(_LEFT_OUT):
            yield from vars(base).values()


def _names_data(function: Any) -> bool:
    """As `names_data`, of what can be called, or of a property's getter; with what it wraps."""
    code = _attribute(function, "__code__")
    if isinstance(code, CodeType) and _code_names_data(code):
        return True
    inner = [_attribute(function, name) for name in ("__func__", "__wrapped__", "fget")]
    if isinstance(function, (partial, partialmethod, cached_property)):
        inner.append(function.func)
    if code is None and not isinstance(function, (type, nn.Module)):
        # An object that is called; those of Python's own classes have no code.
        called = type(function).__call__ if callable(function) else None
        inner.append(called if hasattr(called, "__code__") else None)
    return any(_names_data(each) for each in inner if each is not None and each is not function)


def _attribute(of: Any, name: str) -> Any:
    try:
        return getattr(of, name, None)
    except Exception:
        # Attributes of somebody's own, which may do anything: a dictionary that has its entries for attributes.
        return None


def _code_names_data(code: CodeType) -> bool:
    within = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return "data" in code.co_names or any(map(_code_names_data, within))


def checksum(values: torch.Tensor) -> int:
    """A number that changes with any bit of a tensor, and nearly always with the order of its elements.

    Args:
        values: of any shape and dtype. Little more than a piece of them is copied at a time.
    """
    real = torch.view_as_real(values.detach().resolve_conj()) if values.is_complex() else values.detach()
    bits = real.reshape(-1).view(_BITS[real.dtype.itemsize])
    # Times an odd number nothing is lost modulo 2**64.
    weights = 2 * torch.arange(min(_PIECE_ELEMENTS, bits.numel()), device=bits.device) + 1
    sums = [(piece * weights[: piece.numel()]).sum() for piece in bits.split(_PIECE_ELEMENTS)]
    total = 0
    for each in torch.stack(sums).tolist():
        total = (total * _FACTOR + each) % 2**64
    return total
