"""Whether the process that writes something is still alive, told by what it has said of itself.

The number of a process says nothing outside of its PID namespace: a container beside this one has the same numbers. So
host, boot and namespace are told with it, and a process that cannot be looked at from here counts as alive.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDED = ("Z", "X")
"""States of a process that only waits for its parent to take note of its end."""


def told() -> str:
    """What this process says of itself, for `is_dead` in another one."""
    return json.dumps({**_place(), "pid": os.getpid(), "start": _state("self")[1]})


def is_dead(text: str) -> bool:
    """Returns whether a process has ended; False as well where that cannot be told from here.

    Args:
        text: what the process has `told`.
    """
    try:
        there = json.loads(text)
    except (ValueError, RecursionError):
        return False
    place = _place()
    if not isinstance(there, dict) or any(value is None or there.get(key) != value for key, value in place.items()):
        return False
    pid, start = there.get("pid"), there.get("start")
    if not isinstance(pid, int) or not is_running(pid):
        return isinstance(pid, int)
    now = _state(str(pid))[1]
    return None not in (start, now) and start != now


def is_running(pid: int) -> bool:
    """Returns whether there is a process of this number in this PID namespace that has not ended, as a zombie has."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        # It is another user's.
        pass
    return _state(str(pid))[0] not in _ENDED


def _place() -> dict[str, str | None]:
    """Where numbers of processes mean the same: host, boot and PID namespace; None where one is not known."""
    boot = namespace = None
    with suppress(OSError):
        boot = _BOOT_ID.read_text().strip()
    with suppress(OSError):
        namespace = os.readlink("/proc/self/ns/pid")
    return {"host": os.uname().nodename, "boot": boot, "namespace": namespace}


def _state(process: str) -> tuple[str, int | None]:
    """A process's state, and when it was started, in ticks since the boot; empty and None where neither can be read."""
    try:
        if process != "self" and os.readlink("/proc/self") != str(os.getpid()):
            # /proc is of another namespace: its numbers are of other processes.
            return "", None
        fields = Path("/proc", process, "stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", None
    return fields[0], int(fields[19])
