"""Train models that do not fit: pages over GPU, CPU and SSD under an unchanged Hugging Face script."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptm_accel.config import PTMConfig
    from ptm_accel.engine import Engine, engine_of, gathered
    from ptm_accel.model.copying import plain_copy

__version__ = "0.1.0"

_HOMES = {
    "PTMConfig": "ptm_accel.config",
    "Engine": "ptm_accel.engine",
    "engine_of": "ptm_accel.engine",
    "gathered": "ptm_accel.engine",
    "plain_copy": "ptm_accel.engine",
    "Trainer": "ptm_accel.integrations.transformers",
    "enable": "ptm_accel.integrations.transformers",
    "disable": "ptm_accel.integrations.transformers",
    "from_pretrained": "ptm_accel.integrations.transformers",
    "from_config": "ptm_accel.integrations.transformers",
}

__all__ = [*_HOMES, "__version__"]


def __getattr__(name: str) -> Any:
    """Imports the public names on first use, so that `import ptm_accel` costs next to nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ptm_accel' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
