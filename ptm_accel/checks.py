"""Checks of a machine before a run: what would fail, what would be slow, and what to do about it.

Each check returns one line. Rates of disks and links are measured anew, and kept for plans.
"""

from __future__ import annotations

import enum
import os
import platform
import resource
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import psutil
import torch
from packaging.requirements import Requirement

from ptm_accel import machine
from ptm_accel.errors import BudgetError
from ptm_accel.hardware.cache import machine_fingerprint
from ptm_accel.hardware.measure import LEAST_ROOM_BYTES
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.hardware.rates import kept_in, renew_device_rates, renew_disk_rates
from ptm_accel.memory.mapping import anonymous_run
from ptm_accel.memory.pinned import register_pinned
from ptm_accel.memory.scratch import IN_MEMORY, Io, ScratchFile, file_system_of
from ptm_accel.units import GIB, MIB, format_bytes

LEAST_MEMORY_BYTES = GIB
"""Python, torch and transformers take nearly half of it before there is a model."""
_SLOW_DISK_BYTES_S = 0.5e9
"""Of an SSD on SATA; every NVMe drive is faster."""
_SLOW_LINK_BYTES_S = 10e9
"""A little less than PCIe 3.0 gives on 16 lanes."""
_MORE_MEMORY = (
    f"{format_bytes(LEAST_MEMORY_BYTES)} is the least: raise the container's limit (docker run --memory, "
    "resources.limits.memory), or end other processes"
)
_SWAPPED = 0.25
"""Part of the swap that is in use on a machine that is short of memory."""
_PINNED_BEYOND_BYTES = 64 * MIB
_MOST_PINNED_BYTES = GIB
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


class Verdict(enum.Enum):
    """What a line comes to: nothing to do, a run that takes longer than it need, or one that fails."""

    GOOD = "good"
    SLOW = "slow"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Line:
    """The outcome of one check.

    Attributes:
        name: of what was looked at.
        verdict: whether something is to be done.
        found: what is there.
        to_do: what to do; empty for a good line.
    """

    name: str
    verdict: Verdict
    found: str
    to_do: str = ""


def checks(folders: Iterable[Path]) -> Iterator[Line]:
    """Runs all checks, one after the other.

    Args:
        folders: for scratch files, to be looked at and measured.
    """
    cards = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    each: list[Callable[[], Line]] = [
        versions,
        memory,
        swap,
        *(partial(disk, folder) for folder in folders),
        *(partial(link, card) for card in cards),
        *([] if cards else [no_card]),
        pinning,
        huge_pages,
        threads,
        waiting,
        profile,
    ]
    for check in each:
        yield check()


# ---- disks and links -----------------------------------------------------------------------------------------------


def disk(folder: Path) -> Line:
    """A folder for scratch files: whether it can be used, and how fast its disk is."""
    name = f"disk {folder}"
    try:
        with warnings.catch_warnings():
            # What it warns of is in the lines below.
            warnings.simplefilter("ignore")
            file = ScratchFile(folder, Io())
        file.close()
        free_bytes = shutil.disk_usage(folder).free
        kind = file_system_of(folder)
        room = f"{kind}, {format_bytes(free_bytes)} free"
        if kind in IN_MEMORY:
            found = f"{room}: memory and no disk; pages there take memory that host_memory does not count"
            return Line(name, Verdict.BAD, found, "name a folder on an SSD")
        if free_bytes < LEAST_ROOM_BYTES:
            to_do = "free space there, or name a folder with more room; estimate tells how much a model needs"
            return Line(name, Verdict.BAD, f"{room}: no room", to_do)
        rates = renew_disk_rates(folder)
    except OSError as error:
        # Our own errors say more than a line holds, of a run that has begun.
        reason = os.strerror(error.errno) if error.errno else str(error)
        to_do = "name an existing folder that you may write to, on a sound disk"
        return Line(name, Verdict.BAD, f"cannot be used: {reason}", to_do)
    except BudgetError as error:
        return Line(name, Verdict.BAD, f"{room}; cannot be measured: {error}", _MORE_MEMORY)
    if rates is None:
        return Line(name, Verdict.BAD, f"{room}; too little memory to measure it", _MORE_MEMORY)
    found = f"{_rates(rates, 'read', 'written')}; {room}"
    if not file.direct:
        found = f"{found}; no direct transfers (O_DIRECT), so it also takes page cache"
        return Line(name, Verdict.SLOW, found, "name a folder on a local disk with ext4 or xfs")
    if min(rates.read_bytes_s, rates.write_bytes_s) < _SLOW_DISK_BYTES_S:
        return Line(name, Verdict.SLOW, found, "name a folder on an NVMe SSD, or several on different drives")
    return Line(name, Verdict.GOOD, found)


