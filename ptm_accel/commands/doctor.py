"""`ptm-accel doctor`."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from ptm_accel.checks import Line

_MARKS = {"good": ("+", typer.colors.GREEN), "slow": ("!", typer.colors.YELLOW), "bad": ("x", typer.colors.RED)}


def doctor(
    disk: Annotated[str | None, typer.Option(help="Folders for scratch files, separated by commas.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints JSON.")] = False,
) -> None:
    """Checks this machine: what would fail, what would be slow, and what to do; keeps the rates that plans use.

    ptm-accel doctor --disk /mnt/ssd

    Disks and links are measured anew, for a second or two each: nothing else should run meanwhile. Exits with status
    1 if a check fails.
    """
    from ptm_accel.checks import Verdict, checks
    from ptm_accel.config import DiskConfig
    from ptm_accel.config_checks import expand

    texts = [] if disk is None else DiskConfig.load(disk.split(",")).paths
    lines = []
    for line in checks([Path(os.path.realpath(expand(text))) for text in texts]):
        lines.append(line)
        if not as_json:
            _show(line)
    if as_json:
        typer.echo(json.dumps([{**asdict(line), "verdict": line.verdict.value} for line in lines], indent=1))
    elif disk is None:
        typer.echo("No disk was looked at: --disk FOLDER checks and measures one.")
    if any(line.verdict is Verdict.BAD for line in lines):
        raise typer.Exit(1)


def _show(line: Line) -> None:
    mark, color = _MARKS[line.verdict.value]
    typer.secho(f"{mark} {line.verdict.value:4}", fg=color, nl=False)
    typer.echo(f"  {line.name}: {line.found}")
    if line.to_do:
        typer.echo(f"        {line.to_do}")
