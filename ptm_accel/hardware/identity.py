"""Which machine this is, and which disk a folder lies on."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import torch

from ptm_accel.hardware.profile import Fingerprint
from ptm_accel.units import GIB

_PROC = Path("/proc")


def machine_fingerprint(proc: Path = _PROC) -> Fingerprint:
    """The fingerprint of this machine.

    GPUs and driver are read from `/proc`: asking CUDA would start it, which takes memory on the card and forbids
    forks, also in a process that never uses it. (Where `/proc` does not tell, devices are still told apart by name.)

    Args:
        proc: where the kernel's files are.
    """
    gpus = sorted(_field(file, "Model") for file in (proc / "driver/nvidia/gpus").glob("*/information"))
    return Fingerprint(
        cpu=_field(proc / "cpuinfo", "model name") or platform.processor() or platform.machine(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(psutil.virtual_memory().total / GIB),
        kernel=platform.release(),
        torch=str(torch.__version__),
        gpus=", ".join(gpus),
        driver=_field(proc / "driver/nvidia/version", "NVRM version"),
    )


def disk_key(folder: Path) -> str:
    """What tells the disk that holds `folder` from others: device number, file system type, source of the mount.

    Raises:
        OSError: there is no such folder, or it may not be looked at.
    """
    real = Path(os.path.realpath(folder))
    number = os.stat(real).st_dev
    # The last mount of several at one place is the one that is seen.
    mounts = [mount for mount in psutil.disk_partitions(all=True)[::-1] if real.is_relative_to(mount.mountpoint)]
    mount = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    kind, source = (mount.fstype, mount.device) if mount is not None else ("unknown", "unknown")
    return f"{os.major(number)}:{os.minor(number)} {kind} {source}"


def _field(file: Path, name: str) -> str:
    """The first `name: value` of a file; empty where there is none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return " ".join(value.split())
    return ""
