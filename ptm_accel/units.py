"""Byte counts as people write them (`10GB`, `512MiB`, `80%`) and as messages show them."""

from __future__ import annotations

import re
from fractions import Fraction

from ptm_accel.errors import ConfigError, shown

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30
TIB = 1 << 40

ACCEPTED_FORMS = 'a whole number of bytes, decimal units like "10GB", binary units like "512MiB", or a share like "80%"'
"""Forms that `parse_bytes` takes, in words for error messages and help texts."""

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": TIB,
}
MOST_BYTES = 1 << 62
"""More than any machine has; so much may be asked for, and no more."""
_QUANTITY = re.compile(
    rf"(?P<number>[0-9]{{1,40}}(?:\.[0-9]{{1,40}})?)\s*(?P<unit>%|{'|'.join(_UNITS)})", re.IGNORECASE | re.ASCII
)


def format_bytes(n: int) -> str:
    """Shows a byte count with two decimals in the largest binary unit that fits, e.g. `1.50 GiB`.

    Counts below 64 KiB are shown exactly, e.g. `4096 B`, since pages and alignments are read there.

    Args:
        n: bytes; may be negative (a difference).
    """
    unit, name = _unit_of(n)
    return f"{n} B" if unit == 1 else f"{n / unit:.2f} {name}"


def format_least(n: int) -> str:
    """Shows the least value of an option as one writes it, e.g. `1.5GiB`: up to 1% more than it, and never less.

    Args:
        n: bytes.
    """
    return _as_option(n, up=True)


def format_most(n: int) -> str:
    """Shows the most that an option may be, as `format_least`, but never more than it.

    Args:
        n: bytes.
    """
    return _as_option(n, up=False)


def _as_option(n: int, *, up: bool) -> str:
    # Without a blank, which a shell would cut a size at.
    unit, name = _unit_of(n)
    hundredths = -(-100 * n // unit) if up else 100 * n // unit
    whole, part = divmod(hundredths, 100)
    return f"{whole}.{part:02}".rstrip("0").rstrip(".") + name


def _unit_of(n: int) -> tuple[int, str]:
    """The unit that a byte count is shown in, and its name."""
    size = abs(n)
    if size < 64 * KIB:
        return 1, "B"
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB")):
        if size >= unit:
            return unit, name
    return KIB, "KiB"


def format_seconds(seconds: float) -> str:
    """Shows a duration in the unit that people would use, e.g. `3.2 s`, `43 min`, `2.5 days`."""
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        # From two of a unit on: 90 s, 43 min, 36 h.
        if seconds >= 2 * unit:
            return f"{_digits(seconds / unit)} {name}"
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * unit:
            return f"{_digits(seconds / unit)} {name}"
    return f"{_digits(seconds * 1e6)} us"


def _digits(value: float) -> str:
    """Two digits at least, and no more than whole numbers have."""
    return f"{value:.2g}" if value < 9.95 else f"{value:.0f}"


_DECIMAL = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "KB"))


def format_decimal(n: float) -> str:
    """Shows a byte count as makers of memory and disks write it, to three digits: `22.7 GB`."""
    for unit, name in _DECIMAL:
        # Not 1000 GB.
        if abs(n) >= 0.9995 * unit:
            value = n / unit
            places = 2 if abs(value) < 9.995 else 1 if abs(value) < 99.95 else 0
            return f"{value:.{places}f} {name}"
    return f"{n:.0f} B"


def format_least_decimal(n: int) -> str:
    """Shows a least size as an option takes it, to three digits, and never less than it: `22.8GB`."""
    for unit, name in _DECIMAL:
        if n >= unit:
            step = unit // 100 if n < 10 * unit else unit // 10 if n < 100 * unit else unit
            return f"{-(-n // step) * step / unit:g}{name}"
    return f"{n}B"


def parse_bytes(text: str | int, *, total_bytes: int | None = None) -> int:
    """Reads a byte count.

    Args:
        text: bytes as an int, or a text such as `"10GB"` (10^10), `"512MiB"` (2^29), `"4096"` or `"80%"`.
            Fractions such as `"1.5GiB"` are rounded down to whole bytes. Units are not case-sensitive.
        total_bytes: what a share is a share of; without it, shares are refused.

    Returns:
        Bytes, zero or more.

    Raises:
        ConfigError: the text does not parse, is negative, is a share above 100%, or is a share of nothing known.
    """
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return _no_more(text, text)
    match = _QUANTITY.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{shown(text)} is not a byte count; use {ACCEPTED_FORMS}.")
    number = Fraction(match["number"])
    if match["unit"] != "%":
        return _no_more(int(number * _UNITS[match["unit"].lower()]), text)
    if number > 100:
        raise ConfigError(f'{text!r} is more than the whole; use at most "100%".')
    if total_bytes is None:
        raise ConfigError(f'{text!r} is a share, and here there is no total to take it of; use a size such as "10GB".')
    return int(number * total_bytes / 100)


def _no_more(nbytes: int, text: str | int) -> int:
    """`nbytes`, unless no machine has as many."""
    if nbytes > MOST_BYTES:
        raise ConfigError(f"{shown(text)} is more than {MOST_BYTES} bytes, which no machine has; use {ACCEPTED_FORMS}.")
    return nbytes
