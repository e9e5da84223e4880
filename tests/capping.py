"""Runs a command in a process group whose memory the kernel caps, page cache included.

A child of the caller's own cgroup-v1 memory group where that can be made (root, v1 hierarchy); it is removed
afterwards. Over the cap the process is killed with SIGKILL. Elsewhere nothing is capped and `available()` says why not.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MOUNT = Path("/sys/fs/cgroup/memory")


@dataclass(frozen=True)
class Capped:
    """How a capped command ended.

    Attributes:
        returncode: its exit status; -9 when the kernel killed it.
        peak_bytes: the most memory its group was charged, page cache included.
        kills: how often the kernel killed in the group.
        stdout: what it printed.
        stderr: what it complained about.
    """

    returncode: int
    peak_bytes: int
    kills: int
    stdout: str
    stderr: str


def _own_group() -> Path | None:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            return _MOUNT / path.lstrip("/")
    return None


def available() -> str | None:
    """None if commands can be capped here, else the reason why not."""
    group = _own_group()
    if group is None or not (group / "memory.limit_in_bytes").exists():
        return "no cgroup-v1 memory hierarchy"
    probe = group / f"ptm_probe_{os.getpid()}"
    try:
        probe.mkdir()
    except OSError as error:
        return f"cannot make a memory group: {error.strerror}"
    probe.rmdir()
    return None


@contextmanager
def memory_group(limit_bytes: int) -> Iterator[Path]:
    """A memory group under a cap, for processes that join it."""
    own = _own_group()
    assert own is not None, "check available() first"
    group = own / f"ptm_cap_{os.getpid()}_{time.monotonic_ns()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit_bytes))
        yield group
    finally:
        _remove(group)


def kills(group: Path) -> int:
    """How often the kernel killed in a memory group."""
    lines = (group / "memory.oom_control").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))


def run_capped(limit_bytes: int, command: Sequence[str], *, env: dict[str, str], timeout_s: float) -> Capped:
    """Runs `command` under a cap of `limit_bytes`."""
    with memory_group(limit_bytes) as group:

        def join() -> None:
            (group / "cgroup.procs").write_text("0")

        done = subprocess.run(
            command, env=env, timeout=timeout_s, capture_output=True, text=True, preexec_fn=join, check=False
        )
        peak = int((group / "memory.max_usage_in_bytes").read_text())
        return Capped(done.returncode, peak, kills(group), done.stdout, done.stderr)


def _remove(group: Path) -> None:
    for _ in range(20):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.2)
    raise AssertionError(f"{group} could not be removed")
