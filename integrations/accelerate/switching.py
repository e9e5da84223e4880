"""Every `Accelerator` that a script makes is one on pages, where the environment switches them on."""

from __future__ import annotations

from types import ModuleType
from typing import Any

_made: dict[type, type] = {}


def switch_accelerator(module: ModuleType) -> None:
    """Makes `Accelerator(...)` give a `PTMAccelerator`, under all the names that the class may have been imported by.

    Args:
        module: `accelerate.accelerator`.
    """
    stock: type = module.Accelerator

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(_paged(cls, stock))

    stock.__new__ = staticmethod(new)  # type: ignore[assignment]


def _paged(cls: type, stock: type) -> type:
    """The class that is `cls` on pages, under the same name."""
    from .accelerator import PTMAccelerator

    if issubclass(cls, PTMAccelerator):
        return cls
    if cls is stock:
        return PTMAccelerator
    if cls not in _made:
        metaclass: Any = type(cls)
        _made[cls] = metaclass(cls.__name__, (PTMAccelerator, cls), {"__module__": cls.__module__})
    return _made[cls]
