"""`enable()`: every stock Trainer that is built afterwards is one on pages, with no change in the script."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import transformers

from ptm_accel.config import PTMConfig
from ptm_accel.errors import ConfigError

from .trainer import PTMTrainerMixin, ptm_trainer


@dataclass(slots=True)
class _Switch:
    """Whether Trainers are put on pages, and with which options (None: off)."""

    config: PTMConfig | None = None
    installed: bool = False


_switch = _Switch()


class Enabled:
    """What `enable` returns: ends it as a context manager.

    Args:
        ends: whether leaving the context switches off, or leaves that to an `enable` further out.
    """

    def __init__(self, ends: bool) -> None:
        self._ends = ends

    def __enter__(self) -> Enabled:
        return self

    def __exit__(self, *exc: object) -> None:
        if self._ends:
            disable()


def enable(ptm_config: PTMConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None) -> Enabled:
    """Makes every `transformers.Trainer` (or subclass) that is built until `disable()` train on pages.

    Args:
        ptm_config: the options: a `PTMConfig`, a mapping, or the path of a YAML file.

    Returns:
        a context manager: `with enable(...):` switches it off at the end of the block.

    Raises:
        ConfigError: options that cannot be used, or other options than those it is already enabled with.
    """
    config = PTMConfig.load(ptm_config)
    if _switch.config is not None:
        if _switch.config != config:
            there, asked = _switch.config.unlike(config)
            raise ConfigError(
                f"ptm_accel is already enabled with {there}, and cannot be enabled with {asked} as well. "
                "Call ptm_accel.disable() first."
            )
        return Enabled(ends=False)
    if not _switch.installed:
        # Stays for good: a class whose `__new__` was taken away again refuses arguments (a quirk of CPython).
        transformers.Trainer.__new__ = staticmethod(_new)  # type: ignore[assignment]
        _switch.installed = True
    _switch.config = config
    return Enabled(ends=True)


def disable() -> None:
    """Ends `enable`: Trainers built from now on are stock ones. Those built before stay as they are."""
    _switch.config = None


def _new(cls: type[transformers.Trainer], *args: Any, **kwargs: Any) -> transformers.Trainer:
    if _switch.config is None:
        return object.__new__(cls)
    trainer = object.__new__(ptm_trainer(cls))
    assert isinstance(trainer, PTMTrainerMixin)
    trainer.ptm_config = _switch.config
    return trainer
