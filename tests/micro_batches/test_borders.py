"""Borders of micro-batches by layer: what they take of a device, and the chunks that a step is cut into for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import groupby, pairwise
from typing import Any

import pytest
import torch
from ptm_accel.integrations.transformers.by_layer import CaughtOutputs
from ptm_accel.integrations.transformers.layers import layers_of
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.activation_reserve import MARGIN, Shapes
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.micro_batches.borders import Chunks, border_bytes, most_together
from ptm_accel.micro_batches.by_layer import ByLayer
from ptm_accel.units import MIB
from tests.card import Card, CardTier, OnCard
from tests.tiers import jitter

SCALE = 64
LAYERS, WIDTH, ROWS, LENGTH = 6, 128, 2, 96
BORDERS = border_bytes(LAYERS, batch=ROWS, length=LENGTH, width=WIDTH, element_bytes=4)
Batch = dict[str, torch.Tensor]


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": WIDTH, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=256, num_hidden_layers=LAYERS, use_cache=False, tie_word_embeddings=False, **shape)
    return LlamaForCausalLM(config).train()


def batches_of(step: int, lengths: list[int]) -> list[Batch]:
    made, generator = [], torch.Generator().manual_seed(step)
    for length in lengths:
        ids = torch.randint(1, 256, (ROWS, length), generator=generator)
        made.append({"input_ids": ids, "labels": ids})
    return made


def shapes_of(batches: list[Batch]) -> list[Shapes]:
    return [tuple(tuple(tensor.shape) for tensor in batch.values()) for batch in batches]


def works_of(model: nn.Module, batches: list[Batch], mode: OnCard | None) -> list[Callable[[], torch.Tensor]]:
    def work(batch: Batch) -> torch.Tensor:
        # Each thread has modes of its own.
        with mode or nullcontext():
            loss = model(**batch).loss
            loss.backward()
            return loss.detach()

    return [lambda batch=batch: work(batch) for batch in batches]


def by_layer(model: nn.Module, engine: Engine | None) -> ByLayer:
    return ByLayer(model, layers_of(model), engine, CaughtOutputs(), inexact=False)


@contextmanager
def on_card(model: nn.Module, nbytes: int) -> Iterator[tuple[Engine, OnCard]]:
    """The model on pages of a card with so many bytes, and what is computed within counted on it."""
    card = Card(nbytes, SCALE)
    capacities = Capacities(page_bytes=65536, host_bytes=1 << 28, device_bytes=nbytes)
    memory = build_memory(capacities, CardTier(card, SCALE, delay=jitter(0)))
    engine = Engine.attach(model, PTMConfig(page_size=65536), memory=memory)
    try:
        with OnCard(card) as mode:
            yield engine, mode
        engine.check_integrity()
    finally:
        engine.close()


def trained(
    model: nn.Module, steps: list[list[int]], engine: Engine | None = None, mode: OnCard | None = None
) -> tuple[list[torch.Tensor], list[list[int]], int]:
    """Trains with clipping; returns losses, the chunks of each step, and the bytes loaded in the last step."""
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if engine is not None:
        optimizer, layered = engine.bind_optimizer(optimizer), by_layer(model, engine)
    losses, chunks, loaded = [], [], 0
    for step, lengths in enumerate(steps):
        batches = batches_of(step, lengths)
        works = works_of(model, batches, mode)
        if engine is None:
            losses += [work() for work in works]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        else:
            loaded = engine.pool.stats.loaded_bytes
            losses += layered.run(works, shapes=shapes_of(batches))
            loaded = engine.pool.stats.loaded_bytes - loaded
            chunks.append(chunks_in(layered.order))
            engine.clip_grad_norm_(0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, chunks, loaded


def chunks_in(order: list[tuple[int, int]]) -> list[int]:
    """How many micro-batches each chunk of a step has: at the last layer the backward of each follows its forward."""
    runs = groupby(layer for layer, _ in order)
    return [len(list(run)) // 2 for layer, run in runs if layer == LAYERS - 1]


# ---- the numbers -----------------------------------------------------------------------------------------------------


def test_borders_are_the_inputs_of_layers_and_the_last_output() -> None:
    model = llama()
    layered = by_layer(model, None)
    layered.run(works_of(model, batches_of(0, [LENGTH] * 3), None))
    sizes = {"batch": ROWS, "length": LENGTH, "width": WIDTH, "element_bytes": 4}
    assert layered.kept_bytes == border_bytes(LAYERS, micro_batches=3, **sizes) == 3 * BORDERS


def test_a_micro_batch_more_takes_its_borders_and_no_more() -> None:
    """The gradient of the last output takes the place of that."""
    peaks = []
    for count in (2, 4, 6):
        model, card = llama(), Card(1 << 30, SCALE)
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        with OnCard(card) as mode:
            by_layer(model, None).run(works_of(model, batches_of(0, [LENGTH] * count), mode))
        peaks.append(card.peak_allocated)
    for less, more in pairwise(peaks):
        assert 2 * BORDERS <= more - less <= 2.1 * BORDERS


# ---- chunks ----------------------------------------------------------------------------------------------------------


def size(length: int) -> Shapes:
    return ((ROWS, length),)


class Reserve:
    """A card on which a chunk takes `beside` bytes and its borders."""

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes, self.least_bytes, self.trained_bytes = total_bytes, 100, 0


class Pool:
    """What chunks ask of a pool."""

    def __init__(self, reserve: Reserve | None) -> None:
        self.admission = self.calls = self
        self.activation_reserve = reserve

    def during(self, call: object, pool: object) -> Any:
        return nullcontext()

    def sample(self) -> None:
        pass

    def expect(self, nbytes: int) -> None:
        assert self.activation_reserve is not None
        self.activation_reserve.trained_bytes = max(self.activation_reserve.trained_bytes, nbytes)


def counts_of(chunks: Chunks, reserve: Reserve, lengths: list[int], *, beside: int = 10) -> list[int]:
    """Runs a step in which each token has a byte of borders and `beside` bytes beside them."""
    counts, shapes = list[int](), [size(length) for length in lengths]
    while (done := sum(counts)) < len(shapes):
        counts.append(chunks.next(shapes[done:]))
        run = lengths[done : sum(counts)]
        taken = sum(run) + beside * max(run)
        assert len(run) == 1 or reserve.trained_bytes >= taken, "it was left free"
        reserve.trained_bytes = max(reserve.trained_bytes, taken)
        assert len(run) == 1 or reserve.trained_bytes * MARGIN <= reserve.total_bytes - reserve.least_bytes
        chunks.ran([size(length) for length in run], sum(run))
    return counts


@pytest.mark.parametrize(
    ("fit", "count", "first", "later"),
    [(8, 8, [1, 7], [8]), (7, 8, [1, 7], [4, 4]), (3, 7, [1, 3, 3], [3, 2, 2]), (1, 3, [1, 1, 1], [1, 1, 1])],
)
def test_chunks_are_the_fewest_equal_ones_that_fit(fit: int, count: int, first: list[int], later: list[int]) -> None:
    reserve = Reserve(100 + int((10 + fit) * 16 * MARGIN) + 1)
    chunks = Chunks(Pool(reserve))  # type: ignore[arg-type]
    assert counts_of(chunks, reserve, [16] * count) == first
    assert chunks.cut([size(16)] * count) == later
    assert counts_of(chunks, reserve, [16] * count) == later


def test_a_micro_batch_larger_than_all_before_goes_alone() -> None:
    reserve = Reserve(100 + int((10 + 4) * 32 * MARGIN) + 1)
    chunks = Chunks(Pool(reserve))  # type: ignore[arg-type]
    assert counts_of(chunks, reserve, [8, 8, 8, 8]) == [1, 3]
    assert counts_of(chunks, reserve, [8, 8, 32, 8]) == [2, 1, 1]
    assert counts_of(chunks, reserve, [8, 8, 32, 8]) == [4]
    assert counts_of(chunks, reserve, [32] * 8) == [4, 4]
    # What does not fit even so is the card's to refuse, as without chunks.
    assert counts_of(chunks, reserve, [4096, 8], beside=1) == [1, 1]


def test_nothing_is_cut_on_a_cpu() -> None:
    for pool in (None, Pool(None)):
        assert Chunks(pool).cut([size(8)] * 5) == [5]  # type: ignore[arg-type]
    assert most_together(0, 1, 5) == 1


# ---- on a card -------------------------------------------------------------------------------------------------------


@pytest.mark.thinned(1)
@pytest.mark.parametrize("lengths", [[LENGTH] * 6, [64, 80, LENGTH, 48, 96, 72]], ids=["one length", "lengths"])
def test_a_card_with_too_little_room_runs_chunks_and_changes_no_bit(lengths: list[int]) -> None:
    steps, plain = [lengths] * 5, llama()
    expected, _, _ = trained(plain, steps)
    found: dict[int, list[int]] = {}
    read: dict[int, int] = {}
    for mib in (9, 24):
        model = llama()
        with on_card(model, mib * MIB) as (engine, mode):
            losses, chunks, read[mib] = trained(model, steps, engine, mode)
            assert not mode.card.flushes, "nothing was asked for that there was no room for"
            with _disable_current_modes():
                weights = {name: value.clone() for name, value in model.state_dict().items()}
        assert all(map(torch.equal, losses, expected))
        assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
        assert chunks[0][0] == 1, "what it takes is seen first"
        assert chunks[-1] == chunks[-2]
        found[mib] = chunks[-1]
    assert found[9] in ([3, 3], [2, 2, 2])
    assert found[24] == [6]
    assert read[24] < read[9]


def test_without_chunks_that_card_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Chunks, "next", lambda chunks, shapes: len(shapes))
    model = llama()
    with pytest.raises(torch.OutOfMemoryError), on_card(model, 9 * MIB) as (engine, mode):
        trained(model, [[LENGTH] * 6] * 4, engine, mode)


def test_where_all_fits_a_step_with_more_micro_batches_is_met_with_more_room() -> None:
    """Hooks are off then, and what a step takes is not looked at: it must be left free before."""
    steps, plain, model = [[LENGTH] * count for count in (2, 2, 2, 8, 8)], llama(), llama()
    expected, _, _ = trained(plain, steps)
    active: list[bool] = []
    with on_card(model, 29 * MIB) as (engine, mode):
        model.lm_head.register_forward_hook(lambda *_: active.append(engine.training.plain.active))
        losses, chunks, _ = trained(model, steps, engine, mode)
        assert not mode.card.flushes
    assert all(map(torch.equal, losses, expected))
    assert chunks[-1] == [8]
    assert all(active[2:6])
    assert not any(active[6:14])
