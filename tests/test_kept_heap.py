"""Where all pages fit, what torch frees is kept for the next step; the engine's end lets the allocator be."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.glibc import Glibc
from ptm_accel.memory.heap import HeapTide

MIB = 1 << 20


pytestmark = pytest.mark.skipif(not Glibc.found(), reason="another C library")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the C library is told, as it is told; what it is told twice in a row, once."""
    gc.collect()
    assert not HeapTide.watching(), "another test's model is still there"
    calls: list[str] = []
    for name in ("give_back", "keep", "let_be"):
        monkeypatch.setattr(Glibc, name, _noted(calls, name))
    return calls


def _noted(calls: list[str], name: str) -> Any:
    original = getattr(Glibc, name)

    def call(heap: Glibc, **how: bool) -> None:
        said = name + ("" if how.get("large", True) else " small")
        if calls[-1:] != [said]:
            calls.append(said)
        original(heap, **how)

    return call


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))


def trained(engine: Engine) -> Engine:
    engine.bind_optimizer(torch.optim.AdamW(engine.model.parameters(), fused=True))
    return engine


@pytest.mark.parametrize("disk", [False, True])
def test_what_is_freed_is_kept_where_all_fits(told: list[str], tmp_path: Path, disk: bool) -> None:
    dials = PTMConfig(host_memory="1GiB", disk=str(tmp_path) if disk else None)
    engine = Engine.attach(model(), dials)
    assert told == [], "nothing is trained yet"
    trained(engine)
    assert told == ["keep"]
    engine.close()
    assert told == ["keep", "let_be"]


def test_it_is_watched_where_not_all_fits_any_more(told: list[str], tmp_path: Path) -> None:
    engine = trained(Engine.attach(model(), PTMConfig(host_memory="1GiB", disk=str(tmp_path), page_size="64KiB")))
    assert isinstance(engine.pool.room.keeper, Glibc)
    engine.pool.budget.capacity_bytes = engine.floor.total_bytes + 4 * MIB
    engine.pool.room.shrink()
    engine.adapt()
    assert engine.pool.room.keeper is None
    assert isinstance(engine.pool.room.tide, HeapTide)
    engine.close()
    assert told == ["keep", "give_back", "let_be"]


def test_another_models_watch_is_not_ended(told: list[str], tmp_path: Path) -> None:
    fits = trained(Engine.attach(model(), PTMConfig(host_memory="1GiB")))
    dials = PTMConfig(host_memory="12MiB", disk=str(tmp_path), page_size="64KiB")
    short = trained(Engine.attach(model(), dials))
    assert HeapTide.watching()
    fits.close()
    assert told == ["keep", "give_back"]
    short.close()
    assert told == ["keep", "give_back", "let_be"]
