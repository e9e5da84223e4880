"""The arithmetic of updates: carried out in pieces that stay in a cache, it gives the bits of whole updates."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.memory.admission import Admission
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.transfer import round_up
from ptm_accel.optim import arithmetic
from ptm_accel.optim.arithmetic import InPieces
from ptm_accel.optim.core_threads import CoreThreads
from ptm_accel.pages import Pages
from tests.plain_loop import MakeOptimizer, Recipe, assert_same, decay_groups, train, train_with_masters
from tests.tiers import budget_bytes, needs, on_pages
from tests.zoo import ENTRIES, Entry

PIECE = 320
"""So few elements that tiny parameters are cut into many pieces, the last one short."""

FUSED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2}),
    "adamw-tensor-lr": (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "adam-amsgrad": (torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 1e-1}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-1, "momentum": 0.9, "nesterov": True}),
}


ADAGRAD: tuple[type[torch.optim.Optimizer], dict[str, Any]] = (torch.optim.Adagrad, {"lr": 1e-2, "lr_decay": 0.1})
"""It makes its state in its constructor, in the dtype of the parameters, so the plain loop has no masters for it."""


def fused(name: str) -> MakeOptimizer:
    cls, options = {**FUSED, "adagrad": ADAGRAD}[name]
    return lambda model: cls(decay_groups(model), fused=True, **options)  # type: ignore[call-arg]


def narrow(entry: Entry) -> Entry:
    return dataclasses.replace(entry, make=lambda: entry.make().to(torch.bfloat16))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Small pieces; the elements of each tensor that a kernel is called with, call by call."""
    calls: list[list[int]] = []
    run = InPieces._run

    def watched(self: InPieces, kernel: Any, rows: list[Any], *args: Any) -> None:
        calls.append([row.tensors[0].numel() for row in rows])
        run(self, kernel, rows, *args)

    monkeypatch.setattr(InPieces, "_run", watched)
    monkeypatch.setattr(arithmetic, "PIECE_ELEMENTS", PIECE)
    return calls


def on_budget(entry: Entry, recipe: Recipe, budget: str, directory: Path, **options: object) -> Any:
    model = entry.build()
    unbound = needs(model, directory, "host+disk", **options)
    bound = needs(model, directory, "host+disk", optimizer=recipe.optimizer, **options)
    sizes = max(unbound[0], bound[0]), max(unbound[1], bound[1])
    with on_pages(model, "host+disk", budget_bytes(budget, *sizes), directory, **options) as engine:
        return train(model, entry, recipe, engine)


def check_calls(calls: list[list[int]], budget: str) -> None:
    """Large tensors came in pieces, small ones together if there was room, and each call ended when it was full."""
    assert max(max(call) for call in calls) == PIECE
    assert (max(len(call) for call in calls) > 1) == (budget == "fits")
    assert all(sum(call[:-1]) < PIECE for call in calls)


@pytest.mark.thinned(5)
@pytest.mark.parametrize("budget", ["fits", "floor"])
@pytest.mark.parametrize("name", FUSED)
def test_masters_in_pieces(name: str, budget: str, called: list[list[int]], tmp_path: Path) -> None:
    """Gradients are widened, scaled and masters rounded piece by piece, to the numbers of the plain loop."""
    entry = narrow(ENTRIES["llama"])
    recipe = Recipe(clip=0.1, optimizer=fused(name))
    oracle = train_with_masters(entry.build(), entry, recipe)
    paged = on_budget(entry, recipe, budget, tmp_path, master_weights="fp32")
    check_calls(called, budget)
    assert_same(paged, oracle)


@pytest.mark.thinned(2)
@pytest.mark.parametrize("budget", ["fits", "floor"])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_masters_of_sums(accumulation: int, budget: str, called: list[list[int]], tmp_path: Path) -> None:
    """Sums of gradients are as wide as the masters; without clipping nothing but the rounding surrounds the kernel."""
    entry = narrow(ENTRIES["gpt2"])
    recipe = Recipe(clip=None, accumulation=accumulation, optimizer=fused("adamw"))
    oracle = train_with_masters(entry.build(), entry, recipe)
    paged = on_budget(entry, recipe, budget, tmp_path, master_weights="fp32")
    check_calls(called, budget)
    assert_same(paged, oracle)


