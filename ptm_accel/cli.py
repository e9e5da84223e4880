"""`ptm-accel`: the command line beside accelerate's own."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from ptm_accel import autoload, machine
from ptm_accel.config import YAML_SECTION, DiskConfig, PTMConfig, check_disk_path
from ptm_accel.environment import SWITCH
from ptm_accel.errors import ConfigError, PTMError
from ptm_accel.units import format_bytes

app = typer.Typer(
    add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, help="Train models that do not fit."
)

_PACKAGES = ("ptm-accel", "torch", "transformers", "accelerate", "peft", "trl", "datasets", "safetensors")
_PLAIN_SETUP = {
    "compute_environment": "LOCAL_MACHINE",
    "distributed_type": "NO",
    "mixed_precision": "no",
    "num_machines": 1,
    "num_processes": 1,
    "use_cpu": False,
}
"""What accelerate asks for in a configuration file of one process."""


def main() -> None:
    """The entry point: errors of ours are one line, and exit status 2."""
    try:
        app()
    except PTMError as error:
        sys.stderr.write(f"ptm-accel: error: {error}\n")
        raise SystemExit(2) from error


# ---- env -------------------------------------------------------------------------------------------------------------


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Shows what a report of a problem should tell: versions, machine, memory limits, devices."""
    found = environment_report()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    table = Table(show_header=False, box=None)
    for name, value in found.items():
        table.add_row(name, str(value))
    Console(soft_wrap=True).print(table)


def environment_report() -> dict[str, str]:
    """Names and values, in the order in which they are shown."""
    import torch

    limit = machine.host_limit()
    found = {name: _version(name) for name in _PACKAGES}
    found |= {
        "Python": platform.python_version(),
        "system": platform.platform(),
        "CPU cores": str(os.cpu_count()),
        "host memory": f"{format_bytes(limit.bytes)} ({limit.origin})",
        "available": format_bytes(machine.available_bytes()),
        "threads of torch": str(torch.get_num_threads()),
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "not set"),
        "CUDA": str(torch.version.cuda) if torch.cuda.is_available() else "none",
        "switched on": os.environ.get(SWITCH, "no"),
    }
    for number in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(number)
        found[f"device {number}"] = f"{card.name}, {format_bytes(card.total_memory)}"
    return found


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


# ---- config ----------------------------------------------------------------------------------------------------------


@app.command()
def config(
    config_file: Annotated[
        Path | None, typer.Option("--config_file", "--config-file", help="accelerate's file; by default its own.")
    ] = None,
) -> None:
    """Asks for the dials, and writes them as `ptm_config:` into accelerate's configuration file."""
    dials = _asked()
    file = config_file if config_file is not None else _default_file()
    write_section(file, dials)
    typer.echo(f"Written to {file}. Train with: accelerate launch{_option(config_file)} train.py")


def _option(file: Path | None) -> str:
    return f" --config_file {file}" if file is not None else ""


def _default_file() -> Path:
    return Path(import_module("accelerate.commands.config.config_args").default_yaml_config_file)


def _asked() -> dict[str, Any]:
    """The dials that were answered with anything but the default."""
    limit = machine.host_limit()
    typer.echo(f"This machine lets a process use {format_bytes(limit.bytes)} ({limit.origin}). Enter keeps a default.")
    questions = {
        "host_memory": "Host memory for the model's states, such as 64GB or 50%",
        "device_memory": "Memory on the accelerator, such as 10GB or 90%",
        "disk": "Folder on an SSD for what does not fit (several: separated by commas)",
        "update": "When the optimizer updates: exact or blocking",
        "master_weights": "fp32 masters of bf16 parameters: fp32 or none",
    }
    dials: dict[str, Any] = {}
    for dial, question in questions.items():
        while answer := typer.prompt(question, default="", show_default=False).strip():
            value: Any = [part.strip() for part in answer.split(",")] if dial == "disk" else answer
            try:
                checked = PTMConfig.load({dial: value})
                for path in DiskConfig.load(checked.disk).paths if checked.disk is not None else ():
                    check_disk_path(Path(os.path.expanduser(os.path.expandvars(path))))
            except PTMError as error:
                typer.echo(f"  {error}", err=True)
                continue
            dials[dial] = value
            break
    return dials


def write_section(file: Path, dials: dict[str, Any]) -> None:
    """Puts the dials into accelerate's configuration file, beside what it says already.

    Raises:
        ConfigError: the file is there, and is not such a file.
    """
    content: Any = dict(_PLAIN_SETUP)
    if file.exists():
        try:
            content = yaml.safe_load(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(f"{file}: cannot be read as YAML: {error}; correct it, or name another file.") from error
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: holds no mapping, so it is no configuration of accelerate; name another file.")
    content[YAML_SECTION] = dials
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content, sort_keys=True), encoding="utf-8")


# ---- export ----------------------------------------------------------------------------------------------------------


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of the Trainer, or what save_state has written.")],
    output: Annotated[Path | None, typer.Option(help="By default optimizer.pt in the checkpoint.")] = None,
) -> None:
    """Writes a checkpoint's optimizer state as runs without ptm_accel read it (for an Accelerator: optimizer.bin)."""
    from ptm_accel.checkpoint.plain_state import write_plain_state

    file = checkpoint / "optimizer.pt" if output is None else output
    write_plain_state(checkpoint, file)
    typer.echo(f"{file}: {format_bytes(file.stat().st_size)}")


# ---- launch ----------------------------------------------------------------------------------------------------------


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def launch(context: typer.Context) -> None:
    """As `accelerate launch --use_ptm`, with all its flags; works where torch's entry points are off as well."""
    launch_script(context.args)


def launch_script(arguments: Sequence[str]) -> None:
    """Starts a script as accelerate does, with pages switched on.

    Args:
        arguments: flags of `accelerate launch`, the script, and what is the script's.
    """
    autoload.watch(autoload.COMMANDS)
    host = import_module("accelerate.commands.launch")
    parser = host.launch_command_parser()
    parser.prog = "ptm-accel launch"
    args = parser.parse_args(["--use_ptm", *arguments])
    if not args.no_python:
        # Runs it as a module of ours, which needs no help from torch.
        args.training_script_args = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        args.training_script, args.module = "ptm_accel", True
    host.launch_command(args)


if __name__ == "__main__":
    main()
