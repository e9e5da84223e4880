"""Threads of our own, and what must not be done in one of them.

The garbage collector runs in whichever thread allocates, and closes what is garbage. Closing waits for our threads to
end; a thread of ours that closes would wait for itself.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable


class OwnThread(threading.Thread):
    """A daemon thread that calls `work(*args)`."""

    def __init__(self, work: Callable[..., object], args: tuple[object, ...], name: str) -> None:
        super().__init__(target=work, args=args, name=name, daemon=True)


def do_elsewhere_if_own(step: Callable[[], object]) -> None:
    """Calls `step`; in a thread of our own it leaves that to another thread, and does not wait."""
    if isinstance(threading.current_thread(), OwnThread):
        # Not by `threading`: the collector may have interrupted that module, which has a lock of its own.
        _thread.start_new_thread(step, ())
    else:
        step()
