"""Which stage of which pipeline a process has, where there are several of each."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ptm_accel.errors import ConfigError, UnsupportedError

_NUMBERS = 16
"""Of what is compared: another number than anybody else gathers, at which collective operations fail."""


class Ranks:
    """The place of this process: ranks that follow one another are a pipeline, and each pipeline is a replica.

    Args:
        stages: of each pipeline. All processes make one of these at the same time.
        device: where this process computes.

    Attributes:
        stages, replicas: how many there are.
        stage, replica: of this process.
        device: see above.
        pipeline: the processes of its pipeline, in the order of their stages, for tensors on its device.
        told: the same processes, for tensors in host memory.
        alike: the processes that have the same stage.

    Raises:
        ConfigError: there are not as many processes as stages x replicas; they talk by NCCL, and have no GPU.
    """

    def __init__(self, stages: int, device: torch.device) -> None:
        processes = dist.get_world_size() if dist.is_initialized() else 1
        if processes % stages:
            raise ConfigError(
                f"pipeline.stages: {stages} stages, and {processes} processes; start {stages} of them, or a multiple "
                f"for replicas (accelerate launch --num_processes {stages})."
            )
        if device.type == "cpu" and dist.get_backend() == "nccl":
            raise ConfigError(
                f"the {processes} processes talk by NCCL, which needs a GPU in each, and this one computes on the CPU; "
                "set ddp_backend='gloo'."
            )
        self.device = device
        rank = dist.get_rank()
        self.stages, self.replicas = stages, processes // stages
        self.stage, self.replica = rank % stages, rank // stages
        pipelines = [list(range(first, first + stages)) for first in range(0, processes, stages)]
        self.pipeline = _group_of(rank, pipelines)
        self.told = _group_of(rank, pipelines, backend="gloo")
        self.alike = _group_of(rank, [list(range(stage, processes, stages)) for stage in range(stages)])

    def agree(self, doing: str, numbers: Sequence[torch.Tensor] = ()) -> bool:
        """Compares what all processes are about to do.

        Whatever another one does instead, it comes to a collective operation of all processes, as this is one.

        Args:
            doing: in words.
            numbers: integers that tell more, of one element each.

        Returns:
            whether the stages of this pipeline have the same numbers.

        Raises:
            UnsupportedError: another one does something else, or has ended.
        """
        own = torch.zeros(_NUMBERS, dtype=torch.int64, device=self.device)
        own[0] = zlib.crc32(doing.encode())
        if numbers:
            own[1 : 1 + len(numbers)] = torch.stack(list(numbers))
        gathered = [torch.zeros_like(own) for _ in range(self.stages * self.replicas)]
        cause = None
        try:
            dist.all_gather(gathered, own)
        except RuntimeError as error:
            cause = error
        found = torch.stack(gathered).cpu()
        if cause is not None or bool((found[:, 0] != found[self.replica * self.stages + self.stage, 0]).any()):
            raise UnsupportedError(
                f"stage {self.stage} of {self.stages} is to {doing}, and another process is not: all of them take "
                "part. Leave it to the Trainer, or call it in all (not only where is_world_process_zero)."
            ) from cause
        pipeline = found.view(self.replicas, self.stages, -1)[self.replica]
        return bool((pipeline == pipeline[0]).all())


def _group_of(rank: int, groups: Sequence[list[int]], **how: Any) -> dist.ProcessGroup:
    """Makes groups, which all processes do in the same order."""
    made = [dist.new_group(ranks, **how) for ranks in groups]
    found: dist.ProcessGroup = next(group for group, ranks in zip(made, groups, strict=True) if rank in ranks)
    return found
