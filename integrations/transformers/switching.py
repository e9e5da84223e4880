"""Every Trainer that a script makes is one on pages, and models that memory has no room for are read onto pages.

Done where the environment switches pages on (`ptm_accel.autoload` calls this when the hosts are imported). The hosts
import one another in circles, so all that needs them waits until the first Trainer or model is made.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from ptm_accel.config import resolve
from ptm_accel.environment import from_environment
from ptm_accel.opening import local_processes


def switch_trainer(module: ModuleType) -> None:
    """Puts every Trainer on pages that is made from now on.

    Args:
        module: `transformers.trainer`.
    """
    stock: type = module.Trainer

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        from .enabling import enable

        # Puts its own in the place of this.
        enable(from_environment(os.environ))
        return stock.__new__(cls, *args, **kwargs)

    stock.__new__ = staticmethod(new)  # type: ignore[assignment]


def switch_models(module: ModuleType) -> None:
    """Has models that are larger than `host_memory` read onto pages, where there is a disk for them.

    Args:
        module: `transformers.modeling_utils`.

    Raises:
        ConfigError, BudgetError: options that cannot be used.
    """
    config = from_environment(os.environ)
    if config is None or config.disk is None:
        return
    # No card is asked for: whoever imports this may fork yet, and a child could use none that was.
    host_bytes = resolve(config, device_total_bytes=None, processes=local_processes()).host_bytes
    stock = module.PreTrainedModel.from_pretrained.__func__

    @functools.wraps(stock)
    def from_pretrained(cls: type, *args: Any, **kwargs: Any) -> Any:
        from .loading import read_if_too_large

        return read_if_too_large(functools.partial(stock, cls), config, host_bytes, *args, **kwargs)

    module.PreTrainedModel.from_pretrained = classmethod(from_pretrained)
