"""Rates of a machine that a step is forecast by: measured here, or of hardware that is described."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ptm_accel.hardware.profile import LinkRates, in_a_row, side_by_side
from ptm_accel.hardware.rates import device_rates, disk_rates
from ptm_accel.model.touches import Touch
from ptm_accel.optim.update_rate import cpu_update_rate

_WIDTH = 2048
_PRODUCTS = 5


@dataclass(frozen=True, slots=True)
class Speeds:
    """Rates of a machine.

    Attributes:
        flops: of products, in the dtype of the model.
        made_bytes_s: memory that other operations make; infinite where that is in the rate of products.
        gradient_bytes_s: gradients that are taken where they arrive; infinite where that is in the rate of products.
        link: the link between a device and host memory; None without a device.
        disk: what is below the host memory that passes are computed in; None where nothing has to go there.
        update_params: parameters that are updated where passes are computed.
        host_params: parameters that are updated on the CPU beside a device; None without one, or with a disk below:
            these updates would wait for it.
        network_bytes_s: what a process receives from others; None where there are none.
    """

    flops: float
    update_params: float
    link: LinkRates | None = None
    disk: LinkRates | None = None
    host_params: float | None = None
    network_bytes_s: float | None = None
    made_bytes_s: float = math.inf
    gradient_bytes_s: float = math.inf

    def seconds(self, touches: Iterable[Touch]) -> float:
        """Arithmetic of a part of a pass."""
        return sum(
            touch.flops / self.flops
            + touch.made_bytes / self.made_bytes_s
            + touch.gradient_bytes / self.gradient_bytes_s
            for touch in touches
        )

    @property
    def below(self) -> LinkRates | None:
        """Of transfers between the tier that computes and those below, as a run plans with them (`Pages`)."""
        known = [link for link in (self.link, self.disk) if link is not None]
        return in_a_row(known)


def measured_speeds(
    device: torch.device, dtype: torch.dtype, disk: Sequence[Path], *, master_weights: bool = False
) -> Speeds | None:
    """What this machine does; None where its link, or its updates, cannot be measured.

    Args:
        device: where passes are computed.
        dtype: of the model.
        disk: folders; used where there is no device.
        master_weights: whether narrower parameters get fp32 masters.
    """
    cpu = cpu_update_rate(dtype, masters=master_weights)
    card = device_rates(device)
    flops = products_s(device, dtype)
    if card is not None:
        return Speeds(flops, card.update_params_s, card, host_params=cpu)
    below = side_by_side(disk_rates(disk)) if disk else None
    return None if below is None or cpu is None else on_cpu(flops, cpu, below)


CPU_SHARE = 0.85
"""What the products of a step get of the CPU's rate of products of large matrices. This figure and those below were
fitted to steps of other models than those of docs/benchmarks/forecast.md, on one machine of two cores."""

_MADE_FLOPS, _GRADIENT_FLOPS = 60, 160
"""A byte that an operation makes without products takes a CPU as long as so many operations of products, and so does a
byte of gradient that arrives: memory that is given back after each operation is cleared by the system for the next."""

_MADE_FLOPS_KEPT = 15
"""The first of these where all fits: freed memory is kept then, and gradients stay where they are made."""

_UPDATE_SHARE = 0.3
"""What updates reach, beside transfers of a disk, of the rate that they have alone."""


def on_cpu(flops: float, update_params: float, disk: LinkRates | None, network_bytes_s: float | None = None) -> Speeds:
    """The rates of a machine that computes on its CPU, while something moves.

    Args:
        flops: of products of large matrices.
        update_params: parameters that are updated while nothing else is done.
        disk: as of `Speeds`.
        network_bytes_s: as of `Speeds`.
    """
    return Speeds(
        flops * CPU_SHARE,
        update_params * _UPDATE_SHARE,
        disk=disk,
        network_bytes_s=network_bytes_s,
        made_bytes_s=flops / _MADE_FLOPS,
        gradient_bytes_s=flops / _GRADIENT_FLOPS,
    )


def while_all_fits(speeds: Speeds) -> Speeds:
    """The rates of the same machine while nothing moves."""
    if math.isinf(speeds.made_bytes_s):
        return speeds
    return replace(
        speeds,
        update_params=speeds.update_params / _UPDATE_SHARE,
        made_bytes_s=speeds.made_bytes_s * _MADE_FLOPS / _MADE_FLOPS_KEPT,
        gradient_bytes_s=math.inf,
    )


def products_s(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of products of large matrices."""
    left, right = (torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=device) for _ in range(2))
    # The first one loads kernels; reading an element waits for a device.
    (left @ right)[0, 0].item()
    begin = time.perf_counter()
    for _ in range(_PRODUCTS):
        product = left @ right
    product[0, 0].item()
    return _PRODUCTS * 2 * _WIDTH**3 / (time.perf_counter() - begin)
