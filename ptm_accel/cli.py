"""`ptm-accel`: the command line beside accelerate's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption

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

_UsageError: type[Any] = typer.BadParameter.__bases__[0]
"""What cannot be read of a command; typer exports this case of it alone."""


def _with_underscores(name: str) -> str:
    return name.replace("-", "_")


class Command(TyperCommand):
    """A command whose options have `_` in their names, as those of the Trainer, and are also read with `-`.

    The context's `token_normalize_func` reads them; they are shown once, however a command has named them.
    """

    def __init__(self, name: str | None, **settings: Any) -> None:
        for param in settings.get("params") or ():
            if isinstance(param, TyperOption):
                param.opts = list(dict.fromkeys(f"--{_with_underscores(opt[2:])}" for opt in param.opts))
        super().__init__(name, **settings)


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": _with_underscores, "help_option_names": ["--help", "-h"]},
)


def main(argv: Sequence[str] | None = None) -> None:
    """The entry point: what is wrong is one line, and exit status 2.

    Args:
        argv: the words behind `ptm-accel`; by default those of this process.
    """
    try:
        status = app(argv, prog_name="ptm-accel", standalone_mode=False)
    except PTMError as error:
        refuse("ptm-accel", error)
    except _UsageError as error:
        said = error.format_message()
        if not said:
            # The help has been shown, of a command without words.
            raise SystemExit(2) from None
        command = "ptm-accel" if error.ctx is None else error.ctx.command_path
        refuse(command, f"{said}{'' if said.endswith(('.', '?')) else '.'} See {command} --help.")
    except typer.Abort:
        typer.echo("Stopped; nothing was written.", err=True)
        raise SystemExit(1) from None
    raise SystemExit(status or 0)


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
    app.command(cls=Command)(command)
# All that follows is for accelerate.
app.command(
    cls=Command,
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)(launch)


if __name__ == "__main__":
    main()
