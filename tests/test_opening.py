"""How dials become tiers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ptm_accel import opening
from ptm_accel.config import PTMConfig
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.mock_device import MockDevice
from ptm_accel.memory.setup import Capacities, Memory, build_memory
from ptm_accel.units import GIB

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


def test_the_default_on_a_card_is_of_what_others_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Capacities] = []

    def watched(capacities: Capacities, device: torch.device) -> Memory:
        seen.append(capacities)
        return build_memory(capacities, MockDevice())

    # Of 80 GiB another process has 50, and torch keeps 6 in this one.
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda card: SimpleNamespace(total_memory=80 * GIB))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda card: (24 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda card: 6 * GIB)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda card: 1.0)
    monkeypatch.setattr(opening, "build_memory", watched)
    resolved, memory = opening.open_memory(PTMConfig(host_memory="64MiB"), device=torch.device("cuda", 0))
    memory.close()
    assert seen[0].device_bytes == resolved.device_bytes == 27 * GIB
