"""`python -m ptm_accel [options] script.py ...`: a script with pages switched on.

The same as `accelerate launch --use_ptm script.py ...` in one process; and `accelerate launch -m ptm_accel script.py`
does it where torch's entry points are off (`TORCH_DEVICE_BACKEND_AUTOLOAD=0`), in as many processes as are asked for.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from typing import NoReturn

from ptm_accel import autoload
from ptm_accel.config import PTMConfig, check_machine
from ptm_accel.environment import (
    CONFIG_FILE,
    TEXT_OPTIONS,
    from_environment,
    is_flag,
    launched_with,
    misplaced_flag,
    overridden,
    to_environment,
    unknown_flag,
)
from ptm_accel.errors import PTMError
from ptm_accel.uncaught import refuse


class _Parser(argparse.ArgumentParser):
    """Ends with one line where a command cannot be read, without all flags."""

    def error(self, message: str) -> NoReturn:
        refuse(self.prog, message)


def main(argv: list[str] | None = None) -> None:
    """Runs a script, or with `-m` a module, as Python would; `argv` is what stands behind `python -m ptm_accel`."""
    parser = _Parser("python -m ptm_accel", allow_abbrev=False, description=__doc__.split("\n")[0])
    for option, text in TEXT_OPTIONS.items():
        parser.add_argument(f"--ptm_{option}", help=text)
    parser.add_argument(f"--ptm_{CONFIG_FILE}", help="YAML file with the options")
    parser.add_argument("-m", dest="module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER).required = False
    given, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(unknown_flag(unknown[0]))
    if (misplaced := next(filter(is_flag, given.args), None)) is not None:
        parser.error(misplaced_flag(misplaced, given.script))
    texts = {name: value for name in TEXT_OPTIONS if (value := getattr(given, f"ptm_{name}")) is not None}
    file = getattr(given, f"ptm_{CONFIG_FILE}")
    try:
        asked = from_environment(os.environ) if file is None else None
        config = overridden(asked or PTMConfig.load(file), texts)
        check_machine(config, processes=launched_with("LOCAL_WORLD_SIZE", 1))
        options = to_environment(config)
    except PTMError as error:
        refuse(parser.prog, error)
    if not given.module and not os.path.exists(given.script):
        parser.error(f"there is no script {given.script}; name one, or a module after -m.")
    os.environ.update(options)
    _run(given.script, given.args, given.module)


def _run(script: str, args: list[str], module: bool) -> None:
    import torch  # noqa: F401  # calls `autoload.install`, unless that is off

    autoload.install()
    sys.argv = [script, *args]
    if module:
        sys.path[0] = os.getcwd()
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(script))
        runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main()
