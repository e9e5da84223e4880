"""The rates of this machine: measured when first asked for, then kept in the process and in the cache file."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from ptm_accel.errors import PTMError
from ptm_accel.hardware.cache import RateCache, cache_directory, disk_key, machine_fingerprint
from ptm_accel.hardware.measure import measure_cpu_update, measure_device, measure_disk
from ptm_accel.hardware.profile import DeviceRates, LinkRates, read_device, read_link, read_rate
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
    return [_disk(path) for path in paths]


def cpu_update_rate(threads: int) -> float:
    """Parameters per second of torch's fused fp32 AdamW with so many threads; uses 64 MiB while it is measured.

    Args:
        threads: positive.

    Raises:
        BudgetError: the machine gives no memory.
    """
    known = _this_machine()
    rate = known.find(f"cpu {threads} threads", read_rate, lambda: measure_cpu_update(threads))
    assert rate is not None, f"no rate for {threads} threads"
    return rate


def device_rates(device: torch.device) -> DeviceRates | None:
    """The rates of a device; uses 64 MiB of host and 256 MiB of device memory while they are measured.

    Args:
        device: any.

    Returns:
        None for one that is not CUDA, or that cannot be measured, which the log explains. Never an error.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    measure = _logged(f"{name} ({device})", lambda: measure_device(device))
    return _this_machine().find(f"device {name}", read_device, measure)


def _disk(path: Path) -> LinkRates | None:
    what = f"the disk path {path}"
    try:
        key = disk_key(path)
    except OSError as error:
        _warn(what, error)
        return None
    return _this_machine().find(f"disk {key}", read_link, _logged(what, lambda: measure_disk(path)))


class Known:
    """The rates of one machine that are known in this process.

    What could not be measured is None, and not tried again in this process.

    Args:
        cache: keeps them for later processes.
    """

    def __init__(self, cache: RateCache) -> None:
        self._cache = cache
        self._known: dict[str, Any] = {}
        self._lock = threading.Lock()

    def find(self, key: str, read: Callable[[Any], T], measure: Callable[[], T | None]) -> T | None:
        """An entry: from this process, else from the cache, else measured.

        Args:
            key: its name.
            read: makes it from JSON.
            measure: measures it; None where that is not possible.
        """
        with self._lock:
            if key not in self._known:
                cached = self._cached(key, read)
                self._known[key] = self._measured(key, read, measure) if cached is None else cached
            found: T | None = self._known[key]
            return found

    def _cached(self, key: str, read: Callable[[Any], T]) -> T | None:
        entries = self._cache.read()
        try:
            return read(entries[key]) if key in entries else None
        except (ValueError, TypeError, KeyError) as error:
            logger.info("the entry %r of %s is damaged (%r); it is measured again.", key, self._cache.path, error)
            return None

    def _measured(self, key: str, read: Callable[[Any], T], measure: Callable[[], T | None]) -> T | None:
        with self._cache.alone():
            # Another process may have measured it while this one waited.
            found = self._cached(key, read)
            if found is None and (found := measure()) is not None:
                logger.info("measured: %s: %s.", key, _shown(found))
                self._cache.add(key, found)
            return found


@lru_cache(maxsize=1)
def _this_machine() -> Known:
    return Known(RateCache(machine_fingerprint(), cache_directory()))


def _logged(what: str, measure: Callable[[], T | None]) -> Callable[[], T | None]:
    """`measure`, with errors logged, and None in their place."""

    def measure_or_warn() -> T | None:
        try:
            return measure()
        except (PTMError, OSError, RuntimeError) as error:
            _warn(what, error)
            return None

    return measure_or_warn


def _warn(what: str, error: Exception) -> None:
    logger.warning("the speed of %s cannot be measured: %s", what, error)


def _shown(found: object) -> str:
    if isinstance(found, DeviceRates):
        return _shown(found.pinned or found.pageable)
    if not isinstance(found, LinkRates):
        return f"{found:.3g} updates (AdamW) a second"
    read, write, both = (f"{rate / GIB:.2f}" for rate in (found.read_bytes_s, found.write_bytes_s, found.both_bytes_s))
    return f"reads {read} GiB/s, writes {write} GiB/s, {both} GiB/s of both at once"
