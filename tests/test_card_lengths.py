"""Where everything fits an emulated card, or nearly: lengths rise and fall, training and evaluation take turns.

A batch that is larger than all before it ends plain mode, and pages get the least until what it takes has been seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.setup import Capacities, build_memory
from tests.card import Card, CardTier, OnCard
from tests.plain_loop import adamw
from tests.tiers import PAGE, jitter

SCALE = 64
"""Blocks up to 16 KiB are small, as norms and biases are."""

VOCABULARY = 128
LENGTHS = [16, 32, 8, 64, 24, 96, 16]
Log = list[float]
Loop = Callable[[nn.Module, torch.optim.Optimizer, Log], object]


def llama(checkpointed: bool) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 176, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=5, use_cache=False, **shape)
    model = LlamaForCausalLM(config)
    if checkpointed:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def loss_of(model: nn.Module, number: int, length: int) -> torch.Tensor:
    ids = torch.randint(0, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(number))
    loss = model(input_ids=ids, labels=ids).loss
    assert isinstance(loss, torch.Tensor)
    return loss


def evaluated(model: nn.Module, number: int, length: int) -> float:
    model.eval()
    with torch.no_grad():
        loss = loss_of(model, number, length).item()
    model.train()
    return loss


def one_batch_a_step(model: nn.Module, optimizer: torch.optim.Optimizer, log: Log) -> None:
    for step, length in enumerate(LENGTHS):
        loss = loss_of(model, step, length)
        loss.backward()
        log.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()


def with_evaluation(model: nn.Module, optimizer: torch.optim.Optimizer, log: Log) -> None:
    for step, length in enumerate(LENGTHS[:5]):
        one = loss_of(model, step, length)
        one.backward()
        optimizer.step()
        optimizer.zero_grad()
        log += [one.item(), evaluated(model, step, LENGTHS[-step - 1])]


def added_up(model: nn.Module, optimizer: torch.optim.Optimizer, log: Log) -> None:
    """Gradients of the batches before it have arrived when a longer one comes."""
    for step in range(3):
        for number, length in enumerate(sorted(LENGTHS[2 * step : 2 * step + 3])):
            loss = loss_of(model, 3 * step + number, length)
            loss.backward()
            log.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()


def several_forwards(model: nn.Module, optimizer: torch.optim.Optimizer, log: Log) -> None:
    """Graphs of the batches before it are alive when a longer one comes, or a longer one is evaluated."""
    for step in range(4):
        first, second = sorted(LENGTHS[step : step + 2])
        loss = loss_of(model, step, first) + loss_of(model, 100 + step, second)
        log.append(evaluated(model, step, second + 16) if step % 2 else 0.0)
        loss.backward()
        log.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()


LOOPS = [one_batch_a_step, with_evaluation, added_up, several_forwards]


def need_of(checkpointed: bool, loop: Loop) -> int:
    """What a plain run takes of a card."""
    card, model = Card(1 << 40, SCALE), llama(checkpointed)
    with OnCard(card):
        loop(model, adamw(model), [])
    return card.peak_reserved + sum(param.nbytes for param in model.parameters())


@contextmanager
def on_card(model: nn.Module, nbytes: int) -> Iterator[Engine]:
    """The model on pages of a card with so many bytes, and what is computed within counted on it."""
    card = Card(nbytes, SCALE)
    capacities = Capacities(page_bytes=PAGE, host_bytes=1 << 28, device_bytes=nbytes)
    memory = build_memory(capacities, CardTier(card, SCALE, delay=jitter(0)))
    engine = Engine.attach(model, PTMConfig(page_size=PAGE), memory=memory)
    try:
        with OnCard(card):
            yield engine
        engine.check_integrity()
    finally:
        engine.close()


@pytest.mark.parametrize("share", [1.05, 1.5, 2, 3])
@pytest.mark.parametrize("checkpointed", [False, True], ids=["kept", "checkpointed"])
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.thinned(6)
def test_lengths_that_rise_and_fall(loop: Loop, checkpointed: bool, share: float) -> None:
    expected, plain = Log(), llama(checkpointed)
    loop(plain, adamw(plain), expected)
    found, model, modes = Log(), llama(checkpointed), list[bool]()
    with on_card(model, int(need_of(checkpointed, loop) * share) // PAGE * PAGE) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        model.lm_head.register_forward_hook(lambda *_: modes.append(engine.training.plain.active))
        loop(model, optimizer, found)
        assert found == expected
        with _disable_current_modes():
            for name, value in model.state_dict().items():
                assert torch.equal(value, plain.state_dict()[name]), name
    if share > 2:
        began = [now for before, now in pairwise(modes) if now is not before]
        assert began[:3] == [True, False, True], "it began, a longer batch has ended it, and it began again"


def test_what_is_pinned_leaves_where_the_capacity_is_lowered() -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, lower: Callable[[], None]) -> Log:
        log = Log()
        for number in range(4):
            for part in range(2):
                loss = loss_of(model, 2 * number + part, 16)
                loss.backward()
                log.append(loss.item())
                if (number, part) == (2, 0):
                    lower()
            optimizer.step()
            optimizer.zero_grad()
        return log

    plain, model = llama(checkpointed=False), llama(checkpointed=False)
    expected = train(plain, adamw(plain), lambda: None)
    with on_card(model, 3 * need_of(False, one_batch_a_step)) as engine:

        def lower() -> None:
            admission, reserve = engine.pool.admission, engine.pool.admission.activation_reserve
            assert engine.training.plain.active
            assert reserve is not None
            admission.budget.capacity_bytes = reserve.least_bytes
            admission.shrink()
            assert not engine.training.plain.active
            assert admission.budget.free_bytes >= 0

        assert train(model, engine.bind_optimizer(adamw(model)), lower) == expected


def test_a_larger_evaluation_is_seen_before_pages_get_more() -> None:
    model, seen = llama(checkpointed=False), list[tuple[bool, bool]]()
    with on_card(model, 3 * need_of(False, one_batch_a_step)) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        reserve = engine.pool.admission.activation_reserve
        assert reserve is not None

        def look(*_: object) -> None:
            seen.append((engine.training.plain.active, reserve.warming))

        model.lm_head.register_forward_hook(look)
        for number in range(3):
            loss_of(model, number, 32).backward()
            optimizer.step()
            optimizer.zero_grad()
        evaluated(model, 3, 256)
        evaluated(model, 4, 256)
        loss_of(model, 5, 32).backward()
    assert seen == [(False, True), (True, False), (True, False), (False, True), (False, False), (False, False)]


def test_what_a_graph_has_pinned_is_beside_the_least() -> None:
    model = llama(checkpointed=False)
    with on_card(model, 3 * need_of(False, one_batch_a_step)) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        for number in range(2):
            loss_of(model, number, 16).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert engine.training.plain.active
        short = loss_of(model, 2, 16)
        long = loss_of(model, 3, 32)
        reserve, pinned = engine.pool.admission.activation_reserve, engine.pool.admission.pinned_bytes()
        assert reserve is not None
        assert pinned > sum(param.nbytes for param in model.parameters()) // 2
        assert engine.pool.budget.capacity_bytes == reserve.least_bytes + pinned
        (short + long).backward()
