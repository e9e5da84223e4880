"""`ptm-accel plan`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ptm_accel.commands.asking import Asked, asking
from ptm_accel.commands.estimating import kept_by_layer
from ptm_accel.commands.showing import show
from ptm_accel.config import PTMConfig
from ptm_accel.errors import BudgetError, ConfigError
from ptm_accel.units import format_bytes, format_least, format_seconds, parse_bytes

if TYPE_CHECKING:
    from ptm_accel.config import ResolvedConfig
    from ptm_accel.hardware.described import Hardware
    from ptm_accel.outlook import Outlook, Work
    from ptm_accel.speeds import Speeds


@asking
def plan(
    asked: Asked,
    *,
    device_memory: Annotated[str | None, typer.Option("--device_memory", help="As the option; with a GPU.")] = None,
    host_memory: Annotated[str | None, typer.Option("--host_memory", help="As the option.")] = None,
    disk: Annotated[str | None, typer.Option(help="As the option; a folder of this machine.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Prints JSON.")] = False,
) -> None:
    """Shows which layers would stay and which would leave, and the time of a step, here or on a described machine.

    ptm-accel plan Qwen/Qwen3-8B --dtype bfloat16 --checkpointing --length 2048 --gpu 4090 --ram 96GB
    """
    hardware = asked.hardware()
    options = asked.configured(
        device_memory=device_memory, host_memory=host_memory, disk=_disk(disk, described=hardware is not None)
    )
    work = asked.step(meta := asked.meta())
    if hardware is not None:
        _show_there(work, hardware, options, asked.tokens, as_json=as_json)
        return
    if asked.processes > 1:
        raise ConfigError("processes: they are only planned for a described machine; add --gpu and --ram.")
    found, device_bytes = _here(work, options)
    host = import_module("ptm_accel.integrations.transformers.estimating")
    borders = host.kept_by_layer(meta, asked.batch_size, asked.length)
    together = None
    if device_bytes is not None and borders is not None:
        # Layers are recomputed then.
        together = _together(work, asked.meta(checkpointing=True), device_bytes, borders)
    if as_json:
        told = {**_data(found), "border_bytes": borders, "micro_batches_together": together}
        typer.echo(json.dumps(told, indent=1))
        return
    show({**_rows(found, asked.tokens), **kept_by_layer(borders, together)})


def _disk(paths: str | None, *, described: bool) -> Any:
    from ptm_accel.config import DiskConfig

    if paths is None:
        return None
    if described:
        raise ConfigError("disk: it is a folder of this machine; for a described machine write --ssd 1TB@5GB/s.")
    return DiskConfig.load(paths.split(","))


def _here(work: Work, asked: PTMConfig) -> tuple[Outlook, int | None]:
    """The step on this machine, and the budget of its GPU, if it has one."""
    import torch

    from ptm_accel.config import resolve
    from ptm_accel.opening import default_device
    from ptm_accel.outlook import outlook
    from ptm_accel.speeds import measured_speeds

    device = default_device()
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    resolved = resolve(asked, device_total_bytes=total)
    if asked.device_memory is not None and resolved.device_bytes is None:
        raise ConfigError(
            "device_memory: this machine has no GPU; describe one, such as --gpu 24GB@165TFLOPS --ram 64GB, or --gpu "
            "4090."
        )
    dtype: Any = work.model.dtype
    speeds = measured_speeds(device, dtype, resolved.disk_paths, master_weights=work.master_weights)
    if speeds is None:
        raise ConfigError(
            "disk: without a GPU, layers that do not fit go to a disk; give --disk a folder on an SSD, or describe a "
            "machine with --gpu or --ram."
        )
    if resolved.device_bytes is None:
        return outlook(work, resolved.host_bytes, speeds, counts_activations=False), None
    if resolved.disk_paths and work.estimate().whole_bytes > resolved.host_bytes:
        # A run does not update on the CPU then: that would wait for the disk.
        speeds = replace(speeds, host_params=None)
    found = outlook(work, resolved.device_bytes, speeds, counts_activations=True)
    return _in_ram_and_below(found, resolved, speeds), resolved.device_bytes


def _in_ram_and_below(found: Outlook, resolved: ResolvedConfig, speeds: Speeds) -> Outlook:
    """The step on a GPU with the RAM and the disk of this machine."""
    from ptm_accel.hardware.profile import side_by_side
    from ptm_accel.hardware.rates import disk_rates
    from ptm_accel.outlook import overflowing

    missing = found.away_bytes - resolved.host_bytes
    if missing <= 0:
        return found
    rates = side_by_side(disk_rates(resolved.disk_paths)) if resolved.disk_paths else None
    if rates is None:
        raise BudgetError(
            f"host_memory lacks {format_bytes(missing)} for what does not stay on the GPU; give --disk a folder on an "
            f"SSD, or --host_memory at least {format_least(found.away_bytes)}."
        )
    assert speeds.link is not None, "a GPU without a link"
    return overflowing(found, missing, speeds.link, rates)


def _together(work: Work, recomputed: Any, device_bytes: int, borders: int) -> int:
    """How many micro-batches fit a device by layer."""
    from ptm_accel.micro_batches.borders import most_together

    again = replace(work, model=recomputed)
    room, beside = device_bytes - again.estimate().least_bytes, max(again.touched().pass_bytes - borders, 0)
    return most_together(room, borders, beside)


def _show_there(work: Work, hardware: Hardware, asked: PTMConfig, tokens: int, *, as_json: bool) -> None:
    """The step on a machine that is described, under the budgets that were given, or those of a run."""
    from ptm_accel.commands.forecasting import answer, as_data, rows_of
    from ptm_accel.fitting import budgets_of, fitting

    machine = hardware.shared_by(work.processes)
    if asked.device_memory is not None and machine.gpu is None:
        raise ConfigError("device_memory: the described machine has no GPU; add --gpu.")
    budgets = budgets_of(machine, work.touched().pass_bytes if machine.gpu is None else 0)
    if asked.device_memory is not None and machine.gpu is not None:
        budgets = replace(budgets, gpu=_size("device_memory", asked.device_memory, machine.gpu.memory_bytes))
    if asked.host_memory is not None:
        budgets = replace(budgets, ram=_size("host_memory", asked.host_memory, machine.ram_bytes))
    found = fitting(work, hardware, budgets)
    if as_json:
        typer.echo(json.dumps(as_data(found, hardware, tokens, work.processes), indent=1))
        return
    said = answer(found, hardware, work.processes, smaller=", or with a smaller batch")
    if found.found is None:
        raise BudgetError(said)
    typer.echo(said)
    standing = {} if found.found.standing is None else found.found.standing.rows()
    show({**rows_of(found, hardware, tokens, work.processes), **standing})


def _size(option: str, asked: str | int, total_bytes: int) -> int:
    nbytes = parse_bytes(asked, total_bytes=total_bytes)
    if nbytes > total_bytes:
        raise BudgetError(
            f"{option}: asked {format_bytes(nbytes)}, the described machine has {format_bytes(total_bytes)}."
        )
    return nbytes


def _rows(found: Outlook, tokens: int) -> dict[str, str]:
    step, arithmetic = format_seconds(found.step_s), format_seconds(found.arithmetic_s)
    late = {}
    if found.disk_s and not found.link_s:
        without = format_seconds(found.cost.forward_s + found.cost.backward_s)
        late = {"with update: lock_free": f"{without} at best, and the loss falls less in a step (docs/lock-free.md)"}
    return {
        "step (forecast)": f"{step}, {tokens / found.step_s:,.3g} tokens/s; {arithmetic} of it are arithmetic",
        **late,
        "moved in and out": f"{format_bytes(found.in_bytes)}, {format_bytes(found.out_bytes)}",
        **({} if found.standing is None else found.standing.rows()),
    }


def _data(found: Outlook) -> dict[str, Any]:
    return {
        "step_s": found.step_s,
        "arithmetic_s": found.arithmetic_s,
        "bound": found.bound[1].value,
        "bound_s": found.bound[0],
        "moved_in_bytes": found.in_bytes,
        "moved_out_bytes": found.out_bytes,
        "pages_bytes": found.pages_bytes,
        "pass_bytes": found.pass_bytes,
        "standing": None if found.standing is None else asdict(found.standing),
    }
