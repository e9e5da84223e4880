"""Threads of our own, for whose work others wait, and what must not be done in one of them.

The garbage collector runs in whichever thread allocates, and closes what nobody uses any more. Closing waits for what
has begun; in the very thread that is to end it, it would wait for itself.
"""

from __future__ import annotations

import _thread
import logging
import os
import threading
from collections.abc import Callable

from ptm_accel.memory.cores import leave_inherited_cores

logger = logging.getLogger(__name__)

_leaving: set[int] = set()
"""The kernel's numbers of threads of our own that have ended, as long as the kernel still has them: a moment."""


class OwnThread(threading.Thread):
    """A thread that moves or computes what others wait for; no process waits for it at its end.

    Args:
        work: what it does.
        args: what that is given.
        name: of the thread.
        count: how many threads like this one want to run at once.
    """

    def __init__(self, work: Callable[..., object], args: tuple[object, ...], name: str, count: int = 1) -> None:
        super().__init__(target=work, args=args, name=name, daemon=True)
        self._count = count

    def run(self) -> None:
        """Leaves the cores that it has inherited, and works."""
        try:
            leave_inherited_cores(self._count, own_numbers())
        except OSError as error:
            # Others wait for its work; where it runs is a matter of speed.
            logger.warning("%s stays on the cores that it has inherited, which may be slow: %s", self.name, error)
        try:
            super().run()
        finally:
            _leaving.add(threading.get_native_id())


def own_numbers() -> frozenset[int]:
    """The kernel's numbers of all threads of our own that it has."""
    _leaving.difference_update([number for number in list(_leaving) if not _kernel_has(number)])
    own = (thread.native_id for thread in threading.enumerate() if isinstance(thread, OwnThread))
    return frozenset(_leaving).union(number for number in own if number is not None)


def _kernel_has(number: int) -> bool:
    return os.path.exists(f"/proc/self/task/{number}")


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
