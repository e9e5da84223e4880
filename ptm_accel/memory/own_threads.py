"""Threads of our own, and what must not be done in one of them.

The garbage collector runs in whichever thread allocates, and closes what nobody uses any more. Closing waits for our
threads to end; a thread of ours that closes would wait for itself.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable


class OwnThread(threading.Thread):
    """A thread that moves or computes what others wait for; no process waits for it at its end.

    Args:
        work: what it does.
        args: what that is given.
        name: of the thread.
    """

    def __init__(self, work: Callable[..., object], args: tuple[object, ...], name: str) -> None:
        super().__init__(target=work, args=args, name=name, daemon=True)


def do_elsewhere_if_own(step: Callable[[], object]) -> None:
    """Does at once what may wait; in a thread of our own it has another thread do it, and does not wait for that.

    Args:
        step: what is to be done.
    """
    if isinstance(threading.current_thread(), OwnThread):
        # Not by `threading`: the collector may have come in the middle of that, which has a lock of its own.
        _thread.start_new_thread(step, ())
    else:
        step()
