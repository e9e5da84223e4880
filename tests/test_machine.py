"""Limits are read from whatever control groups there are; the trees here are made up, in a temporary folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ptm_accel.machine import MemoryLimit, available_bytes, host_limit
from ptm_accel.units import GIB, MIB

UNLIMITED_V1 = 9223372036854771712


class Machine:
    """A made-up machine: physical memory, and the control groups of one process."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "cgroup"
        self.proc = folder / "proc_self_cgroup"
        self.root.mkdir()
        self.proc.write_text("")

    def write(self, path: str, text: str | int) -> None:
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v1(self, group: str, limit: int, usage: int = 0, stat: str = "") -> None:
        self.write(f"memory{group}/memory.limit_in_bytes", limit)
        self.write(f"memory{group}/memory.usage_in_bytes", usage)
        self.write(f"memory{group}/memory.stat", stat)

    def v2(self, group: str, limit: int | str, usage: int = 0, stat: str = "", mount: str = ".") -> None:
        self.write(f"{mount}{group}/memory.max", limit)
        self.write(f"{mount}{group}/memory.current", usage)
        self.write(f"{mount}{group}/memory.stat", stat)

    def limit(self) -> MemoryLimit:
        return host_limit()

    def available(self) -> int:
        return available_bytes()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    memory = SimpleNamespace(total=16 * GIB, available=10 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    made = Machine(tmp_path)
    monkeypatch.setattr("ptm_accel.machine.CGROUP_ROOT", made.root)
    monkeypatch.setattr("ptm_accel.machine.PROC_CGROUP", made.proc)
    return made


def test_no_control_group(machine: Machine) -> None:
    assert machine.limit() == MemoryLimit(16 * GIB, "physical memory")
    assert machine.available() == 10 * GIB


def test_no_proc_file(machine: Machine) -> None:
    machine.proc.unlink()
    assert machine.limit() == MemoryLimit(16 * GIB, "physical memory")


def test_v1_own_group(machine: Machine) -> None:
    machine.proc.write_text("5:cpu,cpuacct:/job\n4:memory:/job\n0::/\n")
    machine.v1("", UNLIMITED_V1)
    machine.v1("/job", 2 * GIB, 1 * GIB)
    assert machine.limit() == MemoryLimit(2 * GIB, "cgroup v1 limit")
    assert machine.available() == 1 * GIB


def test_v1_without_a_limit_is_the_physical_memory(machine: Machine) -> None:
    machine.proc.write_text("4:memory:/job\n")
    machine.v1("/job", UNLIMITED_V1, 1 * GIB)
    assert machine.limit() == MemoryLimit(16 * GIB, "physical memory")
    assert machine.available() == 10 * GIB


def test_v1_ancestor_is_tighter(machine: Machine) -> None:
    machine.proc.write_text("4:memory:/job/step/task\n")
    machine.v1("/job/step/task", 8 * GIB)
    machine.v1("/job/step", UNLIMITED_V1)
    machine.v1("/job", 3 * GIB, 1 * GIB)
    assert machine.limit() == MemoryLimit(3 * GIB, "cgroup v1 limit")
    assert machine.available() == 2 * GIB


def test_v1_limit_of_an_ancestor_outside_of_the_mount(machine: Machine) -> None:
    machine.proc.write_text("4:memory:/\n")
    machine.v1("", UNLIMITED_V1, 512 * MIB, f"cache 1\nhierarchical_memory_limit {1 * GIB}\n")
    assert machine.limit() == MemoryLimit(1 * GIB, "cgroup v1 limit")
    assert machine.available() == 512 * MIB


@pytest.mark.parametrize("path", ["/docker/0123abcd/inner", "/../../inner"])
def test_v1_path_seen_from_the_host(machine: Machine, path: str) -> None:
    """In a container, the mount point is the container's own group."""
    machine.proc.write_text(f"4:memory:{path}\n")
    machine.v1("", 4 * GIB)
    machine.v1("/inner", 2 * GIB)
    assert machine.limit() == MemoryLimit(2 * GIB, "cgroup v1 limit")


def test_v1_path_that_does_not_exist_at_all(machine: Machine) -> None:
    machine.proc.write_text("4:memory:/docker/0123abcd\n")
    machine.v1("", 4 * GIB)
    assert machine.limit() == MemoryLimit(4 * GIB, "cgroup v1 limit")


def test_v1_droppable_page_cache_is_not_used(machine: Machine) -> None:
    machine.proc.write_text("4:memory:/job\n")
    stat = f"total_inactive_file {700 * MIB}\ntotal_active_file {100 * MIB}\nactive_file 5\n"
    machine.v1("/job", 2 * GIB, 1 * GIB, stat)
    assert machine.available() == 1 * GIB + 800 * MIB


def test_v2_own_group_and_ancestors(machine: Machine) -> None:
    machine.proc.write_text("0::/a.slice/b.scope\n")
    machine.v2("/a.slice", 6 * GIB, 5 * GIB, f"inactive_file {GIB}\nactive_file {GIB}\n")
    machine.v2("/a.slice/b.scope", "max", 1 * GIB)
    assert machine.limit() == MemoryLimit(6 * GIB, "cgroup v2 limit")
    assert machine.available() == 3 * GIB


def test_v2_own_limit_is_tighter(machine: Machine) -> None:
    machine.proc.write_text("0::/a.slice/b.scope\n")
    machine.v2("/a.slice", 6 * GIB, 1 * GIB)
    machine.v2("/a.slice/b.scope", 2 * GIB, 1 * GIB)
    assert machine.limit() == MemoryLimit(2 * GIB, "cgroup v2 limit")
    assert machine.available() == 1 * GIB


def test_v2_beside_v1(machine: Machine) -> None:
    machine.proc.write_text("4:memory:/job\n0::/job\n")
    machine.v1("/job", 4 * GIB)
    machine.v2("/job", 3 * GIB, mount="unified")
    assert machine.limit() == MemoryLimit(3 * GIB, "cgroup v2 limit")


def test_limit_above_physical_memory_does_not_raise_it(machine: Machine) -> None:
    machine.proc.write_text("0::/\n")
    machine.v2("", 64 * GIB, 1 * GIB)
    assert machine.limit() == MemoryLimit(16 * GIB, "physical memory")
    assert machine.available() == 10 * GIB


def test_nothing_left_is_zero(machine: Machine) -> None:
    machine.proc.write_text("0::/\n")
    machine.v2("", 1 * GIB, 2 * GIB)
    assert machine.available() == 0


def test_this_machine() -> None:
    limit = host_limit()
    assert limit.origin in {"physical memory", "cgroup v1 limit", "cgroup v2 limit"}
    assert 0 < available_bytes() <= limit.bytes <= psutil.virtual_memory().total
