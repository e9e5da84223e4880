"""Raising errors that were kept for later."""

from __future__ import annotations


def raise_first(kept: list[BaseException]) -> None:
    """Raises the first of some errors, if there is any, and empties the list.

    What is raised refers to the frames that it passes, and so to all that they hold: pages, and views of them. Were it
    known by a name or in a list there, that would be a cycle, and their memory in use until the collector comes by.

    Args:
        kept: the errors; known to nobody else.

    Raises:
        BaseException: the first of them.
    """
    if not kept:
        return
    error = kept[0]
    kept.clear()
    try:
        raise error
    finally:
        del error
