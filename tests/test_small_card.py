"""Training on a card that is too small, whose allocator is torch's: pages and activations share all of it.

A 1B model on an 8 GB card, an eighth as large in each dimension and with fewer layers, on a card that is as much
smaller. Nothing here may ask the card for more than it has; where torch does, its error ends the test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel import training
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.activation_reserve import ActivationReserve
from ptm_accel.memory.device import CopyDirection
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.optim import arithmetic
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.units import MIB
from tests.card import Card, CardTier, OnCard
from tests.plain_loop import adamw
from tests.tiers import jitter

SCALE = 64
"""Tensors have so many times fewer bytes."""

VOCABULARY = 1024
WORKSPACE = {"_scaled_dot_product_flash_attention_for_cpu_backward": 144 * MIB // SCALE}
"""What attention's backward takes on an H100 where it has to repeat itself."""


def llama(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=layers, use_cache=False, **shape)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def tokens(step: int, length: int, rows: int = 1) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(step))


@contextmanager
def on_card(model: LlamaForCausalLM, nbytes: int) -> Iterator[tuple[Engine, Card]]:
    """The model on pages of a card with so many bytes, and what is computed within counted on it."""
    card = Card(nbytes, SCALE)
    capacities = Capacities(page_bytes=65536, host_bytes=1 << 30, device_bytes=nbytes)
    memory = build_memory(capacities, CardTier(card, SCALE, delay=jitter(0)))
    engine = Engine.attach(model, PTMConfig(page_size=65536), memory=memory)
    try:
        with OnCard(card, WORKSPACE):
            yield engine, card
        if not memory.closed:
            engine.check_integrity()
    finally:
        if not memory.closed:
            engine.close()


def train(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, lengths: Sequence[int]) -> list[float]:
    losses = []
    for step, length in enumerate(lengths):
        ids = tokens(step, length)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def reserve_of(engine: Engine) -> ActivationReserve:
    reserve = engine.pool.admission.activation_reserve
    assert isinstance(reserve, ActivationReserve)
    return reserve


@pytest.mark.thinned(1)
@pytest.mark.parametrize(
    ("layers", "lengths"),
    [(6, [256] * 4), (6, [64, 128, 256, 192, 96, 320, 320, 64, 512, 448, 512])],
    ids=["one length", "batches that become longer"],
)
def test_a_card_that_is_too_small_trains_and_gives_the_same_numbers(layers: int, lengths: list[int]) -> None:
    plain = llama(layers)
    expected = train(plain, adamw(plain), lengths)
    states = 4 * sum(p.nbytes for p in plain.parameters())
    model = llama(layers)
    with on_card(model, states * 7 // 10) as (engine, card):
        optimizer = engine.bind_optimizer(adamw(model))
        assert train(model, optimizer, lengths) == expected
        with _disable_current_modes():
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        assert not card.flushes, "nothing was asked for that there was no room for"
        assert engine.pool.card is not None
        held = engine.pool.card.held_bytes
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
    assert held > states * 3 // 10, "pages use what there is"


@pytest.mark.thinned(1)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "one tensor at a time"])
def test_where_all_fits_a_card_parameters_are_updated_together(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def optimizer_of(model: LlamaForCausalLM) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused, foreach=False)

    plain, lengths = llama(4), [256] * 3
    expected = train(plain, optimizer_of(plain), lengths)
    states = 4 * sum(p.nbytes for p in plain.parameters())
    model, calls = llama(4), list[int]()
    bare_step = arithmetic.bare_step

    def noted(optimizer: torch.optim.Optimizer) -> None:
        calls.append(sum(len(group["params"]) for group in optimizer.param_groups))
        bare_step(optimizer)

    monkeypatch.setattr(arithmetic, "bare_step", noted)
    # With masters, or in several processes, hooks stay on where all fits.
    monkeypatch.setattr(PagedOptimizer, "can_be_plain", lambda optimizer: False)
    # An optimizer that makes tensors of its own as it goes is given a few parameters at a time, for their sake.
    monkeypatch.setattr(training, "_LARGEST_BATCH_BYTES", 4 * MIB)
    with on_card(model, 2 * states) as (engine, _):
        assert train(model, engine.bind_optimizer(optimizer_of(model)), lengths) == expected
        assert engine.pool.fits_on_card
        with _disable_current_modes():
            weights = {name: value.clone() for name, value in model.state_dict().items()}
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
    count = len(list(plain.parameters()))
    assert (calls[-1] == count) == fused


