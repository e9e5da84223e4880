"""Hooks on modules that stay behind when a module is copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook on a module of a paged model. A deep copy of the module has one that does nothing, and knows no engine.

    Args:
        call: what it does.
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Does it."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing


def _nothing(*args: Any, **kwargs: Any) -> None:
    """What a copied module has in its place."""
