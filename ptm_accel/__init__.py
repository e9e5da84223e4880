"""Train models that do not fit: pages over GPU, CPU and SSD under an unchanged Hugging Face script."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ptm_accel.config import PTMConfig as PTMConfig
    from ptm_accel.engine import Engine as Engine
    from ptm_accel.engine import engine_of as engine_of
    from ptm_accel.outside import gathered as gathered
    from ptm_accel.outside import plain_copy as plain_copy

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "PTMConfig",
    "Trainer",
    "__version__",
    "disable",
    "enable",
    "engine_of",
    "from_config",
    "from_pretrained",
    "gathered",
    "plain_copy",
]

_TRANSFORMERS = "ptm_accel.integrations.transformers"
_HOMES = {
    "PTMConfig": "ptm_accel.config",
    "Engine": "ptm_accel.engine",
    "engine_of": "ptm_accel.engine",
    "gathered": "ptm_accel.outside",
    "plain_copy": "ptm_accel.outside",
    "Trainer": _TRANSFORMERS,
    "enable": _TRANSFORMERS,
    "disable": _TRANSFORMERS,
    "from_pretrained": _TRANSFORMERS,
    "from_config": _TRANSFORMERS,
}


def __getattr__(name: str) -> Any:
    """Imports the public names on first use, so that `import ptm_accel` costs next to nothing."""
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'ptm_accel' has no attribute {name!r}")
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
