"""The Llama that several measurements train: 222M parameters in bf16, with the same values for everyone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ptm_accel

VOCABULARY = 8192


def small_llama(host_memory: str, directory: Path) -> tuple[Any, dict[str, str]]:
    """The model on pages, with fp32 masters, and the dials it is on pages with.

    Args:
        host_memory: what it may use of host memory.
        directory: where the rest goes.
    """
    shape = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    dials = {"host_memory": host_memory, "disk": str(directory), "master_weights": "fp32"}
    torch.manual_seed(0)
    return ptm_accel.from_config(AutoModelForCausalLM, shape, dials, dtype=torch.bfloat16), dials
