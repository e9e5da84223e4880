from __future__ import annotations

import pytest

from tests.zoo import ENTRIES


def test_probe() -> None:
    assert ENTRIES
