"""`ptm-accel export` and `ptm-accel check`."""

from __future__ import annotations

import json
import time
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from ptm_accel.errors import CheckpointError
from ptm_accel.units import format_bytes


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of the Trainer or of save_state.")],
    output: Annotated[Path | None, typer.Option(help="By default optimizer.pt in the checkpoint.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that was saved after the checkpoint.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Prints JSON.")] = False,
) -> None:
    """Writes a checkpoint's optimizer state as runs without ptm_accel read it (for an Accelerator: optimizer.bin).

    ptm-accel export run/checkpoint-500
    """
    from ptm_accel.checkpoint.plain_state import write_plain_state

    file = checkpoint / "optimizer.pt" if output is None else output
    write_plain_state(checkpoint, file, replace_newer=force)
    nbytes = file.stat().st_size
    typer.echo(json.dumps({"file": str(file), "bytes": nbytes}) if as_json else f"{file}: {format_bytes(nbytes)}")


def check(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of the Trainer or of save_state.")],
    as_json: Annotated[bool, typer.Option("--json", help="Prints JSON.")] = False,
) -> None:
    """Compares the files of a checkpoint with the CRCs of its save; exit status 2 and a file's name if it is damaged.

    ptm-accel check run/checkpoint-500
    """
    from ptm_accel.checkpoint.index import INDEX_NAME
    from ptm_accel.checkpoint.manifest import MANIFEST_NAME, check_manifest
    from ptm_accel.checkpoint.training_state import check_optimizer_state

    if not checkpoint.is_dir():
        raise CheckpointError(f"no such directory: {checkpoint}. Give the path of a checkpoint.")
    begin = time.perf_counter()
    try:
        sums = check_manifest(checkpoint)
        took_s = time.perf_counter() - begin
        for index in sorted(checkpoint.rglob(INDEX_NAME)):
            check_optimizer_state(index.parent)
        if (checkpoint / "trainer_state.json").is_file():
            _trainers().check_files(checkpoint, hashes=False)
    except CheckpointError as error:
        raise CheckpointError(f"{error}{_trainers().newest_beside(checkpoint)}") from error
    nbytes = None if sums is None else sum(each.nbytes for each in sums.values())
    if as_json:
        told = {"files": None if sums is None else len(sums), "bytes": nbytes, "seconds": took_s}
        typer.echo(json.dumps({"compared": sums is not None, **told}, indent=1))
        return
    if sums is None or nbytes is None:
        typer.echo(f"{checkpoint}: can be read. It has no {MANIFEST_NAME}, so a changed byte is not noticed.")
        return
    rate = format_bytes(int(nbytes / took_s))
    typer.echo(f"{checkpoint}: {len(sums)} files, {format_bytes(nbytes)}, are as they were saved ({rate}/s)")


def _trainers() -> Any:
    """What knows the checkpoints of the Trainer; it imports transformers, for which other checkpoints need not wait."""
    return import_module("ptm_accel.integrations.transformers.resuming")
