"""What ranks do together though one of them may fail: where one does, all raise, and nobody waits for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ptm_accel.distributed.ranks import Ranks
from ptm_accel.errors import DiskError, PTMError

T = TypeVar("T")

_Told = tuple[type[Exception], int | None, str]
"""An error as other ranks are told of it: its class, its number, its text."""


def on_each(ranks: Ranks, what: str, call: Callable[[], T]) -> T:
    """Calls a function on every rank; where it fails on one, all raise.

    Args:
        ranks: the ranks; all of them come here.
        what: each rank has done then, for the message of those that wait for one that hangs.
        call: the function.

    Returns:
        what it has returned here.

    Raises:
        Exception: the one of this rank, or else one that names the first rank that has one.
    """
    error: Exception | None = None
    try:
        found = call()
    except Exception as failed:
        error = failed
    # Whoever hangs is named; `all_of` would only say that somebody is missing.
    ranks.meet(what)
    others = ranks.all_of(None if error is None else _told(error))
    if error is not None:
        raise error
    _raise_first(dict(enumerate(others)))
    return found


def on_first(ranks: Ranks, call: Callable[[], T]) -> T:
    """Calls a function on the first rank; where it fails, all raise.

    Args:
        ranks: the ranks; all of them come here.
        call: the function; what it returns can be pickled.

    Returns:
        what it has returned there.

    Raises:
        Exception: as `on_each`.
    """
    error: Exception | None = None
    found: T | None = None
    if ranks.rank == 0:
        try:
            found = call()
        except Exception as failed:
            error = failed
    failure, found = ranks.told((None if error is None else _told(error), found))
    if error is not None:
        raise error
    _raise_first({0: failure})
    return found


def _told(error: Exception) -> _Told:
    kind: type[Exception] = type(error) if isinstance(error, PTMError) else RuntimeError
    if isinstance(error, OSError):
        kind = DiskError
        return kind, error.errno, error.strerror or str(error)
    return kind, None, str(error) if isinstance(error, PTMError) else f"{type(error).__name__}: {error}"


def _raise_first(told: dict[int, _Told | None]) -> None:
    for rank, each in told.items():
        if each is not None:
            kind, number, text = each
            text = f"rank {rank}: {text}"
            raise kind(text) if number is None else kind(number, text)
