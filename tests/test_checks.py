"""`ptm-accel doctor`: each line that is bad or slow is made here, and says what to do."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from typer.testing import CliRunner

from ptm_accel import checks, cli
from ptm_accel.checks import Line, Verdict
from ptm_accel.errors import BudgetError, ConfigError, DiskError
from ptm_accel.hardware import measure, rates
from ptm_accel.hardware.cache import RateCache
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.scratch import IN_MEMORY, ScratchFile, file_system_of
from ptm_accel.units import GIB, MIB
from tests.hardware.machines import CARD, DISK, HERE

MEMORY = Path("/dev/shm")
CUDA = torch.device("cuda", 0)
BIG = SimpleNamespace(total=32 * GIB, available=16 * GIB)


@pytest.fixture(autouse=True)
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RateCache:
    """An empty cache, with short measurements."""
    monkeypatch.setattr(measure, "_DISK_S", 0.05)
    monkeypatch.setattr(measure, "_AREA_BYTES", 64 * MIB)
    # The folder for temporary files may be in memory.
    monkeypatch.setattr(checks, "IN_MEMORY", ())
    known = RateCache(HERE, tmp_path / "cache")
    monkeypatch.setattr(rates, "_this_machine", lambda: known)
    return known


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Sets the limit and the use of a container of a made-up machine of 32 GiB."""
    root, proc = tmp_path / "cgroup", tmp_path / "proc_self_cgroup"
    root.mkdir()
    proc.write_text("0::/\n")
    monkeypatch.setattr("ptm_accel.machine.CGROUP_ROOT", root)
    monkeypatch.setattr("ptm_accel.machine.PROC_CGROUP", proc)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: BIG)

    def set_limit(limit: int, used: int) -> None:
        (root / "memory.max").write_text(f"{limit}\n")
        (root / "memory.current").write_text(f"{used}\n")

    return set_limit


def _gives(answer: Any) -> Callable[..., Any]:
    def give(*arguments: object) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return give