def link(card: torch.device) -> Line:
    """The link to a GPU."""
    name = f"link of {card}"
    try:
        rates = renew_device_rates(card)
    except (BudgetError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        return Line(name, Verdict.BAD, f"cannot be measured: {reason}", "end other processes on the GPU (nvidia-smi)")
    found = f"{torch.cuda.get_device_name(card)}: {_rates(rates, 'to the GPU', 'from it')}"
    if min(rates.read_bytes_s, rates.write_bytes_s) < _SLOW_LINK_BYTES_S:
        to_do = "put the GPU into a slot with 16 lanes (nvidia-smi -q -d PCIE tells how many it has)"
        return Line(name, Verdict.SLOW, found, to_do)
    return Line(name, Verdict.GOOD, found)


def no_card() -> Line:
    """No GPU that torch can use, which may be one that it should."""
    there = machine_fingerprint()["gpus"]
    if not there:
        return Line("GPU", Verdict.GOOD, "none; the CPU computes")
    built = torch.version.cuda
    found = f"{there}: torch {torch.__version__} " + (f"for CUDA {built} finds none" if built else "is for CPUs only")
    to_do = "install torch for the driver's version of CUDA (nvidia-smi names it), and look at CUDA_VISIBLE_DEVICES"
    return Line("GPU", Verdict.BAD, found, to_do)


def pinning() -> Line:
    """Whether host memory can be pinned beyond the limit of locked memory, as far as a small trial shows."""
    name = "pinned memory"
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    unlimited = limit == resource.RLIM_INFINITY
    shown = f"limit of locked memory (ulimit -l): {'none' if unlimited else format_bytes(limit)}"
    if not torch.cuda.is_available():
        return Line(name, Verdict.GOOD, f"{shown}; nothing is pinned without a GPU")
    beyond = _PINNED_BEYOND_BYTES + (0 if unlimited else limit)
    trial = min(beyond, _MOST_PINNED_BYTES, machine.available_bytes() // 4) // MIB * MIB
    try:
        run = anonymous_run(trial, "a trial of pinning")
        register_pinned(run.address, run.nbytes)()
    except OSError:
        to_do = "raise the limit: ulimit -l unlimited; docker run --ulimit memlock=-1"
        return Line(name, Verdict.SLOW, f"{format_bytes(trial)} could not be pinned; {shown}", to_do)
    return Line(name, Verdict.GOOD, f"{format_bytes(trial)} pinned as a trial; {shown}")


def profile() -> Line:
    """The file that keeps what was measured."""
    file = kept_in()
    if file is None:
        to_do = "set PTM_ACCEL_CACHE to a folder that you may write to"
        return Line("profile", Verdict.SLOW, "cannot be kept: each process measures anew, for a second a disk", to_do)
    return Line("profile", Verdict.GOOD, f"{file} keeps the rates of disks and links, which plans use")


def _rates(rates: LinkRates, read: str, written: str) -> str:
    one, other, both = (f"{rate / 1e9:.2f}" for rate in (rates.read_bytes_s, rates.write_bytes_s, rates.both_bytes_s))
    return f"{one} GB/s {read}, {other} {written}, {both} both at once"


# ---- memory --------------------------------------------------------------------------------------------------------


def memory() -> Line:
    """Memory of the container beside that of the machine."""
    limit, available = machine.host_limit(), machine.available_bytes()
    physical = psutil.virtual_memory().total
    of = "physical" if limit.bytes >= physical else f"the {limit.origin}; the machine has {format_bytes(physical)}"
    found = f"{format_bytes(limit.bytes)} ({of}), {format_bytes(available)} available"
    if available < LEAST_MEMORY_BYTES:
        return Line("host memory", Verdict.BAD, found, _MORE_MEMORY)
    return Line("host memory", Verdict.GOOD, found)


def swap() -> Line:
    """Whether the machine swaps, which pages are to make unnecessary."""
    there = psutil.swap_memory()
    if not there.total:
        return Line("swap", Verdict.GOOD, "none; budgets stay below the memory, and a process above it is killed")
    found = f"{format_bytes(there.used)} of {format_bytes(there.total)} in use"
    if there.used > _SWAPPED * there.total:
        to_do = "end other processes, or lower host_memory: the kernel's swap is much slower than pages on an SSD"
        return Line("swap", Verdict.SLOW, found, to_do)
    return Line("swap", Verdict.GOOD, found)


def huge_pages() -> Line:
    """Transparent huge pages, without which direct transfers go through many small pieces."""
    name = "huge pages"
    try:
        text = HUGE_PAGES.read_text()
    except OSError:
        return Line(name, Verdict.SLOW, "this kernel has none", "use one with transparent huge pages")
    chosen = text.partition("[")[2].partition("]")[0] or "unknown"
    found = f"transparent huge pages: {chosen}"
    if chosen in ("always", "madvise"):
        return Line(name, Verdict.GOOD, found)
    to_do = f"echo madvise | sudo tee {HUGE_PAGES}: direct disk transfers are two to three times as fast with them"
    return Line(name, Verdict.SLOW, found, to_do)


# ---- threads and versions ------------------------------------------------------------------------------------------


def threads() -> Line:
    """Threads that compute, beside cores."""
    cores, count, asked = len(os.sched_getaffinity(0)), torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    found = f"{count} of torch on {cores} cores; {_variable('OMP_NUM_THREADS')}"
    if count > cores:
        to_do = f"export OMP_NUM_THREADS={cores}: threads beyond the cores wait for one another"
        return Line("threads", Verdict.SLOW, found, to_do)
    if asked and 2 * count < cores:
        to_do = f"export OMP_NUM_THREADS={cores}, divided by the processes that train on this machine"
        return Line("threads", Verdict.SLOW, found, to_do)
    if not asked:
        found = f"{found}: with accelerate launch each process then has one"
    return Line("threads", Verdict.GOOD, found)


def waiting() -> Line:
    """How threads wait for work."""
    policy, bind = (os.environ.get(name) for name in ("OMP_WAIT_POLICY", "OMP_PROC_BIND"))
    found = _variable("OMP_WAIT_POLICY") + (f", OMP_PROC_BIND={bind}" if bind else "")
    to_do = []
    if (policy or "").lower() != "passive":
        to_do.append("export OMP_WAIT_POLICY=passive: threads that spin are tens of times slower while others are busy")
    if bind and bind.lower() != "false":
        to_do.append("unset OMP_PROC_BIND: threads that are bound cannot leave a core that is busy")
    return Line("waiting threads", Verdict.SLOW if to_do else Verdict.GOOD, found, "; ".join(to_do))


def _variable(name: str) -> str:
    value = os.environ.get(name)
    return f"{name}={value}" if value else f"{name} is not set"


def versions() -> Line:
    """Versions of the packages that ours names, beside the range that it names."""
    name = "versions"
    try:
        wanted = [Requirement(text) for text in requires("ptm-accel") or []]
    except PackageNotFoundError:
        to_do = "pip install -e . in the checkout: --use_ptm and the ranges of versions come with the installation"
        return Line(name, Verdict.BAD, "ptm-accel is not installed", to_do)
    wrong, right = [], [f"Python {platform.python_version()}"]
    for each in wanted:
        try:
            there = version(each.name)
        except PackageNotFoundError:
            # What stands under an extra may be missing.
            if each.marker is None:
                wrong.append((each, f"{each.name} is not installed"))
            continue
        if not each.specifier.contains(there, prereleases=True):
            wrong.append((each, f"{each.name} {there} is not {each.specifier}"))
        elif each.specifier:
            right.append(f"{each.name} {there}")
    if not wrong:
        return Line(name, Verdict.GOOD, ", ".join(right))
    pinned = " ".join(f'"{each.name}{each.specifier}"' for each, _ in wrong)
    return Line(name, Verdict.BAD, "; ".join(text for _, text in wrong), f"pip install {pinned}")
