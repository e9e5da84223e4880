"""What was measured of a machine, as plain data, and its form in a file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

FORMAT = 1
"""Of the file; raised whenever what it holds, or how that is measured, changes."""

_GREATEST_RATE = 1e18
"""No machine does more of anything in a second, so that such a number in a file is damage."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class LinkRates:
    """How fast bytes move on a link with two directions: a disk, or the link to a device.

    Attributes:
        read_bytes_s: bytes per second when only reading (from the disk; of a device link: from host to device).
        write_bytes_s: bytes per second when only writing (to the disk; of a device link: from device to host).
        both_bytes_s: bytes read and written per second, together, while as many are read as written.
    """

    read_bytes_s: float
    write_bytes_s: float
    both_bytes_s: float

    def __post_init__(self) -> None:
        rates = (self.read_bytes_s, self.write_bytes_s, self.both_bytes_s)
        assert all(0 < rate < _GREATEST_RATE for rate in rates), f"rates of a link: {rates}"

    @property
    def shared(self) -> float:
        """What part of the shorter direction's time is added to the longer's when both run at once.

        0 on a duplex link, where the shorter hides behind the longer; 1 where the two can only take turns. It is what
        makes `seconds` of equal amounts come to the measured `both_bytes_s`, except that it stays within these limits:
        a measurement beyond them is noise, since no direction gets faster by the other's traffic, and whoever is
        slower with both at once can take turns instead.
        """
        longer, shorter = 1 / min(self.read_bytes_s, self.write_bytes_s), 1 / max(self.read_bytes_s, self.write_bytes_s)
        return min(1.0, max(0.0, (2 / self.both_bytes_s - longer) / shorter))

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """The least time in which both amounts can be moved, in seconds, as far as was measured.

        Each direction alone would take its bytes over its rate. Together they take the longer of these times and the
        `shared` part of the shorter: never less than the longer, never more than one after the other. It is exact for
        one direction alone and for equal amounts, which were measured, and in between and beyond it interpolates.
        (`both_bytes_s` by itself is no bound: on a link that is not duplex it lies between the two other rates.)

        Args:
            read_bytes: zero or more.
            written_bytes: zero or more.
        """
        reading, writing = read_bytes / self.read_bytes_s, written_bytes / self.write_bytes_s
        return max(reading, writing) + self.shared * min(reading, writing)


def side_by_side(links: Sequence[LinkRates | None]) -> LinkRates | None:
    """The rates of links that bytes are dealt out to in proportion to their speed; None if one is not known."""
    return _combined(links, sum)


def in_a_row(links: Sequence[LinkRates | None]) -> LinkRates | None:
    """The rates of links that bytes pass one after the other, many at a time; None if one is not known."""
    return _combined(links, min)


def _combined(links: Sequence[LinkRates | None], combine: Callable[[list[float]], float]) -> LinkRates | None:
    known = [link for link in links if link is not None]
    if not known or len(known) < len(links):
        return None
    return LinkRates(
        combine([link.read_bytes_s for link in known]),
        combine([link.write_bytes_s for link in known]),
        combine([link.both_bytes_s for link in known]),
    )


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """What was measured of a device.

    Attributes:
        pinned: its link, from and to pinned host memory; None where pinning was refused.
        pageable: its link, from and to ordinary host memory.
        update_params_s: parameters per second of torch's fused fp32 AdamW on the device.
    """

    pinned: LinkRates | None
    pageable: LinkRates
    update_params_s: float


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells one machine from another; a profile holds only where all of it is the same.

    Attributes:
        cpu: the processor's model.
        cores: how many of its cores this process may use.
        memory_gib: physical memory, rounded, since a kernel keeps a little more or less of it back at each start.
        kernel: the release of the kernel.
        torch: the version of torch.
        gpus: the models of all GPUs, joined; empty without one.
        driver: the version of their driver; empty without one.
    """

    cpu: str
    cores: int
    memory_gib: int
    kernel: str
    torch: str
    gpus: str
    driver: str

    def digest(self) -> str:
        """A short name for it, fit for a file."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class HardwareProfile:
    """What has been measured of one machine so far.

    Attributes:
        fingerprint: of which machine.
        disks: by `identity.disk_key`.
        devices: by the device's name.
        cpu_update_params_s: parameters per second of torch's fused fp32 AdamW, by the number of threads.
    """

    fingerprint: Fingerprint
    disks: Mapping[str, LinkRates] = field(default_factory=dict)
    devices: Mapping[str, DeviceRates] = field(default_factory=dict)
    cpu_update_params_s: Mapping[int, float] = field(default_factory=dict)

    def merged(self, newer: HardwareProfile) -> HardwareProfile:
        """This and `newer` together; what both have is `newer`'s."""
        assert self.fingerprint == newer.fingerprint, f"profiles of {self.fingerprint} and {newer.fingerprint}"
        return HardwareProfile(
            fingerprint=self.fingerprint,
            disks={**self.disks, **newer.disks},
            devices={**self.devices, **newer.devices},
            cpu_update_params_s={**self.cpu_update_params_s, **newer.cpu_update_params_s},
        )


def to_json(profile: HardwareProfile) -> str:
    """The profile as the text of a file."""
    return json.dumps({"format": FORMAT, **asdict(profile)}, indent=1, sort_keys=True)


def from_json(text: str, fingerprint: Fingerprint) -> HardwareProfile | None:
    """The profile in the text of a file; entries that make no sense are left out.

    Args:
        text: of the file.
        fingerprint: of the machine it must be of.

    Returns:
        None if it is no profile, of another format, or of another machine.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("fingerprint") != asdict(fingerprint):
        return None
    updates = _entries(found.get("cpu_update_params_s"), _rate)
    return HardwareProfile(
        fingerprint=fingerprint,
        disks=_entries(found.get("disks"), _link),
        devices=_entries(found.get("devices"), _device),
        cpu_update_params_s={int(key): rate for key, rate in updates.items() if key.isascii() and key.isdigit()},
    )


def _entries(found: Any, read: Callable[[Any], T | None]) -> dict[str, T]:
    entries = found.items() if isinstance(found, dict) else ()
    return {key: value for key, text in entries if (value := read(text)) is not None}


def _rate(found: Any) -> float | None:
    number = isinstance(found, (int, float)) and not isinstance(found, bool)
    return float(found) if number and 0 < found < _GREATEST_RATE else None


def _link(found: Any) -> LinkRates | None:
    rates = _entries(found, _rate)
    names = ("read_bytes_s", "write_bytes_s", "both_bytes_s")
    return LinkRates(*(rates[name] for name in names)) if rates.keys() >= set(names) else None


def _device(found: Any) -> DeviceRates | None:
    links, rates = _entries(found, _link), _entries(found, _rate)
    if "pageable" not in links or "update_params_s" not in rates:
        return None
    return DeviceRates(links.get("pinned"), links["pageable"], rates["update_params_s"])
