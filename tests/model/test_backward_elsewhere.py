"""Backward in another thread than forward, as it is on a GPU: hooks, faults and recomputation happen there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.plain_loop import Recipe, assert_same, train
from tests.tiers import at_floor
from tests.zoo import ENTRIES

RECIPES = {
    "plain": Recipe(),
    "accumulated": Recipe(accumulation=3),
    "non-reentrant": Recipe(checkpointing="non-reentrant"),
    "reentrant": Recipe(checkpointing="reentrant", clip=None),
    "autocast": Recipe(checkpointing="non-reentrant", autocast=torch.bfloat16),
}


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The threads of all backwards but those that a backward calls, which stay in its thread."""
    autograd: Any = torch.autograd
    run: Callable[..., Any] = autograd._engine_run_backward
    seen: list[int] = []

    def there(*args: Any, **kwargs: Any) -> Any:
        seen.append(threading.get_ident())
        return run(*args, **kwargs)

    def elsewhere(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() in seen:
            return run(*args, **kwargs)
        return pool.submit(there, *args, **kwargs).result()

    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(autograd, "_engine_run_backward", elsewhere)
        yield seen


@pytest.mark.parametrize("name", RECIPES)
def test_backward_in_another_thread(name: str, threads: list[int], tmp_path: Path) -> None:
    entry, recipe = ENTRIES["llama"], RECIPES[name]
    theirs = train(entry.build(), entry, recipe)
    model = entry.build()
    with at_floor(model, tmp_path, "mock+host") as engine:
        assert_same(train(model, entry, recipe, engine), theirs)
    assert len(threads) == 2 * recipe.steps * recipe.accumulation
    assert set(threads).isdisjoint({threading.get_ident()})
