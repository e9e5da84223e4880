"""Hooks on modules that stay behind when a module is copied."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ptm_accel.errors import PagedModelError
from ptm_accel.memory.traffic import PoolStats

COPY_HELP = (
    "Its parameters are on pages and may be away. Use `ptm_accel.plain_copy(model)` for an ordinary copy in memory, "
    "`with ptm_accel.gathered(model):` to read the values, `model.save_pretrained(...)` to write them, or "
    "`ptm_accel.engine_of(model).detach()` to take the model off its pages."
)
"""Advice for those who copy or pickle a model."""


class Hook:
    """A hook on a module of a paged model. A deep copy of the module has one that does nothing, and knows no engine.

    Args:
        call: what it does.
        stats: where the time that it takes is counted.
    """

    def __init__(self, call: Callable[..., Any], stats: PoolStats) -> None:
        self._call = call
        self._stats = stats

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Does it."""
        if torch.compiler.is_dynamo_compiling():
            # Dynamo cannot trace clocks.
            return self._call(*args, **kwargs)
        stats = self._stats
        begin = time.perf_counter() - stats.elsewhere_s
        result = self._call(*args, **kwargs)
        spent = time.perf_counter() - stats.elsewhere_s - begin
        stats.own_s += spent
        stats.elsewhere_s += spent
        return result

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # torch pickles a module's hooks before its parameters, which would say so as well.
        raise PagedModelError(f"this model cannot be pickled. {COPY_HELP}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return no_hook


class RootHook(Hook):
    """The hook on the model itself: a deep copy of all of it, which may not fit, is refused.

    `ptm_accel.plain_copy` puts `no_hook` for it into the memo.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        raise PagedModelError(f"this model cannot be copied by copy.deepcopy. {COPY_HELP}")


def no_hook(*args: Any, **kwargs: Any) -> None:
    """Does nothing: a copied module has it in the place of a hook."""
