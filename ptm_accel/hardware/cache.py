"""Which machine this is, and the file in the user's cache directory in which its rates outlive the process.

There is one file for each fingerprint, so that machines that share a home directory do not overwrite each other's. It
is only a cache: whatever is wrong with it or its folder, the worst that happens is that things are measured again.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import platform
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import torch

from ptm_accel.hardware.profile import Fingerprint, HardwareProfile, from_json, to_json
from ptm_accel.units import GIB

logger = logging.getLogger(__name__)

_PATIENCE_S = 30.0
_LOOK_AGAIN_S = 0.05


def machine_fingerprint(proc: Path = Path("/proc")) -> Fingerprint:
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


def cache_directory(environ: Mapping[str, str] = os.environ) -> Path | None:
    """`$PTM_ACCEL_CACHE`, else `$XDG_CACHE_HOME/ptm_accel`, else `~/.cache/ptm_accel`; None for a user without a home.

    Args:
        environ: the environment.
    """
    if own := environ.get("PTM_ACCEL_CACHE"):
        return Path(own).absolute()
    # Relative paths are to be ignored, by the XDG specification.
    if os.path.isabs(shared := environ.get("XDG_CACHE_HOME", "")):
        return Path(shared) / "ptm_accel"
    try:
        return Path.home() / ".cache" / "ptm_accel"
    except RuntimeError:
        return None


class ProfileStore:
    """The profile of one machine in a folder. Nothing here raises: what cannot be kept is said, once, and not kept.

    Args:
        fingerprint: of the machine.
        folder: where the file is; made when there is something to write. None keeps nothing.

    Attributes:
        path: the file; None if nothing is kept.
    """

    def __init__(self, fingerprint: Fingerprint, folder: Path | None) -> None:
        self.fingerprint = fingerprint
        self.path = None if folder is None else folder / f"hardware-{fingerprint.digest()}.json"
        self._complained = False

    def read(self) -> HardwareProfile:
        """What is in the file; an empty profile if there is none, or none of this machine and format."""
        profile, problem = None, "is damaged, or of another version or machine"
        if self.path is not None:
            try:
                profile = from_json(self.path.read_text(encoding="utf-8"), self.fingerprint)
            except FileNotFoundError:
                problem = ""
            except (OSError, ValueError) as error:
                problem = f"cannot be read ({error})"
            if profile is None and problem:
                logger.info("the hardware profile %s %s; it is measured again.", self.path, problem)
        return profile or HardwareProfile(fingerprint=self.fingerprint)

    def add(self, measured: HardwareProfile) -> None:
        """Puts what was measured beside what is in the file, by replacing the file as a whole.

        Between writers that do not hold `alone` one may undo what the other added; it is then measured again some day.
        """
        if self.path is None:
            return
        text = to_json(self.read().merged(measured))
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            _replace(self.path, text)
        except OSError as error:
            self._complain(error)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """While this is held, no other process that asks for it measures this machine: two at once would halve rates.

        A hint: without a folder to hold a lock in, or after half a minute, it goes on all the same.
        """
        with contextlib.ExitStack() as cleanup:
            if self.path is not None:
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    fd = os.open(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                except OSError as error:
                    self._complain(error)
                else:
                    # Closing is what unlocks.
                    cleanup.callback(os.close, fd)
                    _lock(fd)
            yield

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            logger.info(
                "the hardware profile cannot be kept in %s (%s): it is measured in each process anew; set "
                "PTM_ACCEL_CACHE to a folder that can be written to.",
                self.path and self.path.parent,
                error.strerror or error,
            )


def _lock(fd: int) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(_LOOK_AGAIN_S)
        except OSError:
            # A file system without locks: there is nothing to wait for.
            return


def _replace(path: Path, text: str) -> None:
    fd, name = tempfile.mkstemp(prefix=".hardware-", suffix=".tmp", dir=path.parent)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
