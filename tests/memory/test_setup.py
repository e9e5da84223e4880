"""Memory is closed whole, whatever goes wrong meanwhile."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch

from ptm_accel.memory.budget import Tag
from tests.tiers import MEMORIES, open_memory


@pytest.mark.parametrize("kind", MEMORIES)
def test_a_pin_that_is_left_keeps_nothing_else_open(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    threads = set(threading.enumerate())
    memory = open_memory(kind, 1 << 20, tmp_path)
    closed: list[type] = []
    for part in {type(part): part for part in memory.parts}.values():

        def closing(part: object, close: object = type(part).close) -> None:
            closed.append(type(part))
            close(part)  # type: ignore[operator]

        monkeypatch.setattr(type(part), "close", closing)

    def told() -> None:
        raise OSError("of whoever is told")

    memory.when_closed = told
    tensor = memory.pool.create("left", Tag.PARAM, torch.Size([1024]), torch.float32, fill=0.0)
    pin = memory.pool.pin(tensor)
    with caplog.at_level(logging.ERROR), pytest.raises(AssertionError, match=r"left.* is pinned"):
        memory.close()
    assert set(closed) == {type(part) for part in memory.parts}
    assert memory.disk is None or memory.disk.closed
    assert not [thread for thread in set(threading.enumerate()) - threads if thread.is_alive()]
    assert "of whoever is told" in caplog.text, "a later error is not lost"
    memory.close()
    pin.release()
