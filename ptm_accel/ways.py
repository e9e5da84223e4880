"""Gives the planner and the metrics the measured rates of the link between the compute tier and its home."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ptm_accel.hardware.profile import in_a_row, side_by_side
from ptm_accel.hardware.rates import cpu_update_rate, device_rates, disk_rates
from ptm_accel.memory.budget import Tier
from ptm_accel.memory.device import DeviceTier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.paged import Part
from ptm_accel.memory.setup import Memory
from ptm_accel.metrics import Metrics
from ptm_accel.model.run_ahead import RunAhead
from ptm_accel.schedule.watch import LinkUse


def know_way(
    run_ahead: RunAhead,
    metrics: Metrics,
    memory: Memory,
    disk_paths: Sequence[Path],
    trained: Sequence[Part],
    whole_bytes: int,
) -> None:
    """Sets the rates of transfers, and on a device those of updates.

    Args:
        run_ahead: the planner.
        metrics: the metrics.
        memory: the tiers that bytes move between.
        disk_paths: folders of the disk tier.
        trained: the parameters that are updated.
        whole_bytes: bytes of all paged tensors.
    """
    device, disk = memory.device, memory.disk
    if device is None:
        if isinstance(home := memory.pool.home, DiskTier):
            run_ahead.rates = metrics.rates = side_by_side(disk_rates(disk_paths))
            run_ahead.link_use = lambda: LinkUse(home.bytes_read, home.bytes_written, home.busy_s)
        return
    if disk is not None and whole_bytes <= memory.budgets[Tier.HOST].capacity_bytes:
        disk = None
    run_ahead.link_use = partial(_use_of_way, device, disk)
    rates = device_rates(device.device)
    if rates is None:
        return
    run_ahead.rates = metrics.rates = rates
    if disk is not None:
        # Most transfers pass the disk as well; the planner corrects the rate by the use that it sees.
        metrics.disk_rates = side_by_side(disk_rates(disk_paths))
        run_ahead.rates = in_a_row([rates, metrics.disk_rates])
    params_a_byte = sum(value.numel for value in trained) / max(sum(value.nbytes for value in trained), 1)
    run_ahead.rated_update_s = params_a_byte / rates.update_params_s
    if disk is None:
        # With a disk below, updates on the host would wait for the disk as well.
        rate = cpu_update_rate()
        run_ahead.host_s = None if rate is None else params_a_byte / rate


def _use_of_way(device: DeviceTier, disk: DiskTier | None) -> LinkUse:
    """Bytes to and from a device, and the busy time of the slower of link and disk."""
    moved = device.moved()
    return LinkUse(moved.in_bytes, moved.out_bytes, max(moved.busy_s, 0.0 if disk is None else disk.busy_s))
