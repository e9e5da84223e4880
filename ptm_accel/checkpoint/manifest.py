"""`ptm_manifest.json`: names, sizes and CRCs of what training goes on from, so that damage of a checkpoint is noticed.

It is written last, and read first. It covers weights, optimizer, schedule, random numbers and the Trainer's own state.
What a person may edit (configurations, a tokenizer, notes) is not in it, and files that are added later are not missed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from ptm_accel.checkpoint.crc import PIECE_BYTES, FileSum, sum_file, threads
from ptm_accel.checkpoint.index import damaged, of_another_version, read_json, reason_of
from ptm_accel.errors import CheckpointError
from ptm_accel.progress import progress

logger = logging.getLogger(__name__)

MANIFEST_NAME = "ptm_manifest.json"
FORMAT = "ptm_accel manifest"
VERSION = 1

_COVERED = re.compile(
    r".+\.(safetensors|bin|pt|pth|pkl|distcp)|.+\.(safetensors|bin)\.index\.json|trainer_state\.json|optimizer\.json"
)
_EDITED = "training_args.bin"
"""Nothing reads it where a run is resumed."""
_PLAIN = re.compile(r"optimizer(_\d+)?\.bin|optimizer\.pt")
_UNHASHED = ", or set checkpoint_hashes to false"
_OTHERWISE = ", or set checkpoint_hashes to false if it was changed on purpose"

Sums = dict[str, FileSum]
"""What files are compared by, by their paths in the checkpoint."""


def covered(directory: Path) -> list[str]:
    """Returns the files under a directory that training goes on from, by their paths in it."""
    found = []
    for folder, _, files in os.walk(directory):
        for name in files:
            path = Path(folder, name)
            if _COVERED.fullmatch(name) and name != _EDITED and path.is_file() and not path.is_symlink():
                found.append(path.relative_to(directory).as_posix())
    return sorted(found)


def completed(directory: Path, names: list[str], known: Mapping[str, FileSum], pool: Executor) -> Sums:
    """What the files of a new checkpoint are compared by; those that are not known yet are read.

    Args:
        directory: where they are.
        names: of the files.
        known: of some of them, from when they were written.
        pool: where CRCs are computed.

    Raises:
        OSError: one cannot be read.
    """
    return {name: known[name] if name in known else sum_file(directory / name, pool) for name in names}


def write_manifest(directory: Path, sums: Mapping[str, FileSum]) -> Path:
    """Writes the manifest of a checkpoint; returns its path.

    Raises:
        OSError: writing failed.
    """
    body = {
        "version": VERSION,
        "piece_bytes": PIECE_BYTES,
        "files": {name: {"bytes": each.nbytes, "crc32": list(each.crcs)} for name, each in sorted(sums.items())},
    }
    path = directory / MANIFEST_NAME
    path.write_text(json.dumps({"format": FORMAT, **body, "crc32": _own_crc(body)}, indent=1), encoding="utf-8")
    return path


def _own_crc(body: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, sort_keys=True).encode("utf-8"))


def read_manifest(directory: Path) -> Sums | None:
    """Returns the manifest of a checkpoint; None if it has none.

    Raises:
        CheckpointError: it is damaged, or of another version.
    """
    path = directory / MANIFEST_NAME
    try:
        read = read_json(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise damaged(path, reason_of(error)) from error
    if not isinstance(read, dict) or read.pop("format", None) != FORMAT:
        raise damaged(path, f"it is not of the format {FORMAT!r}")
    if read.pop("crc32", None) != _own_crc(read):
        raise damaged(path, "its bytes are not those that were written")
    if read["version"] != VERSION:
        raise of_another_version(path, read["version"], VERSION, _UNHASHED)
    if read["piece_bytes"] != PIECE_BYTES:
        raise CheckpointError(
            f"{path} has CRCs of pieces of {read['piece_bytes']} bytes, and this ptm_accel reads those of "
            f"{PIECE_BYTES}. Install the ptm_accel that wrote it{_UNHASHED}."
        )
    return {name: FileSum(each["bytes"], tuple(each["crc32"])) for name, each in read["files"].items()}


def check_manifest(directory: Path) -> Sums | None:
    """Compares a checkpoint with its manifest.

    One that a run without pages has saved again, in the same place, is not compared: its optimizer state is newer than
    the manifest.

    Returns:
        what was compared; None if there is no manifest, or it is out of date.

    Raises:
        CheckpointError: a file is missing or has changed; it is named.
    """
    sums = read_manifest(directory)
    if sums is None:
        return None
    written_ns = (directory / MANIFEST_NAME).stat().st_mtime_ns
    for path in directory.iterdir():
        if _PLAIN.fullmatch(path.name) and path.name not in sums and path.stat().st_mtime_ns > written_ns:
            logger.warning("%s was saved without pages after %s, which is not compared with it.", path, MANIFEST_NAME)
            return None
    nbytes = sum(each.nbytes for each in sums.values())
    with threads() as pool, progress(f"comparing {directory.name}", nbytes) as moved:
        for name, saved in sums.items():
            reason = _difference(directory / name, saved, pool)
            if reason is not None:
                raise damaged(directory / name, reason, _OTHERWISE)
            moved(saved.nbytes)
    return sums


def _difference(path: Path, saved: FileSum, pool: Executor) -> str | None:
    """Says how a file differs from what was saved; None if it does not."""
    try:
        nbytes = path.stat().st_size
        if path.is_file() and nbytes != saved.nbytes:
            return f"it has {nbytes} bytes, and had {saved.nbytes} when the checkpoint was saved"
        crcs = sum_file(path, pool).crcs
    except FileNotFoundError:
        return f"it is missing, and had {saved.nbytes} bytes when the checkpoint was saved"
    except OSError as error:
        return reason_of(error)
    for number, (here, there) in enumerate(zip(crcs, saved.crcs, strict=False)):
        if here != there:
            begin, end = number * PIECE_BYTES, min((number + 1) * PIECE_BYTES, saved.nbytes)
            return f"bytes {begin} to {end} are not those that were saved (CRC-32 {here:08x}, and was {there:08x})"
    return None if len(crcs) == len(saved.crcs) else "it has changed while it was read"
