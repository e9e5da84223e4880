"""`accelerate launch --use_ptm`: the flags, the section `ptm_config:` of accelerate's YAML, and what they come to.

The parser and the checks are accelerate's, with ours around them (`ptm_accel.autoload` calls this when their modules
are imported). What was asked is checked before any process is started, and told to it by environment variables.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any, NoReturn

import torch
import yaml
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from ptm_accel.config import YAML_SECTION, PTMConfig, check_machine
from ptm_accel.environment import (
    CONFIG_FILE,
    PREFIX,
    SWITCH_FLAG,
    TEXT_OPTIONS,
    is_flag,
    is_on,
    misplaced_flag,
    overridden,
    to_environment,
    unknown_flag,
)
from ptm_accel.errors import ConfigError, PTMError, UnsupportedError
from ptm_accel.uncaught import refuse, wants_traceback

FAILURES = (subprocess.CalledProcessError, ChildFailedError)
"""What accelerate's launcher raises where a script has failed."""
_PROGRAM = "accelerate launch"
PROGRAM = "ptm_program"
"""Where parsed flags name another."""
_GROUP = "PTM Arguments"
_OTHERS = {
    "use_deepspeed": "DeepSpeed",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "Megatron-LM",
    "use_parallelism_config": "a parallelism config",
    "tpu": "TPUs",
}


def extend_config(module: ModuleType) -> None:
    """Lets accelerate's configuration file have a section `ptm_config:`.

    Args:
        module: `accelerate.commands.config.config_args`.
    """
    stock: Any = module.ClusterConfig

    @dataclass
    class ClusterConfig(stock):  # type: ignore[misc]
        """accelerate's own, with the options of ptm_accel; None where there is no such section."""

        ptm_config: dict[str, Any] | None = None

        @staticmethod
        def process_config(config_dict: dict[str, Any]) -> Any:
            # An empty section asks for the defaults.
            if YAML_SECTION in config_dict and config_dict[YAML_SECTION] is None:
                config_dict[YAML_SECTION] = {}
            return stock.process_config(config_dict)

    ClusterConfig.__module__, ClusterConfig.__qualname__ = stock.__module__, stock.__qualname__
    module.ClusterConfig = ClusterConfig  # type: ignore[attr-defined]


def extend_launch(module: ModuleType) -> None:
    """Gives `accelerate launch` the flags.

    Args:
        module: `accelerate.commands.launch`.
    """
    stock_parser: Callable[..., argparse.ArgumentParser] = module.launch_command_parser
    stock_command: Callable[[argparse.Namespace], None] = module.launch_command
    stock_validate: Callable[[argparse.Namespace], tuple[Any, Any, Any]] = module._validate_launch_command

    def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
        parser = stock_parser(subparsers)
        add_flags(parser)
        return parser

    def _validate_launch_command(args: argparse.Namespace) -> tuple[Any, Any, Any]:
        try:
            refuse_misplaced(args)
            with _held_back(module.__name__):
                result = stock_validate(args)
                switch_on(*result[:2])
        except PTMError as error:
            refuse(_program_of(args), error)
        except (OSError, ValueError, yaml.YAMLError) as error:
            # accelerate's own, of flags or a file that it cannot use.
            if not args.use_ptm:
                raise
            refuse(_program_of(args), error)
        return result

    @wraps(stock_command)
    def launch_command(args: argparse.Namespace) -> None:
        try:
            stock_command(args)
        except FAILURES as error:
            if not is_on(os.environ) or wants_traceback():
                raise
            tell_of_end(error, _PROGRAM)
            raise SystemExit(1) from None

    module.launch_command = launch_command  # type: ignore[attr-defined]
    module.launch_command_parser = launch_command_parser  # type: ignore[attr-defined]
    module._validate_launch_command = _validate_launch_command  # type: ignore[attr-defined]
    module.options_to_group[SWITCH_FLAG] = _GROUP


def _program_of(args: argparse.Namespace) -> str:
    """The command that was typed; ours notes itself beside the flags (`ptm_accel.commands.launching`)."""
    program: str = getattr(args, PROGRAM, _PROGRAM)
    return program


@contextmanager
def _held_back(name: str) -> Iterator[None]:
    """While it lasts, a logger says nothing; then all of it, unless an error has said more."""
    logger, held = logging.getLogger(name), []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    logger.addFilter(hold)
    try:
        yield
    finally:
        logger.removeFilter(hold)
    for record in held:
        logger.handle(record)


