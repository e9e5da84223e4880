"""Checkpoints that several processes resume from: whether all see the same files, and how many have saved them."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import torch

from ptm_accel.errors import CheckpointError

logger = logging.getLogger(__name__)

_READ_BY_ALL = (".safetensors", ".bin", ".pt", ".json")
"""What files end with that are not of one process alone."""
_RANDOM_NUMBERS = re.compile(r"(?P<alone>rng_state\.pth)|rng_state_\d+\.pth|random_states_\d+\.pkl")
"""Files of which each process writes one: the Trainer's, and accelerate's."""


def are_several() -> bool:
    """Returns whether this is one of several processes that know of one another."""
    known = torch.distributed.is_available() and torch.distributed.is_initialized()
    return known and torch.distributed.get_world_size() > 1


def refuse_other_files(directory: Path) -> None:
    """Refuses a checkpoint of which not all processes see the same files: one would stop, and the others wait for it.

    Raises:
        CheckpointError: on all of them; names the first file that differs.
    """
    if not are_several():
        return
    paths = [path for pattern in ("*", "*/*") for path in directory.glob(pattern)]
    mine = {
        path.relative_to(directory).as_posix(): path.stat().st_size
        for path in paths
        if path.suffix in _READ_BY_ALL and path.is_file()
    }
    every: list[dict[str, int]] = [{}] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, mine)
    for rank, other in enumerate(every):
        if other != every[0]:
            name = min(name for name, _ in other.items() ^ every[0].items())
            sizes = " and ".join(
                f"{f'{files[name]} bytes' if name in files else 'no such file'} on rank {number}"
                for number, files in ((0, every[0]), (rank, other))
            )
            raise CheckpointError(
                f"not all of {len(every)} processes see the same checkpoint {directory}: {name} has {sizes}. Put it "
                "where all of them see it, or a copy of it on each machine. Nothing was changed."
            )


def tell_of_processes(directory: Path, now: int, each: int | None = None) -> None:
    """Says that a checkpoint was saved by another number of processes than train now, if so.

    Args:
        directory: the checkpoint.
        now: how many train.
        each: samples of each in a step; None where that is not known.
    """
    before = _saved_by(directory)
    if before in (None, now):
        return
    if each is None:
        step = f"a step has the batches of {now} instead of {before}"
    else:
        step = f"a step has {now} x {each} = {now * each} samples instead of {before} x {each} = {before * each}"
    logger.warning(
        "%s was saved by %d process%s, and %d train%s now: %s. To keep the old number, set the batch size or the "
        "accumulation.",
        directory,
        before,
        "" if before == 1 else "es",
        now,
        "s" if now == 1 else "",
        step,
    )


def _saved_by(directory: Path) -> int | None:
    """How many processes have saved a checkpoint; None where no file tells."""
    found = {path: match for path in directory.glob("r*") if (match := _RANDOM_NUMBERS.fullmatch(path.name))}
    newest = max(found, key=lambda path: path.stat().st_mtime_ns, default=None)
    if newest is None:
        return None
    # A save by one process leaves those of several there, and the other way round.
    return 1 if found[newest]["alone"] else sum(match["alone"] is None for match in found.values())
