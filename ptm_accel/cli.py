"""`ptm-accel`: the command line beside accelerate's own."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
import yaml
from rich.console import Console
from rich.table import Table

from ptm_accel import __version__, autoload, machine
from ptm_accel.config import DEFAULT_PAGE_SIZE, YAML_SECTION, PTMConfig
from ptm_accel.config_files import read_yaml
from ptm_accel.environment import SWITCH, TEXT_OPTIONS
from ptm_accel.errors import CheckpointError, ConfigError, PTMError
from ptm_accel.units import format_bytes

if TYPE_CHECKING:
    from ptm_accel.estimate import Estimate

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

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


# ---- env -------------------------------------------------------------------------------------------------------------


@app.command()
def env(as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Shows what a report of a problem should tell: versions, machine, memory limits, devices."""
    found = environment_report()
    if as_json:
        typer.echo(json.dumps(found, indent=1))
        return
    _show(found)


def _show(rows: dict[str, str]) -> None:
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)


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


# ---- estimate --------------------------------------------------------------------------------------------------------


@app.command()
def estimate(
    model: Annotated[str, typer.Argument(help="A model id, or a directory with a config.json; no weights are read.")],
    batch_size: Annotated[int, typer.Option("--batch_size", "--batch-size", min=1, help="Rows of a batch.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a row.")] = 512,
    dtype: Annotated[str, typer.Option(help="Of the parameters: float32, bfloat16 or float16.")] = "float32",
    bf16: Annotated[bool, typer.Option("--bf16", help="Autocast, as bf16=True of the Trainer.")] = False,
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="With activation checkpointing.")] = False,
    master_weights: Annotated[str, typer.Option("--master_weights", "--master-weights", help="fp32 or none.")] = "none",
    page_size: Annotated[
        str, typer.Option("--page_size", "--page-size", help="As the option; a small model wants less.")
    ] = DEFAULT_PAGE_SIZE,
    processes: Annotated[int, typer.Option(min=1, help="Of several processes with shard: full, what each needs.")] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Tells what training a model with AdamW needs: memory, disk, and the least that it can do with."""
    import torch

    from ptm_accel.estimate import estimate as work_out

    options = PTMConfig(master_weights=master_weights, page_size=page_size)
    host = import_module("ptm_accel.integrations.transformers.estimating")
    meta = host.meta_model(model, _dtype_of(dtype), checkpointing=checkpointing)
    masters = options.master_weights is not None
    needs = partial(work_out, meta, master_weights=masters, page_size=options.page_size, processes=processes)
    batch: Any = host.text_batch(meta, batch_size, length)
    found, unknown = needs(), None
    own = "call ptm_accel.estimate.estimate(model, batch) with a batch of your own."
    if batch is None:
        kind = f"{type(meta).__name__} takes {meta.main_input_name}"
        unknown = f"What a batch holds is worked out for text only, and {kind}: {own}"
    else:
        try:
            found = needs(batch, autocast_dtype=torch.bfloat16 if bf16 else None)
        except Exception as error:  # whatever a model raises that wants another batch, or cannot be traced
            reason = f"{type(error).__name__}: {(str(error) or 'no more is said').splitlines()[0]}"
            unknown = f"{type(meta).__name__} does not take the batch of text that was made up ({reason}): {own}"
    borders = host.kept_by_layer(meta, batch_size, length) if processes == 1 else None
    if as_json:
        typer.echo(json.dumps({**asdict(found), "border_bytes": borders, "unknown": unknown}, indent=1))
        return
    _show_estimate(found, f"{batch_size} x {length}", borders, unknown)


def _show_estimate(found: Estimate, batch: str, borders: int | None, unknown: str | None) -> None:
    held = "not known beforehand" if found.pass_bytes is None else format_bytes(found.pass_bytes)
    several = found.processes > 1
    rows = {
        "parameters": f"{found.parameters / 1e6:,.1f}M, of which {found.trainable / 1e6:,.1f}M train",
        **(_states_of_one(found) if several else {"their states": format_bytes(found.states_bytes)}),
        "all in memory": f"host_memory of {format_bytes(found.whole_bytes)}",
        "the least": f"host_memory of {format_bytes(found.least_bytes)}, and {format_bytes(found.below_bytes)} of disk",
        "what makes it the least": found.reason,
        **(_beside_ranges(found) if several else {}),
        f"beside it, a batch of {batch}": held,
        **_by_layer(borders),
    }
    _show(rows)
    typer.echo("On a GPU, device_memory takes the place of host_memory, and counts what a batch takes.")
    if unknown is not None:
        typer.echo(unknown)


def _by_layer(borders: int | None, together: int | None = None) -> dict[str, str]:
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
        f"each of {found.processes} processes": "with shard: full; below, the one that has most",
        "its states": format_bytes(found.states_bytes),
        "of these": ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in parts.items() if nbytes),
    }


def _beside_ranges(found: Estimate) -> dict[str, str]:
    """What processes need because layers are sharded over them, and what they need together."""
    count = found.processes
    memory, disk = format_bytes(count * found.least_bytes), format_bytes(count * found.below_bytes)
    return {
        "of the least, for whole layers": f"{format_bytes(found.gathered_bytes)}, beside those in use",
        f"{count} on one machine": f"at least {memory} of memory, and {disk} of disk",
        "over the network": f"{format_bytes(found.network_bytes)} to each process in a micro-batch",
    }


# ---- plan ------------------------------------------------------------------------------------------------------------


@app.command()
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
    meta = host.meta_model(model, _dtype_of(dtype), checkpointing=checkpointing)
    masters = resolved.master_weights is not None
    speeds = measured_speeds(device, _dtype_of(dtype), resolved.disk_paths, master_weights=masters)
    if speeds is None:
        raise ConfigError("disk: without a GPU layers leave for a disk; give --disk a folder on an SSD.")
    batch: Any = host.text_batch(meta, batch_size, length)
    passing = together = None
    borders = host.kept_by_layer(meta, batch_size, length)
    if resolved.device_bytes is not None and batch is not None:
        passing = work_out(meta, batch).pass_bytes
        if borders is not None:
            # Layers are recomputed then.
            meta_again = host.meta_model(model, _dtype_of(dtype), checkpointing=True)
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
    _show(
        {
            "a step, simulated": f"{found.step_s:.3g} s, of which {found.arithmetic_s:.3g} s are arithmetic",
            "moved in and out": f"{format_bytes(found.in_bytes)}, {format_bytes(found.out_bytes)}",
            **dict(part.split(": ", 1) for part in found.layers.split("; ")),
            **_by_layer(borders, together),
        }
    )


def _dtype_of(name: str) -> Any:
    """Returns a dtype of torch by its name.

    Raises:
        ConfigError: it is none of the three.
    """
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"dtype: {name!r} is unknown; set it to {', '.join(known)}.")
    return known[name]


# ---- slices ----------------------------------------------------------------------------------------------------------


@app.command()
def slices(
    model: Annotated[str, typer.Argument(help="A model id, or a directory with a config.json; no weights are read.")],
    length: Annotated[int, typer.Option("--seq", min=1, help="Tokens of a row.")],
    stages: Annotated[int, typer.Option(min=2, help="Of the pipeline.")],
    rows: Annotated[int, typer.Option("--batch", min=1, help="Rows of a batch.")] = 1,
    dtype: Annotated[str, typer.Option(help="Of the parameters: float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Tells how a pipeline of stages like this machine would best cut a batch into rows and slices of tokens."""
    from ptm_accel.opening import default_device
    from ptm_accel.pipeline.advice import advise
    from ptm_accel.pipeline.stage import Stage

    host = import_module("ptm_accel.integrations.transformers.estimating")
    config = host.meta_model(model, _dtype_of(dtype)).config
    layers = config.num_hidden_layers
    if stages > layers:
        raise ConfigError(f"stages: {stages} stages of {layers} layers; set it to at most {layers}.")
    part = host.some_layers(model, _dtype_of(dtype), -(-layers // stages), default_device())
    found = advise(Stage(part, 0, 1), rows=rows, length=length, stages=stages, vocabulary=config.vocab_size)
    cuts = "; ".join(f"{size} x {list(tokens)}" for size, tokens in found.scheme.parts)
    if all(len(tokens) == 1 for _, tokens in found.scheme.parts):
        cuts += " (sequences are best left whole)"
    _show(
        {
            "rows x slices": cuts,
            "a step": f"{found.scheme.seconds:.3g} s",
            "by rows alone": f"{found.rows_s:.3g} s",
            "in one piece": f"{found.whole_s:.3g} s",
            "if no stage waited": f"{found.bound_s:.3g} s",
        }
    )


# ---- config ----------------------------------------------------------------------------------------------------------

_ASKED = ("host_memory", "device_memory", "disk", "update", "master_weights", "shard")


@app.command()
def config(
    config_file: Annotated[
        Path | None, typer.Option("--config_file", "--config-file", help="accelerate's file; by default its own.")
    ] = None,
) -> None:
    """Asks for the options, and writes them as `ptm_config:` into accelerate's configuration file."""
    file, flag = config_file, f" --config_file {config_file}"
    if file is None:
        file, flag = Path(import_module("accelerate.commands.config.config_args").default_yaml_config_file), ""
    limit = machine.host_limit()
    typer.echo(f"This machine lets a process use {format_bytes(limit.bytes)} ({limit.origin}). Enter keeps a default.")
    answers = {option: _asked_for(option) for option in _ASKED}
    write_section(file, {option: answer for option, answer in answers.items() if answer})
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


def write_section(file: Path, options: dict[str, Any]) -> None:
    """Puts the options into accelerate's configuration file, beside what it says already.

    Raises:
        ConfigError: the file is there, and is not such a file.
    """
    content: Any = dict(_PLAIN_SETUP)
    if file.exists():
        content = read_yaml(file)
        if not isinstance(content, dict):
            raise ConfigError(f"{file}: holds no mapping, so it is no configuration of accelerate; name another file.")
    content[YAML_SECTION] = options
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(yaml.safe_dump(content, sort_keys=True), encoding="utf-8")


# ---- export ----------------------------------------------------------------------------------------------------------


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of the Trainer, or what save_state has written.")],
    output: Annotated[Path | None, typer.Option(help="By default optimizer.pt in the checkpoint.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a file that was saved after the checkpoint.")] = False,
) -> None:
    """Writes a checkpoint's optimizer state as runs without ptm_accel read it (for an Accelerator: optimizer.bin)."""
    from ptm_accel.checkpoint.plain_state import write_plain_state

    file = checkpoint / "optimizer.pt" if output is None else output
    write_plain_state(checkpoint, file, replace_newer=force)
    typer.echo(f"{file}: {format_bytes(file.stat().st_size)}")


# ---- check -----------------------------------------------------------------------------------------------------------


@app.command()
def check(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint of the Trainer, or what save_state has written.")],
) -> None:
    """Compares the files of a checkpoint with what was saved; exit status 2 and the file's name if one is damaged."""
    from ptm_accel.checkpoint.index import INDEX_NAME
    from ptm_accel.checkpoint.manifest import MANIFEST_NAME, check_manifest
    from ptm_accel.checkpoint.training_state import check_optimizer_state

    if not checkpoint.is_dir():
        raise CheckpointError(f"no such directory: {checkpoint}. Give the path of a checkpoint.")
    begin = time.perf_counter()
    sums = check_manifest(checkpoint)
    took_s = time.perf_counter() - begin
    for index in sorted(checkpoint.rglob(INDEX_NAME)):
        check_optimizer_state(index.parent)
    if (checkpoint / "trainer_state.json").is_file():
        import_module("ptm_accel.integrations.transformers.resuming").check_checkpoint(checkpoint, hashes=False)
    if sums is None:
        typer.echo(f"{checkpoint}: can be read. It has no {MANIFEST_NAME} that tells what was saved.")
        return
    nbytes = sum(each.nbytes for each in sums.values())
    rate = format_bytes(int(nbytes / took_s))
    typer.echo(f"{checkpoint}: {len(sums)} files, {format_bytes(nbytes)}, are what was saved ({rate}/s)")


# ---- launch ----------------------------------------------------------------------------------------------------------


@app.command(
    add_help_option=False,
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False},
)
def launch(context: typer.Context) -> None:
    """As `accelerate launch --use_ptm`, with all its flags; works where torch's entry points are off as well."""
    autoload.watch(autoload.COMMANDS)
    host = import_module("accelerate.commands.launch")
    parser = host.launch_command_parser()
    parser.prog = "ptm-accel launch"
    args = parser.parse_args(["--use_ptm", *context.args])
    if not args.no_python:
        # Runs it as a module of ours, which needs no help from torch.
        args.training_script_args = [*(["-m"] if args.module else []), args.training_script, *args.training_script_args]
        args.training_script, args.module = "ptm_accel", True
    try:
        host.launch_command(args)
    except subprocess.CalledProcessError as error:
        # The script has printed its own traceback.
        raise SystemExit(_status(error.returncode)) from None


def _status(code: int) -> int:
    """Returns a shell's exit status for a return code of `subprocess`, where a negative one is a signal."""
    if code >= 0:
        return code
    hint = " Memory may have run out: lower host_memory or the batch size." if -code == signal.SIGKILL else ""
    sys.stderr.write(f"ptm-accel launch: the script was ended by {signal.Signals(-code).name}.{hint}\n")
    return 128 - code


if __name__ == "__main__":
    main()
