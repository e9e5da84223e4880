"""Groups of several parameters give the numbers of the plain Trainer, bit for bit, with every model and memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from ptm_accel.errors import BudgetError
from ptm_accel.optim.host_updates import HostUpdates
from ptm_accel.optim.units import Entry, Unit
from ptm_accel.runtime.run_ahead import RunAhead
from tests.plain_loop import Recipe, assert_same, train, train_with_masters
from tests.test_equality import plain_run, sizes
from tests.test_equality_precision import narrowed
from tests.tiers import MEMORIES, in_groups, members, needs, on_pages
from tests.trainer_runs import Job, run_trainer
from tests.zoo import ENTRIES

pytestmark = pytest.mark.usefixtures("all_cores")
ROWS = [
    (
        model,
        memory,
        (1, 3)[(number + kind) % 2],
        ENTRIES[model].checkpointing[(number + kind) % len(ENTRIES[model].checkpointing)],
    )
    for number, model in enumerate(ENTRIES)
    for kind, memory in enumerate(MEMORIES)
]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.mark.thinned(9)
@pytest.mark.parametrize(("model", "memory", "accumulation", "checkpointing"), ROWS)
@pytest.mark.parametrize("clip", [0.1, 0.0])
def test_same_numbers_in_groups(
    model: str, memory: str, accumulation: int, checkpointing: str, clip: float, scratch: Path, tmp_path: Path
) -> None:
    job, entry = Job(accumulation=accumulation, clip=clip, checkpointing=checkpointing), ENTRIES[model]
    plain = plain_run(model, job, scratch)
    floor, need = sizes(model, memory, scratch)
    ours = entry.build()
    with in_groups(), on_pages(ours, memory, max(need // 2, floor), tmp_path) as engine:
        paged = run_trainer(ours, entry, job, tmp_path, paged=True)
        assert members(engine) > 1
        assert engine.pool.stats.evictions > 0
    assert_same(paged, plain)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", ["llama-tied", "gpt2", "t5", "mamba"])
def test_masters_in_groups(name: str, accumulation: int, memory: str, tmp_path: Path) -> None:
    entry, recipe = narrowed(ENTRIES[name]), Recipe(accumulation=accumulation, clip=0.1 if accumulation == 3 else None)
    oracle = train_with_masters(entry.build(), entry, recipe)
    model = entry.build()
    _, need = needs(model, tmp_path, memory, master_weights="fp32")
    with in_groups(), on_pages(model, memory, need // 2, tmp_path, master_weights="fp32") as engine:
        paged = train(model, entry, recipe, engine)
        assert members(engine) > 1
        assert engine.pool.stats.evictions > 0
    assert_same(paged, oracle)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)


def filled(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=1e-2, initial_accumulator_value=0.5)


def whole(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def two_kinds(model: nn.Module) -> torch.optim.Optimizer:
    """Members of a group in two parameter groups, and one that is not updated."""
    params = list(model.parameters())
    options = [{"params": params[1::2], "weight_decay": 0.1}, {"params": params[2::2], "lr": 1e-3}]
    return torch.optim.AdamW(options, lr=1e-2, fused=True)


@pytest.mark.thinned(4)
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
@pytest.mark.parametrize("make", [momentum, filled, whole, two_kinds])
def test_other_optimizers_in_groups(
    make: Callable[[nn.Module], torch.optim.Optimizer], autocast: torch.dtype | None, memory: str, tmp_path: Path
) -> None:
    entry, recipe = ENTRIES["llama"], Recipe(accumulation=2, optimizer=make, autocast=autocast)
    plain = train(entry.build(), entry, recipe)
    model = entry.build()
    _, need = needs(model, tmp_path, memory, optimizer=make)
    with in_groups(), on_pages(model, memory, need // 2, tmp_path) as engine:
        paged = train(model, entry, recipe, engine)
        assert members(engine) > 1
        assert engine.pool.stats.evictions > 0
    assert_same(paged, plain)


@pytest.mark.parametrize("memory", ["mock+host", "mock+host+disk"])
@pytest.mark.parametrize("refused", ["none", "taken", "opened"])
def test_updates_on_the_cpu_in_groups(refused: str, memory: str, tmp_path: Path) -> None:
    """Where the CPU refuses one member, as it is given or as it is begun, no other is updated beside it there."""
    entry, recipe = ENTRIES["gpt2"], Recipe(accumulation=2, steps=8)
    plain = train(entry.build(), entry, recipe)
    model = entry.build()
    _, need = needs(model, tmp_path, memory, page_size=16 << 10)
    taken: list[str] = []
    host = {"host_bytes": 512 << 10} if memory == "mock+host+disk" else {}
    with (
        in_groups(),
        on_pages(model, memory, need * 3 // 4, tmp_path, page_size=16 << 10, **host) as engine,
        pytest.MonkeyPatch.context() as patch,
    ):
        take, hold = HostUpdates.take, HostUpdates._hold

        def watched(updates: HostUpdates, entry: Entry) -> bool:
            if refused == "taken" and entry[1].slot.name.endswith("c_fc.weight"):
                return False
            took = take(updates, entry)
            taken.extend([entry[1].slot.name] if took else [])
            return took

        def held(updates: HostUpdates, unit: Unit) -> None:
            if refused == "opened" and unit.state.slot.name.endswith("c_attn.weight") and not unit.start:
                raise BudgetError("no room for a window")
            hold(updates, unit)

        patch.setattr(HostUpdates, "take", watched)
        patch.setattr(HostUpdates, "_hold", held)
        patch.setattr(RunAhead, "updates_on_host", lambda ahead, name: "[" in name)
        paged = train(model, entry, recipe, engine)
        assert members(engine) > 1
    assert taken
    assert_same(paged, plain)
