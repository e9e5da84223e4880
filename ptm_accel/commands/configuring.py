"""`ptm-accel config`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from ptm_accel import machine
from ptm_accel.config import YAML_SECTION, PTMConfig
from ptm_accel.config_files import read_yaml
from ptm_accel.environment import TEXT_OPTIONS
from ptm_accel.errors import ConfigError
from ptm_accel.units import format_bytes

_PLAIN_SETUP = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "use_cpu": False,
}
"""What accelerate asks for in a configuration file of one process."""
_ASKED = ("host_memory", "device_memory", "disk", "update", "master_weights", "shard")


def config(
    config_file: Annotated[Path | None, typer.Option(help="accelerate's file; by default its own.")] = None,
) -> None:
    """Asks for the options, and writes them as `ptm_config:` into accelerate's configuration file.

    ptm-accel config --config_file accelerate.yaml
    """
    file, flag = config_file, f" --config_file {config_file}"
    if file is None:
        file, flag = Path(import_module("accelerate.commands.config.config_args").default_yaml_config_file), ""
    content = read_config(file)
    limit = machine.host_limit()
    typer.echo(f"This machine lets a process use {format_bytes(limit.bytes)} ({limit.origin}). Enter keeps a default.")
    answers = {option: _asked_for(option) for option in _ASKED}
    write_section(file, content, {option: answer for option, answer in answers.items() if answer})
    typer.echo(f"Written to {file}. Train with: accelerate launch{flag} train.py")


def _asked_for(option: str) -> str | list[str]:
    """Asks for an option until the answer can be used; empty for the default."""

    def checked(answer: str) -> str | list[str]:
        value = [part.strip() for part in answer.split(",")] if option == "disk" and answer else answer.strip()
        try:
            PTMConfig.load({option: value} if value else {})
        except ConfigError as error:
            raise typer.BadParameter(str(error)) from error
        return value

    question = f"{option} ({TEXT_OPTIONS[option].replace('%%', '%')})"
    found: str | list[str] = typer.prompt(question, default="", show_default=False, value_proc=checked)
    return found


def read_config(file: Path) -> dict[str, Any]:
    """What accelerate's configuration file says; that of one process where there is none yet.

    Raises:
        ConfigError: the file is there, and is not such a file.
    """
    if not file.exists():
        return dict(_PLAIN_SETUP)
    content = read_yaml(file)
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a mapping, so not a configuration of accelerate; name another file.")
    return content


def write_section(file: Path, content: dict[str, Any], options: dict[str, Any]) -> None:
    """Writes accelerate's configuration file, with the options beside what it says already.

    Raises:
        ConfigError: it cannot be written.
    """
    text = yaml.safe_dump({**content, YAML_SECTION: options}, sort_keys=True)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be written: {error.strerror}; name another file.") from error
