"""Functions of other libraries, exchanged for one thread and as long as it takes."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

one_at_a_time = threading.RLock()
"""Held while functions are exchanged."""


@contextmanager
def exchanged(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Exchanges `owner.name` for this thread; other threads go on with the original.

    Args:
        owner: a module or class.
        name: of the function; a plain one or a static method.
        make: makes the other function from the original one.
    """
    original, kept = getattr(owner, name), inspect.getattr_static(owner, name)
    ours = make(original)
    thread = threading.get_ident()

    def either(*args: Any, **kwargs: Any) -> Any:
        return (ours if threading.get_ident() == thread else original)(*args, **kwargs)

    setattr(owner, name, staticmethod(either) if isinstance(kept, staticmethod) else either)
    try:
        yield
    finally:
        setattr(owner, name, kept)
