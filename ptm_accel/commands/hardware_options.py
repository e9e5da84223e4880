"""Options for a machine that is described, which several commands take alike, and the work that is asked about."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ptm_accel.commands.showing import dtype_of
from ptm_accel.errors import UnsupportedError
from ptm_accel.hardware.described import lora_rank

if TYPE_CHECKING:
    from ptm_accel.outlook import Work

GpuOption = Annotated[
    str | None, typer.Option("--gpu", help="A card by name (4090, a100-80gb), or its memory and rate: 24GB@165TFLOPS.")
]
RamOption = Annotated[
    str | None, typer.Option("--ram", help="Memory of the machine, and if you know it its rate: 64GB, 64GB@60GB/s.")
]
SsdOption = Annotated[str | None, typer.Option("--ssd", help="Room on an SSD, and its rate: 1TB@5GB/s.")]
LinkOption = Annotated[
    str | None, typer.Option("--link", help="Between GPU and memory, each way: 25GB/s. By default as the card has it.")
]
CpuOption = Annotated[
    str | None,
    typer.Option("--cpu", help="Without --gpu, the rate of the CPU: 1TFLOPS. By default measured here."),
]
LoraOption = Annotated[str | None, typer.Option("--lora", help="Adapters on all linear layers, the rest frozen: r=16.")]
OptimOption = Annotated[str, typer.Option("--optim", help="adamw, adam, sgd, sgd-momentum, adagrad or adafactor.")]


def model_of(name: str, dtype: str, lora: str | None, *, checkpointing: bool) -> Any:
    """Returns a model on the meta device, with adapters where they are asked for.

    Args:
        name: a model id or a directory.
        dtype: of its parameters.
        lora: as the option.
        checkpointing: whether activations are checkpointed.
    """
    rank = lora_rank(lora)
    with _kept_to_the_end():
        host = import_module("ptm_accel.integrations.transformers.estimating")
        meta = host.meta_model(name, dtype_of(dtype), checkpointing=checkpointing)
        if rank is None:
            return meta
        return import_module("ptm_accel.integrations.peft.estimating").with_lora(meta, rank)


@contextmanager
def _kept_to_the_end() -> Iterator[None]:
    """Leaves what is imported and made out of garbage collections, which took a quarter of the time of `estimate`."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def work_of(
    model: Any, rows: int, length: int, optim: str, *, masters: bool, page_size: str, processes: int, bf16: bool = False
) -> Work:
    """Returns the step that is asked about.

    Raises:
        ConfigError: an optimizer that is not known.
        UnsupportedError: a model that does not take text.
    """
    import torch

    from ptm_accel.fitting import optimizer_memory_named
    from ptm_accel.outlook import Work

    batch = import_module("ptm_accel.integrations.transformers.estimating").text_batch(model, rows, length)
    if batch is None:
        raise UnsupportedError(
            f"a step is forecast for text only, and {type(model).__name__} takes {model.main_input_name}; leave the "
            "machine out, or call ptm_accel.fitting.fitting with a batch of your own."
        )
    return Work(
        model=model,
        batch=batch,
        autocast_dtype=torch.bfloat16 if bf16 else None,
        master_weights=masters,
        optimizer_memory=optimizer_memory_named(optim),
        page_size=page_size,
        processes=processes,
    )