@pytest.mark.thinned(6)
@pytest.mark.parametrize("budget", ["fits", "floor"])
@pytest.mark.parametrize("name", [*FUSED, "adagrad"])
def test_clipped_gradients_in_pieces(name: str, budget: str, called: list[list[int]], tmp_path: Path) -> None:
    entry, recipe = ENTRIES["llama"], Recipe(clip=0.1, optimizer=fused(name))
    plain = train(entry.build(), entry, recipe)
    paged = on_budget(entry, recipe, budget, tmp_path)
    check_calls(called, budget)
    assert_same(paged, plain)


def test_a_kernel_that_nothing_surrounds_is_not_cut(called: list[list[int]], tmp_path: Path) -> None:
    entry, recipe = ENTRIES["llama"], Recipe(clip=None, optimizer=fused("adamw"))
    plain = train(entry.build(), entry, recipe)
    paged = on_budget(entry, recipe, "fits", tmp_path)
    assert max(max(call) for call in called) > PIECE
    assert_same(paged, plain)


@pytest.mark.parametrize("masters", [False, True])
def test_groups_that_are_no_longer_fused(masters: bool, called: list[list[int]], tmp_path: Path) -> None:
    """As a loaded state may leave them: their kernel is another, which is called for whole windows."""
    entry = narrow(ENTRIES["llama"]) if masters else ENTRIES["llama"]

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer = fused("adamw")(model)
        for group in optimizer.param_groups:
            group["fused"] = False
        return optimizer

    recipe = Recipe(clip=0.1, optimizer=make)
    plain = (train_with_masters if masters else train)(entry.build(), entry, recipe)
    options: dict[str, object] = {"master_weights": "fp32"} if masters else {}
    paged = on_budget(entry, recipe, "floor", tmp_path, **options)
    assert not called
    assert_same(paged, plain)


def test_a_piece_at_a_time_is_charged(called: list[list[int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Widened gradients are no larger than the pieces they are used in, but for the first step, which makes state."""
    charged: list[int] = []
    reserve = Admission.reserve

    def watched(self: Admission, nbytes: int, tag: Tag, name: str, *, allocates: bool = False) -> Any:
        if name.startswith("the update of"):
            charged.append(nbytes)
        return reserve(self, nbytes, tag, name, allocates=allocates)

    monkeypatch.setattr(Admission, "reserve", watched)
    # A group has such a piece for each parameter.
    monkeypatch.setattr(Pages, "grouped", False)
    entry = narrow(ENTRIES["llama"])
    model = entry.build()
    _, need = needs(model, tmp_path, "host+disk", master_weights="fp32")
    with on_pages(model, "host+disk", 2 * need, tmp_path, master_weights="fp32") as engine:
        optimizer = engine.bind_optimizer(fused("adamw")(model))
        for step in range(2):
            charged.clear()
            model(**entry.batch_at(step)).loss.backward()
            optimizer.step()
    largest = max(p.numel() for p in entry.build().parameters())
    assert largest > 2 * PIECE
    assert max(charged) == round_up(4 * PIECE) < 4 * largest


def test_what_was_taken_must_be_updated() -> None:
    pieces = InPieces(None, CoreThreads("cores"))
    param, grad = torch.zeros(4), torch.ones(4, dtype=torch.bfloat16)
    stand_in = pieces.take(param, grad, torch.zeros(4, dtype=torch.bfloat16))
    assert stand_in.shape == param.shape
    assert stand_in.dtype == param.dtype
    assert bool(stand_in.isnan().all())
    with pytest.raises(AssertionError, match="1 windows were not updated"):
        pieces.check_done()
