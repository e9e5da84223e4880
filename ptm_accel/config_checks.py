"""Checks of the options' values, each with an error that says what to write."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ptm_accel.errors import ConfigError, shown
from ptm_accel.units import MOST_BYTES, format_bytes, parse_bytes

AUTO = "auto"

_MOST_DIGITS = 18
_ANY_TOTAL_BYTES = MOST_BYTES
"""Stands for a total that is only known on the machine, and so large that no share but 0% of it is too small."""


def check_size(option: str, value: str | int, *, total_bytes: int = _ANY_TOTAL_BYTES) -> int:
    """Bytes of an option; without `total_bytes`, a share is only checked for its form and for not being zero."""
    try:
        return parse_bytes(value, total_bytes=total_bytes)
    except ConfigError as error:
        raise ConfigError(f"{option}: {error}") from error


def check_holds_a_page(option: str, nbytes: int, page_bytes: int, asked: str | int | None = None) -> None:
    """Says that the bytes of an option are too few for anything, if they are."""
    if nbytes < page_bytes:
        # `16` is rarely meant so; neither is the `16` of `--ptm_host_memory 16 GB`, which a shell cuts in two.
        bare = nbytes > 0 and str(asked).strip() == str(nbytes)
        unit = " (a number without a unit is bytes; in a shell a size is one word, such as 16GB)" if bare else ""
        raise ConfigError(
            f"{option}: {format_bytes(nbytes)} cannot hold one page of {format_bytes(page_bytes)}{unit}; "
            f"raise {option}, or lower page_size."
        )


def delink_of(value: object) -> str | int | float:
    """When blocks are delinked: `"auto"`, a positive integer, or a fraction between 0 and 1."""
    if value == AUTO:
        return AUTO
    steps = count_of(value)
    if steps:
        return steps
    given = value
    if isinstance(value, str):
        with suppress(ValueError):
            given = float(value)
    if isinstance(given, float) and 0.0 < given < 1.0:
        return given
    raise ConfigError(
        f"pseudo_to_real.delink: got {shown(value)}; write auto, a number of steps such as 1000, or a fraction of the "
        "training between 0 and 1, such as 0.3."
    )


def count_of(value: object) -> int:
    """Returns a positive whole number, also as text; 0 for what is none, or too long to be one of steps or the like."""
    if isinstance(value, str) and re.fullmatch(rf"[0-9]{{1,{_MOST_DIGITS}}}", value):
        return int(value)
    number = value if isinstance(value, int) and not isinstance(value, bool) else 0
    return number if 0 < number < 10**_MOST_DIGITS else 0


def staleness_of(value: object) -> int:
    """Returns the most steps by which a parameter may lag, 0 or more."""
    steps = 0 if value in (0, "0") and not isinstance(value, bool) else count_of(value)
    if not steps and str(value) != "0":
        raise ConfigError(f"max_staleness: got {shown(value)}; write how many steps a parameter may lag, 0 or more.")
    return steps


def slices_of(value: object) -> str | int:
    """Returns the number of slices of a sequence, or `"auto"`."""
    slices = AUTO if value == AUTO else count_of(value)
    if slices:
        return slices
    raise ConfigError(f"token_slices: got {shown(value)}; write auto, or how many slices each sequence is cut into.")


def switch_of(option: str, value: object) -> bool:
    """Returns whether an option that is true or false is true."""
    text = str(value).strip().lower()
    if text not in ("true", "false"):
        raise ConfigError(f"{option}: got {value!r}; write true or false.")
    return text == "true"


def check_choice(option: str, value: object, choices: tuple[str, ...]) -> None:
    """Refuses a value that is not one of the choices of an option."""
    if value not in choices:
        written = " or ".join(f"{option}: {name}" for name in choices)
        raise ConfigError(f"{option}: got {shown(value)}; write {written}.")


_MEANT = {
    "gpu": "device_memory",
    "cuda": "device_memory",
    "vram": "device_memory",
    "cpu": "host_memory",
    "ram": "host_memory",
    "nvme": "disk",
    "ssd": "disk",
}
"""Other tools' words, each with the option that it is here."""


def nearly(key: object, known: list[str]) -> list[str]:
    """Returns the keys that one may be meant for."""
    text = key[:100] if isinstance(key, str) else shown(key)
    words = re.split("[^a-z]+", text.lower())
    meant = [option for word, option in _MEANT.items() if word in words and option in known]
    return meant or difflib.get_close_matches(text, known, n=1)


def check_keys(value: Mapping[str, Any], known: list[str], where: str) -> None:
    """Says that a mapping has a key that there is not, and which one may be meant."""
    for key in value:
        if key not in known:
            close = nearly(key, known)
            later = "a later ptm_accel may know it, and ptm-accel --version shows this one. "
            hint = f"did you mean {close[0]!r}? " if close else later
            raise ConfigError(f"{where}: unknown key {shown(key)}; {hint}The keys are: {', '.join(known)}.")


def path_texts(paths: object) -> tuple[str, ...]:
    """The paths as texts; accepts one path too, since configurations come from files and callers without types."""
    given = paths if isinstance(paths, list | tuple) else [paths]
    texts = [os.fspath(path) if isinstance(path, str | os.PathLike) else "" for path in given]
    if not texts or not all(text.strip() and is_path(text) for text in texts):
        raise ConfigError(
            f"disk: got {shown(paths)}, which names no folder; write disk: /mnt/ssd, several as disk: [/mnt/a, "
            "/mnt/b], or leave it out to train without."
        )
    return tuple(texts)


def is_path(text: str) -> bool:
    """Returns whether the system can be asked for a file of that name at all."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def expand(text: str) -> str:
    """Returns a path with `~` and environment variables put in."""
    return os.path.expanduser(os.path.expandvars(text))