def tell_of_end(error: subprocess.CalledProcessError | ChildFailedError, program: str) -> int:
    """Says of a script that has failed what it cannot have said itself.

    Args:
        error: accelerate's, or torchrun's with its report of all processes.
        program: the launcher.

    Returns:
        The exit status of a shell.
    """
    if isinstance(error, ChildFailedError):
        sys.stderr.write(f"{error}\n")
        return 1
    if error.returncode >= 0:
        return error.returncode
    number = -error.returncode
    hint = " Memory may have run out: lower host_memory or the batch size." if number == signal.SIGKILL else ""
    sys.stderr.write(f"{program}: the script was ended by {signal.Signals(number).name}.{hint}\n")
    return 128 + number


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds `--use_ptm` and the options to a parser of accelerate's; an unknown option gets a suggestion."""
    paradigms = (group for group in parser._action_groups if group.title == "Training Paradigm Arguments")
    next(paradigms, parser).add_argument(
        f"--{SWITCH_FLAG}", default=False, action="store_true", help="Whether to train on pages over GPU, CPU and SSD."
    )
    group = parser.add_argument_group(_GROUP, "The options of ptm_accel; each has a default derived on the machine.")
    for option, text in TEXT_OPTIONS.items():
        group.add_argument(f"--{PREFIX}{option}", default=None, help=f"{text[0].upper()}{text[1:]}.")
    group.add_argument(
        f"--{PREFIX}{CONFIG_FILE}", default=None, help="YAML file with the options; those given as flags go before it."
    )
    _shorten_errors(parser)


def _shorten_errors(parser: argparse.ArgumentParser) -> None:
    """Has a command with flags of ours end with one line where it cannot be read; accelerate shows all its flags."""
    stock, stock_error = parser.parse_known_args, parser.error
    own = False

    def parse_known_args(args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        nonlocal own
        own = any(map(is_flag, sys.argv[1:] if args is None else args))
        found, unknown = stock(args, namespace)
        for flag in (text.split("=")[0] for text in unknown if is_flag(text)):
            parser.error(unknown_flag(flag, f"--{SWITCH_FLAG}"))
        return found, unknown

    def error(message: str) -> NoReturn:
        if own:
            refuse(parser.prog if parser.prog.startswith("ptm-accel") else _PROGRAM, message)
        stock_error(message)

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    parser.error = error  # type: ignore[method-assign]


def refuse_misplaced(args: argparse.Namespace) -> None:
    """Refuses flags of ours behind the script.

    Raises:
        ConfigError: there is one.
    """
    for text in args.training_script_args:
        if is_flag(text):
            raise ConfigError(misplaced_flag(text, args.training_script))


def switch_on(args: argparse.Namespace, defaults: Any) -> None:
    """Switches pages on in the environment, if they were asked for.

    Args:
        args: as accelerate has checked and completed them.
        defaults: its configuration file, if there is one.

    Raises:
        BudgetError: more is asked than this machine has.
        ConfigError: options that cannot be used, or without `--use_ptm`.
        UnsupportedError: another way to place parameters was asked for as well.
    """
    typed: set[str] = getattr(args, "nondefault", set())
    names = (*TEXT_OPTIONS, CONFIG_FILE)
    flags = {name: getattr(args, PREFIX + name) for name in names if PREFIX + name in typed}
    section = getattr(defaults, YAML_SECTION, None)
    if not args.use_ptm and section is None:
        if flags:
            raise ConfigError(
                f"--{PREFIX}{next(iter(flags))} does nothing without --{SWITCH_FLAG}; add --{SWITCH_FLAG}."
            )
        return
    for name, title in _OTHERS.items():
        if getattr(args, name, False):
            raise UnsupportedError(
                f"{title} (--{name}) and ptm_accel (--{SWITCH_FLAG}, or {YAML_SECTION} in accelerate's configuration "
                "file) both want to place the same parameters; leave one of them out."
            )
    file = flags.pop(CONFIG_FILE, None)
    base = PTMConfig.load(file if file is not None else {YAML_SECTION: section or {}})
    config = overridden(base, flags)
    if args.mpirun_hostfile is None:
        check_machine(config, processes=max((args.num_processes or 1) // (args.num_machines or 1), 1))
    os.environ.update(to_environment(config))
    _start_all(args)


def _start_all(args: argparse.Namespace) -> None:
    """Has as many processes started as were asked for, on a machine without accelerators as well.

    accelerate starts one there, whatever the number, unless it is given hosts for mpirun.
    """
    if (args.num_processes or 1) < 2 or args.multi_gpu or args.mpirun_hostfile is not None:
        return
    if args.cpu or args.use_cpu or not torch.accelerator.is_available():
        os.environ["ACCELERATE_USE_CPU"] = "true"
        args.cpu = False
    args.multi_gpu = True
