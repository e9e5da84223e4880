"""The machine's fingerprint, and what is known of its rates: in this process, and in a file for later ones.

There is one file for each fingerprint, since machines may share a home directory. It is only a cache: if it is damaged,
of another machine, or cannot be written, the rates are measured again. Its folder may be others' as well, so no link is
followed there, and nothing but a regular file is read or locked.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

from ptm_accel.errors import PTMError
from ptm_accel.hardware.profile import are_rates
from ptm_accel.units import GIB

logger = logging.getLogger(__name__)

FORMAT = 4
"""Of the file; raised whenever what it holds, or how that is measured, changes."""

Fingerprint = dict[str, str | int]
"""Marks of a machine, by name; rates hold only where all of them are the same."""

Rates = tuple[float, ...]
"""One rate of updates; the three of a link (`LinkRates`); the four of a device (`DeviceRates`)."""

_MOST_BYTES = 1 << 20
"""No such file is as long."""

_PATIENCE_S = 30.0
_LOOK_AGAIN_S = 0.05


def machine_fingerprint(proc: Path = Path("/proc")) -> Fingerprint:
    """Returns the fingerprint of this machine.

    GPUs and driver are read from `/proc`, since asking CUDA would start it.

    Args:
        proc: where the kernel's files are.
    """
    gpus = sorted(_field(file, "Model") for file in (proc / "driver/nvidia/gpus").glob("*/information"))
    return {
        "format": FORMAT,
        "cpu": _field(proc / "cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        # Rounded: a kernel keeps a little more or less of it back at each start.
        "memory_gib": round(psutil.virtual_memory().total / GIB),
        "kernel": platform.release(),
        "torch": str(torch.__version__),
        "gpus": ", ".join(gpus),
        "driver": _field(proc / "driver/nvidia/version", "NVRM version"),
    }


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
    """Returns the first `name: value` of a file; empty where there is none."""
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return ""
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == name:
            return " ".join(value.split())
    return ""


def cache_directory() -> Path | None:
    """`$PTM_ACCEL_CACHE`, or `ptm_accel` in `$XDG_CACHE_HOME` or `~/.cache`; None for a user without a home."""
    if own := os.environ.get("PTM_ACCEL_CACHE"):
        return Path(own).absolute()
    # Relative paths are to be ignored, by the XDG specification.
    if os.path.isabs(shared := os.environ.get("XDG_CACHE_HOME", "")):
        return Path(shared) / "ptm_accel"
    try:
        return Path.home() / ".cache" / "ptm_accel"
    except RuntimeError:
        return None


class RateCache:
    """The rates of one machine. A file that cannot be used is logged, and not used; nothing raises.

    What could not be measured is None, and not tried again in this process.

    Args:
        fingerprint: of the machine.
        folder: where the file is; made when there is something to write. None keeps nothing for later processes.

    Attributes:
        path: the file; None if nothing is kept.
    """

    def __init__(self, fingerprint: Fingerprint, folder: Path | None) -> None:
        self._fingerprint = fingerprint
        self._known: dict[str, Rates | None] = {}
        digest = hashlib.sha256(json.dumps(fingerprint, sort_keys=True).encode()).hexdigest()[:16]
        self.path = None if folder is None else folder / f"hardware-{digest}.json"

    def find(self, key: str, what: str, count: int, measure: Callable[[], Rates | None]) -> Rates | None:
        """Some rates: from this process, else from the file, else measured.

        Args:
            key: their name.
            what: what they are of, for the log.
            count: how many there are.
            measure: measures them; None where that is not possible.
        """
        if key not in self._known:
            found = self._kept(key, count)
            if found is None:
                with self.alone():
                    # Another process may have measured it while this one waited.
                    found = self._kept(key, count) or self._measured(key, what, measure)
            self._known[key] = found
        return self._known[key]

    def renew(self, key: str, measure: Callable[[], Rates | None]) -> Rates | None:
        """Some rates, measured now, in place of those that were known; `measure` raises as it likes.

        Args:
            key: their name.
            measure: measures them; None where that is not possible, and what was known stays.
        """
        with self.alone():
            found = measure()
            if found is not None:
                self._known[key] = found
                self.add(key, found)
        return found

    def _kept(self, key: str, count: int) -> Rates | None:
        found = self.read().get(key)
        if found is not None and not are_rates(found, count):
            logger.info("the entry %r of %s is damaged (%r); it is measured again.", key, self.path, found)
            return None
        return found and tuple(found)

    def _measured(self, key: str, what: str, measure: Callable[[], Rates | None]) -> Rates | None:
        try:
            found = measure()
        except (PTMError, OSError, RuntimeError) as error:
            warn(what, error)
            return None
        if found is not None:
            logger.info("measured: %s: %s.", key, _shown(found))
            self.add(key, found)
        return found

    def read(self) -> dict[str, Any]:
        """Returns the entries of the file as JSON; none if there is no file, or none of this machine and format."""
        if self.path is None:
            return {}
        try:
            with _regular(self.path, os.O_RDONLY) as fd:
                found = json.loads(os.pread(fd, _MOST_BYTES, 0).decode("utf-8"))
            if found["machine"] != self._fingerprint:
                raise ValueError("it is of another version or machine")
            return dict(found["rates"])
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
            logger.info("the hardware profile %s cannot be read (%r); it is measured again.", self.path, error)
            return {}

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A lock under which one process at a time measures this machine: two at once would halve the rates.

        Without a folder to hold the lock in, or after half a minute, the caller goes on without it.
        """
        with contextlib.ExitStack() as cleanup:
            if self.path is not None:
                try:
                    self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                    # Closing is what unlocks.
                    fd = cleanup.enter_context(_regular(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT))
                except OSError as error:
                    self._give_up(self.path.parent, error)
                else:
                    _lock(fd)
            yield

    def add(self, key: str, rates: Sequence[float]) -> None:
        """Puts an entry into the file, within `alone`, by replacing the file as a whole."""
        if self.path is None:
            return
        whole = {"machine": self._fingerprint, "rates": {**self.read(), key: rates}}
        part = None
        try:
            fd, name = tempfile.mkstemp(prefix=f"{self.path.stem}-", suffix=".tmp", dir=self.path.parent)
            part = Path(name)
            with os.fdopen(fd, "w", encoding="utf-8") as file:
                os.fchmod(fd, 0o644)
                file.write(json.dumps(whole, indent=1, sort_keys=True))
            part.replace(self.path)
        except OSError as error:
            if part is not None:
                with contextlib.suppress(OSError):
                    part.unlink()
            self._give_up(self.path.parent, error)

    def _give_up(self, folder: Path, error: OSError) -> None:
        self.path = None
        logger.info(
            "the hardware profile cannot be stored in %s (%s), so each process measures anew; set PTM_ACCEL_CACHE to "
            "a folder that can be written to.",
            folder,
            error.strerror or error,
        )


@contextlib.contextmanager
def _regular(path: Path, flags: int) -> Iterator[int]:
    """Opens a regular file, and closes it; yields its descriptor.

    Raises:
        OSError: it cannot be opened, or is a link, a pipe or the like.
    """
    # A pipe is opened without waiting for whoever may write to it.
    fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield fd
    finally:
        os.close(fd)


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


def warn(what: str, error: Exception) -> None:
    """Says that something cannot be measured."""
    logger.warning("the speed of %s cannot be measured: %s", what, error)


def _shown(found: Rates) -> str:
    if len(found) == 1:
        return f"{found[0]:.3g} updates (AdamW) a second"
    read, write, both = (f"{rate / GIB:.2f}" for rate in found[:3])
    return f"reads {read} GiB/s, writes {write} GiB/s, {both} GiB/s of both at once"
