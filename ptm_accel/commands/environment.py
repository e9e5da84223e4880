"""`ptm-accel env`."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from ptm_accel import machine
from ptm_accel.commands.showing import show
from ptm_accel.environment import SWITCH
from ptm_accel.units import format_bytes

_PACKAGES = ("ptm-accel", "torch", "transformers", "accelerate", "peft", "trl", "datasets", "safetensors")


def env(as_json: Annotated[bool, typer.Option("--json", help="Prints JSON.")] = False) -> None:
    """Shows the facts for a bug report: versions, machine, memory limits, devices.

    ptm-accel env
    """
    found = environment_report()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    show(found)


def environment_report() -> dict[str, str]:
    """Names and values, in the order in which they are shown."""
    import torch

    limit = machine.host_limit()
    found = {name: _version(name) for name in _PACKAGES}
    # With what it was built for, which its package's version may lack.
    found["torch"] = torch.__version__
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
