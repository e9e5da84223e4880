"""The models that pipelines and slices of tokens are tested with; scripts import it too, so it takes in little."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional

VOCABULARY = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "use_cache": False,
}  # fmt: skip
_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaForCausalLM, transformers.LlamaConfig, {}),
    "qwen2": (transformers.Qwen2ForCausalLM, transformers.Qwen2Config, {}),
    "qwen3": (transformers.Qwen3ForCausalLM, transformers.Qwen3Config, {"head_dim": 8}),
    "mistral": (transformers.MistralForCausalLM, transformers.MistralConfig, {"sliding_window": None}),
    "gpt2": (
        transformers.GPT2LMHeadModel,
        transformers.GPT2Config,
        {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, **dict.fromkeys(_DROPOUT, 0.0)},
    ),
}


def exact(module: nn.Module) -> None:
    """Norms of transformers compute in float32 whatever they are given."""
    for part in module.modules():
        if type(part).__name__.endswith("RMSNorm"):
            part.forward = partial(_norm, part)  # type: ignore[method-assign]


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    scaled: torch.Tensor = module.weight * functional.rms_norm(x, x.shape[-1:], eps=module.variance_epsilon)
    return scaled


def build(kind: str, attention: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    cls, config, more = KINDS[kind]
    sizes = {"vocab_size": VOCABULARY, "use_cache": False} if kind == "gpt2" else SIZES
    model: nn.Module = cls(config(**{**sizes, **more}, attn_implementation=attention)).double().train()
    exact(model)
    return model
