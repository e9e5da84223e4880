"""The decoder layers of a model."""

from __future__ import annotations

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ptm_accel.errors import UnsupportedError


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Returns the decoder layers of a model: the longest list of those that transformers can checkpoint.

    A tower for images or sound may have more layers than the decoder that reads what comes out of it.

    Raises:
        UnsupportedError: it has none, or an encoder.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedError(
            f"micro_batches: by_layer: {type(model).__name__} has an encoder and a decoder; only models with one list "
            "of layers are run layer by layer. Leave micro_batches out."
        )
    found = max((_layer_lists(_decoder_of(model)) or _layer_lists(model)), key=len, default=None)
    if found is None:
        raise UnsupportedError(
            f"micro_batches: by_layer: no list of layers was found in {type(model).__name__} "
            "(GradientCheckpointingLayer of transformers). Leave micro_batches out."
        )
    return list(found)


def _decoder_of(model: nn.Module) -> nn.Module:
    decoder = getattr(model, "get_decoder", lambda: model)()
    return decoder if isinstance(decoder, nn.Module) else model


def _layer_lists(model: nn.Module) -> list[nn.ModuleList]:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    return [each for each in lists if all(isinstance(layer, GradientCheckpointingLayer) for layer in each)]
