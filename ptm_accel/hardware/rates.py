"""What the rest asks: the rates of this machine, measured when first asked for, then known."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

import torch

from ptm_accel.errors import PTMError
from ptm_accel.hardware.identity import disk_key, machine_fingerprint
from ptm_accel.hardware.measure import measure_cpu_update, measure_device, measure_disk
from ptm_accel.hardware.profile import DeviceRates, HardwareProfile, LinkRates
from ptm_accel.hardware.store import ProfileStore, cache_directory
from ptm_accel.units import GIB

logger = logging.getLogger(__name__)

T = TypeVar("T")


def disk_rates(paths: Sequence[Path], *, refresh: bool = False) -> list[LinkRates | None]:
    """The rates of the disk that holds each folder; about a second for one that is not known yet.

    While it is measured, up to 256 MiB are written to an unlinked file there, and 40 MiB of memory are used.

    Args:
        paths: folders; those on one disk share its rates.
        refresh: measure again what is known.

    Returns:
        In the order of `paths`; None where it cannot be measured, which the log explains. Never an error.
    """
    return _this_machine().disks(paths, refresh=refresh)


def cpu_update_rate(threads: int, *, refresh: bool = False) -> float:
    """Parameters per second of torch's fused fp32 AdamW with so many threads; uses 64 MiB while it is measured.

    Args:
        threads: positive.
        refresh: measure again what is known.

    Raises:
        BudgetError: the machine gives no memory.
    """
    return _this_machine().cpu_update(threads, refresh=refresh)


def device_rates(device: torch.device, *, refresh: bool = False) -> DeviceRates | None:
    """The rates of a device; uses 64 MiB of host and 256 MiB of device memory while they are measured.

    Args:
        device: any.
        refresh: measure again what is known.

    Returns:
        None for one that is not CUDA, or that cannot be measured, which the log explains. Never an error.
    """
    return _this_machine().device(device, refresh=refresh) if torch.cuda.is_available() else None


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

    Args:
        store: where the profile outlives the process.
        probe: the measurements.
    """

    def __init__(self, store: ProfileStore, probe: Probe | None = None) -> None:
        self._store = store
        self._probe = probe or Probe()
        self._known: HardwareProfile | None = None
        self._refused: set[str] = set()
        self._lock = threading.Lock()

    @property
    def profile(self) -> HardwareProfile:
        """What is known so far; nothing is measured."""
        if self._known is None:
            self._known = self._store.read()
        return self._known

    def disks(self, paths: Sequence[Path], *, refresh: bool = False) -> list[LinkRates | None]:
        """See `disk_rates`."""
        found: dict[str, LinkRates | None] = {}
        keys = [self._key_of(path) for path in paths]
        for path, key in zip(paths, keys, strict=True):
            if key is not None and key not in found:
                found[key] = self._disk(path, key, refresh)
        return [None if key is None else found[key] for key in keys]

    def cpu_update(self, threads: int, *, refresh: bool = False) -> float:
        """See `cpu_update_rate`."""

        def measure() -> HardwareProfile:
            rate = self._probe.cpu_update(threads)
            logger.info("measured: %.2f billion updates (AdamW) a second with %d threads.", rate / 1e9, threads)
            return self._new(cpu_update_params_s={threads: rate})

        rate = self._find(lambda profile: profile.cpu_update_params_s.get(threads), measure, refresh=refresh)
        assert rate is not None, f"no rate for {threads} threads"
        return rate

    def device(self, device: torch.device, *, refresh: bool = False) -> DeviceRates | None:
        """See `device_rates`."""
        if device.type != "cuda":
            return None
        key = self._probe.device_key(device)
        return self._unless_refused(
            key, lambda profile: profile.devices.get(key), lambda: self._measure_device(device, key), refresh=refresh
        )

    def _disk(self, path: Path, key: str, refresh: bool) -> LinkRates | None:
        return self._unless_refused(
            key, lambda profile: profile.disks.get(key), lambda: self._measure_disk(path, key), refresh=refresh
        )

    def _key_of(self, path: Path) -> str | None:
        try:
            return self._probe.disk_key(path)
        except OSError as error:
            _say_unmeasured(f"the disk path {path}", error)
            return None

    def _measure_disk(self, path: Path, key: str) -> HardwareProfile | None:
        try:
            rates = self._probe.disk(path)
        except (PTMError, OSError) as error:
            _say_unmeasured(f"the disk path {path}", error)
            return None
        if rates is None:
            return None
        logger.info("measured: the disk path %s %s.", path, _shown(rates))
        return self._new(disks={key: rates})

    def _measure_device(self, device: torch.device, key: str) -> HardwareProfile | None:
        try:
            rates = self._probe.device(device)
        except (PTMError, OSError, RuntimeError) as error:
            _say_unmeasured(f"{key} ({device})", error)
            return None
        if rates is None:
            return None
        logger.info("measured: the link of %s %s.", key, _shown(rates.pinned or rates.pageable))
        return self._new(devices={key: rates})

    def _new(
        self,
        disks: dict[str, LinkRates] | None = None,
        devices: dict[str, DeviceRates] | None = None,
        cpu_update_params_s: dict[int, float] | None = None,
    ) -> HardwareProfile:
        return HardwareProfile(
            fingerprint=self._store.fingerprint,
            disks=disks or {},
            devices=devices or {},
            cpu_update_params_s=cpu_update_params_s or {},
        )

    def _unless_refused(
        self,
        key: str,
        pick: Callable[[HardwareProfile], T | None],
        measure: Callable[[], HardwareProfile | None],
        *,
        refresh: bool,
    ) -> T | None:
        """As `_find`; what could not be measured is not tried again in this process."""
        if key in self._refused and not refresh:
            return None
        found = self._find(pick, measure, refresh=refresh)
        if found is None:
            self._refused.add(key)
        else:
            self._refused.discard(key)
        return found

    def _find(
        self,
        pick: Callable[[HardwareProfile], T | None],
        measure: Callable[[], HardwareProfile | None],
        *,
        refresh: bool,
    ) -> T | None:
        """What `pick` finds in the profile, once measured; what was known before if it cannot be, or None."""
        with self._lock:
            if not refresh and (known := pick(self.profile)) is not None:
                return known
            with self._store.alone():
                # Another process may have measured it while this one waited for its turn.
                self._known = self.profile.merged(self._store.read())
                if not refresh and (known := pick(self.profile)) is not None:
                    return known
                measured = measure()
                if measured is not None:
                    self._known = self.profile.merged(measured)
                    self._store.add(measured)
                return pick(self.profile)


@lru_cache(maxsize=1)
def _this_machine() -> Gauge:
    return Gauge(ProfileStore(machine_fingerprint(), cache_directory()))


def _say_unmeasured(what: str, error: Exception) -> None:
    logger.warning("the speed of %s cannot be measured: %s", what, error)


def _shown(rates: LinkRates) -> str:
    read, write, both = (f"{rate / GIB:.2f}" for rate in (rates.read_bytes_s, rates.write_bytes_s, rates.both_bytes_s))
    return f"reads {read} GiB/s, writes {write} GiB/s, {both} GiB/s of both at once"
