"""Layers that are cut over processes (`shard: full`): whether they are, and what cannot be done with them."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch.distributed as dist

from ptm_accel.config import AUTO, FULL, PTMConfig
from ptm_accel.errors import UnsupportedError

logger = logging.getLogger(__name__)


def are_cut(config: PTMConfig, processes: int) -> bool:
    """Returns whether layers are cut over processes."""
    return config.shard == FULL and processes > 1


def may_be_cut(config: PTMConfig, processes: int) -> bool:
    """Returns whether layers are cut over processes that have no room for all of them."""
    other = (config.pipeline, config.pseudo_to_real, config.token_slices)
    return config.shard == AUTO and processes > 1 and other == (None, None, None)


def refuse_beside_cut(config: PTMConfig, processes: int, asked: Iterable[str]) -> None:
    """Refuses what cannot be done where layers are cut over processes.

    Args:
        config: the options.
        processes: how many train together.
        asked: names of arguments by which it is asked for; nothing is refused without.

    Raises:
        UnsupportedError: names them.
    """
    names = " and ".join(asked)
    if names and are_cut(config, processes):
        raise UnsupportedError(
            f"{names}: layers are cut over {processes} processes (shard: full), which save between the same two steps, "
            f"into one directory that all of them see. Leave {names} out, or set shard to none."
        )


def refuse_unknown_processes(config: PTMConfig, processes: int) -> None:
    """Refuses processes that torch has connected and accelerate takes for one each: layers would be cut over them.

    Args:
        config: the options.
        processes: how many train together, as accelerate has it.

    Raises:
        UnsupportedError: there are such.
    """
    if config.shard != FULL or not (dist.is_available() and dist.is_initialized()):
        return
    if (connected := dist.get_world_size()) > processes:
        raise UnsupportedError(
            f"shard: full: torch.distributed connects {connected} processes, and accelerate takes each for the only "
            "one, as it does without a GPU: all would train on the same batches. Set use_cpu=True (Accelerator: "
            "cpu=True) or ACCELERATE_USE_CPU=true, or start them by accelerate launch."
        )


def tell_of_one(config: PTMConfig, processes: int) -> None:
    """Says that there is nothing to cut over, if so."""
    if config.shard == FULL and processes == 1:
        logger.warning("shard: full has no effect with one process.")
