"""Every Trainer that a script makes is one on pages, and its models never need memory for all of them before.

Done where the environment switches pages on (`ptm_accel.autoload` calls this when the hosts are imported). The hosts
import one another in circles, so all that needs them waits until the first Trainer or model is made.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import ModuleType
from typing import Any

from ptm_accel.config import resolve
from ptm_accel.environment import from_environment
from ptm_accel.memory.mapped_files import MappedFiles
from ptm_accel.model.attach import small_bytes
from ptm_accel.model.scratch_parameters import ScratchParameters
from ptm_accel.opening import local_processes

from .first_pages import opening_lightly
from .forgetting import forget_what_is_read


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
    """Has parameters put into scratch files as they are made or read, where there is a disk for them.

    Args:
        module: `transformers.modeling_utils`.

    Raises:
        ConfigError, BudgetError: dials that cannot be used.
    """
    config = from_environment(os.environ)
    if config is None or config.disk is None:
        return
    # No card is asked for: whoever imports this may fork yet, and a child could use none that was.
    resolved = resolve(config, device_total_bytes=None, processes=local_processes())
    assert resolved.disk_limit_bytes is not None
    # Read by several threads at once, tensors that are cast would wait in memory for their turn.
    os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"
    files = MappedFiles(resolved.disk_paths, resolved.disk_limit_bytes)
    ScratchParameters(files, small_bytes(resolved.page_bytes)).install()
    names = vars(module)
    names["safe_open"] = opening_lightly(names["safe_open"])
    forget_what_is_read(import_module("transformers.core_model_loading"))
