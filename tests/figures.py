"""The figures that refusals name, as bytes; for those to the last byte there is the fixture `exact_figures`."""

from __future__ import annotations

import re

from ptm_accel.units import parse_bytes

FIGURE = r"([\d.]+[KMGT]?i?B)"
"""Matches one, as an option is written."""


def named_bytes(pattern: str, error: BaseException) -> int:
    """The bytes of the first group of `pattern` in an error's text."""
    found = re.search(pattern, str(error))
    assert found is not None, error
    return parse_bytes(found[1])
