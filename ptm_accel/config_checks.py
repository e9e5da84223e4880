"""What the options may be: checks of their values, each with an error that says what to write."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ptm_accel.errors import ConfigError
from ptm_accel.units import format_bytes, parse_bytes

AUTO = "auto"


_ANY_TOTAL_BYTES = 1 << 62
"""Stands for a total that is only known on the machine, and so large that no share but 0% of it is too small."""


def check_size(dial: str, value: str | int, *, total_bytes: int = _ANY_TOTAL_BYTES) -> int:
    """Bytes of a dial; without `total_bytes`, a share is only checked for its form and for not being zero."""
    try:
        return parse_bytes(value, total_bytes=total_bytes)
    except ConfigError as error:
        raise ConfigError(f"{dial}: {error}") from error


def check_holds_a_page(dial: str, nbytes: int, page_bytes: int, asked: str | int | None = None) -> None:
    """Says that the bytes of a dial are too few for anything, if they are."""
    if nbytes < page_bytes:
        # `16` is rarely meant so; neither is the `16` of `--ptm_host_memory 16 GB`, which a shell cuts in two.
        bare = nbytes > 0 and str(asked).strip() == str(nbytes)
        unit = " (a number without a unit is bytes; in a shell a size is one word, such as 16GB)" if bare else ""
        raise ConfigError(
            f"{dial}: {format_bytes(nbytes)} cannot hold one page of {format_bytes(page_bytes)}{unit}; "
            f"raise {dial}, or lower page_size."
        )


def delink_of(value: object) -> str | int | float:
    """When blocks are delinked: `"auto"`, a positive integer, or a fraction between 0 and 1."""
    given = value
    if isinstance(value, str) and value != AUTO:
        with suppress(ValueError):
            given = int(value) if value.isdecimal() else float(value)
    if given == AUTO:
        return AUTO
    if isinstance(given, int) and not isinstance(given, bool) and given > 0:
        return given
    if isinstance(given, float) and 0.0 < given < 1.0:
        return given
    raise ConfigError(
        f"pseudo_to_real.delink: got {value!r}; write auto, a number of steps such as 1000, or a fraction of the "
        "training between 0 and 1, such as 0.3."
    )


def slices_of(value: object) -> str | int:
    """The number of slices of a sequence, or `"auto"`."""
    given = int(value) if isinstance(value, str) and value.isdecimal() else value
    if given == AUTO or (isinstance(given, int) and not isinstance(given, bool) and given > 0):
        assert isinstance(given, str | int)
        return given
    raise ConfigError(f"token_slices: got {value!r}; write auto, or how many slices each sequence is cut into.")


def switch_of(dial: str, value: object) -> bool:
    """Whether a dial that is true or false is true."""
    text = str(value).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{dial}: got {value!r}; write true or false.")
    return text == "true"


def check_choice(dial: str, value: object, choices: tuple[str, ...]) -> None:
    """Says that a dial has a value that there is not, if so."""
    if value not in choices:
        written = " or ".join(f"{dial}: {name}" for name in choices)
        raise ConfigError(f"{dial}: got {value!r}, which it cannot be; write {written}.")


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
    """Says that a mapping has a key that there is not, and which one may be meant."""
    for key in value:
        if key not in known:
            words = re.split("[^a-z]+", str(key).lower())
            meant = [dial for word, dial in _MEANT.items() if word in words and dial in known]
            close = meant or difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}The keys are: {', '.join(known)}.")


def path_texts(paths: object) -> tuple[str, ...]:
    """The paths as texts; accepts one path too, since configurations come from files and callers without types."""
    given = paths if isinstance(paths, list | tuple) else [paths]
    texts = [os.fspath(path) if isinstance(path, str | os.PathLike) else "" for path in given]
    if not texts or not all(text.strip() for text in texts):
        raise ConfigError(
            f"disk: got {paths!r}, which names no folder; write disk: /mnt/ssd, several as disk: [/mnt/a, /mnt/b], or "
            "leave it out to train without."
        )
    return tuple(texts)


def expand(text: str) -> str:
    """A path with `~` and environment variables put in."""
    return os.path.expanduser(os.path.expandvars(text))
