"""Turns dials into tiers: resolves them for this machine and opens the memory they describe."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from ptm_accel.config import PTMConfig, ResolvedConfig, resolve
from ptm_accel.hardware.rates import disk_rates
from ptm_accel.memory.device import CudaTier
from ptm_accel.memory.scratch import scratch_bytes
from ptm_accel.memory.setup import Capacities, Memory, build_memory

logger = logging.getLogger(__name__)


def _speeds(paths: Sequence[Path]) -> list[float] | None:
    """How fast each of several disks moves as many bytes in as out, as measured; None where one is not known."""
    if len(paths) < 2:
        return None
    rates = disk_rates(paths)
    return [1 / link.seconds(1, 1) for link in rates if link is not None] if None not in rates else None


def local_processes() -> int:
    """How many processes train on this machine, as launchers tell (`torchrun`, `accelerate launch`)."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def default_device() -> torch.device:
    """Where compute happens if nobody has said: on this process's card, or on the CPU where there is none.

    A launcher gives each process a number; the device that is torch's current one is the same in all of them until
    somebody has set it (`Accelerator`, `TrainingArguments`).
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    current, number = torch.cuda.current_device(), int(os.environ.get("LOCAL_RANK", "0"))
    return torch.device("cuda", number if current == 0 and number < torch.cuda.device_count() else current)


def open_memory(
    config: PTMConfig, memory: Memory | None = None, device: torch.device | None = None
) -> tuple[ResolvedConfig, Memory]:
    """Resolves the dials for this machine and opens its tiers, unless the caller brings `memory`; logs what was chosen.

    Raises:
        ConfigError: dials that this machine cannot meet.
        DiskError: a scratch file cannot be made.
    """
    if device is None:
        device = default_device()
    elif str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    total = free = None
    if device.type == "cuda":
        total, free = torch.cuda.get_device_properties(device).total_memory, CudaTier.left(device)
    resolved = resolve(
        config,
        device_total_bytes=total,
        device_free_bytes=free,
        processes=local_processes(),
        scratch_bytes=scratch_bytes,
    )
    if memory is None:
        capacities = Capacities(
            page_bytes=resolved.page_bytes,
            host_bytes=resolved.host_bytes,
            device_bytes=resolved.device_bytes,
            disk_bytes=resolved.disk_limit_bytes,
            disk_paths=resolved.disk_paths,
            disk_weights=_speeds(resolved.disk_paths),
        )
        memory = build_memory(capacities, device)
        memory.dials = {tier: budget.capacity_bytes for tier, budget in memory.budgets.items()}
        for line in resolved.lines():
            logger.info("%s", line)
    return resolved, memory