def _card(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """A card, which gives that when it is measured."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card X")
    monkeypatch.setattr(rates, "measure_device", _gives(answer))


# ---- disks ---------------------------------------------------------------------------------------------------------


def test_a_disk_is_measured_anew_and_kept_for_plans(tmp_path: Path, kept: RateCache) -> None:
    with kept.alone():
        kept.add(f"disk {rates.disk_key(tmp_path)}", [1.0, 1.0, 1.0])
    assert rates.disk_rates([tmp_path]) == [LinkRates(1.0, 1.0, 1.0)]
    line = checks.disk(tmp_path)
    (found,) = rates.disk_rates([tmp_path])
    assert found is not None
    assert found.read_bytes_s > MIB
    assert line.name == f"disk {tmp_path}"
    shown = f"{found.read_bytes_s / 1e9:.2f} GB/s read, {found.write_bytes_s / 1e9:.2f} written, "
    assert line.found.startswith(shown + f"{found.both_bytes_s / 1e9:.2f} both at once; {file_system_of(tmp_path)}, ")
    assert list(kept.read().values()) == [[found.read_bytes_s, found.write_bytes_s, found.both_bytes_s]]


@pytest.mark.skipif(file_system_of(MEMORY) != "tmpfs", reason="needs a tmpfs at /dev/shm")
def test_a_folder_in_memory_is_no_disk(kept: RateCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "IN_MEMORY", IN_MEMORY)
    line = checks.disk(MEMORY)
    assert (line.verdict, line.to_do) == (Verdict.BAD, "name a folder on an SSD")
    assert "memory and no disk" in line.found
    assert kept.read() == {}


@pytest.mark.parametrize("kind", ["missing", "file", "in a file", "read-only", "denied", "proc"])
def test_a_folder_that_cannot_be_written_to(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, reason = tmp_path / "there", os.strerror(errno.ENOTDIR)
    if kind == "missing":
        reason = os.strerror(errno.ENOENT)
    elif kind == "proc":
        # Not even root may write there.
        folder, reason = Path("/proc"), ""
    elif kind.endswith("file"):
        folder.write_text("")
        folder = folder / "sub" if kind == "in a file" else folder
    else:
        number = errno.EROFS if kind == "read-only" else errno.EACCES
        reason = os.strerror(number)
        monkeypatch.setattr("ptm_accel.memory.scratch._open_unlinked", _gives(OSError(number, reason)))
    line = checks.disk(folder)
    assert line.verdict is Verdict.BAD
    assert line.found.startswith(f"cannot be used: {reason}")
    assert line.to_do == "name an existing folder that you may write to, on a sound disk"


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=63 * MIB))
    line = checks.disk(tmp_path)
    assert line.verdict is Verdict.BAD
    assert line.found == f"{file_system_of(tmp_path)}, 63.00 MiB free: no room"
    assert line.to_do.startswith("free space there, or name a folder with more room")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_while_it_is_measured(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: RateCache
) -> None:
    monkeypatch.setattr(rates, "measure_disk", _gives(DiskError(number, "a long story; set disk.paths.", "x")))
    line = checks.disk(tmp_path)
    assert (line.verdict, line.found) == (Verdict.BAD, f"cannot be used: {os.strerror(number)}")
    assert kept.read() == {}


@pytest.mark.parametrize(
    ("answer", "found"),
    [(None, "too little memory to measure it"), (BudgetError("cannot map"), "cannot be measured: cannot map")],
)
def test_without_memory_no_disk_is_measured(
    answer: Any, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rates, "measure_disk", _gives(answer))
    line = checks.disk(tmp_path)
    assert line.verdict is Verdict.BAD
    assert line.found.endswith(f"; {found}")
    assert line.to_do.startswith("1.00 GiB is the least: raise the container's limit")


def test_a_disk_that_takes_no_direct_transfers_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measure_disk", _gives(DISK))
    monkeypatch.setattr(ScratchFile, "_probe", _gives(OSError(errno.EINVAL, "no")))
    line = checks.disk(tmp_path)
    assert line.verdict is Verdict.SLOW
    assert line.found.startswith("4.00 GB/s read, 8.00 written, 6.00 both at once; ")
    assert "no direct transfers (O_DIRECT)" in line.found
    assert line.to_do == "name a folder on a local disk with ext4 or xfs"


def test_a_disk_that_is_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rates, "measure_disk", _gives(LinkRates(4e9, 0.2e9, 0.3e9)))
    line = checks.disk(tmp_path)
    assert line.verdict is Verdict.SLOW
    assert line.to_do.startswith("name a folder on an NVMe SSD")


# ---- links and pinning ---------------------------------------------------------------------------------------------


def test_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    _card(monkeypatch, CARD)
    found = "Card X: 50.00 GB/s to the GPU, 48.00 from it, 80.00 both at once"
    assert checks.link(CUDA) == Line("link of cuda:0", Verdict.GOOD, found)
    assert rates.device_rates(CUDA) == CARD


def test_a_link_that_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    _card(monkeypatch, type(CARD)(3e9, 48e9, 5e9, 9e10))
    line = checks.link(CUDA)
    assert line.verdict is Verdict.SLOW
    assert "slot with 16 lanes" in line.to_do


def test_a_card_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    _card(monkeypatch, torch.OutOfMemoryError("CUDA out of memory. Tried.\nProcess 7 has all of it."))
    line = checks.link(CUDA)
    assert (line.verdict, line.found) == (Verdict.BAD, "cannot be measured: CUDA out of memory. Tried.")
    assert line.to_do == "end other processes on the GPU (nvidia-smi)"


@pytest.mark.parametrize(("gpus", "built"), [("", None), ("Card X", None), ("Card X", "13.0")])
def test_a_card_that_torch_does_not_see(gpus: str, built: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "machine_fingerprint", lambda: {"gpus": gpus})
    monkeypatch.setattr(torch.version, "cuda", built)
    line = checks.no_card()
    if not gpus:
        assert line == Line("GPU", Verdict.GOOD, "none; the CPU computes")
        return
    assert line.verdict is Verdict.BAD
    assert line.found.endswith("for CUDA 13.0 finds none" if built else "is for CPUs only")
    assert "install torch for the driver's version" in line.to_do


@pytest.mark.parametrize("limit", [8 * MIB, resource.RLIM_INFINITY])
@pytest.mark.parametrize("refused", [False, True])
def test_pinning(limit: int, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    shown = "limit of locked memory (ulimit -l): " + ("8.00 MiB" if limit == 8 * MIB else "none")
    line = checks.pinning()
    assert line == Line("pinned memory", Verdict.GOOD, f"{shown}; nothing is pinned without a GPU")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pinned: list[int] = []

    def register(address: int, nbytes: int) -> Callable[[], None]:
        if refused:
            raise OSError("cudaHostRegister failed")
        pinned.append(nbytes)
        return pinned.clear

    monkeypatch.setattr(checks, "register_pinned", register)
    line = checks.pinning()
    tried = "72.00 MiB" if limit == 8 * MIB else "64.00 MiB"
    if refused:
        assert (line.verdict, line.found) == (Verdict.SLOW, f"{tried} could not be pinned; {shown}")
        assert line.to_do == "raise the limit: ulimit -l unlimited; docker run --ulimit memlock=-1"
    else:
        assert line == Line("pinned memory", Verdict.GOOD, f"{tried} pinned as a trial; {shown}")
    assert not pinned


@pytest.mark.gpu
def test_this_card() -> None:
    assert checks.link(CUDA).verdict is not Verdict.BAD
    assert checks.pinning().verdict is not Verdict.BAD


def test_a_profile_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: RateCache) -> None:
    line = checks.profile()
    assert line.verdict is Verdict.GOOD
    assert line.found.startswith(f"{kept.path} keeps the rates")
    (tmp_path / "file").write_text("")
    known = RateCache(HERE, tmp_path / "file" / "cache")
    monkeypatch.setattr(rates, "_this_machine", lambda: known)
    line = checks.profile()
    assert (line.verdict, line.to_do) == (Verdict.SLOW, "set PTM_ACCEL_CACHE to a folder that you may write to")


# ---- memory --------------------------------------------------------------------------------------------------------


def test_a_container(group: Callable[[int, int], None]) -> None:
    group(8 * GIB, 2 * GIB)
    found = "8.00 GiB (the cgroup v2 limit; the machine has 32.00 GiB), 6.00 GiB available"
    assert checks.memory() == Line("host memory", Verdict.GOOD, found)
    group(64 * GIB, 0)
    assert checks.memory().found == "32.00 GiB (physical), 16.00 GiB available"


@pytest.mark.parametrize(("limit", "used"), [(512 * MIB, 0), (8 * GIB, 8 * GIB - 100 * MIB)])
def test_a_container_that_is_too_small(limit: int, used: int, group: Callable[[int, int], None]) -> None:
    group(limit, used)
    line = checks.memory()
    assert line.verdict is Verdict.BAD
    assert "the cgroup v2 limit; the machine has 32.00 GiB" in line.found
    assert line.to_do.startswith("1.00 GiB is the least: raise the container's limit (docker run --memory")


@pytest.mark.parametrize(
    ("total", "used", "verdict"), [(0, 0, Verdict.GOOD), (8, 2, Verdict.GOOD), (8, 3, Verdict.SLOW)]
)
def test_swap(total: int, used: int, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "swap_memory", lambda: SimpleNamespace(total=total * GIB, used=used * GIB))
    line = checks.swap()
    assert line.verdict is verdict
    assert bool(line.to_do) is (verdict is Verdict.SLOW)


@pytest.mark.parametrize(
    ("text", "verdict", "found"),
    [
        ("[always] madvise never", Verdict.GOOD, "transparent huge pages: always"),
        ("always [madvise] never", Verdict.GOOD, "transparent huge pages: madvise"),
        ("always madvise [never]", Verdict.SLOW, "transparent huge pages: never"),
        (None, Verdict.SLOW, "this kernel has none"),
    ],
)
def test_huge_pages(
    text: str | None, verdict: Verdict, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "enabled"
    monkeypatch.setattr(checks, "HUGE_PAGES", file)
    if text is not None:
        file.write_text(f"{text}\n")
    line = checks.huge_pages()
    assert (line.verdict, line.found) == (verdict, found)
    assert bool(line.to_do) is (verdict is Verdict.SLOW)


# ---- threads and versions ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cores", "count", "asked", "verdict"),
    [
        (8, 8, None, Verdict.GOOD),
        # Two threads of the processor share a core.
        (8, 4, None, Verdict.GOOD),
        (8, 4, "4", Verdict.GOOD),
        (8, 1, "1", Verdict.SLOW),
        (4, 8, None, Verdict.SLOW),
    ],
)
def test_threads(cores: int, count: int, asked: str | None, verdict: Verdict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: count)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    line = checks.threads()
    assert line.verdict is verdict
    told = f"OMP_NUM_THREADS={asked}" if asked else "OMP_NUM_THREADS is not set"
    assert line.found.startswith(f"{count} of torch on {cores} cores; {told}")
    assert line.to_do.startswith(f"export OMP_NUM_THREADS={cores}") is (verdict is Verdict.SLOW)


@pytest.mark.parametrize(
    ("policy", "bind", "to_do"),
    [
        ("passive", None, ""),
        ("PASSIVE", "false", ""),
        (None, None, "export OMP_WAIT_POLICY=passive"),
        ("active", None, "export OMP_WAIT_POLICY=passive"),
        ("passive", "close", "unset OMP_PROC_BIND"),
    ],
)
def test_waiting(policy: str | None, bind: str | None, to_do: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OMP_WAIT_POLICY", policy), ("OMP_PROC_BIND", bind)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    line = checks.waiting()
    assert line.verdict is (Verdict.SLOW if to_do else Verdict.GOOD)
    assert line.to_do.partition(":")[0] == to_do


def _installed(monkeypatch: pytest.MonkeyPatch, there: dict[str, str]) -> None:
    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    wanted = ["torch<2.16,>=2.11", "numpy", 'trl>=1.14; extra == "test"', 'ruff; extra == "dev"']
    monkeypatch.setattr(checks, "requires", lambda name: wanted)
    monkeypatch.setattr(checks, "version", version)


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {"torch": "2.13.0+cpu", "numpy": "2.0"})
    line = checks.versions()
    assert line.verdict is Verdict.GOOD
    assert line.found.partition(", ")[2] == "torch 2.13.0+cpu"


def test_versions_that_are_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    _installed(monkeypatch, {"torch": "2.4.1", "trl": "1.2"})
    found = "torch 2.4.1 is not <2.16,>=2.11; numpy is not installed; trl 1.2 is not >=1.14"
    to_do = 'pip install "torch<2.16,>=2.11" "numpy" "trl>=1.14"'
    assert checks.versions() == Line("versions", Verdict.BAD, found, to_do)


def test_an_installation_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "requires", _gives(metadata.PackageNotFoundError("ptm-accel")))
    line = checks.versions()
    assert (line.verdict, line.found) == (Verdict.BAD, "ptm-accel is not installed")
    assert line.to_do.startswith("pip install -e .")


# ---- the command ---------------------------------------------------------------------------------------------------


def _doctor(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(cli.app, ["doctor", *arguments])
    return found.exit_code, found.output


def test_a_sound_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: RateCache) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    code, told = _doctor("--disk", str(tmp_path))
    assert code == 0, told
    assert f"+ good  disk {tmp_path}: " in told or f"! slow  disk {tmp_path}: " in told
    assert "! slow  waiting threads: OMP_WAIT_POLICY=active\n        export OMP_WAIT_POLICY=passive: " in told
    assert str(kept.path) in told
    assert len(kept.read()) == 1
    code, told = _doctor()
    assert code == 0
    assert "No disk was looked at: --disk FOLDER checks and measures one." in told


def test_what_would_fail_is_the_exit_status(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    code, told = _doctor("--disk", f"{tmp_path},{nowhere}")
    assert code == 1
    assert f"x bad   disk {nowhere}: cannot be used: No such file or directory\n        name an existing" in told
    assert f"disk {tmp_path}: " in told
    code, told = _doctor("--disk", str(nowhere), "--json")
    assert code == 1
    lines = json.loads(told)
    assert [line["name"] for line in lines if line["verdict"] == "bad"] == [f"disk {nowhere}"]
    assert all(line.keys() == {"name", "verdict", "found", "to_do"} for line in lines)
    assert all(bool(line["to_do"]) is (line["verdict"] != "good") for line in lines)


def test_a_card_is_measured_in_place_of_none(monkeypatch: pytest.MonkeyPatch) -> None:
    _card(monkeypatch, torch.OutOfMemoryError("CUDA out of memory."))
    monkeypatch.setattr(checks, "register_pinned", lambda address, nbytes: lambda: None)
    code, told = _doctor()
    assert code == 1
    assert "x bad   link of cuda:0: cannot be measured: CUDA out of memory." in told
    assert "GPU: none" not in told


def test_no_folder() -> None:
    found = CliRunner().invoke(cli.app, ["doctor", "--disk", ","])
    assert isinstance(found.exception, ConfigError)
