"""What is trained in several processes: tiny models whose parameters have odd sizes, other data in each process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.modeling_outputs import SequenceClassifierOutput

from tests.plain_loop import decay_groups
from tests.zoo import use_checkpointing

VOCABULARY, HIDDEN, INNER, LENGTH, BATCH = 257, 96, 211, 12, 2
PAGE = "64KiB"
SMALL_BYTES = 1 << 10
"""With such pages, smaller parameters never leave the compute tier."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LONG = 20
"""Steps where numbers are compared by a bound: rounding has the time to grow."""


@dataclass(frozen=True)
class Case:
    """One training.

    Attributes:
        model: which one of `MODELS`.
        dtype: of its parameters: `fp32` or `bf16`.
        checkpointing: `off`, `non-reentrant` or `reentrant`.
        accumulation: micro-batches per step.
        clip: `max_norm`; None for no call to clipping.
        optimizer: which one of `OPTIMIZERS`.
        foreach: the optimizer's own option.
        masters: fp32 masters of bf16 parameters.
        whole_norms: compared with norms of whole fp32 gradients, from which those of ranges are off by rounding; so
            numbers are compared by bounds, over more steps.
        uneven: the second process has twice the budget, so that its plan is another.
        shard: `full`, or `none` for replicas.
        roomy: the budget is four times as large, and layers are gathered in groups.
        memory: the tiers (`tests.tiers.MEMORIES`); under a mock device collectives end late, at random.
    """

    model: str = "llama"
    dtype: str = "fp32"
    checkpointing: str = "off"
    accumulation: int = 1
    clip: float | None = None
    optimizer: str = "adamw"
    foreach: bool | None = None
    masters: bool = False
    whole_norms: bool = False
    uneven: bool = False
    shard: str = "full"
    roomy: bool = False
    memory: str = "host+disk"

    def __str__(self) -> str:
        given = [(f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != f.default]
        return "-".join([self.model, *(f"{name}={value}" for name, value in given if name != "model")])

    @property
    def by_ranges(self) -> bool:
        """Whether the oracle takes norms of ranges too: once rounded to bf16 they are those of whole gradients."""
        return self.shard != "none" and not self.whole_norms and (self.dtype == "fp32" or self.masters)

    @property
    def steps(self) -> int:
        """Steps of the optimizer."""
        return LONG if self.whole_norms else 4

    def budget_bytes(self, rank: int) -> int:
        """The budget of a process: one and a half times what whole models need at the least."""
        wide, narrow = _KIB[self.model]
        kib = narrow if self.dtype == "bf16" and not self.masters else wide
        return kib * (4 if self.roomy else 1) * (2 if self.uneven and rank == 1 else 1) << 10

    def build(self) -> nn.Module:
        """The model in train mode, the same in every process."""
        torch.manual_seed(0)
        model = MODELS[self.model]().to(DTYPES[self.dtype]).train()
        use_checkpointing(model, self.checkpointing)
        return model

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """A new optimizer of all that is trained."""
        return OPTIMIZERS[self.optimizer](model, foreach=self.foreach)

    def batch(self, number: int, rank: int) -> dict[str, Any]:
        """The inputs of a process's micro-batch."""
        generator = torch.Generator().manual_seed(1000 * number + rank)
        if self.model == "branches":
            x = torch.randn(BATCH, HIDDEN, generator=generator).to(DTYPES[self.dtype])
            return {"x": x, "extra": rank == 0 and number % 2 == 1}
        ids = torch.randint(3, VOCABULARY, (BATCH, LENGTH), generator=generator)
        labels = torch.randint(3, VOCABULARY, (BATCH, 7), generator=generator) if self.model == "t5" else ids.clone()
        return {"input_ids": ids, "labels": labels}


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(decay_groups(model), lr=1e-2, **options)


def _adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


def _sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2, momentum=0.9, **options)


def _adagrad(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad([p for p in model.parameters() if p.requires_grad], lr=1e-2, **options)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
    "adagrad": _adagrad,
}

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}


def _llama(**changes: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**_DECODER, **changes}))


def _mixtral() -> nn.Module:
    # The kernel for experts takes multiples of 16 bytes.
    changes = {"intermediate_size": 56, "num_local_experts": 5, "output_router_logits": True}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**_DECODER, **changes}))


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=3,
        n_head=4,
        n_positions=64,
        n_inner=INNER,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        use_cache=False,
    )
    return transformers.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        d_kv=24,
        d_ff=INNER,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


def _lora() -> nn.Module:
    targets = ["q_proj", "v_proj", "down_proj"]
    lora = LoraConfig(task_type="CAUSAL_LM", r=7, lora_alpha=16, lora_dropout=0.1, target_modules=targets)
    return get_peft_model(_llama(), lora)


class Branches(nn.Module):
    """Layers, parameters that have gradients on some ranks in some micro-batches, and a layer that nobody uses.

    All ranks use the values of what is large, in the same order, as they have to where it is sharded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(10))
        self.table = nn.Embedding(33, HIDDEN)
        self.shift = nn.Parameter(torch.zeros(HIDDEN))
        self.never = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor, extra: bool) -> SequenceClassifierOutput:
        row = self.table(torch.arange(len(x)))
        for layer in self.layers:
            x = torch.relu(layer(x))
        x = x + (row + self.shift if extra else row.detach())
        return SequenceClassifierOutput(loss=x.sub(1.0).square().mean())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": _llama,
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-wide": lambda: _llama(hidden_size=256, intermediate_size=700, num_hidden_layers=2),
    "t5": _t5,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
    "lora": _lora,
    "branches": Branches,
}

_KIB = {
    "llama": (1408, 960),
    "llama-tied": (1408, 960),
    "llama-wide": (8192, 4096),
    "t5": (1600, 1152),
    "mixtral": (2048, 1408),
    "gpt2": (2432, 1536),
    "lora": (1088, 704),
    "branches": (1024, 704),
}
"""Budgets in KiB for each model, in fp32 or with masters, and in bf16."""
