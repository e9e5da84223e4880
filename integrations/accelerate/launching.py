"""`accelerate launch --use_ptm`: the flags, the section `ptm_config:` of accelerate's YAML, and what they come to.

The parser and the checks are accelerate's, with ours around them (`ptm_accel.autoload` calls this when their modules
are imported). What was asked is checked before any process is started, and told to it by environment variables.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NoReturn

import torch

from ptm_accel.config import YAML_SECTION, PTMConfig
from ptm_accel.environment import (
    CONFIG_FILE,
    PREFIX,
    SWITCH_FLAG,
    TEXT_OPTIONS,
    is_flag,
    misplaced_flag,
    overridden,
    to_environment,
    unknown_flag,
)
from ptm_accel.errors import ConfigError, PTMError, UnsupportedError

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
    stock_validate: Callable[[argparse.Namespace], tuple[Any, Any, Any]] = module._validate_launch_command

    def launch_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
        parser = stock_parser(subparsers)
        add_flags(parser)
        return parser

    def _validate_launch_command(args: argparse.Namespace) -> tuple[Any, Any, Any]:
        try:
            _refuse_misplaced(args)
            result = stock_validate(args)
            switch_on(*result[:2])
        except PTMError as error:
            _end(error)
        return result

    module.launch_command_parser = launch_command_parser  # type: ignore[attr-defined]
    module._validate_launch_command = _validate_launch_command  # type: ignore[attr-defined]
    module.options_to_group[SWITCH_FLAG] = _GROUP


def _end(error: PTMError) -> NoReturn:
    sys.stderr.write(f"accelerate launch: error: {error}\n")
    raise SystemExit(2) from error


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
    stock = parser.parse_known_args

    def parse_known_args(args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, unknown = stock(args, namespace)
        for flag in (text.split("=")[0] for text in unknown if is_flag(text)):
            parser.error(unknown_flag(flag, f"--{SWITCH_FLAG}"))
        return found, unknown

    parser.parse_known_args = parse_known_args  # type: ignore[method-assign]


def _refuse_misplaced(args: argparse.Namespace) -> None:
    for text in args.training_script_args:
        if is_flag(text):
            raise ConfigError(misplaced_flag(text, args.training_script))


def switch_on(args: argparse.Namespace, defaults: Any) -> None:
    """Switches pages on in the environment, if they were asked for.

    Args:
        args: as accelerate has checked and completed them.
        defaults: its configuration file, if there is one.

    Raises:
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
    os.environ.update(to_environment(overridden(base, flags)))
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
