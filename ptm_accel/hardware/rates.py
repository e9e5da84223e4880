"""What the rest asks: the rates of this machine, measured when first asked for, then known."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from ptm_accel.errors import PTMError
from ptm_accel.hardware.cache import ProfileStore, cache_directory, disk_key, machine_fingerprint
from ptm_accel.hardware.measure import measure_cpu_update, measure_device, measure_disk
from ptm_accel.hardware.profile import DeviceRates, HardwareProfile, LinkRates
from ptm_accel.units import GIB

logger = logging.getLogger(__name__)

T = TypeVar("T")


def disk_rates(paths: Sequence[Path]) -> list[LinkRates | None]:
    """The rates of the disk that holds each folder; about a second for one that is not known yet.

    While it is measured, up to 256 MiB are written to an unlinked file there, and 40 MiB of memory are used.

    Args:
        paths: folders; those on one disk share its rates.

    Returns:
        In the order of `paths`; None where it cannot be measured, which the log explains. Never an error.
    """
    return _this_machine().disks(paths)


def cpu_update_rate(threads: int) -> float:
    """Parameters per second of torch's fused fp32 AdamW with so many threads; uses 64 MiB while it is measured.

    Args:
        threads: positive.

    Raises:
        BudgetError: the machine gives no memory.
    """
    return _this_machine().cpu_update(threads)


def device_rates(device: torch.device) -> DeviceRates | None:
    """The rates of a device; uses 64 MiB of host and 256 MiB of device memory while they are measured.

    Args:
        device: any.

    Returns:
        None for one that is not CUDA, or that cannot be measured, which the log explains. Never an error.
    """
    return _this_machine().device(device) if torch.cuda.is_available() else None


@dataclass(frozen=True, slots=True)
class Probe:
    """Where the numbers come from, as one value, so that a test can put others in place.

    Attributes:
        disk: measures the disk of a folder.
        cpu_update: measures updates with a number of threads.
        device: measures a device.
        disk_key: names the disk of a folder.
        device_key: names the model of a device.
    """

    disk: Callable[[Path], LinkRates | None] = measure_disk
    cpu_update: Callable[[int], float] = measure_cpu_update
    device: Callable[[torch.device], DeviceRates | None] = measure_device
    disk_key: Callable[[Path], str] = disk_key
    device_key: Callable[[torch.device], str] = torch.cuda.get_device_name


class Gauge:
    """Measures one machine, piece by piece as it is asked, and remembers.

    What could not be measured is not tried again in this process.

    Args:
        store: where the profile outlives the process.
        probe: the measurements.
    """

    def __init__(self, store: ProfileStore, probe: Probe | None = None) -> None:
        self._store = store
        self._probe = probe or Probe()
        self._known: HardwareProfile | None = None
        self._failed: set[object] = set()
        self._lock = threading.Lock()

    @property
    def profile(self) -> HardwareProfile:
        """What is known so far; nothing is measured."""
        if self._known is None:
            self._known = self._store.read()
        return self._known

    def disks(self, paths: Sequence[Path]) -> list[LinkRates | None]:
        """See `disk_rates`."""
        return [self._disk(path) for path in paths]

    def cpu_update(self, threads: int) -> float:
        """See `cpu_update_rate`."""
        rate: float | None = self._find(
            "cpu_update_params_s", threads, lambda: self._probe.cpu_update(threads), _updates
        )
        assert rate is not None, f"no rate for {threads} threads"
        return rate

    def device(self, device: torch.device) -> DeviceRates | None:
        """See `device_rates`."""
        if device.type != "cuda":
            return None
        key = self._probe.device_key(device)
        measure = _logged(f"{key} ({device})", lambda: self._probe.device(device))
        return self._find(
            "devices", key, measure, lambda _, rates: f"the link of {key} {_shown(rates.pinned or rates.pageable)}"
        )

    def _disk(self, path: Path) -> LinkRates | None:
        try:
            key = self._probe.disk_key(path)
        except OSError as error:
            _say_unmeasured(f"the disk path {path}", error)
            return None
        measure = _logged(f"the disk path {path}", lambda: self._probe.disk(path))
        return self._find("disks", key, measure, lambda _, rates: f"the disk path {path} {_shown(rates)}")

    def _find(
        self, kind: str, key: Any, measure: Callable[[], T | None], describe: Callable[[Any, T], str]
    ) -> T | None:
        """One entry of the profile's table `kind`, measured if it is not known."""
        with self._lock:
            known: T | None = getattr(self.profile, kind).get(key)
            if known is not None or key in self._failed:
                return known
            with self._store.alone():
                # Another process may have measured it while this one waited for its turn.
                self._known = self.profile.merged(self._store.read())
                known = getattr(self._known, kind).get(key)
                if known is not None:
                    return known
                found = measure()
                if found is None:
                    self._failed.add(key)
                    return None
                logger.info("measured: %s.", describe(key, found))
                table: dict[str, Any] = {kind: {key: found}}
                measured = HardwareProfile(fingerprint=self._store.fingerprint, **table)
                self._known = self._known.merged(measured)
                self._store.add(measured)
                return found


@lru_cache(maxsize=1)
def _this_machine() -> Gauge:
    return Gauge(ProfileStore(machine_fingerprint(), cache_directory()))


def _logged(what: str, measure: Callable[[], T | None]) -> Callable[[], T | None]:
    """`measure`, with errors in the log in place of a rate."""

    def measure_or_say() -> T | None:
        try:
            return measure()
        except (PTMError, OSError, RuntimeError) as error:
            _say_unmeasured(what, error)
            return None

    return measure_or_say


def _updates(threads: int, rate: float) -> str:
    return f"{rate / 1e9:.2f} billion updates (AdamW) a second with {threads} threads"


def _say_unmeasured(what: str, error: Exception) -> None:
    logger.warning("the speed of %s cannot be measured: %s", what, error)


def _shown(rates: LinkRates) -> str:
    read, write, both = (f"{rate / GIB:.2f}" for rate in (rates.read_bytes_s, rates.write_bytes_s, rates.both_bytes_s))
    return f"reads {read} GiB/s, writes {write} GiB/s, {both} GiB/s of both at once"
