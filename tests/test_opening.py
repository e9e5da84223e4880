"""How options become tiers."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ptm_accel import opening
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine, engine_of
from ptm_accel.errors import ConfigError
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.setup import Capacities, Memory, build_memory
from ptm_accel.model.slots import same_place
from ptm_accel.sizing import refuse_oversized_model
from ptm_accel.units import GIB
from tests.mock_device import MockDevice
from tests.tiers import AMPLE, at_floor, on_pages

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
    options = PTMConfig(host_memory="64MiB", disk=[str(path) for path in paths], page_size=4096)
    _, memory = opening.open_memory(options, device=torch.device("cpu"))
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


@pytest.mark.parametrize(
    ("cards", "current", "number", "expected"),
    [
        (0, 0, "1", torch.device("cpu")),
        (2, 0, None, torch.device("cuda", 0)),
        (2, 0, "1", torch.device("cuda", 1)),
        (2, 1, "0", torch.device("cuda", 1)),
        # The launcher shows each process its own card alone.
        (1, 0, "1", torch.device("cuda", 0)),
    ],
)
def test_a_process_of_several_has_its_own_card(
    cards: int, current: int, number: str | None, expected: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cards > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if number is not None:
        monkeypatch.setenv("LOCAL_RANK", number)
    assert opening.default_device() == expected


def test_a_model_that_is_on_one_card_is_not_taken_for_one_on_another(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 8)
    with at_floor(model, tmp_path) as engine:
        assert Engine.attach(model, device=torch.device("cpu")) is engine
        with pytest.raises(
            ConfigError, match=r"^this model is on pages of cpu already, and was to be put on cuda:1\. "
        ):
            Engine.attach(model, device=torch.device("cuda", 1))


def test_places_without_a_number_are_any_of_their_kind() -> None:
    card, other = torch.device("cuda", 0), torch.device("cuda", 1)
    assert same_place(card, torch.device("cuda"))
    assert same_place(torch.device("cuda"), other)
    assert same_place(card, torch.device("cuda:0"))
    assert not same_place(card, other)
    assert not same_place(card, torch.device("cpu"))


def test_a_played_card_beside_a_real_one_is_not_asked_of_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Linear(64, 64)
    with on_pages(model, "mock+host", AMPLE, tmp_path) as engine:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        refuse_oversized_model(engine.memory, [slot.value for slot in engine.slots])


def test_before_activations_are_known_pages_keep_what_has_no_other_place(tmp_path: Path) -> None:
    def net() -> torch.nn.Module:
        return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))

    with on_pages(net(), "mock+host", AMPLE, tmp_path, host_bytes=64 << 10) as engine:
        floor = engine.needs.floor
        assert floor.whole_bytes - (64 << 10) > floor.total_bytes * 5 // 4
        assert engine.pages.needs.least_beside_activations() == floor.whole_bytes - (64 << 10)
    with on_pages(net(), "mock+host", AMPLE, tmp_path, host_bytes=AMPLE) as engine:
        assert engine.pages.needs.least_beside_activations() == floor.total_bytes * 5 // 4


@pytest.mark.parametrize("config", [{"host_memory": "1GiB"}, "options.yaml"])
def test_an_engine_takes_a_configuration(config: Any) -> None:
    model = torch.nn.Linear(2, 2)
    message = "^configuration: expected a PTMConfig, got (dict|str) .*; pass PTMConfig.load"
    for _ in range(2):
        with pytest.raises(ConfigError, match=message):
            Engine.attach(model, config)
        if engine_of(model) is None:
            # The same of a model that is on pages.
            Engine.attach(model)
    engine = engine_of(model)
    assert engine is not None
    engine.close()


def test_how_many_processes_a_machine_has_is_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "x")
    with pytest.raises(ConfigError, match="^LOCAL_WORLD_SIZE='x' in the environment is not a whole number; launch"):
        Engine.attach(torch.nn.Linear(2, 2))
