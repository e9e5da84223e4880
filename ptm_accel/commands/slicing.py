"""`ptm-accel slices`."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Annotated

import typer

from ptm_accel.commands.showing import dtype_of, show
from ptm_accel.errors import ConfigError
from ptm_accel.units import format_seconds


def slices(
    model: Annotated[str, typer.Argument(help="A model id, or a directory with a config.json; no weights are read.")],
    stages: Annotated[int, typer.Option(min=2, help="Of the pipeline.")],
    batch_size: Annotated[int, typer.Option(min=1, help="Sequences in a batch.")] = 1,
    length: Annotated[int, typer.Option(min=1, help="Tokens of a sequence.")] = 512,
    dtype: Annotated[str, typer.Option(help="Dtype of the parameters: float32, bfloat16 or float16.")] = "float32",
    as_json: Annotated[bool, typer.Option("--json", help="Prints JSON.")] = False,
) -> None:
    """Finds the best cut of a batch into rows and slices of tokens, for a pipeline of stages like this machine.

    ptm-accel slices Qwen/Qwen3-8B --length 8192 --stages 8
    """
    from ptm_accel.opening import default_device
    from ptm_accel.pipeline.advice import advise
    from ptm_accel.pipeline.stage import Stage

    host = import_module("ptm_accel.integrations.transformers.estimating")
    config = host.meta_model(model, dtype_of(dtype)).config
    layers = config.num_hidden_layers
    if stages > layers:
        raise ConfigError(f"stages: {stages} stages of {layers} layers; set it to at most {layers}.")
    part = host.some_layers(model, dtype_of(dtype), -(-layers // stages), default_device())
    found = advise(Stage(part, 0, 1), rows=batch_size, length=length, stages=stages, vocabulary=config.vocab_size)
    parts = found.scheme.parts
    if as_json:
        told = [{"rows": size, "tokens": list(tokens)} for size, tokens in parts]
        times = {"step_s": found.scheme.seconds, "rows_s": found.rows_s, "whole_s": found.whole_s}
        typer.echo(json.dumps({"parts": told, **times, "bound_s": found.bound_s}, indent=1))
        return
    cuts = "; ".join(f"{size} x {list(tokens)}" for size, tokens in parts)
    if all(len(tokens) == 1 for _, tokens in parts):
        cuts += " (sequences are best left whole)"
    show(
        {
            "rows x slices": cuts,
            "a step": format_seconds(found.scheme.seconds),
            "by rows alone": format_seconds(found.rows_s),
            "in one piece": format_seconds(found.whole_s),
            "if no stage waited": format_seconds(found.bound_s),
        }
    )
