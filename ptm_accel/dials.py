"""What the value of a dial may be: its form, its size, its choices. Every error names the dial and what to set."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from ptm_accel.errors import BudgetError, ConfigError
from ptm_accel.units import format_bytes, parse_bytes

_ANY_TOTAL_BYTES = 1 << 62
"""Stands for a total that is only known on the machine, and so large that no share but 0% of it is too small."""


def check_size(dial: str, value: str | int, *, total_bytes: int = _ANY_TOTAL_BYTES) -> int:
    """Bytes of a dial; without `total_bytes`, a share is only checked for its form and for not being zero.

    Raises:
        ConfigError: no size, with the dial's name.
    """
    try:
        return parse_bytes(value, total_bytes=total_bytes)
    except ConfigError as error:
        raise ConfigError(f"{dial}: {error}") from error


def check_holds_a_page(dial: str, nbytes: int, page_bytes: int, asked: str | int | None = None) -> None:
    """Says that the bytes of a dial are too few for anything, if they are.

    Args:
        dial: its name.
        nbytes: what it comes to.
        page_bytes: size of a page.
        asked: what was written.

    Raises:
        ConfigError: less than a page.
    """
    if nbytes < page_bytes:
        # `16` is rarely meant so; neither is the `16` of `--ptm_host_memory 16 GB`, which a shell cuts in two.
        bare = nbytes > 0 and str(asked).strip() == str(nbytes)
        unit = " (a number without a unit is bytes; in a shell a size is one word, such as 16GB)" if bare else ""
        raise ConfigError(
            f"{dial}: {format_bytes(nbytes)} cannot hold one page of {format_bytes(page_bytes)}{unit}; "
            f"raise {dial}, or lower page_size."
        )


def refuse_too_much(dial: str, asked_bytes: int, limit_name: str, limit_bytes: int) -> NoReturn:
    """Says that a dial asks for more than there is.

    Raises:
        BudgetError: always.
    """
    limit = format_bytes(limit_bytes)
    # What is shown may have been rounded up.
    most = limit if parse_bytes(limit) <= limit_bytes else str(limit_bytes)
    raise BudgetError(
        f"{dial}: asked {format_bytes(asked_bytes)}, {limit_name} is {limit}; set {dial} to at most {most}."
    )


def is_share(value: str | int) -> bool:
    """Whether a size is given as a part of something."""
    return isinstance(value, str) and value.strip().endswith("%")


def check_choice(dial: str, value: object, choices: tuple[str, ...]) -> None:
    """Says that a dial has a value that there is not, if so.

    Raises:
        ConfigError: none of the choices.
    """
    if value not in choices:
        raise ConfigError(f"{dial}: {value!r} is unknown; set it to {' or '.join(repr(name) for name in choices)}.")


_MEANT = {
    "gpu": "device_memory",
    "cuda": "device_memory",
    "vram": "device_memory",
    "cpu": "host_memory",
    "ram": "host_memory",
    "nvme": "disk",
    "ssd": "disk",
}
"""What others call it, and the dial that it is here."""


def check_keys(value: Mapping[str, Any], known: list[str], where: str) -> None:
    """Says that a mapping has a key that there is not, and which one may be meant.

    Raises:
        ConfigError: a key that is not known.
    """
    for key in value:
        if key not in known:
            words = re.split("[^a-z]+", str(key).lower())
            meant = [dial for word, dial in _MEANT.items() if word in words and dial in known]
            close = meant or difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}The keys are: {', '.join(known)}.")


def path_texts(paths: object) -> tuple[str, ...]:
    """The paths as texts; accepts one path too, since configurations come from files and callers without types.

    Raises:
        ConfigError: no path, or something that is none.
    """
    if isinstance(paths, str | os.PathLike):
        paths = (paths,)
    if not isinstance(paths, list | tuple) or not all(isinstance(path, str | os.PathLike) for path in paths):
        raise ConfigError(f"disk.paths: {paths!r} is not a path or a list of paths; name existing folders.")
    texts = tuple(os.fspath(path) for path in paths)
    if not texts or not all(text.strip() for text in texts):
        raise ConfigError(
            f"disk.paths: {list(texts)!r} names no folder; name at least one, or leave disk out to train without."
        )
    return texts


def expand(text: str) -> str:
    """A path with `~` and environment variables put in."""
    return os.path.expanduser(os.path.expandvars(text))
