"""The rates of this machine: measured when first asked for, then kept in the process and in the cache file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path

import torch

from ptm_accel.errors import PTMError
from ptm_accel.hardware.cache import RateCache, cache_directory, disk_key, machine_fingerprint
from ptm_accel.hardware.measure import measure_cpu_update, measure_device, measure_disk
from ptm_accel.hardware.profile import DeviceRates, LinkRates, are_rates
from ptm_accel.units import GIB

logger = logging.getLogger(__name__)

Rates = tuple[float, ...]
"""One rate of updates; the three of a link (`LinkRates`); the four of a device (`DeviceRates`)."""


def disk_rates(paths: Sequence[Path]) -> list[LinkRates | None]:
    """The rates of the disk that holds each folder; about a second for one that is not known yet.

    While it is measured, up to 256 MiB are written to an unlinked file there, and 40 MiB of memory are used.

    Args:
        paths: folders; those on one disk share its rates.

    Returns:
        In the order of `paths`; None where it cannot be measured, which the log explains. Never an error.
    """
    return [_disk(path) for path in paths]


def cpu_update_rate(threads: int) -> float | None:
    """Parameters per second of torch's fused fp32 AdamW with so many threads; uses 64 MiB while it is measured.

    Returns:
        None where it cannot be measured, which the log explains. Never an error.
    """
    key = f"cpu {threads} threads"
    found = _this_machine().find(key, f"updates with {threads} threads", 1, lambda: (measure_cpu_update(threads),))
    return found[0] if found else None


def device_rates(device: torch.device) -> DeviceRates | None:
    """The rates of a device; uses 64 MiB of host and 256 MiB of device memory while they are measured.

    Returns:
        None for one that is not CUDA, or that cannot be measured, which the log explains. Never an error.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    found = _this_machine().find(f"device {name}", f"{name} ({device})", 4, lambda: astuple(measure_device(device)))
    return DeviceRates(*found) if found else None


def _disk(path: Path) -> LinkRates | None:
    what = f"the disk path {path}"
    try:
        key = disk_key(path)
    except OSError as error:
        _warn(what, error)
        return None

    def measure() -> Rates | None:
        rates = measure_disk(path)
        return None if rates is None else astuple(rates)

    found = _this_machine().find(f"disk {key}", what, 3, measure)
    return LinkRates(*found) if found else None


class Known:
    """The rates of one machine that are known in this process.

    What could not be measured is None, and not tried again in this process.

    Args:
        cache: keeps them for later processes.
    """

    def __init__(self, cache: RateCache) -> None:
        self._cache = cache
        self._known: dict[str, Rates | None] = {}
        self._lock = threading.Lock()

    def find(self, key: str, what: str, count: int, measure: Callable[[], Rates | None]) -> Rates | None:
        """Some rates: from this process, else from the cache, else measured.

        Args:
            key: their name.
            what: what they are of, for the log.
            count: how many there are.
            measure: measures them; None where that is not possible.
        """
        with self._lock:
            if key not in self._known:
                self._known[key] = self._cached(key, count) or self._measured(key, what, count, measure)
            return self._known[key]

    def _cached(self, key: str, count: int) -> Rates | None:
        found = self._cache.read().get(key)
        if found is not None and not are_rates(found, count):
            logger.info("the entry %r of %s is damaged (%r); it is measured again.", key, self._cache.path, found)
            return None
        return found and tuple(found)

    def _measured(self, key: str, what: str, count: int, measure: Callable[[], Rates | None]) -> Rates | None:
        with self._cache.alone():
            # Another process may have measured it while this one waited.
            if (found := self._cached(key, count)) is not None:
                return found
            try:
                found = measure()
            except (PTMError, OSError, RuntimeError) as error:
                _warn(what, error)
            if found is not None:
                logger.info("measured: %s: %s.", key, _shown(found))
                self._cache.add(key, found)
            return found


@lru_cache(maxsize=1)
def _this_machine() -> Known:
    return Known(RateCache(machine_fingerprint(), cache_directory()))


def _warn(what: str, error: Exception) -> None:
    logger.warning("the speed of %s cannot be measured: %s", what, error)


def _shown(found: Rates) -> str:
    if len(found) == 1:
        return f"{found[0]:.3g} updates (AdamW) a second"
    read, write, both = (f"{rate / GIB:.2f}" for rate in found[:3])
    return f"reads {read} GiB/s, writes {write} GiB/s, {both} GiB/s of both at once"
