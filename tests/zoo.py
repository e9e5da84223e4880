"""Tiny models of every architecture the engine is shown to train, and seeded batches for them.

Nothing is downloaded: each is built from its configuration. Dropout is on where an architecture has it, so that equal
numbers also show that the engine draws no random numbers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn

VOCABULARY = 128
HIDDEN = 64
LENGTH = 12
BATCH = 2

Batch = dict[str, torch.Tensor]

CHECKPOINTING = ("off", "non-reentrant", "reentrant")


@dataclass(frozen=True)
class Entry:
    """One architecture of the table.

    Attributes:
        name: what the row is called.
        make: builds the model; random numbers are seeded before.
        batch: the inputs with labels, from a generator.
        checkpointing: the kinds of gradient checkpointing the model supports.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Batch]
    checkpointing: tuple[str, ...] = CHECKPOINTING

    def build(self, seed: int = 0) -> nn.Module:
        """The model in train mode, the same for the same seed."""
        torch.manual_seed(seed)
        return self.make().train()

    def batch_at(self, step: int) -> Batch:
        """The inputs of the `step`-th micro-batch."""
        return self.batch(torch.Generator().manual_seed(1000 + step))


def use_checkpointing(model: Any, kind: str) -> None:
    """Turns gradient checkpointing of the given kind on."""
    if kind == "off":
        return
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": kind == "reentrant"})
    if kind == "reentrant" and hasattr(model, "peft_config"):
        # Frozen embeddings would leave the first layer without an input that needs a gradient.
        model.enable_input_require_grads()


def _tokens(g: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=g)


def _causal(g: torch.Generator) -> Batch:
    ids = _tokens(g)
    return {"input_ids": ids, "labels": ids.clone()}


def _masked(g: torch.Generator) -> Batch:
    ids = _tokens(g)
    labels = torch.where(torch.rand(ids.shape, generator=g) < 0.4, ids, torch.full_like(ids, -100))
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def _pairs(g: torch.Generator) -> Batch:
    return {"input_ids": _tokens(g), "labels": _tokens(g, 7)}


def _images(g: torch.Generator) -> Batch:
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=g),
        "labels": torch.randint(0, 5, (BATCH,), generator=g),
    }


def _speech(g: torch.Generator) -> Batch:
    return {"input_features": torch.randn(BATCH, 8, 32, generator=g), "labels": _tokens(g, 7)}


_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "use_cache": False,
}


def _decoder(kind: str, **changes: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        config = getattr(transformers, f"{kind}Config")(**{**_DECODER, **changes})
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return make


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=HIDDEN,
        n_layer=3,
        n_head=4,
        n_positions=64,
        n_inner=128,
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
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=0,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config)


_ENCODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 96,
    "max_position_embeddings": 32,
}


def _bert() -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_ENCODER))


def _albert() -> nn.Module:
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**_ENCODER, embedding_size=32))


def _vit() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        image_size=16,
        patch_size=8,
        num_labels=5,
        hidden_dropout_prob=0.1,
    )
    return transformers.ViTForImageClassification(config)


def _whisper() -> nn.Module:
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=HIDDEN,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=96,
        num_mel_bins=8,
        max_source_positions=16,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.1,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        use_cache=False,
    )
    return transformers.WhisperForConditionalGeneration(config)


def _mamba() -> nn.Module:
    config = transformers.MambaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        state_size=8,
        num_hidden_layers=2,
        conv_kernel=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        use_cache=False,
    )
    return transformers.MambaForCausalLM(config)


_LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj", "down_proj"]}


def _lora() -> nn.Module:
    return get_peft_model(_decoder("Llama")(), LoraConfig(task_type="CAUSAL_LM", **_LORA))


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}

ENTRIES = {
    entry.name: entry
    for entry in (
        Entry("llama", _decoder("Llama"), _causal),
        Entry("llama-tied", _decoder("Llama", tie_word_embeddings=True), _causal),
        Entry("qwen2", _decoder("Qwen2"), _causal),
        Entry("qwen3", _decoder("Qwen3", head_dim=16), _causal),
        Entry("gpt2", _gpt2, _causal),
        Entry("gemma2", _decoder("Gemma2", head_dim=16, sliding_window=8, query_pre_attn_scalar=16), _causal),
        Entry("mixtral", _decoder("Mixtral", num_local_experts=4, output_router_logits=True), _causal),
        Entry("qwen2-moe", _decoder("Qwen2Moe", shared_expert_intermediate_size=48, **_EXPERTS), _causal),
        Entry("qwen3-moe", _decoder("Qwen3Moe", head_dim=16, norm_topk_prob=True, **_EXPERTS), _causal),
        Entry("t5", _t5, _pairs),
        Entry("bert", _bert, _masked),
        Entry("albert", _albert, _masked, checkpointing=("off",)),
        Entry("vit", _vit, _images),
        Entry("whisper", _whisper, _speech),
        Entry("mamba", _mamba, _causal),
        Entry("lora", _lora, _causal),
    )
}

ALIKE = {"qwen2", "qwen3", "qwen2-moe", "qwen3-moe", "gemma2", "whisper"}
"""Models whose operations others have as well."""


def _opt() -> nn.Module:
    config = transformers.OPTConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        word_embed_proj_dim=HIDDEN,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        use_cache=False,
    )
    return transformers.OPTForCausalLM(config)


def _swin() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=16, patch_size=2, embed_dim=48, depths=[1, 1], num_heads=[2, 4], window_size=4, num_labels=5
    )
    return transformers.SwinForImageClassification(config)


def _convnext() -> nn.Module:
    config = transformers.ConvNextConfig(
        image_size=16, patch_size=2, hidden_sizes=[32, 48], depths=[1, 2], num_stages=2, num_labels=5
    )
    return transformers.ConvNextForImageClassification(config)


def _wav2vec2() -> nn.Module:
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        conv_dim=[32, 32],
        conv_stride=[5, 2],
        conv_kernel=[10, 3],
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.0,
        layerdrop=0.0,
    )
    return transformers.Wav2Vec2ForCTC(config)


def _waves(g: torch.Generator) -> Batch:
    return {
        "input_values": torch.randn(BATCH, 400, generator=g),
        "labels": torch.randint(1, 32, (BATCH, 3), generator=g),
    }


def _deberta() -> nn.Module:
    config = transformers.DebertaV2Config(
        vocab_size=VOCABULARY,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
        max_position_embeddings=64,
        relative_attention=True,
        pos_att_type=["p2c", "c2p"],
        num_labels=2,
    )
    return transformers.DebertaV2ForSequenceClassification(config)


def _classified(g: torch.Generator) -> Batch:
    return {"input_ids": _tokens(g), "labels": torch.randint(0, 2, (BATCH,), generator=g)}


MORE = {
    entry.name: entry
    for entry in (
        Entry("opt", _opt, _causal),
        Entry("swin", _swin, _images),
        Entry("convnext", _convnext, _images, checkpointing=("off",)),
        Entry("wav2vec2", _wav2vec2, _waves),
        Entry("deberta", _deberta, _classified),
    )
}
"""Architectures whose least budgets are tested, beside those of `ENTRIES`."""
