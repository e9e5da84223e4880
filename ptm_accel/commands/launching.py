"""`ptm-accel launch`."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib import import_module

import typer

from ptm_accel import autoload


def launch(context: typer.Context) -> None:
    """As `accelerate launch --use_ptm`, with all its flags; works where torch's entry points are off as well."""
    autoload.watch(autoload.COMMANDS)
    host = import_module("accelerate.commands.launch")
    parser = host.launch_command_parser()
    parser.prog = "ptm-accel launch"
    args = parser.parse_args(["--use_ptm", *context.args])
    if not args.no_python:
        # Runs it as a module of ours, which needs no help from torch.
        args.training_script_args = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        args.training_script, args.module = "ptm_accel", True
    try:
        host.launch_command(args)
    except subprocess.CalledProcessError as error:
        # The script has printed its own traceback.
        raise SystemExit(_status(error.returncode)) from None


def _status(code: int) -> int:
    """Returns a shell's exit status for a return code of `subprocess`, where a negative one is a signal."""
    if code >= 0:
        return code
    hint = " Memory may have run out: lower host_memory or the batch size." if -code == signal.SIGKILL else ""
    sys.stderr.write(f"ptm-accel launch: the script was ended by {signal.Signals(-code).name}.{hint}\n")
    return 128 - code
