"""`ptm-accel estimate`."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ptm_accel.commands.asking import Asked, asking
from ptm_accel.commands.showing import show
from ptm_accel.units import format_bytes, format_least_decimal

if TYPE_CHECKING:
    from ptm_accel.estimate import Estimate
    from ptm_accel.hardware.described import Hardware
    from ptm_accel.outlook import Work


@asking
def estimate(
    asked: Asked,
    *,
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast, as bf16=True of the Trainer; --dtype stays.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Prints JSON.")] = False,
) -> None:
    """Shows the memory that training a model needs, and whether it fits a machine that you describe.

    ptm-accel estimate Qwen/Qwen3-8B --dtype bfloat16 --checkpointing --length 2048 --gpu 4090 --ram 96GB
    """
    hardware = asked.hardware()
    meta = asked.meta()
    if hardware is not None:
        _show_forecast(asked, asked.step(meta, bf16=bf16), hardware, as_json=as_json)
        return
    batch = asked.batch(meta)
    work = asked.work(meta, batch or {}, bf16=bf16)
    pass_bytes, unknown = _held_by(batch, work)
    found = replace(work.estimate(), pass_bytes=pass_bytes)
    host = import_module("ptm_accel.integrations.transformers.estimating")
    borders = host.kept_by_layer(meta, asked.batch_size, asked.length) if asked.processes == 1 else None
    if as_json:
        typer.echo(json.dumps({**asdict(found), "border_bytes": borders, "unknown": unknown}, indent=1))
        return
    typer.echo(_answer(found, work))
    _show_estimate(found, f"{asked.batch_size} x {asked.length}", borders, unknown)


def _held_by(batch: dict[str, Any] | None, work: Work) -> tuple[int | None, str | None]:
    """What a batch holds, or why that is not known."""
    from ptm_accel.model.forecast import forecast

    own = "call ptm_accel.estimate.estimate(model, batch) with a batch of your own."
    name = type(work.model).__name__
    if batch is None:
        takes = f"{name} takes {work.model.main_input_name}"
        return None, f"What a batch holds is worked out for text only, and {takes}: {own}"
    try:
        return forecast(work.model, batch, autocast_dtype=work.autocast_dtype), None
    except Exception as error:  # whatever a model raises that wants another batch, or cannot be traced
        reason = f"{type(error).__name__}: {(str(error) or 'no more is said').splitlines()[0]}"
        return None, f"{name} does not take the batch of text that was made up ({reason}): {own}"


def _show_forecast(asked: Asked, work: Work, hardware: Hardware, *, as_json: bool) -> None:
    from ptm_accel.commands.forecasting import answer, as_data, rows_of
    from ptm_accel.fitting import fitting

    found = fitting(work, hardware)
    if as_json:
        told = {
            **asdict(found.needs),
            "pass_bytes": found.pass_bytes,
            **as_data(found, hardware, asked.tokens, work.processes),
        }
        typer.echo(json.dumps(told, indent=1))
        return
    smaller = ", or with a smaller batch" + ("" if asked.checkpointing else " or --checkpointing")
    typer.echo(answer(found, hardware, work.processes, smaller=smaller))
    counts = f"{found.needs.parameters / 1e6:,.1f}M, of which {found.needs.trainable / 1e6:,.1f}M train"
    show({**rows_of(found, hardware, asked.tokens, work.processes), "parameters": counts})


def _answer(found: Estimate, work: Work) -> str:
    """Says on which machines it trains, and on which nothing moves, in sizes for `--gpu`, `--ram` and `--ssd`."""
    from ptm_accel.fitting import GPU, RAM, SSD, stays_from, total_of

    count, passing = found.processes, found.pass_bytes or 0

    def of(tier: str, nbytes: int, beside: int = 0) -> str:
        return format_least_decimal(total_of(tier, nbytes, beside, count))

    gpu, gpus = ("a GPU", "a GPU") if count == 1 else (f"{count} GPUs", "GPUs")
    least, whole = of(GPU, found.least_bytes + passing), of(GPU, stays_from(work, found, passing))
    ram, ssd = of(RAM, found.below_bytes), of(SSD, found.below_bytes)
    ram_least, ram_whole = of(RAM, found.least_bytes, passing), of(RAM, found.whole_bytes, passing)
    lines = (
        f"It needs {gpu} of at least {least}, and {ram} of RAM; with {gpus} of {whole} nothing moves.",
        f"Without {gpus} it needs at least {ram_least} of RAM, and {ssd} on an SSD; with {ram_whole} of RAM nothing "
        "moves.",
        *([] if found.pass_bytes is not None else ["Add what a batch takes."]),
    )
    return "\n".join(lines)


def _show_estimate(found: Estimate, batch: str, borders: int | None, unknown: str | None) -> None:
    held = "not known beforehand" if found.pass_bytes is None else format_bytes(found.pass_bytes)
    several = found.processes > 1
    rows = {
        "parameters": f"{found.parameters / 1e6:,.1f}M, of which {found.trainable / 1e6:,.1f}M train",
        **(_states_of_one(found) if several else {"their states": format_bytes(found.states_bytes)}),
        "all in memory": f"host_memory of {format_bytes(found.whole_bytes)}",
        "the least": f"host_memory of {format_bytes(found.least_bytes)}, and {format_bytes(found.below_bytes)} of disk",
        "decided by": found.reason,
        **(_beside_ranges(found) if several else {}),
        f"in addition, a batch of {batch}": held,
        **kept_by_layer(borders),
    }
    show(rows)
    typer.echo("On a GPU, device_memory takes the place of host_memory, and counts the batch as well.")
    if unknown is not None:
        typer.echo(unknown)


def kept_by_layer(borders: int | None, together: int | None = None) -> dict[str, str]:
    """What micro-batches keep that run layer by layer.

    Args:
        borders: bytes of one; None for a model that cannot be run so.
        together: how many fit a device; None without one.
    """
    fits = "" if together is None else f"; at most {together} fit device_memory together"
    row = f"{format_bytes(borders or 0)} for each micro-batch of a step{fits}"
    return {} if borders is None else {"kept with micro_batches: by_layer": row}


def _states_of_one(found: Estimate) -> dict[str, str]:
    """What the first of several processes keeps, whose ranges are the largest; all other figures are its too."""
    kept = found.kept
    parts = {
        "parameters": kept.parameters_bytes,
        "masters": kept.masters_bytes,
        "optimizer state": kept.optimizer_bytes,
        "gradients": kept.gradients_bytes,
    }
    return {
        f"each of {found.processes} processes": "with shard: full; figures of the largest one",
        "its states": format_bytes(found.states_bytes),
        "of these": ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes),
    }


def _beside_ranges(found: Estimate) -> dict[str, str]:
    """What processes need because layers are sharded over them, and what they need together."""
    count = found.processes
    memory, disk = format_bytes(count * found.least_bytes), format_bytes(count * found.below_bytes)
    return {
        "of the least, for whole layers": f"{format_bytes(found.gathered_bytes)}, without those in use",
        f"{count} on one machine": f"at least {memory} of memory, and {disk} of disk",
        "over the network": f"{format_bytes(found.network_bytes)} to each process in a micro-batch",
    }