@pytest.mark.slow
def test_what_a_larger_evaluation_takes_is_taken_from_pages_and_given_back() -> None:
    plain, lengths = llama(6), [256] * 3
    optimizer = adamw(plain)
    expected = [train(plain, optimizer, lengths)]
    with torch.no_grad():
        expected.append([plain.eval()(input_ids=tokens(n, 256, 4)).logits.float().sum().item() for n in range(2)])
    plain.train()
    expected.append(train(plain, optimizer, lengths))
    states = 4 * sum(p.nbytes for p in plain.parameters())
    model, capacities = llama(6), list[int]()
    with on_card(model, states * 7 // 10) as (engine, _):
        paged = engine.bind_optimizer(adamw(model))
        found = [train(model, paged, lengths)]
        found.append([])
        capacities.append(engine.pool.budget.capacity_bytes)
        model.eval()
        for number in range(2):
            with torch.no_grad():
                found[-1].append(model(input_ids=tokens(number, 256, 4)).logits.float().sum().item())
            capacities.append(engine.pool.budget.capacity_bytes)
        model.train()
        found.append(train(model, paged, lengths))
        capacities.append(engine.pool.budget.capacity_bytes)
    assert found == expected
    trained, first, second, after = capacities
    assert first < trained // 4, "what it takes is not known before it has been seen"
    assert first < second <= trained
    assert after > trained // 2


def test_a_model_that_is_only_evaluated_keeps_what_fits_on_the_card() -> None:
    model = llama(6).eval()
    nbytes = sum(p.nbytes for p in model.parameters())
    with on_card(model, 2 * nbytes) as (engine, card), torch.no_grad():
        moved, ids = [], tokens(0, 128)
        for _ in range(4):
            model(input_ids=ids)
            tier = engine.pool.compute
            assert isinstance(tier, CardTier)
            moved.append(tier.counts["bytes_in"])
        assert not reserve_of(engine).warming
        assert not card.flushes
    assert moved[0] > nbytes // 2, "at first pages have the least, and what leaves comes again"
    assert moved[3] == moved[2], "then all stays"


@pytest.mark.slow
def test_a_model_is_taken_off_a_card_that_its_pages_have_filled() -> None:
    plain, lengths = llama(6), [256] * 3
    train(plain, adamw(plain), lengths)
    states = 4 * sum(p.nbytes for p in plain.parameters())
    model = llama(6)
    with on_card(model, states * 7 // 10) as (engine, card):
        train(model, engine.bind_optimizer(adamw(model)), lengths)
        assert engine.pool.card is not None
        assert engine.pool.card.held_bytes > states // 3
        assert engine.detach() is model
        assert engine.pool.card.held_bytes == 0
        assert states // 4 <= card.allocated < states // 3
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_where_all_fits_nothing_moves_and_nothing_is_planned_once_a_step_was_seen() -> None:
    model = llama(2)
    states = 4 * sum(p.nbytes for p in model.parameters())
    with on_card(model, 3 * states) as (engine, _):
        optimizer, moved, planning = engine.bind_optimizer(adamw(model)), list[int](), list[bool]()
        for step in range(4):
            ids = tokens(step, 256)
            loss = model(input_ids=ids, labels=ids).loss
            planning.append(engine.pages.executor.plan is not None)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tier = engine.pool.compute
            assert isinstance(tier, CardTier)
            moved.append(tier.counts["bytes_in"] + tier.counts["bytes_out"])
    assert planning == [True, False, False, False]
    assert moved[0] > states // 2
    assert moved[2] == moved[3]


@pytest.mark.slow
def test_a_batch_that_leaves_pages_too_little_is_refused_with_the_numbers() -> None:
    with on_card(model := llama(2), 256 * MIB) as (engine, _):
        train(model, engine.bind_optimizer(adamw(model)), [4096])
        most, least = reserve_of(engine).high_water_bytes, reserve_of(engine).least_bytes
    # Enough for the step as it was, but not for that and an eighth.
    with (
        on_card(model := llama(2), most * 106 // 100 + least) as (engine, _),
        pytest.raises(DeviceBudgetError, match=r" out of memory\. activations and workspaces took .* leaves .* pages"),
    ):
        train(model, engine.bind_optimizer(adamw(model)), [4096])


def test_copies_have_been_going_on_beside_all_that() -> None:
    """The mock device's copies run late, and by address: a block that is moved or reused under one would show."""
    seen: list[CopyDirection] = []
    model = llama(2)
    states = 4 * sum(p.nbytes for p in model.parameters())
    with on_card(model, states * 8 // 10) as (engine, _):
        tier = engine.pool.compute
        assert isinstance(tier, CardTier)
        tier.delay = lambda copy: seen.append(copy.direction)
        train(model, engine.bind_optimizer(adamw(model)), [256] * 3)
    assert set(seen) == set(CopyDirection)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("share", [0.7, 2.0], ids=["too small", "all fits"])
def test_an_average_of_the_weights_goes_in_and_out(share: float) -> None:
    """The values that are kept meanwhile stay on the card; nothing is copied over memory that is still viewed."""

    def run(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer) -> list[float]:
        seen = train(model, optimizer, [128] * 3)
        kept = {}
        for name, p in model.named_parameters():
            kept[name], p.data = p.data, p.data * 0.5
        with torch.no_grad():
            seen.append(model.eval()(input_ids=tokens(9, 128)).logits.float().sum().item())
        model.train()
        for name, p in model.named_parameters():
            p.data = kept.pop(name)
        return seen + train(model, optimizer, [128])

    plain = llama(3)
    expected = run(plain, adamw(plain))
    states = 4 * sum(p.nbytes for p in plain.parameters())
    model = llama(3)
    with on_card(model, int(states * share)) as (engine, card):
        assert run(model, engine.bind_optimizer(adamw(model))) == expected
        with _disable_current_modes():
            weights = {name: value.clone() for name, value in model.state_dict().items()}
        assert not card.flushes, "nothing was asked for that there was no room for"
    assert all(torch.equal(weights[name], value) for name, value in plain.state_dict().items())
