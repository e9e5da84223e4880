"""`ptm-accel plan`."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any

import typer

from ptm_accel.commands.estimating import kept_by_layer
from ptm_accel.commands.showing import dtype_of, show
from ptm_accel.config import DEFAULT_PAGE_SIZE, PTMConfig
from ptm_accel.errors import ConfigError
from ptm_accel.units import format_bytes


def plan(
    model: Annotated[str, typer.Argument(help="A model id, or a directory with a config.json; no weights are read.")],
    device_memory: Annotated[str | None, typer.Option("--device_memory", help="As the option; with a GPU.")] = None,
    host_memory: Annotated[str | None, typer.Option("--host_memory", help="As the option; without a GPU.")] = None,
    disk: Annotated[str | None, typer.Option(help="As the option; without a GPU.")] = None,
    batch_size: Annotated[int, typer.Option("--batch_size", "--batch-size", min=1, help="Rows of a batch.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 512,
    dtype: Annotated[str, typer.Option(help="Of the parameters: float32, bfloat16 or float16.")] = "float32",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="With activation checkpointing.")] = False,
    master_weights: Annotated[str, typer.Option("--master_weights", "--master-weights", help="fp32 or none.")] = "none",
    page_size: Annotated[
        str, typer.Option("--page_size", "--page-size", help="As the option; a small model wants less.")
    ] = DEFAULT_PAGE_SIZE,
) -> None:
    """Tells which layers would stay and which would leave on this machine, and what a step would take."""
    import torch

    from ptm_accel.config import DiskConfig, resolve
    from ptm_accel.estimate import estimate as work_out
    from ptm_accel.micro_batches.borders import most_together
    from ptm_accel.opening import default_device
    from ptm_accel.outlook import measured_speeds, outlook

    asked = PTMConfig(
        device_memory=device_memory,
        host_memory=host_memory,
        disk=None if disk is None else DiskConfig.load(disk.split(",")),
        master_weights=master_weights,
        page_size=page_size,
    )
    device = default_device()
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    resolved = resolve(asked, device_total_bytes=total)
    host = import_module("ptm_accel.integrations.transformers.estimating")
    meta = host.meta_model(model, dtype_of(dtype), checkpointing=checkpointing)
    masters = resolved.master_weights is not None
    speeds = measured_speeds(device, dtype_of(dtype), resolved.disk_paths, master_weights=masters)
    if speeds is None:
        raise ConfigError("disk: without a GPU layers leave for a disk; give --disk a folder on an SSD.")
    batch: Any = host.text_batch(meta, batch_size, length)
    passing = together = None
    borders = host.kept_by_layer(meta, batch_size, length)
    if resolved.device_bytes is not None and batch is not None:
        passing = work_out(meta, batch).pass_bytes
        if borders is not None:
            # Layers are recomputed then.
            meta_again = host.meta_model(model, dtype_of(dtype), checkpointing=True)
            needed = work_out(meta_again, batch, master_weights=masters, page_size=page_size)
            room, beside = resolved.device_bytes - needed.least_bytes, max((needed.pass_bytes or 0) - borders, 0)
            together = most_together(room, borders, beside)
    found = outlook(
        meta,
        resolved.host_bytes if resolved.device_bytes is None else resolved.device_bytes,
        speeds,
        tokens=batch_size * length,
        pass_bytes=passing or 0,
        checkpointing=checkpointing,
        master_weights=masters,
        page_size=page_size,
    )
    show(
        {
            "a step, simulated": f"{found.step_s:.3g} s, of which {found.arithmetic_s:.3g} s are arithmetic",
            "moved in and out": f"{format_bytes(found.in_bytes)}, {format_bytes(found.out_bytes)}",
            **dict(part.split(": ", 1) for part in found.layers.split("; ")),
            **kept_by_layer(borders, together),
        }
    )
