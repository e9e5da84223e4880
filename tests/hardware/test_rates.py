"""What is asked for is measured once: in the process, and from then on by nobody who shares its cache."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.hardware import measure, rates
from ptm_accel.hardware.cache import RateCache
from ptm_accel.hardware.profile import DeviceRates, LinkRates
from ptm_accel.hardware.rates import device_rates, disk_rates, kept_in, renew_device_rates, renew_disk_rates
from ptm_accel.optim import update_rate
from ptm_accel.optim.update_rate import cpu_update_rate
from ptm_accel.units import MIB
from tests.hardware.machines import CARD, DISK, HERE, LINK

ONE, ALSO_ONE, TWO = Path("/one/a"), Path("/one/b"), Path("/two")


CUDA = torch.device("cuda")


class Machine:
    """Answers in place of the measurements, and counts them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: Counter[str] = Counter()
        self.disks: dict[str, LinkRates | Exception | None] = {"one": DISK, "two": LINK}
        self.card: DeviceRates | Exception = CARD
        self.update: Exception | None = None
        self._monkeypatch = monkeypatch
        for name in ("disk_key", "measure_disk", "measure_device"):
            monkeypatch.setattr(rates, name, getattr(self, name))
        monkeypatch.setattr(update_rate, "measure_cpu_update", self.measure_cpu_update)
        self.threads = 1
        monkeypatch.setattr(torch, "get_num_threads", lambda: self.threads)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card X")

    def start(self, folder: Path | None) -> RateCache:
        """As a new process with its cache in `folder`."""
        known = RateCache(HERE, folder)
        self.go_on(known)
        return known

    def go_on(self, known: RateCache) -> None:
        """As the process that knows so much."""
        self._monkeypatch.setattr(rates, "_this_machine", lambda: known)

    def disk_key(self, path: Path) -> str:
        if path.parts[1] not in self.disks:
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return path.parts[1]

    def measure_disk(self, path: Path) -> LinkRates | None:
        return self._answer(path.parts[1], self.disks[path.parts[1]])

    def measure_cpu_update(self, dtype: torch.dtype, *, masters: bool) -> float:
        threads = torch.get_num_threads()
        rate: float = self._answer(f"{threads} threads", self.update or 2e9 * threads)
        return rate

    def measure_device(self, device: torch.device) -> DeviceRates:
        rates: DeviceRates = self._answer("card", self.card)
        return rates

    def _answer(self, name: str, answer: Any) -> Any:
        self.asked[name] += 1
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def test_each_disk_is_measured_once_and_only_when_asked_for(machine: Machine, tmp_path: Path) -> None:
    machine.start(tmp_path)
    assert not machine.asked
    assert disk_rates([ONE, ALSO_ONE]) == [DISK, DISK]
    assert machine.asked == {"one": 1}
    assert disk_rates([TWO, ONE]) == [LINK, DISK]
    assert machine.asked == {"one": 1, "two": 1}
    assert disk_rates([]) == []


def test_other_processes_find_it_in_the_cache(machine: Machine, tmp_path: Path) -> None:
    machine.start(tmp_path)
    assert (disk_rates([ONE]), cpu_update_rate(), device_rates(CUDA)) == ([DISK], 2e9, CARD)
    machine.threads = 2
    assert cpu_update_rate() == 4e9
    assert machine.asked["2 threads"] == 1
    assert cpu_update_rate(torch.bfloat16) == 4e9
    assert machine.asked["2 threads"] == 2, "each dtype is measured"
    assert cpu_update_rate(torch.bfloat16, masters=True) == 4e9
    assert machine.asked["2 threads"] == 3, "with masters it is another update"
    assert cpu_update_rate(torch.float32, masters=True) == 4e9
    assert machine.asked["2 threads"] == 3, "fp32 parameters are their own masters"
    asked = Counter(machine.asked)
    machine.start(tmp_path)
    assert (disk_rates([ONE]), cpu_update_rate(), device_rates(CUDA)) == ([DISK], 4e9, CARD)
    assert machine.asked == asked


def test_what_another_measured_meanwhile_is_not_measured_again(machine: Machine, tmp_path: Path) -> None:
    mine = machine.start(tmp_path)
    cpu_update_rate()
    machine.start(tmp_path)
    disk_rates([ONE])
    machine.go_on(mine)
    assert disk_rates([ONE, TWO]) == [DISK, LINK]
    assert machine.asked == {"1 threads": 1, "one": 1, "two": 1}
    machine.start(tmp_path)
    assert disk_rates([ONE, TWO]) == [DISK, LINK]
    assert machine.asked == {"1 threads": 1, "one": 1, "two": 1}


def test_a_damaged_entry_is_measured_again(machine: Machine, tmp_path: Path) -> None:
    cache = RateCache(HERE, tmp_path)
    with cache.alone():
        cache.add("disk one", [1e9])
        cache.add("cpu float32 with 1 threads", [-1.0])
    machine.start(tmp_path)
    assert (disk_rates([ONE]), cpu_update_rate()) == ([DISK], 2e9)
    machine.start(tmp_path)
    assert (disk_rates([ONE]), cpu_update_rate()) == ([DISK], 2e9)
    assert machine.asked == {"one": 1, "1 threads": 1}


