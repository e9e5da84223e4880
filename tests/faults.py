"""Counts what passes find missing, in loops whose batches are like those of ordinary training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.block import Block
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.runtime.run_ahead import RunAhead
from tests.mock_device import MockDevice

VOCABULARY = 512
LENGTHS = (12, 16, 20, 24, 28, 32)


@dataclass
class Pass:
    """What was counted from the beginning of one pass to that of the next.

    Attributes:
        kind: what `RunAhead.begin` was given, and what else its plan is kept by.
        faults: the tensors that were not there, each with the number of accesses before it.
        absent: how many of them the plan of the pass has no access of.
        hits: accesses to what had been sent for.
    """

    kind: Any
    faults: list[tuple[int, str]] = field(default_factory=list)
    absent: int = 0
    hits: int = 0


@contextmanager
def counted(engine: Engine) -> Iterator[list[Pass]]:
    """The passes that begin within."""
    passes: list[Pass] = []
    begin, demand = RunAhead.begin, Pool._demand
    pool, before = engine.pool, [0]

    def close() -> None:
        if passes:
            passes[-1].hits += pool.stats.hits - before[0]
        before[0] = pool.stats.hits

    def begun(self: RunAhead, kind: Any, **how: Any) -> None:
        if self is engine.run_ahead:
            close()
        begin(self, kind, **how)
        if self is engine.run_ahead:
            recorder = self._recorder
            passes.append(Pass(kind if recorder is None else recorder.key))

    def demanded(self: Pool, tensor: Block, begun: Callable[[Block], object] | None) -> None:
        if self is pool and passes:
            ahead = engine.run_ahead
            at = -1 if ahead._recorder is None else len(ahead._recorder)
            passes[-1].faults.append((at, tensor.name))
            route = ahead._route
            passes[-1].absent += route is not None and tensor.name not in route.places and begun is not None
        demand(self, tensor, begun)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunAhead, "begin", begun)
        patch.setattr(Pool, "_demand", demanded)
        yield passes
        close()


def llama(hidden: int, layers: int = 12) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": hidden, "intermediate_size": hidden * 11 // 4, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=VOCABULARY, num_hidden_layers=layers, num_key_value_heads=4, use_cache=False, **shape
    )
    return LlamaForCausalLM(config).train()


class Experts(nn.Module):
    """Layers of eight experts in a list, of which each pass takes two a layer; `seed` decides which."""

    def __init__(self, width: int = 64, layers: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(
            nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(8)) for _ in range(layers)
        )
        self.head = nn.Linear(width, width)
        self.seed = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = random.Random(self.seed)
        for layer in self.layers:
            x = x + sum(torch.tanh(layer[number](x)) for number in sorted(chosen.sample(range(8), 2)))
        return self.head(x)


@contextmanager
def paged(
    model: nn.Module, nbytes: int, page: int, directory: Path, device: bool = False
) -> Iterator[tuple[Engine, torch.optim.Optimizer]]:
    """The model on pages, with its optimizer."""
    if device:
        capacities = Capacities(page_bytes=page, host_bytes=1 << 30, device_bytes=nbytes)
        memory = build_memory(capacities, MockDevice())
    else:
        capacities = Capacities(page_bytes=page, host_bytes=nbytes, disk_paths=[directory])
        memory = build_memory(capacities, torch.device("cpu"))
    engine = Engine.attach(model, PTMConfig(page_size=page), memory=memory)
    try:
        trained = [param for param in model.parameters() if param.requires_grad]
        yield engine, engine.bind_optimizer(torch.optim.AdamW(trained, lr=1e-3, fused=True))
        engine.check_integrity()
        engine.close()
    finally:
        memory.close()
    assert memory.pool.budget.used_bytes == 0


class Batches:
    """Batches of token ids, all of one length or of random ones."""

    def __init__(self, *, equal: bool) -> None:
        self._random = random.Random(0)
        self._equal = equal
        self._number = 0

    def __call__(self, rows: int = 2) -> torch.Tensor:
        self._number += 1
        length = max(LENGTHS) if self._equal else max(self._random.choice(LENGTHS) for _ in range(rows))
        generator = torch.Generator().manual_seed(self._number)
        return torch.randint(0, VOCABULARY, (rows, length), generator=generator)


Loop = Callable[[Any, torch.optim.Optimizer, Batches], None]


def loss_of(model: Any, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=ids, labels=ids, **more).loss
    return loss


def stepped(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def one_batch(model: Any, optimizer: torch.optim.Optimizer, batches: Batches, steps: int = 12) -> None:
    for _ in range(steps):
        loss_of(model, batches()).backward()
        stepped(optimizer)


def packed(model: Any, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    """All rows of a batch in one, with their positions."""
    for _ in range(12):
        ids = batches(rows=2)
        positions = torch.arange(ids.shape[1]).repeat(len(ids))[None]
        loss_of(model, ids.reshape(1, -1), position_ids=positions).backward()
        stepped(optimizer)


def accumulated(micro: int) -> Loop:
    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
        for _ in range(8):
            for _ in range(micro):
                (loss_of(model, batches()) / micro).backward()
            stepped(optimizer)

    return loop


def evaluated(model: Any, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    for _ in range(6):
        one_batch(model, optimizer, batches, steps=3)
        model.eval()
        with torch.no_grad():
            for _ in range(3):
                loss_of(model, batches())
        model.train()


def two_forwards(model: Any, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    for _ in range(12):
        (loss_of(model, batches()) + loss_of(model, batches())).backward()
        stepped(optimizer)


def with_reference(model: Any, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    for _ in range(12):
        ids = batches()
        with torch.no_grad():
            loss_of(model, ids)
        loss_of(model, ids).backward()
        stepped(optimizer)


def with_adapter_off(model: Any, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
    for _ in range(12):
        ids = batches()
        with torch.no_grad(), model.disable_adapter():
            loss_of(model, ids)
        loss_of(model, ids).backward()
        stepped(optimizer)


def routed(*, equal: bool) -> Loop:
    """Experts that are the same two a layer in each pass, or others each time."""

    def loop(model: Any, optimizer: torch.optim.Optimizer, batches: Batches) -> None:
        for number in range(16):
            model.seed = 0 if equal else number
            model(torch.randn(4, 64, generator=torch.Generator().manual_seed(number))).square().mean().backward()
            stepped(optimizer)

    return loop
