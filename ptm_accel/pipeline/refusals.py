"""Which models can be cut into slices of tokens: what is not known to be right is refused by name."""

from __future__ import annotations

from typing import Any

from torch import nn

from ptm_accel.errors import UnsupportedError

MODEL_TYPES = ("llama", "gpt2", "qwen2", "qwen3", "mistral")
"""transformers' causal language models whose gradients are tested."""
_ATTENTION = ("sdpa", "eager")


def refuse_slicing(model: nn.Module) -> None:
    """Refuses a model that cannot be cut into slices of tokens.

    Raises:
        UnsupportedError: names what the model has that cannot.
    """
    config: Any = getattr(model, "config", None)
    kind, name = getattr(config, "model_type", None), type(model).__name__
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "an encoder reads tokens that come later"
    elif kind not in MODEL_TYPES:
        reason = f"its model type is {kind}, and known are {', '.join(MODEL_TYPES)}"
    elif getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        reason = "prompts of PEFT are put before the tokens within the model"
    elif getattr(config, "sliding_window", None) is not None and getattr(config, "use_sliding_window", True):
        reason = f"its layers see windows of {config.sliding_window} tokens (sliding_window)"
    elif getattr(config, "add_cross_attention", False):
        reason = "it has cross attention (add_cross_attention)"
    elif config._attn_implementation not in _ATTENTION:
        reason = f"its attention is {config._attn_implementation}; load it with attn_implementation='sdpa'"
    if reason is not None:
        raise UnsupportedError(f"{name} cannot be cut into slices of tokens: {reason}. Or leave token_slices out.")
