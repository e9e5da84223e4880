"""The least time that a step can take on a machine, with buffers without end, and the resource that it is busy with."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ptm_accel.hardware.profile import LinkRates


class Resource(enum.Enum):
    """Resource that a step can have to wait for."""

    COMPUTE = "compute"
    """Tier that passes are computed on."""
    CPU = "CPU"
    """Updates on the CPU beside a device."""
    LINK_IN = "link in"
    """From host to device."""
    LINK_OUT = "link out"
    DISK_READ = "disk read"
    DISK_WRITE = "disk write"
    NETWORK = "network"
    """Other ranks, which are waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Work of a step.

    Attributes:
        forward_s: seconds of arithmetic in its forwards.
        backward_s: seconds of arithmetic in its backwards, and in the norm.
        update_s: seconds of arithmetic in its update, where passes are computed.
        host_s: seconds of arithmetic in updates on the CPU beside a device.
        in_bytes: bytes that come in over the link to a device.
        out_bytes: bytes that go out over it.
        read_bytes: bytes that are read from disk.
        written_bytes: bytes that are written to it.
        network_s: seconds that other ranks were waited for, at least those in which bytes came from them.
        clipped: no update may begin before the norm of all gradients is known.
    """

    forward_s: float
    backward_s: float
    update_s: float
    host_s: float = 0.0
    in_bytes: float = 0.0
    out_bytes: float = 0.0
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    network_s: float = 0.0
    clipped: bool = True


def lower_bound(cost: StepCost, link: LinkRates | None = None, disk: LinkRates | None = None) -> tuple[float, Resource]:
    """Returns the least seconds that a step takes, and what it cannot go below them for.

    On the same cores all arithmetic follows one another. What is updated on others runs beside the rest: with clipping
    it begins as backward ends, and only what follows until the next backward is there to run beside.

    Args:
        cost: what it does.
        link: the rates of the link to a device, both directions at once as measured; None if there is none.
        disk: the rates of the disk; None if nothing is moved there, or nothing is known.
    """
    found = [
        (cost.forward_s + cost.backward_s + cost.update_s, Resource.COMPUTE),
        ((cost.backward_s if cost.clipped else 0.0) + cost.host_s, Resource.CPU),
        (cost.network_s, Resource.NETWORK),
    ]
    for rates, coming, going, to, back in (
        (link, cost.in_bytes, cost.out_bytes, Resource.LINK_IN, Resource.LINK_OUT),
        (disk, cost.read_bytes, cost.written_bytes, Resource.DISK_READ, Resource.DISK_WRITE),
    ):
        if rates is not None:
            mostly = to if coming / rates.read_bytes_s >= going / rates.write_bytes_s else back
            found.append((rates.seconds(coming, going), mostly))
    return max(found, key=lambda each: each[0])
