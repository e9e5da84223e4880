"""`ptm-accel launch`."""

from __future__ import annotations

from importlib import import_module

import typer

from ptm_accel import autoload


def launch(context: typer.Context) -> None:
    """As `accelerate launch --use_ptm`, with all its flags; works where torch's entry points are off as well."""
    autoload.watch(autoload.COMMANDS)
    host = import_module("accelerate.commands.launch")
    parser = host.launch_command_parser()
    parser.prog = "ptm-accel launch"
    parser.epilog = "ptm-accel launch --ptm_host_memory 8GB --ptm_disk /mnt/ssd train.py"
    ours = import_module("ptm_accel.integrations.accelerate.launching")
    parser.set_defaults(**{ours.PROGRAM: parser.prog})
    args = parser.parse_args(["--use_ptm", *context.args])
    ours.refuse_misplaced(args)
    if not args.no_python:
        # Runs it as a module of ours, which needs no help from torch.
        args.training_script_args = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        args.training_script, args.module = "ptm_accel", True
    try:
        # accelerate's own, since ours says only that a script has failed, and this the status of the script.
        host.launch_command.__wrapped__(args)
    except ours.FAILURES as error:
        raise SystemExit(ours.tell_of_end(error, parser.prog)) from None
