"""Micro-batches by layer: the numbers of plain accumulation to the bit, and weights that come twice a step.

The oracle is the same model in ordinary memory, whose micro-batches run one by one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from ptm_accel.integrations.transformers.by_layer import CaughtOutputs
from ptm_accel.integrations.transformers.layers import layers_of
from torch import nn
from transformers import AutoModelForCausalLM, set_seed

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import UnsupportedError
from ptm_accel.micro_batches.by_layer import ByLayer
from tests.tiers import open_memory

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}
MIXTURE = {**SMALL, "num_local_experts": 4}
LATENT = {
    **SMALL,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
}
HYBRID = {
    **MIXTURE,
    "layer_types": ["mamba", "attention", "mamba", "attention"],
    "shared_intermediate_size": 48,
    **dict.fromkeys(("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_chunk_size"), 8),
}
CONFIGS: dict[str, Any] = {
    "llama": transformers.LlamaConfig(**SMALL),
    "eager": transformers.LlamaConfig(**SMALL, attn_implementation="eager"),
    "gpt2": transformers.GPT2Config(
        vocab_size=96,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=64,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0),
        tie_word_embeddings=False,
    ),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=8),
    "mistral": transformers.MistralConfig(**SMALL, sliding_window=None),
    "gemma2": transformers.Gemma2Config(**SMALL, head_dim=8, sliding_window=4),
    "gemma3": transformers.Gemma3TextConfig(**SMALL, head_dim=8, sliding_window=4),
    "mixtral": transformers.MixtralConfig(**MIXTURE),
    "mixtral-aux": transformers.MixtralConfig(**MIXTURE, output_router_logits=True),
    "olmo2": transformers.Olmo2Config(**SMALL),
    "phi3": transformers.Phi3Config(**SMALL),
    # Attention and MLP read the same; layers return a tuple.
    "gptj": transformers.GPTJConfig(
        vocab_size=96, n_embd=32, n_layer=4, n_head=4, n_positions=64, rotary_dim=4, tie_word_embeddings=False
    ),
    # Latent attention; a dense layer, then experts of which one is shared.
    "deepseek3": transformers.DeepseekV3Config(**LATENT),
    "mamba": transformers.MambaConfig(
        vocab_size=96, hidden_size=32, state_size=8, num_hidden_layers=4, time_step_rank=4, tie_word_embeddings=False
    ),
    # State-space layers and layers with attention, with experts.
    "granite4": transformers.GraniteMoeHybridConfig(**HYBRID),
    "dropout": transformers.LlamaConfig(**SMALL, attention_dropout=0.2),
    "tied": transformers.LlamaConfig(**{**SMALL, "tie_word_embeddings": True}),
    "large": transformers.LlamaConfig(
        **{**SMALL, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6}
    ),
}
Loss = Callable[[nn.Module, dict[str, Any]], torch.Tensor]


def built(name: str, *, lora: bool = False, checkpointing: bool | str = False, frozen: int = 0) -> nn.Module:
    set_seed(1)
    model: Any = AutoModelForCausalLM.from_config(CONFIGS[name]).train()
    if lora:
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing == "re-entrant"})
    for param in list(model.parameters())[:frozen]:
        param.requires_grad_(False)
    return model


def batches_of(count: int, rows: int = 3) -> list[dict[str, torch.Tensor]]:
    """Texts of other lengths in each micro-batch, padded."""
    made, generator = [], torch.Generator().manual_seed(7)
    for number in range(count):
        width = 9 + 3 * number
        ids = torch.randint(1, 96, (rows, width), generator=generator)
        lengths = torch.randint(4, width + 1, (rows,), generator=generator)
        mask = (torch.arange(width) < lengths[:, None]).long()
        labels = ids.masked_fill(mask == 0, -100)
        made.append({"input_ids": ids * mask, "attention_mask": mask, "labels": labels})
    return made


def own_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return model(**batch, num_items_in_batch=50).loss


def works_of(model: nn.Module, count: int, loss: Loss, autocast: bool) -> list[Callable[[], torch.Tensor]]:
    def work(batch: dict[str, Any]) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            value = loss(model, batch)
        value.backward()
        return value.detach()

    return [lambda batch=batch: work(batch) for batch in batches_of(count)]


def by_layer(model: nn.Module, engine: Engine | None = None, *, inexact: bool = False) -> ByLayer:
    return ByLayer(model, layers_of(model), engine, CaughtOutputs(), inexact=inexact)


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: param.grad for name, param in model.named_parameters()}


def same(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    assert ours.keys() == theirs.keys()
    return all(
        (ours[name] is None) == (value is None) and (value is None or torch.equal(ours[name], value))
        for name, value in theirs.items()
    )


def check(name: str, count: int, *, loss: Loss = own_loss, autocast: bool = False, **how: Any) -> None:
    """Losses and gradients are those of plain accumulation; each layer runs for all before the next one."""
    model, plain = built(name, **how), built(name, **how)
    layered = by_layer(model)
    set_seed(3)
    expected = [work() for work in works_of(plain, count, loss, autocast)]
    set_seed(3)
    found = layered.run(works_of(model, count, loss, autocast))
    assert all(map(torch.equal, found, expected))
    assert same(gradients(model), gradients(plain))
    assert any(grad is not None for grad in gradients(plain).values())
    order = [number for number, _ in layered.order]
    changes = sum(one != other for one, other in pairwise(order))
    assert changes <= 2 * len(layers_of(model)) - 2


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in ("dropout", "tied", "large")])
def test_models_have_the_bits_of_plain_accumulation(name: str, count: int) -> None:
    check(name, count)


@pytest.mark.parametrize(
    "how",
    [
        {"lora": True},
        {"checkpointing": True},
        {"lora": True, "checkpointing": True, "autocast": True},
        {"checkpointing": "re-entrant", "autocast": True},
        {"autocast": True},
        {"frozen": 12},
    ],
)
@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral-aux"])
def test_ways_of_training_have_the_bits_of_plain_accumulation(name: str, how: dict[str, Any]) -> None:
    check(name, 3, **how)


@pytest.mark.parametrize("checkpointing", [False, True, "re-entrant"])
def test_hidden_states_are_cast_as_often_as_in_plain_accumulation(checkpointing: bool | str) -> None:
    """Queries, keys and values read them without a norm, and autocast casts a leaf once for all three."""
    check("olmo2", 3, checkpointing=checkpointing, autocast=True)


@pytest.mark.parametrize("threads", [1, 2])
def test_threads_of_openmp_change_no_bit(threads: int) -> None:
    """Each job's thread has a team of its own, of as many as the caller's."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check("large", 3)
        asked: list[int] = []

        def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
            asked.append(torch.get_num_threads())
            return own_loss(model, batch)

        model = built("large")
        by_layer(model).run(works_of(model, 3, loss, autocast=False))
        assert asked == [threads] * 3
    finally:
        torch.set_num_threads(before)


