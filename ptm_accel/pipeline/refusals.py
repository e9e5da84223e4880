"""Refuses models that cannot be cut into slices of tokens: what is not known to be right, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ptm_accel.errors import UnsupportedError

MODEL_TYPES = ("llama", "gpt2", "qwen2", "qwen3", "mistral")
"""transformers' causal language models whose gradients are tested."""
_ATTENTION = ("sdpa", "eager")
TAKEN = ("input_ids", "labels", "attention_mask")
"""What a model in a pipeline takes of a batch."""


def refuse_slicing(model: nn.Module, option: str = "token_slices") -> None:
    """Refuses a model that cannot be cut into slices of tokens.

    Args:
        model: the model.
        option: by which that was asked for.

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
        raise UnsupportedError(f"{name} cannot be cut into slices of tokens: {reason}. Or leave {option} out.")


def refuse_pipeline(model: Any) -> None:
    """Refuses a model that computes something else than its stages would.

    Raises:
        UnsupportedError: names what it has.
    """
    rope = getattr(model.config, "rope_parameters", None) or getattr(model.config, "rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type"))
    reason = None
    if model.get_output_embeddings() is None:
        reason = "it has no head that predicts tokens"
    elif not type(model).__module__.startswith("transformers.models.") or "forward" in vars(model):
        reason = "its forward is not that of transformers, and stages would not call it"
    elif getattr(model.loss_function, "__name__", "") != "ForCausalLMLoss":
        reason = "its loss_function is not that of causal language models"
    elif kind in ("dynamic", "longrope"):
        reason = f"its positions are turned by the length of a sequence (rope_type {kind}), which slices differ in"
    if reason is not None:
        raise UnsupportedError(f"{type(model).__name__} cannot be cut into stages: {reason}. Or leave pipeline out.")


def refuse_shared(model: nn.Module) -> None:
    """Refuses a model whose parts share parameters, as a head that is tied to the embedding: they may be apart then.

    Raises:
        UnsupportedError: names two of them.
    """
    first: dict[int, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        before = first.setdefault(id(param), name)
        if before != name:
            raise UnsupportedError(
                f"{type(model).__name__}: {before} and {name} are one parameter (tie_word_embeddings ties a head to "
                "its embedding), which stages would have twice. A model that is trained from scratch can be built with "
                "tie_word_embeddings=False."
            )


def refuse_batch(given: Mapping[str, Any]) -> None:
    """Refuses what a model in a pipeline is called with, if its stages do not take it.

    Args:
        given: all arguments by name.

    Raises:
        UnsupportedError: names what is there, or is not.
    """
    ignored = ("kwargs", "num_items_in_batch", "return_dict", "use_cache")
    others = [name for name, value in given.items() if value is not None and name not in (*TAKEN, *ignored)]
    reason = None
    mask = given.get("attention_mask")
    if others:
        reason = f"it was given {', '.join(others)} (packed sequences among them), and takes {', '.join(TAKEN)}"
    elif missing := [name for name in ("input_ids", "labels") if given.get(name) is None]:
        reason = f"it was given no {' and no '.join(missing)}, by which its loss is made"
    elif mask is not None and (mask.dim() > 2 or bool((mask[:, 1:] > mask[:, :-1]).any())):
        reason = "its attention_mask hides other tokens than those at the end of a row; pad on the right"
    if reason is not None:
        raise UnsupportedError(f"a model in a pipeline computes its loss alone: {reason}.")
