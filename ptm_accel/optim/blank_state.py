"""Optimizers that make their state as they are constructed (Adagrad), over parameters that do not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.overrides import TorchFunctionMode

from ptm_accel.model.slots import SlotTable


class _BlankState(TorchFunctionMode):
    """Gives optimizer constructors constant state without memory: `full_like(param)` becomes an expanded scalar."""

    _FILLS: ClassVar[dict[Any, float]] = {torch.zeros_like: 0.0, torch.ones_like: 1.0}

    def __init__(self, slots: SlotTable) -> None:
        super().__init__()
        self._slots = slots

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.zeros_like, torch.ones_like, torch.full_like) and self._slots.of(args[0]) is not None:
            fill = self._FILLS.get(func)
            if fill is None:
                fill = args[1] if len(args) > 1 else kwargs["fill_value"]
            param = args[0]
            dtype = kwargs.get("dtype") or param.dtype
            return torch.full((1,) * param.dim(), fill, dtype=dtype, device=param.device).expand(param.shape)
        return func(*args, **kwargs)


@contextmanager
def blank_state(slots: SlotTable) -> Iterator[None]:
    """Within it, optimizers may be constructed over paged parameters without allocating full-size state (Adagrad)."""
    with _BlankState(slots):
        yield
