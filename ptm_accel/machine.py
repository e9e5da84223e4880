"""Memory that this machine lets the process use: the least of physical memory and every cgroup limit above it.

`psutil` reports the host even inside a container, where the kernel kills at the cgroup's limit. So the limits of the
process's own control group and of each of its ancestors are read too, for cgroup v1 and v2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROC_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The most host memory this process may use.

    Attributes:
        bytes: the limit.
        origin: what sets it: `"cgroup v1 limit"`, `"cgroup v2 limit"` or `"physical memory"`.
    """

    bytes: int
    origin: str


_FILES = {
    "v1": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    "v2": ("memory.max", "memory.current", ""),
}
"""Of each cgroup version: the files of a group's limit and use, and what the names in its statistics begin with."""


def host_limit() -> MemoryLimit:
    """Returns the least of physical memory and the limits of all control groups the process is in."""
    physical = MemoryLimit(psutil.virtual_memory().total, "physical memory")
    return min([physical, *(limit for limit, _ in _limits())], key=lambda limit: limit.bytes)


def available_bytes() -> int:
    """Bytes of host memory that can still be taken without swapping or being killed; never negative.

    The least, over the machine and every limiting control group, of its limit less what is used there. Page cache
    that the kernel can drop counts as free.
    """
    free = [int(psutil.virtual_memory().available), *(limit.bytes - used for limit, used in _limits())]
    return max(0, min(free))


def _limits() -> Iterator[tuple[MemoryLimit, int]]:
    """Yields the limit of every memory group of the process that has one, and the bytes that are used of it."""
    for version, folder in _groups():
        limit_file, usage_file, prefix = _FILES[version]
        stat = _read_stat(folder)
        # Version 1 also tells the least limit of all ancestors, those outside of our mount included.
        found = (_read_int(folder / limit_file), stat.get("hierarchical_memory_limit"))
        limits = [limit for limit in found if limit is not None]
        if limits:
            cached = sum(stat.get(f"{prefix}{name}", 0) for name in ("active_file", "inactive_file"))
            used = max(0, (_read_int(folder / usage_file) or 0) - cached)
            yield MemoryLimit(min(limits), f"cgroup {version} limit"), used


def _groups() -> Iterator[tuple[str, Path]]:
    """Yields the process's memory groups with all their ancestors, from the own one upward, of both cgroup versions."""
    try:
        lines = PROC_CGROUP.read_text().splitlines()
    except OSError:
        # No control groups here (another system, or /proc is hidden): physical memory is the limit.
        return
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            yield from (("v1", folder) for folder in _own_and_ancestors(CGROUP_ROOT / "memory", path))
        elif hierarchy == "0" and not controllers:
            hybrid = CGROUP_ROOT / "unified"
            mount = hybrid if hybrid.is_dir() else CGROUP_ROOT
            yield from (("v2", folder) for folder in _own_and_ancestors(mount, path))


def _own_and_ancestors(mount: Path, path: str) -> Iterator[Path]:
    """Yields the folders of a group and of its ancestors up to the mount point, the own one first.

    In a container the mount point often is the container's own group while `path` is still seen from the host, so
    leading parts of `path` that do not exist under the mount point are left out.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    while parts and not mount.joinpath(*parts).is_dir():
        parts.pop(0)
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _read_int(file: Path) -> int | None:
    """Returns the number in a control file; None where it is missing, unreadable or says `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _read_stat(folder: Path) -> dict[str, int]:
    """Returns the `memory.stat` of a group by name; empty where there is none."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
