"""Adapter for accelerate: an `Accelerator` that puts models on pages, and the flags of `accelerate launch`.

Names are imported on first use: `launching` is needed while accelerate itself is being imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .accelerator import PagedAcceleratedOptimizer, PagedGradScaler, PTMAccelerator

__all__ = ["PTMAccelerator", "PagedAcceleratedOptimizer", "PagedGradScaler"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(".accelerator", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
