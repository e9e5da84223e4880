"""Bars for what takes long."""

from __future__ import annotations

import pytest

from ptm_accel.progress import LEAST_BYTES, progress


@pytest.mark.parametrize(
    ("nbytes", "rank", "shown"), [(LEAST_BYTES, "0", True), (LEAST_BYTES, "1", False), (9, "0", False)]
)
def test_a_bar_is_shown_once_where_there_is_much_to_do(
    nbytes: int, rank: str, shown: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", rank)
    with progress("saving optimizer state", nbytes) as moved:
        moved(nbytes // 2)
        moved(nbytes - nbytes // 2)
    assert ("saving optimizer state: " in capsys.readouterr().err) is shown
