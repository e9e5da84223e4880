"""Errors of ranks that have diverged: each names what this rank does, and the line of user code."""

from __future__ import annotations

import linecache
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ptm_accel.errors import UnsupportedError

ADVICE = (
    "Every rank has to do the same, in the same order, with parameters that are sharded over ranks: take that line out "
    "of conditions such as `if rank == 0`, do it on all ranks, and use the result on one (`with "
    "ptm_accel.gathered(model): ...`)."
)

_LIBRARY = (sysconfig.get_path("stdlib"), "<frozen")
_OURS = "ptm_accel"


def line() -> str:
    """Returns the innermost line under way that is of no library, for messages; "" if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name, code = frame.f_globals.get("__name__", ""), frame.f_code
        library = "site-packages" in code.co_filename or code.co_filename.startswith(_LIBRARY)
        if not library and name.partition(".")[0] != _OURS:
            text = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return f" (in {Path(code.co_filename).name}:{frame.f_lineno}: {text})"
        frame = frame.f_back
    return ""


@contextmanager
def named(rank: int, what: str) -> Iterator[None]:
    """Names what a rank does in the error of a collective: another one has ended, or has not come.

    Args:
        rank: which one this is.
        what: it does.

    Raises:
        UnsupportedError: with the error of torch.
    """
    try:
        yield
    except RuntimeError as error:
        raise diverged(rank, what, error) from error


def diverged(rank: int, what: str, error: RuntimeError) -> UnsupportedError:
    """Returns the error of a collective that the other ranks have not joined."""
    return UnsupportedError(
        f"rank {rank} {what}{line()}, and the other ranks have not done so: one of them has ended (its own error says "
        f"why), or does something else. {ADVICE} ({error})"
    )
