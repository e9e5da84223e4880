"""Builds the tiers that a machine has into one memory: compute tier, budgets, backing store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from ptm_accel.memory.arena import HostArena
from ptm_accel.memory.budget import Budget, Tier
from ptm_accel.memory.copies import close_all
from ptm_accel.memory.device import CudaTier, DeviceTier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.frames import FramePool
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.pinned import host_pin
from ptm_accel.memory.pool import Pool


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacities:
    """Bytes of each tier that may be used.

    Attributes:
        device_bytes: None without a device.
        disk_bytes: None without a limit.
        disk_paths: directories for the scratch files; empty for no disk tier.
        disk_weights: the speed of each; None for all alike.
        disk_verifies: whether what is read there is compared with the CRC of what was written.
    """

    page_bytes: int
    host_bytes: int
    device_bytes: int | None = None
    disk_bytes: int | None = None
    disk_paths: Sequence[Path] = ()
    disk_weights: Sequence[float] | None = None
    disk_verifies: bool = False


class Closes(Protocol):
    """Thing to close with the last pool: a tier, or a note that tiers are open."""

    def close(self) -> None:
        """Gives back what it has."""
        ...


@dataclass(slots=True, eq=False)
class Memory:
    """A model's pool over the tiers of one device, which other models may share.

    Attributes:
        budgets: the budget of each tier that there is.
        disk: the disk tier, if any.
        parts: what is closed with the last pool, in order.
        device: the device tier, if any.
        users: the `Memory` of each model that has these tiers open, this one among them.
        closed: whether this model has given up its part.
    """

    pool: Pool
    budgets: dict[Tier, Budget]
    disk: DiskTier | None
    parts: list[Closes]
    device: DeviceTier | None = None
    users: list[Memory] = field(default_factory=list)
    closed: bool = False
    _owner: int = field(default_factory=os.getpid, init=False)

    def __post_init__(self) -> None:
        """Joins the users."""
        self.users.append(self)

    def join(self) -> Memory:
        """Returns the same tiers for another model."""
        assert not self.closed, "tiers that are closed"
        return Memory(self.pool.beside(), self.budgets, self.disk, self.parts, self.device, self.users)

    @property
    def others(self) -> list[Memory]:
        """The users but this one."""
        return [user for user in self.users if user is not self]

    @property
    def is_own(self) -> bool:
        """Whether it was made in this process, not in one that this is a fork of."""
        return os.getpid() == self._owner

    def close(self) -> None:
        """Gives back what the model has; the last one closes the tiers. Idempotent; does nothing in a fork.

        Raises:
            BaseException: the first error of a part; the others have been closed all the same, and their errors logged.
        """
        if self.closed:
            return
        self.closed = True
        # A fork shares the memory under a device with the process that trains, and has none of its threads.
        if self.is_own:
            self.users.remove(self)
            close_all([self.pool.close, *(part.close for part in self.parts if not self.users)])

    def check_integrity(self) -> None:
        """Checks the conservation laws of every tier."""
        self.pool.check_integrity()
        for budget in self.budgets.values():
            budget.check_integrity()


_PAGES_A_FRAME = 8
_LEAST_HOST_FRAMES, _LEAST_DEVICE_FRAMES = 512, 128
"""A frame under a device holds several pages if so many frames fit into host memory, since starting a copy of 4 MiB
takes the host longer than a fast link takes for it; and if so many fit on the device, since parts of tensors that are
updated at a time must not be smaller than a frame.
"""


def frame_bytes(capacities: Capacities) -> int:
    """Returns the bytes of host memory under a device that are booked, copied and spilled at once."""
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
            verifies=capacities.disk_verifies,
        )
    if isinstance(device, torch.device) and device.type == "cpu":
        arena = HostArena(host)
        parts: list[Closes] = [arena] if disk is None else [disk, arena]
        return Memory(Pool(arena, host, disk), budgets, disk, parts)
    tier: DeviceTier = CudaTier(device) if isinstance(device, torch.device) else device
    assert capacities.device_bytes is not None, "a device needs device_bytes"
    budgets[Tier.DEVICE] = Budget(Tier.DEVICE, capacities.device_bytes)
    pin = host_pin() if isinstance(device, torch.device) else None
    frames = FramePool(host, frame_bytes(capacities), page_bytes=capacities.page_bytes, pin=pin)
    backing = HostStore(tier, frames, disk)
    over: list[Closes] = [backing, tier, frames]
    if disk is not None:
        over.append(disk)
    if tier.memory is not None:
        tier.memory.confine(capacities.device_bytes)
    pool = Pool(tier, budgets[Tier.DEVICE], backing, card=tier.memory)
    return Memory(pool, budgets, disk, over, device=tier)
