"""What this machine lets the process use: the least of physical memory and every cgroup limit above the process.

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


@dataclass(frozen=True, slots=True)
class _Group:
    """One control group that limits the process: its folder and the file names of its cgroup version."""

    folder: Path
    origin: str
    limit_file: str
    usage_file: str
    stat_prefix: str

    def limit_bytes(self) -> int | None:
        """The limit that holds in this group; None without one."""
        found = [_read_int(self.folder / self.limit_file)]
        # Version 1 also tells the least limit of all ancestors, those outside of our mount included.
        found.append(_read_stat(self.folder).get("hierarchical_memory_limit"))
        limits = [limit for limit in found if limit is not None]
        return min(limits) if limits else None

    def used_bytes(self) -> int | None:
        """What the group uses, page cache that can be dropped not counted; None where the kernel does not tell."""
        usage = _read_int(self.folder / self.usage_file)
        if usage is None:
            return None
        stat = _read_stat(self.folder)
        cached = sum(stat.get(f"{self.stat_prefix}{name}", 0) for name in ("active_file", "inactive_file"))
        return max(0, usage - cached)


def host_limit(*, cgroup_root: Path = CGROUP_ROOT, proc_cgroup: Path = PROC_CGROUP) -> MemoryLimit:
    """The least of physical memory and the limits of all control groups the process is in.

    Args:
        cgroup_root: where the control groups are mounted.
        proc_cgroup: the file that names the process's own groups.
    """
    least = MemoryLimit(psutil.virtual_memory().total, "physical memory")
    for group in _groups(cgroup_root, proc_cgroup):
        limit = group.limit_bytes()
        if limit is not None and limit < least.bytes:
            least = MemoryLimit(limit, group.origin)
    return least


def available_bytes(*, cgroup_root: Path = CGROUP_ROOT, proc_cgroup: Path = PROC_CGROUP) -> int:
    """Bytes of host memory that can still be taken without swapping or being killed; never negative.

    The least, over the machine and every limiting control group, of its limit less what is used there. Page cache
    that the kernel can drop counts as free.

    Args:
        cgroup_root: where the control groups are mounted.
        proc_cgroup: the file that names the process's own groups.
    """
    least = int(psutil.virtual_memory().available)
    for group in _groups(cgroup_root, proc_cgroup):
        limit, used = group.limit_bytes(), group.used_bytes()
        if limit is not None and used is not None:
            least = min(least, limit - used)
    return max(0, least)


def process_rss_bytes() -> int:
    """Resident memory of this process in bytes."""
    return int(psutil.Process().memory_info().rss)


def _groups(cgroup_root: Path, proc_cgroup: Path) -> Iterator[_Group]:
    """The process's memory groups with all their ancestors, from the own one upward, of both cgroup versions."""
    try:
        lines = proc_cgroup.read_text().splitlines()
    except OSError:
        # No control groups here (another system, or /proc is hidden): physical memory is the limit.
        return
    for line in lines:
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if "memory" in controllers.split(","):
            for folder in _own_and_ancestors(cgroup_root / "memory", path):
                yield _Group(folder, "cgroup v1 limit", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        elif hierarchy == "0" and not controllers:
            hybrid = cgroup_root / "unified"
            mount = hybrid if hybrid.is_dir() else cgroup_root
            for folder in _own_and_ancestors(mount, path):
                yield _Group(folder, "cgroup v2 limit", "memory.max", "memory.current", "")


def _own_and_ancestors(mount: Path, path: str) -> Iterator[Path]:
    """The folders of a group and of its ancestors up to the mount point, the own one first.

    In a container the mount point often is the container's own group while `path` is still seen from the host, so
    leading parts of `path` that do not exist under the mount point are left out.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    while parts and not mount.joinpath(*parts).is_dir():
        parts.pop(0)
    for length in range(len(parts), -1, -1):
        yield mount.joinpath(*parts[:length])


def _read_int(file: Path) -> int | None:
    """The number in a control file; None where it is missing, unreadable or says `max`."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _read_stat(folder: Path) -> dict[str, int]:
    """The `memory.stat` of a group by name; empty where there is none."""
    try:
        lines = (folder / "memory.stat").read_text().splitlines()
    except OSError:
        return {}
    pairs = (line.split() for line in lines)
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}
