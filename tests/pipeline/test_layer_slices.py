"""Layers that compute slices of tokens have the gradients of whole sequences, and hold less while they compute."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from ptm_accel.errors import ConfigError, UnsupportedError
from ptm_accel.pipeline.layer_slices import cuts, slice_layers
from tests.pipeline.models import KINDS, SIZES, VOCABULARY, build
from tests.tiers import MEMORIES, in_groups, needs, on_pages
from tests.zoo import CHECKPOINTING, ENTRIES, use_checkpointing

LENGTH, ROWS = 48, 2


def batch(padded: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    if not padded:
        return {"input_ids": ids}
    mask = torch.ones_like(ids)
    mask[1, LENGTH - 11 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def loss_of(model: Any, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """In float64, which the loss of transformers is not."""
    logits = model(**given).logits[:, :-1]
    labels = given["input_ids"][:, 1:].clone()
    if "attention_mask" in given:
        labels[given["attention_mask"][:, 1:] == 0] = -100
    return functional.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


def gradients(model: nn.Module, given: dict[str, torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    loss = loss_of(model, given)
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return loss.item(), found


def check(found: Any, wanted: Any, within: float = 1e-12) -> None:
    assert abs(found[0] - wanted[0]) <= within * abs(wanted[0])
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in found[1].items():
        # Of a bias of keys the gradient is zero but for rounding: softmax does not see what is added to all.
        scale = max(wanted[1][name].abs().max().item(), 1e-3)
        assert (gradient - wanted[1][name]).abs().max().item() <= within * scale, name


@pytest.mark.thinned(18)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("slices", [1, 5, LENGTH])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_whole_sequences(kind: str, slices: int, checkpointing: str, padded: bool) -> None:
    wanted = gradients(build(kind), batch(padded))
    model = build(kind)
    use_checkpointing(model, checkpointing)
    assert slice_layers(model, slices) == 3
    seen = []
    first = next(part for name, part in model.named_modules() if name.endswith("0.mlp"))
    first.register_forward_pre_hook(lambda module, given: seen.append(given[0].shape[1]))
    check(gradients(model, batch(padded)), wanted)
    assert max(seen) == -(-LENGTH // slices), "a layer computes slices, and never the whole"


def test_packed_sequences_stay_apart() -> None:
    given = batch(False)
    given["position_ids"] = torch.cat([torch.arange(20), torch.arange(LENGTH - 20)])[None].expand(ROWS, -1)
    wanted = gradients(build("llama"), given)
    apart = gradients(build("llama"), batch(False))
    assert wanted[0] != apart[0]
    model = build("llama")
    slice_layers(model, 5)
    check(gradients(model, given), wanted)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_eager_attention(kind: str) -> None:
    """Its softmax computes in float32."""
    wanted = gradients(build(kind, "eager"), batch(False))
    model = build(kind, "eager")
    slice_layers(model, 5)
    check(gradients(model, batch(False)), wanted, within=2e-6)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("kind", MEMORIES)
def test_on_pages(kind: str, checkpointing: str, tmp_path: Path) -> None:
    wanted = gradients(build("llama"), batch(True))
    floor, need = needs(build("llama"), tmp_path, kind)
    model = build("llama")
    use_checkpointing(model, checkpointing)
    with in_groups(), on_pages(model, kind, floor + (need - floor) // 8, tmp_path):
        slice_layers(model, 5)
        check(gradients(model, batch(True)), wanted)


def test_training_in_float32() -> None:
    """Twenty steps, clipped: within 1e-5 of the plain run's losses."""
    losses = []
    for slices in (None, 4):
        model: Any = ENTRIES["llama"].build()
        if slices is not None:
            slice_layers(model, slices)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        found = []
        for step in range(20):
            loss = model(**ENTRIES["llama"].batch_at(step)).loss
            found.append(loss.item())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(found)
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


def test_evaluation_and_generation_are_as_ever() -> None:
    plain, sliced = (ENTRIES["llama"].build().eval() for _ in range(2))
    slice_layers(sliced, 4)
    ids = ENTRIES["llama"].batch_at(0)["input_ids"]
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, sliced(input_ids=ids).logits)
    made = [model.generate(ids, max_new_tokens=5, do_sample=False, use_cache=True) for model in (plain, sliced)]  # type: ignore[operator]
    assert torch.equal(made[0], made[1])


class Alive(TorchDispatchMode):
    """Counts the bytes of tensors that are alive at once, of those that are made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else [made]:
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        return made

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)

        def gone() -> None:
            self._known.discard(key)
            self.now -= nbytes

        weakref.finalize(storage, gone)


def test_what_a_layer_holds_is_that_of_a_slice() -> None:
    """A layer's backward holds gate, up, their product and its factor: with n slices, an n-th of it."""
    inner, tokens, slices = 1024, 4 * 64, 8
    sizes = {**SIZES, "intermediate_size": inner, "num_hidden_layers": 2, "vocab_size": 16}
    most = {}
    for count in (None, slices):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()
        use_checkpointing(model, "non-reentrant")
        if count is not None:
            slice_layers(model, count)
        ids = torch.randint(0, 16, (4, 64), generator=torch.Generator().manual_seed(0))
        with Alive() as alive:
            model(input_ids=ids, labels=ids).loss.backward()
        most[count] = alive.most
    activations = 4 * inner * tokens * 4
    assert most[None] > activations
    assert most[slices] < most[None] - activations * (1 - 1 / slices) * 0.9


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_nothing_is_left_of_a_pass(checkpointing: str) -> None:
    """Tensors in a cycle through autograd's graph would never be collected."""
    model = build("llama")
    use_checkpointing(model, checkpointing)
    slice_layers(model, 5)
    seen = []
    layer: Any = model.get_submodule("model.layers.1.mlp")
    layer.register_forward_hook(lambda module, given, output: seen.append(weakref.ref(output)))
    gradients(model, batch(False))
    gc.collect()
    assert len(seen) >= 5
    assert not [known for known in seen if known() is not None]


def test_cuts_are_even() -> None:
    assert list(cuts(10, 3)) == [(0, 3), (3, 6), (6, 10)]
    assert list(cuts(4, 4)) == [(0, 1), (1, 2), (2, 3), (3, 4)]


def test_more_slices_than_tokens() -> None:
    model = ENTRIES["llama"].build()
    slice_layers(model, 13)
    with pytest.raises(ConfigError, match="13 slices of 12 tokens; set it to at most 12"):
        model(**ENTRIES["llama"].batch_at(0))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("t5", {}, "an encoder reads tokens that come later"),
        ("bert", {}, "its model type is bert, and known are llama"),
        ("gemma2", {}, "its model type is gemma2"),
        ("llama", {"sliding_window": 8}, r"windows of 8 tokens \(sliding_window\)"),
        ("gpt2", {"add_cross_attention": True}, "cross attention"),
        ("llama", {"_attn_implementation": "flash_attention_2"}, "its attention is flash_attention_2; load it with"),
    ],
)
def test_models_that_are_refused(name: str, changes: dict[str, Any], reason: str) -> None:
    model: Any = ENTRIES[name].build()
    for key, value in changes.items():
        if key == "_attn_implementation":
            model.config._attn_implementation_internal = value
        else:
            setattr(model.config, key, value)
    with pytest.raises(UnsupportedError, match=reason):
        slice_layers(model, 2)
