"""What `estimate` and `plan` take alike: the step that is asked about, and the machine that is described."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ptm_accel.commands.showing import dtype_of
from ptm_accel.config import DEFAULT_PAGE_SIZE, PTMConfig
from ptm_accel.errors import ConfigError, UnsupportedError
from ptm_accel.hardware.described import Hardware, described, lora_rank

if TYPE_CHECKING:
    from ptm_accel.outlook import Work


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options, as they were given; fields are read by typer."""

    model: Annotated[str, typer.Argument(help="A model id, or a directory with a config.json; no weights are read.")]
    batch_size: Annotated[int, typer.Option("--batch_size", min=1, help="Sequences in a batch.")] = 1
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 512
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters: float32, bfloat16 or float16.")] = "float32"
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="With activation checkpointing.")] = False
    master_weights: Annotated[str, typer.Option("--master_weights", help="fp32 or none.")] = "none"
    page_size: Annotated[str, typer.Option("--page_size", help="Size of a page; less for a small model.")] = (
        DEFAULT_PAGE_SIZE
    )
    processes: Annotated[int, typer.Option(min=1, help="Processes with shard: full; figures are of each.")] = 1
    optim: Annotated[str, typer.Option(help="adamw, adam, sgd, sgd-momentum, adagrad or adafactor.")] = "adamw"
    lora: Annotated[str | None, typer.Option(help="Adapters on all linear layers, the rest frozen: r=16.")] = None
    gpu: Annotated[
        str | None, typer.Option(help="A card by name (4090, a100-80gb), or its memory and rate: 24GB@165TFLOPS.")
    ] = None
    ram: Annotated[
        str | None, typer.Option(help="Memory of the machine, and if you know it its rate: 64GB, 64GB@60GB/s.")
    ] = None
    ssd: Annotated[str | None, typer.Option(help="Room on an SSD, and its rate: 1TB@5GB/s.")] = None
    link: Annotated[
        str | None, typer.Option(help="Between GPU and memory, each way: 25GB/s. By default as the card has it.")
    ] = None
    cpu: Annotated[
        str | None, typer.Option(help="Without --gpu, the rate of the CPU: 1TFLOPS. By default measured here.")
    ] = None
    network: Annotated[
        str | None,
        typer.Option(help="To each process from the others: 12.5GB/s or 100Gb/s. By default NVLink, or as --link."),
    ] = None

    @property
    def tokens(self) -> int:
        """Of the batch."""
        return self.batch_size * self.length

    def hardware(self) -> Hardware | None:
        """The machine; None where none is described.

        Raises:
            ConfigError: an option that cannot be read, or that is of nothing.
        """
        if self.network is not None and self.processes == 1:
            raise ConfigError("network: it is between processes; write --processes beside it, or leave --network out.")
        return described(self.gpu, self.ram, self.ssd, self.link, self.cpu, self.network)

    def configured(self, **budgets: Any) -> PTMConfig:
        """The options of a run."""
        return PTMConfig(master_weights=self.master_weights, page_size=self.page_size, **budgets)

    def meta(self, *, checkpointing: bool | None = None) -> Any:
        """The model on the meta device, with adapters where they are asked for.

        Args:
            checkpointing: whether activations are checkpointed, if not as was asked.
        """
        rank = lora_rank(self.lora)
        recomputed = self.checkpointing if checkpointing is None else checkpointing
        with _kept_to_the_end():
            host = import_module("ptm_accel.integrations.transformers.estimating")
            meta = host.meta_model(self.model, dtype_of(self.dtype), checkpointing=recomputed)
            if rank is None:
                return meta
            return import_module("ptm_accel.integrations.peft.estimating").with_lora(meta, rank)

    def batch(self, meta: Any) -> dict[str, Any] | None:
        """The shapes of the batch; None for a model that does not take text."""
        host = import_module("ptm_accel.integrations.transformers.estimating")
        found: dict[str, Any] | None = host.text_batch(meta, self.batch_size, self.length)
        return found

    def step(self, meta: Any, *, bf16: bool = False) -> Work:
        """The step that is asked about.

        Args:
            meta: the model.
            bf16: whether with autocast.

        Raises:
            ConfigError: an optimizer that is not known.
            UnsupportedError: a model that does not take text.
        """
        batch = self.batch(meta)
        if batch is None:
            raise UnsupportedError(
                f"a step is forecast for text only, and {type(meta).__name__} takes {meta.main_input_name}; leave the "
                "machine out, or call ptm_accel.fitting.fitting with a batch of your own."
            )
        return self.work(meta, batch, bf16=bf16)

    def work(self, meta: Any, batch: dict[str, Any], *, bf16: bool) -> Work:
        """The same of a batch that is known."""
        import torch

        from ptm_accel.fitting import optimizer_memory_named
        from ptm_accel.outlook import Work

        return Work(
            model=meta,
            batch=batch,
            autocast_dtype=torch.bfloat16 if bf16 else None,
            master_weights=self.configured().master_weights is not None,
            optimizer_memory=optimizer_memory_named(self.optim),
            page_size=self.page_size,
            processes=self.processes,
        )


def asking(command: Callable[..., None]) -> Callable[..., None]:
    """Lets typer read the options of `Asked` beside those of a command that takes them as one argument, its first."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    shared = list(inspect.signature(Asked, eval_str=True).parameters.values())

    def called(**given: Any) -> None:
        command(Asked(**{each.name: given.pop(each.name) for each in shared}), **given)

    parameters = [*shared, *own]
    called.__name__, called.__doc__ = command.__name__, command.__doc__
    called.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(called)["__signature__"] = inspect.Signature(parameters)
    return called


@contextmanager
def _kept_to_the_end() -> Iterator[None]:
    """Leaves what is imported and made out of garbage collections, which took a quarter of the time of `estimate`."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
