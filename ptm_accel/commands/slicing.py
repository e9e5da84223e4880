"""`ptm-accel slices`."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated

import typer

from ptm_accel.commands.showing import dtype_of, show
from ptm_accel.errors import ConfigError


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
    config = host.meta_model(model, dtype_of(dtype)).config
    layers = config.num_hidden_layers
    if stages > layers:
        raise ConfigError(f"stages: {stages} stages of {layers} layers; set it to at most {layers}.")
    part = host.some_layers(model, dtype_of(dtype), -(-layers // stages), default_device())
    found = advise(Stage(part, 0, 1), rows=rows, length=length, stages=stages, vocabulary=config.vocab_size)
    cuts = "; ".join(f"{size} x {list(tokens)}" for size, tokens in found.scheme.parts)
    if all(len(tokens) == 1 for _, tokens in found.scheme.parts):
        cuts += " (sequences are best left whole)"
    show(
        {
            "rows x slices": cuts,
            "a step": f"{found.scheme.seconds:.3g} s",
            "by rows alone": f"{found.rows_s:.3g} s",
            "in one piece": f"{found.whole_s:.3g} s",
            "if no stage waited": f"{found.bound_s:.3g} s",
        }
    )
