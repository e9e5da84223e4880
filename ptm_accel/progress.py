"""A bar by bytes for what takes long and is no step: saves, comparisons, taking a model off its pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

LEAST_BYTES = 4 << 30
"""Less is done before anybody has read a bar."""


@contextmanager
def progress(what: str, nbytes: int) -> Iterator[Callable[[int], object]]:
    """Shows a bar, where there is much to do and this process is the first of several.

    Args:
        what: is done.
        nbytes: all that is to be moved.

    Yields:
        what is called with the bytes that have been moved since the last call.
    """
    shown = nbytes >= LEAST_BYTES and os.environ.get("RANK", "0") == "0"
    with tqdm(desc=what, total=nbytes, unit="B", unit_scale=True, leave=False, disable=not shown) as bar:
        yield bar.update
