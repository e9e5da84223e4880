"""The Llama that several measurements train: 222M parameters, with the same values for everyone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

import ptm_accel

VOCABULARY = 8192


def numerics(*, fp32: bool) -> str:
    """In which numbers it is trained, in words."""
    return "fp32" if fp32 else "bf16 with fp32 masters"


def small_llama(host_memory: str, directory: Path, *, fp32: bool = False) -> tuple[Any, dict[str, str]]:
    """The model on pages, and the options it is on pages with.

    Args:
        host_memory: what it may use of host memory.
        directory: where the rest goes.
        fp32: all in fp32; else in bf16, with fp32 masters. Either takes 16 bytes a parameter.
    """
    shape = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        vocab_size=VOCABULARY,
        use_cache=False,
    )
    options = {"host_memory": host_memory, "disk": str(directory)}
    if not fp32:
        options["master_weights"] = "fp32"
    torch.manual_seed(0)
    dtype = torch.float32 if fp32 else torch.bfloat16
    return ptm_accel.from_config(AutoModelForCausalLM, shape, options, dtype=dtype), options
