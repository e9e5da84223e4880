"""Builds the tiers that a machine has into one memory: compute tier, budgets, home."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.arena import HostArena
from ptm_accel.memory.budget import Budget, Tier
from ptm_accel.memory.copies import close_all
from ptm_accel.memory.device import CudaTier, DeviceTier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.frame_home import FrameHome
from ptm_accel.memory.frames import FramePool
from ptm_accel.memory.pinned import host_pin
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.transfer import ComputeTier, Home
from ptm_accel.units import format_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacities:
    """How much of each tier may be used, in bytes.

    Attributes:
        page_bytes: the page size.
        host_bytes: host memory.
        device_bytes: device memory; None without a device.
        disk_bytes: disk space; None without a limit.
        disk_paths: directories for the scratch files; empty for no disk tier.
        disk_weights: how fast each is, for dealing bytes out; None for all alike.
    """

    page_bytes: int
    host_bytes: int
    device_bytes: int | None = None
    disk_bytes: int | None = None
    disk_paths: Sequence[Path] = ()
    disk_weights: Sequence[float] | None = None


@dataclass(slots=True)
class Memory:
    """The tiers of one engine, and the pool over them.

    Attributes:
        pool: paged tensors over the compute tier.
        budgets: the budget of each tier that there is.
        disk: the disk tier, for its counters; None without one.
        parts: what is closed at the end, in order.
        dials: the capacities that its user set, which other models of this process may have been given as well; empty
            for memory that somebody made for one model.
        when_closed: called once, at its end.
        device: the device, for its counters; None without one.
    """

    pool: Pool
    budgets: dict[Tier, Budget]
    disk: DiskTier | None
    parts: list[ComputeTier | Home | FramePool]
    closed: bool = False
    dials: Mapping[Tier, int] = field(default_factory=dict)
    when_closed: Callable[[], None] | None = None
    device: DeviceTier | None = None
    _owner: int = field(default_factory=os.getpid, init=False)

    def close(self) -> None:
        """Gives everything back. Idempotent; does nothing in a fork of the process that has made it.

        Raises:
            BaseException: the first error of a part; the others have been closed all the same, and their errors logged.
        """
        if self.closed:
            return
        self.closed = True
        self._close()

    def _close(self) -> None:
        if os.getpid() != self._owner:
            # A fork shares the memory under a device with the process that trains, and has none of its threads.
            return
        steps = [self.pool.close, *(part.close for part in self.parts)]
        if self.when_closed is not None:
            steps.append(self.when_closed)
        close_all(steps)

    def resize(self, capacities: Mapping[Tier, int]) -> None:
        """Gives tiers other capacities; what is in use beyond one is moved to the tier below.

        Args:
            capacities: in bytes, of some of the tiers.

        Raises:
            BudgetError: what is in use cannot be moved away now, or host memory under a device would hold no frame; the
                capacities are what they were.
            DiskError: moving it failed.
        """
        home, host_bytes = self.pool.home, capacities.get(Tier.HOST)
        if isinstance(home, FrameHome) and host_bytes is not None and host_bytes < home.page_bytes:
            frame = format_bytes(home.page_bytes)
            raise BudgetError(
                f"host_memory: {format_bytes(host_bytes)} cannot hold a frame of {frame}, a size that was chosen for "
                f"what there was at first, and stays; set host_memory to at least {frame}, or begin with less."
            )
        before = {tier: self.capacity_bytes(tier) for tier in capacities}
        try:
            self._resize({tier: nbytes for tier, nbytes in capacities.items() if nbytes != before[tier]})
        except BaseException:
            self._resize({tier: nbytes for tier, nbytes in before.items() if nbytes != self.capacity_bytes(tier)})
            raise

    def capacity_bytes(self, tier: Tier) -> int:
        """What a tier was given; of a device, other memory takes a part at times."""
        pool = self.pool
        return pool.room.limit_bytes if tier is pool.budget.tier else self.budgets[tier].capacity_bytes

    def _resize(self, capacities: Mapping[Tier, int]) -> None:
        pool = self.pool
        for tier, nbytes in capacities.items():
            if tier is not pool.budget.tier:
                self.budgets[tier].capacity_bytes = nbytes
        if Tier.HOST in capacities and isinstance(pool.home, FrameHome):
            pool.home.fit()
        if pool.budget.tier in capacities:
            pool.room.resize(capacities[pool.budget.tier])

    def check_integrity(self) -> None:
        """Checks the conservation laws of every tier."""
        self.pool.check_integrity()
        for budget in self.budgets.values():
            budget.check_integrity()


_PAGES_A_FRAME = 8
_LEAST_HOST_FRAMES, _LEAST_DEVICE_FRAMES = 512, 128
"""A frame under a device holds several pages if so many frames fit into host memory: a page of its own for each 4 MiB
costs the thread that computes more than a fast link takes to copy it. And if so many fit on the device: with less
there, tensors are updated in parts that are smaller than a frame, and would wait for each other at its ends.
"""


def _frame_bytes(capacities: Capacities) -> int:
    """What is booked, copied and spilled at once of host memory under a device."""
    assert capacities.device_bytes is not None
    most = min(capacities.host_bytes // _LEAST_HOST_FRAMES, capacities.device_bytes // _LEAST_DEVICE_FRAMES)
    frame_bytes = capacities.page_bytes
    while frame_bytes < capacities.page_bytes * _PAGES_A_FRAME and 2 * frame_bytes <= most:
        frame_bytes *= 2
    return frame_bytes


def build_memory(capacities: Capacities, device: DeviceTier | torch.device) -> Memory:
    """Opens the tiers.

    Args:
        capacities: their sizes.
        device: where compute happens: a torch device, or a device tier made by the caller (a mock).

    Raises:
        DiskError: a scratch file cannot be made.
    """
    host = Budget(Tier.HOST, capacities.host_bytes)
    budgets = {Tier.HOST: host}
    disk: DiskTier | None = None
    if capacities.disk_paths:
        limit = capacities.disk_bytes if capacities.disk_bytes is not None else 1 << 62
        budgets[Tier.DISK] = Budget(Tier.DISK, limit)
        disk = DiskTier(
            list(capacities.disk_paths),
            budgets[Tier.DISK],
            block_bytes=capacities.page_bytes,
            weights=capacities.disk_weights,
            staging=host,
        )
    if isinstance(device, torch.device) and device.type == "cpu":
        arena = HostArena(host)
        parts: list[ComputeTier | Home | FramePool] = [arena] if disk is None else [disk, arena]
        return Memory(Pool(arena, host, disk), budgets, disk, parts)
    tier: DeviceTier = CudaTier(device) if isinstance(device, torch.device) else device
    assert capacities.device_bytes is not None, "a device needs device_bytes"
    budgets[Tier.DEVICE] = Budget(Tier.DEVICE, capacities.device_bytes)
    pin = host_pin() if isinstance(device, torch.device) else None
    frames = FramePool(host, _frame_bytes(capacities), page_bytes=capacities.page_bytes, pin=pin)
    home = FrameHome(tier, frames, disk)
    over: list[ComputeTier | Home | FramePool] = [home, tier, frames]
    if disk is not None:
        over.append(disk)
    if tier.memory is not None:
        tier.memory.confine(capacities.device_bytes)
    pool = Pool(tier, budgets[Tier.DEVICE], home, card=tier.memory)
    return Memory(pool, budgets, disk, over, device=tier)
