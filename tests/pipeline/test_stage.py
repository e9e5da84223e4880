"""Stages that compute slices have the gradients of the whole model on whole sequences."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.errors import ConfigError, UnsupportedError
from ptm_accel.pipeline.stage import Stage, balanced, shifted
from tests.pipeline.models import KINDS, VOCABULARY, build, exact
from tests.pipeline.test_layer_slices import LENGTH, batch, check, gradients
from tests.tiers import in_groups, needs, on_pages
from tests.zoo import ENTRIES

EDGES = (0, 7, 8, 29, LENGTH)
"""Uneven slices, one of them a single token."""


def stages_of(model: Any, count: int, checkpoints: bool) -> list[Stage]:
    return [Stage(copy.deepcopy(model), number, count, checkpoints=checkpoints) for number in range(count)]


def step(stages: list[Stage], given: dict[str, torch.Tensor], edges: tuple[int, ...] = EDGES) -> float:
    """All slices through one stage after the other, and back: the order of a pipeline without its overlap."""
    ids, mask = given["input_ids"], given.get("attention_mask")
    labels = ids if mask is None else ids.masked_fill(mask == 0, -100)
    following, predicted = shifted(labels)
    flow = [ids[:, begin:end] for begin, end in pairwise(edges)]
    slices = []
    for stage in stages:
        slices.append(stage.begin())
        flow = [
            stage.forward(
                part,
                begin,
                mask=mask,
                labels=following[:, begin:end],
                predicted=predicted,
                alone=len(edges) == 2,
            )
            for part, (begin, end) in zip(flow, pairwise(edges), strict=True)
        ]
    back: list[torch.Tensor | None] = [None] * len(flow)
    for stage, own in zip(reversed(stages), reversed(slices), strict=True):
        back = [stage.backward(own, gradient) for gradient in reversed(back)][::-1]
    return sum(loss.item() for loss in flow)


def found(stages: list[Stage], whole: nn.Module) -> dict[str, torch.Tensor]:
    """Gradients by name; parts of a stage are named as in the whole model."""
    named = [pair for stage in stages for pair in stage.model.named_parameters()]
    assert sorted(name for name, _ in named) == sorted(name for name, _ in whole.named_parameters())
    return {name: param.grad.clone() for name, param in named if param.grad is not None}


def model_of(kind: str) -> Any:
    model: Any = build(kind)
    if model.config.tie_word_embeddings:
        model.config.tie_word_embeddings = False
        model.set_output_embeddings(copy.deepcopy(model.get_output_embeddings()))
        model.get_output_embeddings().weight = nn.Parameter(model.get_output_embeddings().weight.detach().clone())
    exact(model)
    return model


@pytest.mark.thinned(24)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("checkpoints", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_those_of_the_whole_model(kind: str, count: int, checkpoints: bool, padded: bool) -> None:
    whole = model_of(kind)
    stages = stages_of(whole, count, checkpoints)
    wanted = gradients(whole, batch(padded))
    loss = step(stages, batch(padded))
    check((loss, found(stages, whole)), wanted)
    assert all(not stage._slices for stage in stages)


@pytest.mark.parametrize("kind", KINDS)
def test_one_slice_is_the_whole_sequence(kind: str) -> None:
    whole = model_of(kind)
    stages = stages_of(whole, 2, False)
    wanted = gradients(whole, batch(True))
    loss = step(stages, batch(True), (0, LENGTH))
    check((loss, found(stages, whole)), wanted)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_stages_on_pages(checkpoints: bool, tmp_path: Path) -> None:
    whole = model_of("llama")
    stages = stages_of(whole, 2, checkpoints)
    wanted = gradients(whole, batch(True))
    with ExitStack() as stack, in_groups():
        for stage in stages:
            floor, need = needs(copy.deepcopy(stage.model), tmp_path, "host+disk")
            stack.enter_context(on_pages(stage.model, "host+disk", floor + (need - floor) // 8, tmp_path))
        loss = step(stages, batch(True))
        check((loss, found(stages, whole)), wanted)


def test_training_in_float32() -> None:
    """Twenty steps, clipped over all stages: within 1e-5 of the plain run's losses."""
    model: Any = ENTRIES["llama"].build()
    stages = stages_of(model, 2, False)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-3) for each in (model, *(s.model for s in stages))]
    for number in range(20):
        given = ENTRIES["llama"].batch_at(number)
        loss = model(**given).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        ours = step(stages, {"input_ids": given["input_ids"]}, (0, 5, 6, 12))
        torch.nn.utils.clip_grad_norm_([p for s in stages for p in s.model.parameters()], 1.0)
        assert ours == pytest.approx(loss.item(), rel=1e-5)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_frozen_layers(layers: int) -> None:
    """A first stage may have nothing to train, or its first layers may not."""
    whole = model_of("llama")
    inner: Any = whole.base_model
    for part in (inner.embed_tokens, *inner.layers[:layers]):
        part.requires_grad_(False)
    stages = stages_of(whole, 2, False)
    given = batch(True)
    loss = step(stages, given)
    check((loss, found(stages, whole)), gradients(whole, given))


@pytest.mark.parametrize(
    ("layers", "head", "stages", "expected"),
    [
        (12, 0, 3, [4, 4, 4]),
        (12, 1, 3, [4, 4, 4]),
        (12, 4, 2, [8, 4]),
        (16, 4.3, 4, [5, 5, 5, 1]),
        (2, 100, 2, [1, 1]),
        (7, 0, 3, [2, 2, 3]),
        (5, 3, 1, [5]),
    ],
)
def test_stages_are_balanced_by_what_they_compute(layers: int, head: float, stages: int, expected: list[int]) -> None:
    """The head counts as so many layers; no other division has a shorter longest stage."""
    counts = balanced(layers, 1.0, head, stages)
    assert counts == expected

    def longest(division: tuple[int, ...]) -> float:
        return max(*division[:-1], division[-1] + head) if stages > 1 else layers + head

    divisions = [d for d in product(range(1, layers + 1), repeat=stages) if sum(d) == layers]
    assert longest(tuple(counts)) == min(map(longest, divisions))


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(ConfigError, match="4 stages of 3 layers; set it to at most 3"):
        Stage(ENTRIES["llama"].build(), 0, 4)
    with pytest.raises(UnsupportedError, match="tie_word_embeddings ties a head to its embedding"):
        Stage(ENTRIES["llama-tied"].build(), 0, 2)
    with pytest.raises(UnsupportedError, match="model type is mixtral"):
        Stage(ENTRIES["mixtral"].build(), 0, 2)


def test_labels_are_shifted_over_slices() -> None:
    following, predicted = shifted(torch.tensor([[5, 6, 7], [8, -100, 9]]))
    assert following.tolist() == [[6, 7, -100], [-100, 9, -100]]
    assert predicted == 3
    assert VOCABULARY > 9
