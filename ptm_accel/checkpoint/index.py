"""`optimizer.json`: what a saved optimizer state is made of, read and looked through before anything relies on it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ptm_accel.checkpoint.crc import regular_file
from ptm_accel.errors import CheckpointError

INDEX_NAME = "optimizer.json"
FORMAT = "ptm_accel optimizer state"
VERSION = 1
GROUPS = "param_groups"

FULL_SIZE = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "sum", "square_avg", "grad_avg")
"""Entries of torch's optimizers that have the shape of their parameter."""

_KINDS: dict[str, type] = {
    "optimizer": str,
    "master_weights": bool,
    GROUPS: list,
    "parameters": dict,
    "others": dict,
    "state": dict,
    "weight_map": dict,
}
_MOST_NESTED = 50


def read_index(directory: Path) -> dict[str, Any]:
    """Returns the contents of a saved state's JSON file; all in it is of the type that it is to be.

    Raises:
        CheckpointError: it is missing or damaged, or of another version.
    """
    path = directory / INDEX_NAME
    if not directory.is_dir():
        raise CheckpointError(f"no such directory: {directory}. Give the path of a checkpoint.")
    try:
        index = read_json(path)
    except FileNotFoundError:
        raise CheckpointError(
            f"{directory} has no optimizer state: {INDEX_NAME} is missing. Resume from another checkpoint, or load the "
            "weights alone with from_pretrained()."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, reason_of(error)) from error
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise damaged(path, f"it is not of the format {FORMAT!r}")
    if index.get("version") != VERSION:
        raise of_another_version(path, index.get("version"), VERSION)
    reason = _wrong(index)
    if reason is not None:
        raise damaged(path, reason)
    return index


def read_json(path: Path) -> Any:
    """Reads a JSON file.

    Raises:
        OSError: it cannot be read, or is no regular file.
        ValueError, RecursionError: it is no JSON.
    """
    with regular_file(path) as descriptor, os.fdopen(os.dup(descriptor), encoding="utf-8") as file:
        return json.load(file)


def damaged(path: Path, reason: str, otherwise: str = "") -> CheckpointError:
    """Returns the error of a file of a checkpoint that cannot be used; `otherwise` says what else may be done."""
    return CheckpointError(f"{path} is damaged: {reason}. Resume from another checkpoint{otherwise}.")


def of_another_version(path: Path, found: object, known: int, otherwise: str = "") -> CheckpointError:
    """Returns the error of a file whose format has another version; `otherwise` says what else may be done."""
    remedy = "Install the ptm_accel that wrote it"
    if isinstance(found, int) and found > known:
        remedy = "A later ptm_accel wrote it: install that version"
    return CheckpointError(
        f"{path} has version {found} of its format, and this ptm_accel reads version {known}. {remedy}{otherwise}."
    )


def reason_of(error: Exception) -> str:
    """Returns the first line of an error's text, without the path that is told beside it."""
    text = (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__
    return text.splitlines()[0]


def _wrong(index: dict[str, Any]) -> str | None:
    """Returns the first thing that is of another type than it is to be; None if nothing is."""
    index.setdefault("others", {})
    for name, kind in _KINDS.items():
        if name not in index:
            return f"it lacks {name!r}"
        if not isinstance(index[name], kind):
            return f"{name} is a {type(index[name]).__name__}, and no {kind.__name__}"
    held: set[str] = set()
    for number, group in enumerate(index[GROUPS]):
        values = group.get("values") if isinstance(group, dict) else None
        names = group.get("params") if isinstance(group, dict) else None
        if not isinstance(values, dict) or not isinstance(names, list) or not all(isinstance(n, str) for n in names):
            return f"{GROUPS}/{number} is no group of parameters"
        held.update(names)
        for key, value in values.items():
            if not _is_value(value):
                return f"{GROUPS}/{number}/{key} is no value"
    for name, described in (*index["parameters"].items(), *index["others"].items()):
        if not _is_description(described):
            return f"parameters/{name} is no shape and dtype"
    for name, entries in index["state"].items():
        if name not in held or not isinstance(entries, dict):
            return f"state/{name} is of no parameter in a group"
        for key, value in entries.items():
            if not _is_value(value) or (key == "step" and not _is_number(value)):
                return f"state/{name}/{key} is no {'number' if key == 'step' else 'value'}"
            if key in FULL_SIZE and value is not None and not _is_tensor(value):
                return f"state/{name}/{key} is no tensor"
    for name, file in index["weight_map"].items():
        if not isinstance(file, str) or os.path.basename(file) != file or file in ("", ".", ".."):
            return f"weight_map/{name} is no name of a file in this folder"
    return None


def _is_description(value: Any) -> bool:
    shape = value.get("shape") if isinstance(value, dict) else None
    return isinstance(shape, list) and all(type(size) is int for size in shape) and isinstance(value.get("dtype"), str)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("paged", value.get("tensor")), str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) or _is_tensor(value)


def _is_value(value: Any, depth: int = 0) -> bool:
    """Returns whether it is what is written for a value: a number, a text, a tensor's name, or a container of such."""
    if value is None or isinstance(value, (bool, int, float, str)) or _is_tensor(value):
        return True
    if isinstance(value, dict):
        given = value.get("tuple", value.get("dict"))
        # A tuple is written as a list, and a dictionary as one.
        value = given if "tuple" in value else list(given.values()) if isinstance(given, dict) else None
    return isinstance(value, list) and depth < _MOST_NESTED and all(_is_value(item, depth + 1) for item in value)
