"""Rates measured on one machine, and the time that a transfer takes at these rates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any

_GREATEST_RATE = 1e18
"""No machine does more of anything in a second: a greater rate in a file is damage."""


@dataclass(frozen=True, slots=True)
class LinkRates:
    """Speed of a link with two directions: a disk, or the link to a device.

    Attributes:
        read_bytes_s: bytes per second when only reading (from the disk; of a device link: from host to device).
        write_bytes_s: bytes per second when only writing (to the disk; of a device link: from device to host).
        both_bytes_s: bytes read and written per second, together, while as many are read as written.
    """

    read_bytes_s: float
    write_bytes_s: float
    both_bytes_s: float

    def __post_init__(self) -> None:
        assert all(0 < rate < _GREATEST_RATE for rate in astuple(self)), f"rates of a link: {self}"

    @property
    def shared(self) -> float:
        """The part of the shorter direction's time that is added to the longer's when both run at once.

        0 on a duplex link, where the shorter hides behind the longer; 1 where the two can only take turns. With it
        `seconds` of equal amounts gives the measured `both_bytes_s`. A measurement beyond 0 and 1 is noise.
        """
        longer, shorter = 1 / min(self.read_bytes_s, self.write_bytes_s), 1 / max(self.read_bytes_s, self.write_bytes_s)
        return min(1.0, max(0.0, (2 / self.both_bytes_s - longer) / shorter))

    def seconds(self, read_bytes: float, written_bytes: float) -> float:
        """Returns the least time in which both amounts can be moved, in seconds.

        Each direction alone takes its bytes over its rate; together they take the longer of these times and the
        `shared` part of the shorter. This is exact for one direction alone and for equal amounts, which were measured.
        """
        reading, writing = read_bytes / self.read_bytes_s, written_bytes / self.write_bytes_s
        return max(reading, writing) + self.shared * min(reading, writing)


def side_by_side(links: Sequence[LinkRates | None]) -> LinkRates | None:
    """Returns the rates of links that share the bytes in proportion to their speed; None if one is not known."""
    return _combined(links, sum)


def in_a_row(links: Sequence[LinkRates | None]) -> LinkRates | None:
    """Returns the rates of links that all bytes pass one after the other; None if one is not known."""
    return _combined(links, min)


def _combined(links: Sequence[LinkRates | None], combine: Callable[[tuple[float, ...]], float]) -> LinkRates | None:
    known = [link for link in links if link is not None]
    if not known or len(known) < len(links):
        return None
    rates = [(link.read_bytes_s, link.write_bytes_s, link.both_bytes_s) for link in known]
    return LinkRates(*map(combine, zip(*rates, strict=True)))


@dataclass(frozen=True, slots=True)
class DeviceRates(LinkRates):
    """The link to a device, of pinned host memory unless pinning was refused, and updates on it.

    Attributes:
        update_params_s: parameters per second of torch's fused fp32 AdamW on the device.
    """

    update_params_s: float


def are_rates(found: Any, count: int) -> bool:
    """Returns whether what was read from a file is so many rates."""
    if not isinstance(found, list) or len(found) != count:
        return False
    return all(isinstance(rate, float) and 0 < rate < _GREATEST_RATE for rate in found)
