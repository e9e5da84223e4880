"""Whether a checkpoint can be resumed from: all of it is looked through before anything of the run is changed."""

from __future__ import annotations

import logging
import math
import random
import re
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from transformers import TrainerState
from transformers.trainer import SCHEDULER_NAME, TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from ptm_accel.checkpoint.crc import regular_file
from ptm_accel.checkpoint.directory import is_complete
from ptm_accel.checkpoint.index import damaged, reason_of
from ptm_accel.checkpoint.manifest import check_manifest
from ptm_accel.checkpoint.plain_state import check_either_state
from ptm_accel.checkpoint.training_state import saved_last
from ptm_accel.errors import CheckpointError

from .weights import read_headers, weight_files

logger = logging.getLogger(__name__)

PLAIN_OPTIMIZER = ("optimizer.pt", "optimizer.bin")
_NUMBERED = re.compile(rf"^{PREFIX_CHECKPOINT_DIR}-(\d+)$")
_UNREADABLE = (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, EOFError, UnpicklingError)


def last_state(folder: Path) -> Path | None:
    """The optimizer state in a folder of a checkpoint that was saved last."""
    return saved_last(folder, [folder / name for name in PLAIN_OPTIMIZER])


def find_whole(asked: str | bool, run_dir: Path, *, hashes: bool = True) -> str | None:
    """Looks through the checkpoint that is to be resumed from.

    Args:
        asked: it; True for the newest that is complete.
        run_dir: where those lie that are numbered.
        hashes: as for `check_checkpoint`.

    Returns:
        its name; None where there is none.

    Raises:
        CheckpointError: it is not complete, or damaged.
    """
    if not isinstance(asked, bool):
        path = Path(asked)
        if path.is_dir():
            _refuse_incomplete(path, hashes)
            check_checkpoint(path, _others(path), hashes=hashes)
        return path.name
    found = _numbered(run_dir)
    for path in found:
        if _whole(path):
            check_checkpoint(path, _others(path), hashes=hashes)
            return path.name
        logger.warning("%s is incomplete (no %s); it is not resumed from.", path, TRAINER_STATE_NAME)
    if found:
        raise CheckpointError(
            f"cannot resume: all {len(found)} checkpoints in {found[0].parent} are incomplete (no "
            f"{TRAINER_STATE_NAME}), such as {found[0].name}. Set output_dir to where complete ones are, or train "
            "without resume_from_checkpoint."
        )
    return None


def _refuse_incomplete(path: Path, hashes: bool) -> None:
    if _whole(path):
        return
    within = [found.name for found in _numbered(path) if _whole(found)]
    if within:
        raise CheckpointError(
            f"{path} is not a checkpoint, but holds {', '.join(within)}. Resume from one of them: {path / within[0]}."
        )
    raise CheckpointError(
        f"the checkpoint {path} is incomplete: it has {len(list(path.iterdir()))} files, and no {TRAINER_STATE_NAME}, "
        "which is written last. Resume from another one, or pass resume_from_checkpoint=True for the newest that is "
        f"complete. {newest_whole(_others(path), hashes=hashes)}"
    )


def _whole(path: Path) -> bool:
    return is_complete(path) and (path / TRAINER_STATE_NAME).is_file()


def _numbered(run_dir: Path) -> list[Path]:
    """The directories of `run_dir` that are named as checkpoints are, newest first."""
    if not run_dir.is_dir():
        return []
    found = [(int(match[1]), path) for path in run_dir.iterdir() if (match := _NUMBERED.match(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def _others(path: Path) -> list[Path]:
    """The complete checkpoints beside one, newest first."""
    return [other for other in _numbered(path.absolute().parent) if _whole(other) and other.name != path.name]


def check_checkpoint(directory: Path, others: Iterable[Path] = (), *, hashes: bool = True) -> None:
    """Looks through a checkpoint of the Trainer: every file that is there can be read, and is what was saved.

    Args:
        directory: the checkpoint.
        others: checkpoints beside it, newest first; if this one is damaged, the first whole one of them is named.
        hashes: whether files are compared with the manifest, if there is one.

    Raises:
        CheckpointError: a file is damaged, or missing from the manifest's; nothing has been changed.
    """
    try:
        check_files(directory, hashes)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {newest_whole(others, hashes=hashes)} Nothing was changed.") from error


def newest_whole(others: Iterable[Path], *, hashes: bool) -> str:
    """Says which of some checkpoints, newest first, is the first that is whole.

    Args:
        others: the checkpoints.
        hashes: as for `check_checkpoint`.
    """
    for path in others:
        with suppress(CheckpointError):
            check_files(path, hashes)
            return f"The newest whole one beside it is {path}."
    return "There is no whole one beside it."


def newest_beside(path: Path) -> str:
    """Says the same of those beside a checkpoint of the Trainer, and nothing of a folder that is none by its name."""
    return f" {newest_whole(_others(path), hashes=True)}" if _NUMBERED.match(path.absolute().name) else ""


def check_files(directory: Path, hashes: bool) -> None:
    """As `check_checkpoint`, of one that stands alone."""
    if hashes:
        check_manifest(directory)
    _check_trainer_state(directory / TRAINER_STATE_NAME)
    if any((directory / name).is_file() for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)):
        read_headers(weight_files(directory))
    for folder in (directory, *sorted(directory.glob("stage-*-of-*"))):
        saved = last_state(folder)
        if saved is not None:
            check_either_state(saved)
    if (directory / SCHEDULER_NAME).is_file():
        _check_schedule(directory / SCHEDULER_NAME)
    for path in sorted(directory.glob("rng_state*.pth")):
        _check_random_states(path)


def _check_trainer_state(path: Path) -> None:
    """The Trainer's own state, whose numbers are to be numbers."""
    try:
        with regular_file(path):
            state = TrainerState.load_from_json(str(path))
    except (*_UNREADABLE, RecursionError) as error:
        raise damaged(path, reason_of(error)) from error
    for name, default in vars(TrainerState()).items():
        value = getattr(state, name)
        if value is None and name != "global_step":
            continue
        number = isinstance(value, (int, float)) and math.isfinite(value)
        if isinstance(default, (int, float)) and not number:
            raise damaged(path, f"{name} is {value!r}, and no number")
        if isinstance(default, (list, dict)) and not isinstance(value, type(default)):
            raise damaged(path, f"{name} is {value!r}, and no {type(default).__name__}")
    if not isinstance(state.global_step, int) or state.global_step < 0:
        raise damaged(path, f"global_step is {state.global_step!r}, and no number of steps")


def _check_schedule(path: Path) -> None:
    state = _read(path)
    if not isinstance(state, dict):
        raise damaged(path, f"it holds a {type(state).__name__}, and no state of a schedule")
    for name in ("last_epoch", "_step_count"):
        if not isinstance(state.get(name, 0), int):
            raise damaged(path, f"{name} is {state[name]!r}, and no number of steps")


def _check_random_states(path: Path) -> None:
    state = _read(path)
    try:
        # Generators that nobody uses are set as the Trainer sets those of the run.
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        torch.Generator().set_state(state["cpu"])
    except _UNREADABLE as error:
        raise damaged(path, f"it holds no states of random numbers: {reason_of(error)}") from error


def _read(path: Path) -> Any:
    try:
        with regular_file(path), safe_globals():
            return torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise damaged(path, f"it cannot be read: {reason_of(error)}") from error
