"""Precisions other than plain fp32: each gives the numbers of the same training without ptm_accel, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.plain_loop import Recipe, adamw, assert_same, train, train_with_masters
from tests.tiers import BUDGETS, MEMORIES, budget_bytes, needs, on_pages
from tests.trainer_runs import Job, run_trainer
from tests.zoo import ALIKE, ENTRIES, Entry

pytestmark = pytest.mark.usefixtures("all_cores")
MATRIX = pytest.mark.matrix
KINDS = [(entry.name, kind) for entry in ENTRIES.values() for kind in entry.checkpointing]
IN_TURN = [
    pytest.param(name, kind, marks=[] if kind == one and name not in ALIKE else MATRIX)
    for number, (name, entry) in enumerate(ENTRIES.items())
    for one in [entry.checkpointing[number % len(entry.checkpointing)]]
    for kind in entry.checkpointing
]
"""Each model with one way of checkpointing, in turn; the others, and models like others, are rows of the matrix."""
_BUDGET = {"off": "floor", "non-reentrant": "30%", "reentrant": "floor"}


def narrowed(entry: Entry) -> Entry:
    """The same model with bf16 parameters and inputs."""

    def make() -> nn.Module:
        return entry.make().to(torch.bfloat16)

    def batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
        made = entry.batch(generator)
        return {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in made.items()}

    return dataclasses.replace(entry, make=make, batch=batch)


def narrow_base(entry: Entry) -> Entry:
    """A model with adapters, its base in bf16 and the adapters in fp32."""

    def make() -> nn.Module:
        model = entry.make()
        for param in model.parameters():
            if not param.requires_grad:
                param.data = param.data.to(torch.bfloat16)
        return model

    return dataclasses.replace(entry, make=make)


def check_trainer(entry: Entry, job: Job, budget: str, tmp_path: Path, memory: str = "host+disk") -> None:
    plain = run_trainer(entry.build(), entry, job, tmp_path, paged=False)
    model = entry.build()
    with on_pages(model, memory, budget_bytes(budget, *needs(model, tmp_path, memory)), tmp_path) as engine:
        paged = run_trainer(model, entry, job, tmp_path, paged=True)
        assert (engine.pool.stats.evictions > 0) == (budget != "fits")
    assert_same(paged, plain)


@pytest.mark.parametrize("bf16", [False, True])
def test_the_plain_trainer_has_the_same_numbers_twice(bf16: bool, tmp_path: Path) -> None:
    """Under autocast and in pure bf16; else its numbers would show nothing."""
    entry = ENTRIES["llama"] if bf16 else narrowed(ENTRIES["llama"])
    first, second = (
        run_trainer(entry.build(), entry, Job(accumulation=2, bf16=bf16), tmp_path, paged=False) for _ in range(2)
    )
    assert_same(first, second)


@pytest.mark.thinned(2)
@pytest.mark.parametrize(("name", "checkpointing"), IN_TURN)
def test_autocast(name: str, checkpointing: str, tmp_path: Path) -> None:
    """`bf16=True` on fp32 parameters."""
    job = Job(accumulation=2, checkpointing=checkpointing, bf16=True)
    check_trainer(ENTRIES[name], job, _BUDGET[checkpointing], tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize(("name", "checkpointing"), KINDS)
def test_autocast_everywhere(name: str, checkpointing: str, budget: str, memory: str, tmp_path: Path) -> None:
    job = Job(checkpointing=checkpointing, bf16=True, clip=0.0)
    check_trainer(ENTRIES[name], job, budget, tmp_path, memory)


NARROW = (
    "llama-tied",
    "gpt2",
    "mixtral",
    "t5",
    "bert",
    pytest.param("vit", marks=MATRIX),
    pytest.param("whisper", marks=MATRIX),
    "mamba",
)


@pytest.mark.thinned(3)
@pytest.mark.parametrize("name", NARROW)
def test_pure_bf16(name: str, tmp_path: Path) -> None:
    check_trainer(narrowed(ENTRIES[name]), Job(accumulation=3), "floor", tmp_path)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("checkpointing", ENTRIES["lora"].checkpointing)
def test_bf16_base_with_fp32_adapters(checkpointing: str, tmp_path: Path) -> None:
    """Gradients of two dtypes in one norm, and a frozen base that is cast by nobody."""
    job = Job(accumulation=2, clip=0.05, checkpointing=checkpointing, bf16=True)
    check_trainer(narrow_base(ENTRIES["lora"]), job, "floor", tmp_path)


def check_masters(entry: Entry, recipe: Recipe, budget: str, tmp_path: Path, memory: str = "host+disk") -> None:
    oracle = train_with_masters(entry.build(), entry, recipe)
    model = entry.build()
    sizes = needs(model, tmp_path, memory, master_weights="fp32")
    with on_pages(model, memory, budget_bytes(budget, *sizes), tmp_path, master_weights="fp32") as engine:
        paged = train(model, entry, recipe, engine)
        assert (engine.pool.stats.evictions > 0) == (budget != "fits")
    assert_same(paged, oracle)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("name", NARROW)
def test_masters(name: str, accumulation: int, tmp_path: Path) -> None:
    """`master_weights: fp32` on bf16 parameters, against the oracle in `plain_loop`."""
    budget = "floor" if accumulation == 3 else "30%"
    recipe = Recipe(accumulation=accumulation, clip=0.1 if accumulation == 3 else None)
    check_masters(narrowed(ENTRIES[name]), recipe, budget, tmp_path)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("memory", ["mock+host", "mock+host+disk"])
@pytest.mark.parametrize("budget", BUDGETS)
def test_masters_in_all_memories(budget: str, memory: str, tmp_path: Path) -> None:
    recipe = Recipe(accumulation=2, clip=0.1, checkpointing="non-reentrant")
    check_masters(narrowed(ENTRIES["llama"]), recipe, budget, tmp_path, memory)


def single(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, foreach=False)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("make", [adamw, single])
def test_masters_of_a_mixed_model(
    make: Callable[[nn.Module], torch.optim.Optimizer], accumulation: int, tmp_path: Path
) -> None:
    """Only the narrow parameters have masters; the fp32 ones are their own."""

    def build() -> nn.Module:
        model = ENTRIES["qwen3"].make().to(torch.bfloat16)
        for name, param in model.named_parameters():
            if "layers.0" in name:
                param.data = param.data.float()
        return model

    entry = dataclasses.replace(ENTRIES["qwen3"], make=build)
    recipe = Recipe(accumulation=accumulation, clip=0.1, autocast=torch.bfloat16, optimizer=make)
    oracle = train_with_masters(entry.build(), entry, recipe)
    model = entry.build()
    sizes = needs(model, tmp_path, "host+disk", master_weights="fp32")
    with on_pages(model, "host+disk", budget_bytes("floor", *sizes), tmp_path, master_weights="fp32") as engine:
        paged = train(model, entry, recipe, engine)
    for number in oracle.state:
        if "master" not in paged.state[number]:
            del oracle.state[number]["master"]
    assert 0 < sum("master" in entry for entry in paged.state.values()) < len(paged.state)
    assert_same(paged, oracle)