def test_a_reference_without_gradients_is_not_stopped() -> None:
    def preference(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad():
            reference = model(**batch).logits
        return (model(**batch).logits - reference * 1.1).square().mean()

    check("llama", 3, loss=preference)


def test_a_reference_without_adapters_is_that_of_its_own_micro_batch() -> None:
    def preference(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        with torch.no_grad(), model.disable_adapter():
            reference = model(**batch).logits
        return (model(**batch).logits - reference).square().mean()

    check("llama", 3, loss=preference, lora=True)


@pytest.mark.parametrize("name", ["dropout", "tied"])
def test_what_cannot_be_exact_is_refused_or_close(name: str) -> None:
    model, plain = built(name), built(name)
    if name == "dropout":
        with pytest.raises(UnsupportedError, match=r"random numbers are drawn in a forward \(dropout\)"):
            by_layer(model).run(works_of(model, 2, own_loss, autocast=False))
        model.zero_grad()
        for count in (1, 2):
            losses = by_layer(model, inexact=True).run(works_of(model, count, own_loss, autocast=False))
            assert all(0 < loss < 20 for loss in losses)
    check(name, 1)
    if name == "tied":
        expected = [work() for work in works_of(plain, 3, own_loss, autocast=False)]
        assert all(map(torch.equal, by_layer(model, inexact=True).run(works_of(model, 3, own_loss, False)), expected))
        for param, other in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(param.grad, other.grad)


def test_a_recomputed_layer_draws_the_same_numbers() -> None:
    """With one micro-batch dropout is exact: the draws of the second run are those of the first."""
    check("dropout", 1)


# ---- what is refused -------------------------------------------------------------------------------------------------


def caught_by_a_hook(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    kept: list[torch.Tensor] = []
    hook = model.model.layers[1].mlp.register_forward_hook(lambda module, args, output: kept.append(output))
    value = own_loss(model, batch) + kept[0].sum()
    hook.remove()
    return value


def all_hidden_states(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    output = model(**batch, output_hidden_states=True)
    return output.loss + sum(states.square().mean() for states in output.hidden_states)


def two_forwards(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return own_loss(model, batch) + own_loss(model, batch)


def penalty(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return own_loss(model, batch) + 0.1 * model.model.layers[1].mlp.up_proj.weight.square().sum()


def called_one_by_one(model: Any, batch: dict[str, Any], numbers: list[int], scale: float) -> torch.Tensor:
    """A loop of somebody's own over layers."""
    states = model.model.embed_tokens(batch["input_ids"])
    positions = torch.arange(states.shape[1])[None]
    embeddings = model.model.rotary_emb(states, positions)
    for number in numbers:
        states = model.model.layers[number](states, position_embeddings=embeddings, position_ids=positions)
        states = states if scale == 1 else states * scale
    return states.square().mean()


def skipping(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return called_one_by_one(model, batch, [0, 2, 3], 1)


def looping(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return called_one_by_one(model, batch, [0, 1, 1, 2, 3], 1)


def changing_between(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    return called_one_by_one(model, batch, [0, 1, 2, 3], 1.5)


def switching(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    model.eval()
    value = own_loss(model, batch)
    model.train()
    return value


def with_a_cache(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    with torch.no_grad():
        cache = model(input_ids=batch["input_ids"][:, :2], use_cache=True).past_key_values
    ids = batch["input_ids"][:, 2:]
    return model(input_ids=ids, past_key_values=cache).logits.square().mean()


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (caught_by_a_hook, "the loss uses inner results of a layer"),
        (all_hidden_states, "the loss uses inner results of a layer|a gradient"),
        (two_forwards, "layer 0 is call 4 of layers in a micro-batch"),
        (penalty, "the loss uses parameters of layers outside of their forward"),
        (skipping, "layer 2 is call 1 of layers"),
        (looping, "layer 1 is call 2 of layers"),
        (switching, "modes, adapters or attention backends are changed"),
        (with_a_cache, "a layer is given a cache that is not empty"),
        (changing_between, "the input of layer 1 is not the output of layer 0"),
    ],
)
def test_what_would_go_wrong_in_silence_is_refused(loss: Loss, message: str) -> None:
    model = built("llama")
    layered = by_layer(model)
    with pytest.raises(UnsupportedError, match=message):
        layered.run(works_of(model, 2, loss, autocast=False))
    # Nothing is left of it.
    plain = built("llama")
    model.zero_grad()
    found = layered.run(works_of(model, 2, own_loss, autocast=False))
    assert all(map(torch.equal, found, [work() for work in works_of(plain, 2, own_loss, autocast=False)]))
    assert same(gradients(model), gradients(plain))


def to_a_dict(kwargs: dict[str, Any]) -> None:
    kwargs["shared"]["keys"] = 1


def to_a_tensor(kwargs: dict[str, Any]) -> None:
    kwargs["position_ids"].add_(1)


@pytest.mark.parametrize("write", [to_a_dict, to_a_tensor])
def test_a_layer_that_writes_to_its_arguments_is_refused(write: Callable[[dict[str, Any]], None]) -> None:
    def loss(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        return model(**batch, shared={}).logits.square().mean()

    model: Any = built("llama")
    hook = model.model.layers[2].register_forward_pre_hook(lambda layer, args, kwargs: write(kwargs), with_kwargs=True)
    layered = by_layer(model)
    with pytest.raises(UnsupportedError, match="LlamaDecoderLayer writes to its arguments or to its buffers"):
        layered.run(works_of(model, 2, loss, autocast=False))
    hook.remove()
    model.model.layers[2].register_buffer("calls", torch.zeros(()))
    model.model.layers[2].register_forward_pre_hook(lambda layer, args: layer.calls.add_(1) and None)
    with pytest.raises(UnsupportedError, match="LlamaDecoderLayer writes to its arguments or to its buffers"):
        layered.run(works_of(model, 2, loss, autocast=False))


def test_layers_are_those_that_read_text_however_many_read_images() -> None:
    def model() -> Any:
        set_seed(1)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4}
        vision = transformers.CLIPVisionConfig(**sizes, image_size=16, patch_size=8)
        text = transformers.LlamaConfig(**SMALL)
        config = transformers.LlavaConfig(
            vision_config=vision, text_config=text, image_token_index=95, tie_word_embeddings=False
        )
        return transformers.LlavaForConditionalGeneration(config).train()

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        # An image takes four tokens.
        batch["input_ids"] = batch["input_ids"].clamp(max=94)
        batch["input_ids"][:, :4], batch["attention_mask"][:, :4] = 95, 1
        images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(batch["input_ids"].shape[1]))
        return model(**batch, pixel_values=images).loss

    ours, plain = model(), model()
    assert layers_of(ours) == list(ours.model.language_model.layers)
    found = by_layer(ours).run(works_of(ours, 3, loss, autocast=False))
    assert all(map(torch.equal, found, [work() for work in works_of(plain, 3, loss, autocast=False)]))
    assert same(gradients(ours), gradients(plain))
    assert any("vision" in name and grad is not None for name, grad in gradients(ours).items())


def test_models_without_such_layers_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="no list of layers was found in Linear"):
        layers_of(nn.Linear(2, 2))
    config = transformers.T5Config(d_model=16, d_ff=16, num_layers=2, num_heads=2, vocab_size=96)
    with pytest.raises(UnsupportedError, match="has an encoder and a decoder"):
        layers_of(transformers.T5ForConditionalGeneration(config))


# ---- on pages --------------------------------------------------------------------------------------------------------


@contextmanager
def on_pages(model: nn.Module, folder: Path, memory: str, **options: Any) -> Iterator[Engine]:
    config = PTMConfig(host_memory=memory, disk=str(folder), page_size="64KiB", **options)
    engine = Engine.attach(model, config, device=torch.device("cpu"))
    yield engine
    engine.check_integrity()
    engine.close()


def trained(
    model: nn.Module, count: int, engine: Engine | None, layered: ByLayer | None, steps: int = 4, autocast: bool = False
) -> tuple[list[torch.Tensor], int]:
    """Trains with clipping; returns the losses, and the bytes that were read in all steps but the first two."""
    optimizer: Any = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    if engine is not None:
        optimizer = engine.bind_optimizer(optimizer)
    losses, before = [], 0
    for step in range(steps):
        if step == 2 and engine is not None:
            engine.settle()
            before = engine.pool.stats.loaded_bytes
        works = works_of(model, count, own_loss, autocast)
        losses += [work() for work in works] if layered is None else layered.run(works)
        if engine is not None:
            engine.clip_grad_norm_(0.5)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    if engine is not None:
        engine.settle()
    return losses, 0 if engine is None else engine.pool.stats.loaded_bytes - before


@pytest.mark.parametrize(
    ("count", "memory", "how"),
    [
        (2, "5MiB", {}),
        (4, "5MiB", {"autocast": True}),
        (4, "6MiB", {"checkpointing": True}),
        (3, "8MiB", {"lora": True}),
        (3, "64MiB", {}),
    ],
)
def test_pages_change_no_bit(count: int, memory: str, how: dict[str, Any], tmp_path: Path) -> None:
    autocast = how.pop("autocast", False)
    plain, model = built("large", **how), built("large", **how)
    expected, _ = trained(plain, count, None, None, autocast=autocast)
    with on_pages(model, tmp_path, memory) as engine:
        losses, _ = trained(model, count, engine, by_layer(model, engine), autocast=autocast)
        assert all(map(torch.equal, losses, expected))
        assert same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("memory", ["mock+host", "mock+host+disk"])
@pytest.mark.parametrize("device_bytes", [5 << 20, 8 << 20])
def test_a_device_with_late_copies_changes_no_bit(memory: str, device_bytes: int, tmp_path: Path) -> None:
    plain, model = built("large"), built("large")
    expected, _ = trained(plain, 3, None, None)
    page_bytes = 64 << 10
    tiers = open_memory(memory, device_bytes, tmp_path, seed=device_bytes, host_bytes=64 << 20, page_bytes=page_bytes)
    engine = Engine.attach(model, PTMConfig(page_size=page_bytes), memory=tiers)
    losses, _ = trained(model, 3, engine, by_layer(model, engine))
    assert all(map(torch.equal, losses, expected))
    assert same(model.state_dict(), plain.state_dict())
    assert engine.pool.stats.loaded_bytes
    engine.check_integrity()
    engine.close()


def test_weights_come_twice_a_step_however_many_micro_batches(tmp_path: Path) -> None:
    loaded = {}
    for count in (2, 8):
        for is_layered in (False, True):
            model = built("large")
            with on_pages(model, tmp_path, "5MiB") as engine:
                layered = by_layer(model, engine) if is_layered else None
                _, loaded[count, is_layered] = trained(model, count, engine, layered, steps=5)
    assert loaded[8, True] < 1.1 * loaded[2, True], loaded
    assert loaded[8, False] > 1.5 * loaded[2, False], loaded


def test_a_step_of_a_deep_model_is_planned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each micro-batch adds to all gradients within one pass, which is many times as long as its forward."""
    monkeypatch.setattr("ptm_accel.runtime.following._FEW", 0)
    monkeypatch.setattr("ptm_accel.runtime.following._MOST_AFTER", 3)
    model = built("large")
    with on_pages(model, tmp_path, "5MiB") as engine:
        trained(model, 8, engine, by_layer(model, engine))
        assert any(route.has_plan for route in engine.run_ahead.routes.values())


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("phase", ["embeddings", "layer", "head", "recomputation"])
def test_an_error_leaves_no_thread_and_no_pin(error: type[BaseException], phase: str, tmp_path: Path) -> None:
    model, plain = built("large"), built("large")
    module = {"embeddings": model.model.embed_tokens, "head": model.lm_head}.get(phase, model.model.layers[3].mlp)
    nth = {"recomputation": 5}.get(phase, 2)
    with on_pages(model, tmp_path, "6MiB") as engine:
        layered, calls = by_layer(model, engine), 0

        def fail(*args: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == nth:
                raise error

        hook = module.register_forward_pre_hook(fail)
        with pytest.raises(error):
            layered.run(works_of(model, 3, own_loss, autocast=False))
        assert calls == nth
        hook.remove()
        engine.abort()
        engine.check_integrity()
        model.zero_grad()
        expected, _ = trained(plain, 3, None, None, steps=2)
        losses, _ = trained(model, 3, engine, layered, steps=2)
        assert all(map(torch.equal, losses, expected))
        threads = [worker.thread for worker in layered._workers]
        assert len(threads) == 3, "the same ones as before the error"
        layered.close()
        # What was raised refers to frames that refer to them.
        gc.collect()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def test_kept_are_the_inputs_of_layers_and_the_last_output() -> None:
    model = built("llama")
    layered = by_layer(model)
    layered.run(works_of(model, 4, own_loss, autocast=False))
    tokens = sum(batch["input_ids"].numel() for batch in batches_of(4))
    assert layered.kept_bytes == (SMALL["num_hidden_layers"] + 1) * tokens * SMALL["hidden_size"] * 4


def test_one_micro_batchs_logits_are_alive() -> None:
    model = built("llama")
    alive: list[int] = []
    counts: list[weakref.ref[torch.Tensor]] = []

    def loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
        output = model(**batch, num_items_in_batch=50)
        counts.append(weakref.ref(output.logits))
        alive.append(sum(known() is not None for known in counts))
        return output.loss

    by_layer(model).run(works_of(model, 4, loss, autocast=False))
    assert max(alive) == 1
