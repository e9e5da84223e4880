"""`ptm-accel`: the command line beside accelerate's own."""

from __future__ import annotations

from typing import Annotated

import typer

from ptm_accel import __version__
from ptm_accel.commands.checkpoints import check, export
from ptm_accel.commands.configuring import config
from ptm_accel.commands.doctor import doctor
from ptm_accel.commands.environment import env
from ptm_accel.commands.estimating import estimate
from ptm_accel.commands.launching import launch
from ptm_accel.commands.planning import plan
from ptm_accel.commands.slicing import slices
from ptm_accel.errors import PTMError
from ptm_accel.uncaught import refuse

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def main() -> None:
    """The entry point: errors of ours are one line, and exit status 2."""
    try:
        app()
    except PTMError as error:
        refuse("ptm-accel", error)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"ptm-accel {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    asked: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="Shows the version; env shows all.")
    ] = False,
) -> None:
    """Train models that do not fit."""


for command in (env, doctor, estimate, plan, slices, config, export, check):
    app.command()(command)
# All that follows is for accelerate.
app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)(launch)


if __name__ == "__main__":
    main()
