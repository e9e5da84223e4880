"""What several commands show and take alike."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ptm_accel.errors import ConfigError


def show(rows: dict[str, str]) -> None:
    """Prints names and values in two columns."""
    table = Table(show_header=False, box=None)
    for name, value in rows.items():
        table.add_row(name, value)
    Console(soft_wrap=True).print(table)


def dtype_of(name: str) -> Any:
    """Returns a dtype of torch by its name.

    Raises:
        ConfigError: it is none of the three.
    """
    import torch

    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name not in known:
        raise ConfigError(f"dtype: {name!r} is unknown; set it to {', '.join(known)}.")
    return known[name]
