"""The way between where compute runs and where pages live: what it is worth, as measured once, and its use so far."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from ptm_accel.hardware.profile import in_a_row, side_by_side
from ptm_accel.hardware.rates import cpu_update_rate, device_rates, disk_rates
from ptm_accel.memory.budget import Tier
from ptm_accel.memory.device import DeviceTier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.setup import Memory
from ptm_accel.metrics import Metrics
from ptm_accel.model.run_ahead import RunAhead
from ptm_accel.schedule.watch import LinkUse


def know_way(
    run_ahead: RunAhead,
    metrics: Metrics,
    memory: Memory,
    disk_paths: Sequence[Path],
    trained: Sequence[PagedTensor],
    whole_bytes: int,
) -> None:
    """Tells those who plan and those who report what moves are worth.

    Args:
        run_ahead: who plans.
        metrics: who reports.
        memory: the tiers that bytes move between.
        disk_paths: folders of the disk tier.
        trained: the parameters that are updated.
        whole_bytes: what all that is on pages takes.
    """
    if memory.device is not None:
        _know_link(run_ahead, metrics, memory, memory.device, disk_paths, trained, whole_bytes)
    elif isinstance(home := memory.pool.home, DiskTier):
        run_ahead.rates = metrics.rates = side_by_side(disk_rates(disk_paths))
        run_ahead.link_use = partial(_use_of, home)


def _know_link(
    run_ahead: RunAhead,
    metrics: Metrics,
    memory: Memory,
    device: DeviceTier,
    disk_paths: Sequence[Path],
    trained: Sequence[PagedTensor],
    whole_bytes: int,
) -> None:
    """Makes known what the way between a device and its home is worth, and updates on the device."""
    disk = memory.disk
    if disk is not None and whole_bytes <= memory.budgets[Tier.HOST].capacity_bytes:
        disk = None
    run_ahead.link_use = partial(_use_of_way, device, disk)
    rates = device_rates(device.device)
    if rates is None:
        return
    # Host frames are pinned where that is possible at all, which is when it was measured.
    link = rates.pinned or rates.pageable
    run_ahead.rates = metrics.rates = link
    if disk is not None:
        # Most of what is moved comes from the disk and goes there; how much of it is seen later.
        metrics.disk_rates = side_by_side(disk_rates(disk_paths))
        run_ahead.rates = in_a_row([link, metrics.disk_rates])
    params_a_byte = sum(value.numel for value in trained) / max(sum(value.nbytes for value in trained), 1)
    run_ahead.rated_update_s = params_a_byte / rates.update_params_s
    if disk is None:
        # With a disk below, both kinds of updates wait for that, and there is nothing to be gained by dealing out.
        run_ahead.host_s = params_a_byte / cpu_update_rate(torch.get_num_threads())


def _use_of(disk: DiskTier) -> LinkUse:
    return LinkUse(disk.bytes_read, disk.bytes_written, disk.busy_s)


def _use_of_way(device: DeviceTier, disk: DiskTier | None) -> LinkUse:
    """What came to a device and left it; busy is what is busiest on the way."""
    moved = device.moved()
    return LinkUse(moved.in_bytes, moved.out_bytes, max(moved.busy_s, 0.0 if disk is None else disk.busy_s))
