"""Adapter for transformers: the Trainer on pages, and models that are read or built on pages.

Names are imported on first use, after a check that the installed transformers is one this adapter is written for.
"""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from ptm_accel.errors import UnsupportedError

if TYPE_CHECKING:
    from .callback import PTMCallback
    from .enabling import disable, enable
    from .loading import from_config, from_pretrained
    from .pseudo_to_real import PseudoToReal
    from .trainer import PTMTrainerMixin, Trainer, ptm_trainer

_HOMES = {
    "Trainer": ".trainer",
    "PTMTrainerMixin": ".trainer",
    "ptm_trainer": ".trainer",
    "PTMCallback": ".callback",
    "PseudoToReal": ".pseudo_to_real",
    "enable": ".enabling",
    "disable": ".enabling",
    "from_pretrained": ".loading",
    "from_config": ".loading",
}

OLDEST, BELOW = (5, 17), (6, 0)
"""Versions of transformers that this adapter is written for: at least the first, and less than the second."""

__all__ = [
    "PTMCallback",
    "PTMTrainerMixin",
    "PseudoToReal",
    "Trainer",
    "check_version",
    "disable",
    "enable",
    "from_config",
    "from_pretrained",
    "ptm_trainer",
]


def check_version(installed: str | None = None) -> None:
    """Checks that transformers is of a version that this adapter is written for.

    Args:
        installed: its version; by default the installed one's.

    Raises:
        UnsupportedError: it is not.
    """
    if installed is None:
        installed = version("transformers")
    numbers = re.match(r"(\d+)\.(\d+)", installed)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) < BELOW:
        raise UnsupportedError(
            f"transformers {installed} is installed; ptm_accel works with {OLDEST[0]}.{OLDEST[1]} and later, below "
            f'{BELOW[0]}. Run: pip install "transformers>={OLDEST[0]}.{OLDEST[1]},<{BELOW[0]}".'
        )


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_version()
    return getattr(import_module(home, __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
