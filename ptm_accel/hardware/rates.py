"""The rates of this machine: measured when first asked for, then kept in the process and in the cache file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple
from functools import lru_cache
from pathlib import Path

import torch

from ptm_accel.hardware.cache import RateCache, Rates, cache_directory, disk_key, machine_fingerprint, warn
from ptm_accel.hardware.measure import measure_device, measure_disk
from ptm_accel.hardware.profile import DeviceRates, LinkRates


def disk_rates(paths: Sequence[Path]) -> list[LinkRates | None]:
    """Returns the rates of the disk that holds each folder; about a second for one that is not known yet.

    While it is measured, up to 256 MiB are written to an unlinked file there, and 40 MiB of memory are used.

    Args:
        paths: folders; those on one disk share its rates.

    Returns:
        In the order of `paths`; None where it cannot be measured, which the log explains. Never an error.
    """
    return [_disk(path) for path in paths]


def update_rate(what: str, measure: Callable[[], float]) -> float | None:
    """Parameters per second that the CPU updates.

    Args:
        what: names the kind of update, in the file and in the log.
        measure: measures it, if it is not known yet.

    Returns:
        None where it cannot be measured, which the log explains. Never an error.
    """
    found = _this_machine().find(f"cpu {what}", f"updates in {what}", 1, lambda: (measure(),))
    return found[0] if found else None


def device_rates(device: torch.device) -> DeviceRates | None:
    """Returns the rates of a device; uses 64 MiB of host and 256 MiB of device memory while they are measured.

    Returns:
        None for one that is not CUDA, or that cannot be measured, which the log explains. Never an error.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(device)
    found = _this_machine().find(f"device {name}", f"{name} ({device})", 4, lambda: astuple(measure_device(device)))
    return DeviceRates(*found) if found else None


def renew_disk_rates(path: Path) -> LinkRates | None:
    """Measures the disk that holds a folder now, and keeps that in place of what was known.

    Returns:
        As `measure_disk`.

    Raises:
        DiskError, BudgetError, OSError: as `measure_disk`.
    """
    found = _this_machine().renew(f"disk {disk_key(path)}", lambda: _measured(path))
    return LinkRates(*found) if found else None


def renew_device_rates(device: torch.device) -> DeviceRates:
    """Measures a CUDA device now, and keeps that in place of what was known.

    Raises:
        BudgetError, RuntimeError: as `measure_device`.
    """
    key = f"device {torch.cuda.get_device_name(device)}"
    found = _this_machine().renew(key, lambda: astuple(measure_device(device)))
    assert found is not None, "the rates of a device are always measured"
    return DeviceRates(*found)


def kept_in() -> Path | None:
    """The file that keeps the rates for later processes; None where none can be kept, which the log explains."""
    known = _this_machine()
    # Tries the folder.
    with known.alone():
        return known.path


def _disk(path: Path) -> LinkRates | None:
    what = f"the disk path {path}"
    try:
        key = disk_key(path)
    except OSError as error:
        warn(what, error)
        return None
    found = _this_machine().find(f"disk {key}", what, 3, lambda: _measured(path))
    return LinkRates(*found) if found else None


def _measured(path: Path) -> Rates | None:
    rates = measure_disk(path)
    return None if rates is None else astuple(rates)


@lru_cache(maxsize=1)
def _this_machine() -> RateCache:
    return RateCache(machine_fingerprint(), cache_directory())