@pytest.mark.parametrize("place", ["none", "file"])
def test_without_a_cache_the_process_remembers(machine: Machine, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    folder = None if place == "none" else tmp_path / "file" / "cache"
    machine.start(folder)
    for _ in range(2):
        assert disk_rates([ONE]) == [DISK]
        assert cpu_update_rate() == 2e9
    assert machine.asked == {"one": 1, "1 threads": 1}
    machine.start(folder)
    disk_rates([ONE])
    assert machine.asked["one"] == 2


@pytest.mark.parametrize("answer", [None, DiskError(5, "read of it failed: no; set disk.paths.", "/one")])
def test_a_disk_that_cannot_be_measured_is_none_and_not_tried_again(
    machine: Machine, tmp_path: Path, answer: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    machine.disks["one"] = answer
    mine = machine.start(tmp_path)
    assert disk_rates([ONE, TWO]) == [None, LINK]
    assert disk_rates([ALSO_ONE]) == [None]
    assert machine.asked["one"] == 1
    assert (f"the speed of the disk path {ONE} cannot be measured: " in caplog.text) == (answer is not None)
    machine.disks["one"] = DISK
    machine.start(tmp_path)
    assert disk_rates([ONE]) == [DISK]
    machine.go_on(mine)
    assert disk_rates([ONE]) == [None]


def test_a_folder_that_is_not_there_is_none(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.start(None)
    assert disk_rates([Path("/three"), ONE]) == [None, DISK]
    assert "the speed of the disk path /three cannot be measured: " in caplog.text


def test_without_cuda_no_device_has_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_rates(CUDA) is None


def test_a_device_that_is_the_cpu_is_none(machine: Machine) -> None:
    machine.start(None)
    assert device_rates(torch.device("cpu")) is None
    assert not machine.asked


def test_a_device_that_cannot_be_measured_is_none(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.card = torch.OutOfMemoryError("CUDA out of memory.")
    machine.start(None)
    assert device_rates(torch.device("cuda", 1)) is None
    assert device_rates(torch.device("cuda", 1)) is None
    assert machine.asked == {"card": 1}
    assert "the speed of Card X (cuda:1) cannot be measured: CUDA out of memory." in caplog.text


def test_updates_that_cannot_be_measured_are_none(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    machine.update = BudgetError("the machine gives no memory")
    machine.threads = 2
    machine.start(None)
    assert cpu_update_rate() is None
    assert (
        "the speed of updates in float32 with 2 threads cannot be measured: the machine gives no memory" in caplog.text
    )


def test_what_was_measured_is_said(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ptm_accel.hardware")
    machine.start(None)
    disk_rates([ONE])
    device_rates(CUDA)
    machine.threads = 2
    cpu_update_rate()
    assert caplog.messages == [
        "measured: disk one: reads 3.73 GiB/s, writes 7.45 GiB/s, 5.59 GiB/s of both at once.",
        "measured: device Card X: reads 46.57 GiB/s, writes 44.70 GiB/s, 74.51 GiB/s of both at once.",
        "measured: cpu float32 with 2 threads: 4e+09 updates (AdamW) a second.",
    ]


def test_what_is_measured_anew_takes_the_place_of_what_was_known(machine: Machine, tmp_path: Path) -> None:
    machine.start(tmp_path)
    assert (disk_rates([ONE]), device_rates(CUDA)) == ([DISK], CARD)
    machine.disks["one"], machine.card = LINK, DeviceRates(1e9, 2e9, 3e9, 4e9)
    assert renew_disk_rates(ALSO_ONE) == LINK
    assert renew_device_rates(CUDA) == machine.card
    machine.disks["one"] = None
    assert renew_disk_rates(ONE) is None, "what was known stays"
    machine.disks["one"] = DiskError(5, "read of it failed", "/one")
    with pytest.raises(DiskError, match="read of it failed"):
        renew_disk_rates(ONE)
    asked = Counter(machine.asked)
    for _ in range(2):
        assert (disk_rates([ONE]), device_rates(CUDA)) == ([LINK], machine.card)
        machine.start(tmp_path)
    assert machine.asked == asked


def test_where_it_is_kept(machine: Machine, tmp_path: Path) -> None:
    assert machine.start(tmp_path / "cache").path == kept_in()
    assert machine.start(None).path is kept_in() is None
    (tmp_path / "file").write_text("")
    machine.start(tmp_path / "file" / "cache")
    assert kept_in() is None


@pytest.fixture
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This machine, with an empty cache and short measurements."""
    monkeypatch.setenv("PTM_ACCEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "_DISK_S", 0.05)
    monkeypatch.setattr(measure, "_AREA_BYTES", 64 * MIB)
    monkeypatch.setattr(update_rate, "_BYTES", 4 * MIB)
    rates._this_machine.cache_clear()
    yield
    rates._this_machine.cache_clear()


@pytest.mark.usefixtures("_fresh")
def test_this_machine(tmp_path: Path) -> None:
    """A measurement never comes to the same float twice, so equality means that it was remembered."""
    (found,) = disk_rates([tmp_path])
    rate = cpu_update_rate()
    assert found is not None
    assert rate > 0
    assert device_rates(torch.device("cpu")) is None
    rates._this_machine.cache_clear()
    assert disk_rates([tmp_path]) == [found]
    assert cpu_update_rate() == rate
    (name,) = {path.name for path in (tmp_path / "cache").iterdir() if path.suffix == ".json"}
    assert name.startswith("hardware-")
