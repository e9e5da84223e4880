"""The optimizer state of runs without ptm_accel: one file by torch.save (`optimizer.pt`), read, and written on request.

This is the only place that touches that format. It is read with `weights_only` and mapped, one tensor at a time onto
pages; and written from mapped tensors, so that neither needs memory for all of it.
"""

from __future__ import annotations

import errno
import os
import pickle
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from ptm_accel.checkpoint.crc import regular_file
from ptm_accel.checkpoint.index import FULL_SIZE, INDEX_NAME, damaged, reason_of
from ptm_accel.checkpoint.training_state import Expected, SavedState, check_optimizer_state, load_optimizer_state
from ptm_accel.errors import CheckpointError, DiskError
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.optim.state_dicts import completed, refuse_other_groups
from ptm_accel.optim.states import MASTER_KEY
from ptm_accel.units import format_bytes


def load_either_state(optimizer: PagedOptimizer, saved: Path) -> None:
    """Reads a state that was written with pages or without, onto pages.

    Args:
        optimizer: has the same parameters, in the same groups and order.
        saved: what `saved_last` has found.

    Raises:
        CheckpointError, BudgetError: as `load_optimizer_state` and `load_plain_state`.
    """
    if saved.name == INDEX_NAME:
        load_optimizer_state(optimizer, saved.parent)
    else:
        load_plain_state(optimizer, saved)


def check_either_state(saved: Path, expected: Expected | None = None) -> None:
    """Looks whether a state that was written with pages or without is whole, and of an optimizer.

    Args:
        saved: what `saved_last` has found.
        expected: the optimizer; None where it is not known.

    Raises:
        CheckpointError: as by `load_either_state`; nothing is changed.
    """
    if saved.name == INDEX_NAME:
        check_optimizer_state(saved.parent, expected)
    else:
        _check_plain(_read_plain(saved), saved, expected)


def load_plain_state(optimizer: PagedOptimizer, file: Path) -> None:
    """Reads what `torch.save(optimizer.state_dict(), file)` has written onto pages.

    Args:
        optimizer: has the same parameters, in the same groups and order.
        file: the file.

    Raises:
        CheckpointError: the file is damaged, or of another model or optimizer; nothing has been changed then.
        BudgetError: no room for the state.
    """
    saved = _read_plain(file)
    _check_plain(saved, file, Expected.of(optimizer))
    optimizer.load_state_dict(saved)


def _read_plain(file: Path) -> dict[str, Any]:
    try:
        with regular_file(file):
            saved: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        _ = saved["param_groups"], saved["state"]
    except (OSError, RuntimeError, ValueError, EOFError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{file} ({format_bytes(file.stat().st_size)}) is not an optimizer state that can be read without running "
            f"code from it: {reason_of(error)}. Resume from another checkpoint."
        ) from error
    return saved


def _check_plain(saved: dict[str, Any], file: Path, expected: Expected | None) -> None:
    groups, state = saved["param_groups"], saved["state"]
    sound = isinstance(groups, list) and all(isinstance(g, dict) and isinstance(g.get("params"), list) for g in groups)
    if not sound or not isinstance(state, dict) or not all(isinstance(entry, dict) for entry in state.values()):
        raise damaged(file, "its groups or its state are of other types than torch's")
    if expected is not None:
        _check_groups(expected, groups, file)
        _check_shapes(expected, groups, state, file)


def _check_groups(expected: Expected, groups: list[dict[str, Any]], file: Path) -> None:
    inner = expected.inner
    refuse_other_groups(inner, groups, str(file))
    filled, _ = completed(inner, groups, {})
    for number, (group, now) in enumerate(zip(filled, inner.param_groups, strict=True)):
        lacking = sorted((inner.defaults.keys() & now.keys()) - group.keys())
        if lacking:
            raise CheckpointError(
                f"{file} has no {lacking[0]!r} in parameter group {number}, and {type(inner).__name__} has "
                "one: it is of another optimizer. Train with the one it was saved by."
            )


def _check_shapes(
    expected: Expected, groups: list[dict[str, Any]], state: Mapping[int, dict[str, Any]], file: Path
) -> None:
    slots = chain.from_iterable(expected.groups)
    for number, slot in zip(chain.from_iterable(group["params"] for group in groups), slots, strict=True):
        for key, value in state.get(number, {}).items():
            there = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
            here = tuple(slot.value.shape)
            if key in FULL_SIZE and value is not None and there != here:
                raise CheckpointError(
                    f"{file} has {key!r} of shape {there} for {slot.name}, which has {here} here: it is of another "
                    "model."
                )


def write_plain_state(directory: Path, file: Path, *, replace_newer: bool = False) -> None:
    """Writes a checkpoint's optimizer state as plain torch reads it.

    Args:
        directory: a checkpoint that `save_optimizer_state` has written into.
        file: what to write; it is there as a whole or not at all.
        replace_newer: also a file that was saved after the checkpoint.

    Raises:
        CheckpointError: the checkpoint is damaged, or has fp32 masters, for which plain runs have no place; or there is
            a file that was saved later.
        DiskError: writing failed.
    """
    with ExitStack() as files:
        saved = SavedState(directory, files)
        # Of two states in a directory the one that was saved last is loaded, and an exported one is as old as what it
        # was made from.
        saved_ns = (directory / INDEX_NAME).stat().st_mtime_ns
        if not replace_newer and file.exists() and file.stat().st_mtime_ns > saved_ns:
            raise CheckpointError(
                f"{file} was saved after the state in {directory} that would be written over it, as by a run without "
                "ptm_accel that went on from there. Give another file (--output), or --force to lose this one."
            )
        masters = [name for name, entries in saved.index["state"].items() if MASTER_KEY in entries]
        if masters:
            raise CheckpointError(
                f"the optimizer state in {directory} has fp32 masters (of {masters[0]} first), which a plain run has "
                "no place for; resume with ptm_accel, or train without master_weights."
            )
        # Nobody can have put a link there.
        part = file.with_name(f".{file.name}.{secrets.token_hex(8)}.incomplete")
        try:
            with part.open("xb") as opened:
                # Given the file and not its name, which torch would write into it.
                torch.save(saved.state_dict(), opened)
            os.utime(part, ns=(saved_ns, saved_ns))
            part.replace(file)
        except (OSError, RuntimeError) as error:
            part.unlink(missing_ok=True)
            number = error.errno if isinstance(error, OSError) and error.errno else errno.EIO
            raise DiskError(number, f"cannot write {file.name}: {os.strerror(number)} ({error})", str(file)) from error
