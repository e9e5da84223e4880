"""How dials become tiers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ptm_accel import opening
from ptm_accel.config import PTMConfig
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.setup import Capacities, Memory, build_memory

FAST, SLOW = LinkRates(4e9, 4e9, 4e9), LinkRates(1e9, 1e9, 1e9)


@pytest.mark.parametrize(
    ("folders", "rates", "weights"),
    [
        (2, [FAST, SLOW], [pytest.approx(2e9), pytest.approx(0.5e9)]),
        (2, [FAST, None], None),
        (1, [], None),
    ],
)
def test_bytes_are_dealt_to_disks_by_their_speed(
    folders: int,
    rates: list[LinkRates | None],
    weights: list[float] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    paths = [tmp_path / str(number) for number in range(folders)]
    for path in paths:
        path.mkdir()
    seen: list[Capacities] = []

    def watched(capacities: Capacities, device: torch.device) -> Memory:
        seen.append(capacities)
        return build_memory(capacities, device)

    monkeypatch.setattr(opening, "build_memory", watched)
    monkeypatch.setattr(opening, "disk_rates", lambda asked: rates if list(asked) == paths else pytest.fail("asked"))
    dials = PTMConfig(host_memory="64MiB", disk=[str(path) for path in paths], page_size=4096)
    _, memory = opening.open_memory(dials, device=torch.device("cpu"))
    memory.close()
    assert seen[0].disk_weights == weights
