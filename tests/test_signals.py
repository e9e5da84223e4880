"""Handlers of signals that look at the model see a step's weights and change nothing; Ctrl-C leaves no pin."""

from __future__ import annotations

import gc
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.clipping import clip_grad_value
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine, engine_of
from ptm_accel.memory.pool import Pool
from ptm_accel.outside import gathered
from tests.plain_loop import same_bits
from tests.tiers import MEMORIES, needs, on_pages, open_memory

STEPS = 12


class Net(nn.Module):
    """Half of its weights are read by their modules, half by name, which is outside of all sections."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.tanh(nn.functional.linear(x, layer.weight, layer.bias) if number % 2 else layer(x))
        return x


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, 48, generator=generator) for _ in range(STEPS)]


def look(model: nn.Module) -> list[torch.Tensor]:
    return [value.clone() for value in model.state_dict().values()]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(same_bits(a, b) for a, b in zip(first, second, strict=True))


@pytest.fixture(scope="module")
def plain() -> list[list[torch.Tensor]]:
    """The weights before each step of a plain run, and after the last."""
    model = Net()
    optimizer = adamw(model)
    seen = [look(model)]
    for batch in batches():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(look(model))
    return seen


@contextmanager
def ringing(model: nn.Module, rng: random.Random, looks: list[list[torch.Tensor]]) -> Iterator[None]:
    """While it lasts the model is looked at every few milliseconds, wherever the main thread is."""
    on = True

    def handler(number: int, frame: Any) -> None:
        looks.append(look(model))
        if on:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-4, 6e-3))

    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 1e-3)
    try:
        yield
    finally:
        on = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# The handler stands where pytest's own alarm stands otherwise.
@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("in_backward", [False, True], ids=["at the step", "in backward"])
@pytest.mark.parametrize("kind", MEMORIES)
@pytest.mark.parametrize("seed", range(2))
def test_handlers_that_look_at_the_model(
    seed: int, kind: str, in_backward: bool, plain: list[list[torch.Tensor]], tmp_path: Path
) -> None:
    looks: list[list[torch.Tensor]] = []
    floor, need = needs(Net(), tmp_path, kind, optimizer=adamw)
    model = Net()
    with on_pages(model, kind, floor + (need - floor) // 4, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        engine.updates_in_backward = lambda: in_backward
        with ringing(model, random.Random(seed), looks):
            for batch in batches():
                loss = model(batch).square().mean()
                with engine.backward():
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
        assert same(look(model), plain[-1])
    assert looks
    assert all(any(same(seen, weights) for weights in plain) for seen in looks)


def press_after(patch: pytest.MonkeyPatch) -> None:
    """Ctrl-C as the next pin has been taken, and nobody holds it yet."""
    pin, armed = Pool.pin, [True]

    def pinned(pool: Pool, tensor: Any, **kwargs: Any) -> Any:
        with pool.lock:
            taken = pin(pool, tensor, **kwargs)
            if armed:
                armed.clear()
                signal.raise_signal(signal.SIGINT)
        return taken

    patch.setattr(Pool, "pin", pinned)


def gather(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with gathered(model, grads=True):
        pytest.fail("it was not passed on")


def paged(model: nn.Module) -> Engine:
    engine = engine_of(model)
    assert engine is not None
    return engine


PINNING: dict[str, Callable[[nn.Module, dict[str, torch.Tensor]], object]] = {
    "gathered": gather,
    "clip_grad_value_": lambda model, weights: clip_grad_value(paged(model), list(model.parameters()), 1e-4),
    "load_state_dict": lambda model, weights: model.load_state_dict(weights),
}


@pytest.mark.parametrize("what", PINNING)
def test_ctrl_c_as_a_pin_is_taken_leaves_none(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, need = needs(Net(), tmp_path, "host+disk", optimizer=adamw)
    model = Net()
    weights = model.state_dict()
    with on_pages(model, "host+disk", need, tmp_path) as engine:
        optimizer = engine.bind_optimizer(adamw(model))
        model(batches()[0]).square().mean().backward()
        with monkeypatch.context() as patch:
            press_after(patch)
            with pytest.raises(KeyboardInterrupt):
                PINNING[what](model, weights)
        engine.abort()
        engine.check_integrity()
        optimizer.step()


def test_ctrl_c_while_a_model_comes_off_its_pages_for_good(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = open_memory("host+disk", 1 << 20, tmp_path)
    closed: list[str] = []
    real = Pool.close

    def closing(pool: Pool) -> None:
        signal.raise_signal(signal.SIGINT)
        real(pool)
        closed.append("whole")

    monkeypatch.setattr(Pool, "close", closing)
    with pytest.raises(KeyboardInterrupt):
        memory.close()
    assert closed == ["whole"]


def test_ctrl_c_while_a_forgotten_model_is_closed_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The collector closes it, where Python loses what is raised."""
    real = Pool.close

    def closing(pool: Pool) -> None:
        signal.raise_signal(signal.SIGINT)
        real(pool)

    def forgets() -> None:
        models.clear()
        gc.collect()
        time.sleep(60)

    models = [Net()]
    Engine.attach(models[0], PTMConfig(host_memory="64MiB"))
    monkeypatch.setattr(Pool, "close", closing)
    with pytest.raises(KeyboardInterrupt):
        forgets()
