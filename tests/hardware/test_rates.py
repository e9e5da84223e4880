"""What is asked for is measured once: in the process, and from then on by nobody who shares its cache."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ptm_accel.errors import DiskError
from ptm_accel.hardware import measure, rates
from ptm_accel.hardware.cache import ProfileStore
from ptm_accel.hardware.profile import DeviceRates, LinkRates
from ptm_accel.hardware.rates import Gauge, Probe, cpu_update_rate, device_rates, disk_rates
from ptm_accel.units import MIB
from tests.hardware.machines import CARD, DISK, HERE, LINK

ONE, ALSO_ONE, TWO = Path("/one/a"), Path("/one/b"), Path("/two")


class Machine:
    """Answers for the measurements, and counts them."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.disks: dict[str, LinkRates | Exception | None] = {"one": DISK, "two": LINK}
        self.card: DeviceRates | Exception | None = CARD

    def probe(self) -> Probe:
        return Probe(self.disk, self.cpu_update, self.device, self.disk_key, lambda device: "Card X")

    def disk_key(self, path: Path) -> str:
        if path.parts[1] not in self.disks:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return path.parts[1]

    def disk(self, path: Path) -> LinkRates | None:
        return self._answer(path.parts[1], self.disks[path.parts[1]])

    def cpu_update(self, threads: int) -> float:
        self.asked[f"{threads} threads"] += 1
        return 2e9 * threads

    def device(self, device: torch.device) -> DeviceRates | None:
        return self._answer("card", self.card)

    def _answer(self, name: str, answer: Any) -> Any:
        self.asked[name] += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def machine() -> Machine:
    return Machine()


def gauge(machine: Machine, folder: Path | None) -> Gauge:
    return Gauge(ProfileStore(HERE, folder), machine.probe())


def test_each_disk_is_measured_once_and_only_when_asked_for(machine: Machine, tmp_path: Path) -> None:
    mine = gauge(machine, tmp_path)
    assert not machine.asked
    assert mine.disks([ONE, ALSO_ONE]) == [DISK, DISK]
    assert machine.asked == {"one": 1}
    assert mine.disks([TWO, ONE]) == [LINK, DISK]
    assert machine.asked == {"one": 1, "two": 1}
    assert mine.disks([]) == []


def test_other_processes_find_it_in_the_cache(machine: Machine, tmp_path: Path) -> None:
    first = gauge(machine, tmp_path)
    first.disks([ONE])
    first.cpu_update(1)
    first.cpu_update(2)
    first.device(torch.device("cuda"))
    asked = Counter(machine.asked)
    second = gauge(machine, tmp_path)
    assert second.disks([ONE]) == [DISK]
    assert (second.cpu_update(1), second.cpu_update(2)) == (2e9, 4e9)
    assert second.device(torch.device("cuda")) == CARD
    assert machine.asked == asked
    assert second.profile == first.profile


def test_what_another_measured_meanwhile_is_not_measured_again(machine: Machine, tmp_path: Path) -> None:
    mine, other = gauge(machine, tmp_path), gauge(machine, tmp_path)
    mine.cpu_update(1)
    other.disks([ONE])
    assert mine.disks([ONE]) == [DISK]
    other.disks([TWO])
    assert machine.asked == {"1 threads": 1, "one": 1, "two": 1}
    assert gauge(machine, tmp_path).profile.disks == {"one": DISK, "two": LINK}


@pytest.mark.parametrize("place", ["none", "file"])
def test_without_a_cache_the_process_remembers(machine: Machine, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    folder = None if place == "none" else tmp_path / "file" / "cache"
    mine = gauge(machine, folder)
    for _ in range(2):
        assert mine.disks([ONE]) == [DISK]
        assert mine.cpu_update(1) == 2e9
    assert machine.asked == {"one": 1, "1 threads": 1}
    gauge(machine, folder).disks([ONE])
    assert machine.asked["one"] == 2


@pytest.mark.parametrize("answer", [None, DiskError(5, "read of it failed: no; set disk.paths.", "/one")])
def test_a_disk_that_cannot_be_measured_is_none_and_not_tried_again(
    machine: Machine, tmp_path: Path, answer: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    machine.disks["one"] = answer
    mine = gauge(machine, tmp_path)
    assert mine.disks([ONE, TWO]) == [None, LINK]
    assert mine.disks([ALSO_ONE]) == [None]
    assert machine.asked["one"] == 1
    assert (f"the speed of the disk path {ONE} cannot be measured: " in caplog.text) == (answer is not None)
    machine.disks["one"] = DISK
    assert gauge(machine, tmp_path).disks([ONE]) == [DISK]
    assert mine.disks([ONE]) == [None]


def test_a_folder_that_is_not_there_is_none(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    assert gauge(machine, None).disks([Path("/three"), ONE]) == [None, DISK]
    assert "the speed of the disk path /three cannot be measured: " in caplog.text


def test_without_cuda_no_device_has_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_rates(torch.device("cuda")) is None


def test_a_device_that_is_the_cpu_is_none(machine: Machine) -> None:
    assert gauge(machine, None).device(torch.device("cpu")) is None
    assert not machine.asked


@pytest.mark.parametrize("answer", [torch.OutOfMemoryError("CUDA out of memory."), None])
def test_a_device_that_cannot_be_measured_is_none(
    machine: Machine, answer: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    machine.card = answer
    mine = gauge(machine, None)
    assert mine.device(torch.device("cuda", 1)) is None
    assert mine.device(torch.device("cuda", 1)) is None
    assert machine.asked == {"card": 1}
    assert ("the speed of Card X (cuda:1) cannot be measured: CUDA out of memory." in caplog.text) == bool(answer)


def test_what_was_measured_is_said(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ptm_accel.hardware")
    mine = gauge(machine, None)
    mine.disks([ONE])
    mine.device(torch.device("cuda"))
    mine.cpu_update(2)
    assert caplog.messages == [
        f"measured: the disk path {ONE} reads 3.73 GiB/s, writes 7.45 GiB/s, 5.59 GiB/s of both at once.",
        "measured: the link of Card X reads 46.57 GiB/s, writes 44.70 GiB/s, 74.51 GiB/s of both at once.",
        "measured: 4.00 billion updates (AdamW) a second with 2 threads.",
    ]


@pytest.fixture
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine, with an empty cache and short measurements."""
    monkeypatch.setenv("PTM_ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "_DISK_S", 0.05)
    monkeypatch.setattr(measure, "_AREA_BYTES", 64 * MIB)
    monkeypatch.setattr(measure, "_UPDATE_BYTES", 4 * MIB)
    rates._this_machine.cache_clear()
    yield
    rates._this_machine.cache_clear()


@pytest.mark.usefixtures("_fresh")
def test_this_machine(tmp_path: Path) -> None:
    """A measurement never comes to the same float twice, so equality means that it was remembered."""
    (found,) = disk_rates([tmp_path])
    rate = cpu_update_rate(1)
    assert found is not None
    assert rate > 0
    assert device_rates(torch.device("cpu")) is None
    rates._this_machine.cache_clear()
    assert disk_rates([tmp_path]) == [found]
    assert cpu_update_rate(1) == rate
    (name,) = {path.name for path in (tmp_path / "cache").iterdir() if path.suffix == ".json"}
    assert name.startswith("hardware-")
