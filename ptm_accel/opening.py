"""Opens the tiers that a configuration asks for: one set for each device, shared by all models of the process."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ptm_accel.config import PTMConfig, ResolvedConfig, resolve, staleness
from ptm_accel.environment import launched_with
from ptm_accel.errors import ConfigError
from ptm_accel.hardware.rates import disk_rates
from ptm_accel.memory.device import CudaTier
from ptm_accel.memory.setup import Capacities, Memory, build_memory

logger = logging.getLogger(__name__)


def _speeds(paths: Sequence[Path]) -> list[float] | None:
    """Returns the speed of each of several disks for equal reads and writes; None where one is not known."""
    if len(paths) < 2:
        return None
    rates = disk_rates(paths)
    return [1 / link.seconds(1, 1) for link in rates if link is not None] if None not in rates else None


def local_processes() -> int:
    """Returns the number of processes that train on this machine, from the launcher's environment."""
    return max(launched_with("LOCAL_WORLD_SIZE", 1), 1)


def default_device() -> torch.device:
    """Returns the device of this process: its card, or the CPU where there is none.

    torch's current device is the same in all processes of a launcher until `Accelerator` or `TrainingArguments` sets
    it, so until then `LOCAL_RANK` gives the number.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    current, number = torch.cuda.current_device(), launched_with("LOCAL_RANK", 0)
    return torch.device("cuda", number if current == 0 and number < torch.cuda.device_count() else current)


@dataclass(frozen=True, slots=True, eq=False)
class _Opened:
    """Tiers of this machine that are open for one device.

    Attributes:
        device: see above.
        asked: the configuration that they were opened with.
        resolved: the same, resolved.
        users: the models that share them.
    """

    device: torch.device
    asked: PTMConfig
    resolved: ResolvedConfig
    users: list[Memory]

    def close(self) -> None:
        """They are open no more."""
        if _opened.get(self.device) is self:
            del _opened[self.device]


_opened: dict[torch.device, _Opened] = {}


def open_memory(
    config: PTMConfig, memory: Memory | None = None, device: torch.device | None = None
) -> tuple[ResolvedConfig, Memory]:
    """Returns the tiers for a model: those that are open for the device already, or new ones, which are logged.

    Args:
        config: the configuration.
        memory: tiers made by the caller, used as they are and shared with a model that has them already.
        device: where compute happens; by default `default_device`.

    Raises:
        ConfigError: options that this machine cannot meet, or other tiers are open for the device.
        DiskError: a scratch file cannot be made.
    """
    if device is None:
        device = default_device()
    elif str(device) == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    opened = _living(device) if memory is None else None
    if opened is not None:
        # The same memory is asked for, or none in particular.
        if _of_memory(config) not in (_of_memory(opened.asked), PTMConfig()):
            there, asked = _of_memory(opened.asked).unlike(_of_memory(config))
            raise ConfigError(
                f"models of one process share their memory on {device}: one is on pages already with {there}, and "
                f"another was given {asked}. Give all of them the same, or take those that are not used any more off "
                "their pages: engine_of(model).detach()."
            )
        resolved = replace(
            opened.resolved,
            update=config.update,
            max_staleness=staleness(config),
            master_weights=config.master_weights,
            shard=config.shard,
        )
        return resolved, opened.users[0].join()
    total = free = None
    if device.type == "cuda":
        total, free = torch.cuda.get_device_properties(device).total_memory, CudaTier.left(device)
    resolved = resolve(config, device_total_bytes=total, device_free_bytes=free, processes=local_processes())
    if memory is not None:
        return resolved, memory.join() if memory.pool.need.least_bytes else memory
    capacities = Capacities(
        page_bytes=resolved.page_bytes,
        host_bytes=resolved.host_bytes,
        device_bytes=resolved.device_bytes,
        disk_bytes=resolved.disk_limit_bytes,
        disk_paths=resolved.disk_paths,
        disk_weights=_speeds(resolved.disk_paths),
        disk_verifies=resolved.disk_verify,
    )
    memory = build_memory(capacities, device)
    _opened[device] = _Opened(device, config, resolved, memory.users)
    # Closed with the last model, so that nothing is kept of what it was given.
    memory.parts.append(_opened[device])
    for line in resolved.lines():
        logger.info("%s", line)
    return resolved, memory


def _living(device: torch.device) -> _Opened | None:
    """Returns the tiers that are open for a device, after unreferenced models have been collected."""
    opened = _opened.get(device)
    if opened is not None and opened.users:
        gc.collect()
    # A forked process cannot use the tiers of its parent.
    return opened if opened is not None and opened.users and opened.users[0].is_own else None


def _of_memory(config: PTMConfig) -> PTMConfig:
    """Returns the configuration with the defaults for all that is not about memory."""
    apart = replace(config, pseudo_to_real=None, token_slices=None, pipeline=None, checkpoint_hashes=True)
    plain = PTMConfig()
    return replace(
        apart,
        update=plain.update,
        max_staleness=None,
        master_weights=None,
        shard=plain.shard,
        micro_batches=plain.micro_batches,
    )
