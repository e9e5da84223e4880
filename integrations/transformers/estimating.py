"""A model of the Hub, or of a local directory, without its weights: to be measured, not to be run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ptm_accel.errors import ConfigError, UnsupportedError
from ptm_accel.micro_batches.borders import border_bytes
from ptm_accel.model.forecast import ShapeSpec

from .layers import layers_of


def meta_model(id_or_path: str, dtype: torch.dtype, *, checkpointing: bool = False) -> PreTrainedModel:
    """The model on the meta device, in training mode.

    Args:
        id_or_path: as for `from_pretrained`; only the configuration is read.
        dtype: of its parameters.
        checkpointing: whether activations are checkpointed.

    Raises:
        ConfigError: there is no such configuration, or no model can be made of it.
    """
    # No model of the Hub is named like that, and asking for it takes long.
    if id_or_path.startswith(("/", ".", "~")) and not Path(id_or_path).exists():
        raise ConfigError(f"no such directory: {id_or_path}. Give a model id, or a directory with a config.json.")
    try:
        config = AutoConfig.from_pretrained(id_or_path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{id_or_path} has no configuration that can be read: {str(error).splitlines()[0]} Give a model id, or a "
            "directory with a config.json."
        ) from error
    except Exception as error:  # whatever a class raises of values that make no sense
        raise _senseless(id_or_path, error) from error
    names = getattr(config, "architectures", None) or []
    cls: Any = getattr(transformers, names[0], None) if names else None
    make = AutoModelForCausalLM.from_config if cls is None else cls._from_config
    try:
        with torch.device("meta"):
            model: PreTrainedModel = make(config, dtype=dtype)
    except Exception as error:  # the same of a model
        raise _senseless(id_or_path, error) from error
    model.tie_weights()
    if checkpointing:
        # As the Trainer has it; transformers warns otherwise.
        model.config.use_cache = False
        # Its name since transformers 5.2; before, it was that of gradients.
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable()
    model.train()
    return model


def _senseless(id_or_path: str, error: Exception) -> ConfigError:
    reason = f"{type(error).__name__}: {(str(error) or 'no more is said').splitlines()[0]}"
    return ConfigError(f"no model can be made of the configuration of {id_or_path} ({reason}); correct it.")


def text_batch(model: PreTrainedModel, rows: int, length: int) -> dict[str, ShapeSpec] | None:
    """The shapes of a batch of text with labels; None for a model that takes something else."""
    if model.main_input_name != "input_ids":
        return None
    names = ["input_ids", "labels"]
    if getattr(model.config, "is_encoder_decoder", False):
        names.append("decoder_input_ids")
    return {name: ShapeSpec((rows, length)) for name in names}


def kept_by_layer(model: PreTrainedModel, rows: int, length: int) -> int | None:
    """What a micro-batch keeps with `micro_batches: by_layer`; None for a model that cannot be run so.

    Args:
        model: the model.
        rows: of the micro-batch.
        length: of a row.
    """
    width = getattr(model.config.get_text_config(), "hidden_size", None)
    if width is None or text_batch(model, rows, length) is None:
        return None
    try:
        layers = len(layers_of(model))
    except UnsupportedError:
        return None
    return border_bytes(layers, batch=rows, length=length, width=width, element_bytes=model.dtype.itemsize)


def some_layers(id_or_path: str, dtype: torch.dtype, count: int, device: torch.device) -> PreTrainedModel:
    """A causal language model with its first layers alone and random weights, in training mode.

    Args:
        id_or_path: as for `from_pretrained`; only the configuration is read.
        dtype: of its parameters.
        count: of the layers.
        device: where it is made.

    Raises:
        ConfigError: there is no such configuration.
    """
    config = meta_model(id_or_path, dtype).config
    config.num_hidden_layers = count
    config.use_cache = False
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.train()
    return model
