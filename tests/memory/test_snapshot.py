"""What lies on a card that is full, in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.snapshot import keep_snapshot
from ptm_accel.units import MIB

TEXT = "CUDA out of memory. Tried to allocate 2.00 GiB."
SEGMENTS = [{"device": 0, "address": 512, "total_size": 4 * MIB, "blocks": [{"size": MIB, "state": "inactive"}]}]


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"reserved_bytes.all.current": 4 * MIB})
    monkeypatch.setattr(torch.cuda.memory, "memory_snapshot", lambda: SEGMENTS)


def test_the_file_and_the_message(tmp_path: Path) -> None:
    device, host = Budget(Tier.DEVICE, 8 * MIB), Budget(Tier.HOST, 16 * MIB)
    held = device.reserve(2 * MIB, Tag.PARAM, "a weight")
    device.reserve(3 * MIB, Tag.GRAD, "a gradient").release()
    error, file = torch.OutOfMemoryError(TEXT), tmp_path / "run" / "out_of_memory-0.json"
    keep_snapshot(error, [device, host], file)
    held.release()
    assert error.args == (f"{TEXT} What lay on the card is listed in {file}.",)
    nothing = {"capacity_bytes": 16 * MIB, "used_bytes": 0, "peak_bytes": 0, "used_by_tag": {}}
    used = {"capacity_bytes": 8 * MIB, "used_bytes": 2 * MIB, "peak_bytes": 5 * MIB, "used_by_tag": {"param": 2 * MIB}}
    assert json.loads(file.read_text()) == {
        "error": TEXT,
        "budgets": {"device": used, "host": nothing},
        "statistics": {"reserved_bytes.all.current": 4 * MIB},
        "segments": SEGMENTS,
    }


@pytest.mark.parametrize("fault", ["disk", "card"])
def test_a_file_that_cannot_be_written(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "run").write_text("")

    def broken() -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    if fault == "card":
        monkeypatch.setattr(torch.cuda.memory, "memory_snapshot", broken)
    error, file = torch.OutOfMemoryError(TEXT), tmp_path / "run" / "out_of_memory-0.json"
    keep_snapshot(error, [], file)
    assert error.args == (TEXT,)
    assert f"the memory of the card could not be listed in {file}: " in caplog.text
