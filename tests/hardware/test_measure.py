"""The measurements give numbers, change nothing and leave nothing. How large the numbers are is not asked."""

from __future__ import annotations

import logging
import os
import shutil
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ptm_accel.errors import DiskError
from ptm_accel.hardware import measure
from ptm_accel.hardware.measure import measure_device, measure_disk
from ptm_accel.memory.device import check_copy
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.scratch import file_system_of
from ptm_accel.units import MIB
from tests.descriptors import open_files

MEMORY = Path("/dev/shm")


@pytest.fixture
def _leaves_nothing(tmp_path: Path) -> Iterator[None]:
    def here() -> set[object]:
        disk_threads = [thread for thread in threading.enumerate() if thread.name.startswith("ptm-disk-")]
        return {*open_files(), *disk_threads, *os.listdir(tmp_path)}

    before = here()
    yield
    assert not here() - before


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_DISK_S", 0.05)
    monkeypatch.setattr(measure, "_AREA_BYTES", 64 * MIB)


def _free(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=nbytes))


@pytest.mark.usefixtures("_leaves_nothing", "_short")
def test_a_disk_has_rates(tmp_path: Path) -> None:
    rates = measure_disk(tmp_path)
    assert rates is not None
    assert min(rates.read_bytes_s, rates.write_bytes_s, rates.both_bytes_s) > MIB


@pytest.mark.usefixtures("_leaves_nothing", "_short")
def test_no_more_is_written_than_half_of_what_is_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _free(monkeypatch, 80 * MIB)
    sizes: list[int] = []
    open_tier = DiskTier.__init__

    def spy(self: DiskTier, paths: list[Path], budget: measure.Budget, **options: int) -> None:
        sizes.append(budget.capacity_bytes)
        open_tier(self, paths, budget, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(DiskTier, "__init__", spy)
    assert measure_disk(tmp_path) is not None
    assert sizes == [40 * MIB]


@pytest.mark.usefixtures("_leaves_nothing", "_short")
@pytest.mark.skipif(file_system_of(MEMORY) != "tmpfs", reason="needs a tmpfs at /dev/shm")
def test_a_folder_in_memory_has_rates_and_warns_of_nothing_here() -> None:
    """The tier that trains there is the one that warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measure_disk(MEMORY) is not None


@pytest.mark.usefixtures("_leaves_nothing", "_short")
def test_a_slow_disk_is_measured_with_few_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a first write of 16 MiB had taken a second."""
    moved: list[int] = []
    timed = measure._DiskCourse.seconds

    def slow(self: measure._DiskCourse, read: range, written: range) -> float:
        moved.append(len(read) + len(written))
        return timed(self, read, written) and 1.0

    monkeypatch.setattr(measure._DiskCourse, "seconds", slow)
    monkeypatch.setattr(measure, "_DISK_S", 0.0)
    rates = measure_disk(tmp_path)
    assert rates is not None
    assert moved == [4, 0, 2, 2, 4]
    assert (rates.read_bytes_s, rates.write_bytes_s, rates.both_bytes_s) == (8 * MIB, 8 * MIB, 16 * MIB)


@pytest.mark.usefixtures("_leaves_nothing")
def test_a_disk_with_too_little_room_has_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ptm_accel.hardware")
    _free(monkeypatch, 63 * MIB)
    assert measure_disk(tmp_path) is None
    assert caplog.messages == [
        f"the speed of the disk path {tmp_path} is not measured: 63.00 MiB are free and 64.00 MiB are needed; free "
        f"space there, or set disk.paths to a folder with more room."
    ]


@pytest.mark.usefixtures("_leaves_nothing")
def test_with_too_little_memory_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="ptm_accel.hardware")
    monkeypatch.setattr(measure, "available_bytes", lambda: 63 * MIB)
    assert measure_disk(tmp_path) is None
    assert caplog.messages == [
        f"the speed of the disk path {tmp_path} is not measured: 63.00 MiB of memory are available and 64.00 MiB are "
        f"needed; give the process more memory."
    ]


@pytest.mark.usefixtures("_leaves_nothing", "_short")
def test_a_transfer_that_fails_is_an_error_and_closes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: DiskTier, *arguments: object) -> None:
        raise DiskError(5, "read of it failed: no; set disk.paths.", str(tmp_path))

    monkeypatch.setattr(DiskTier, "load", fails)
    with pytest.raises(DiskError, match="read of it failed"):
        measure_disk(tmp_path)


class CopyingTier:
    """Stands in for a device: copies at once, and counts the blocks."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.blocks: Counter[str] = Counter()

    def copy_in(self, into: torch.Tensor, source: torch.Tensor) -> SimpleNamespace:
        return self._copy("in", into, source)

    def copy_out(self, into: torch.Tensor, source: torch.Tensor) -> SimpleNamespace:
        return self._copy("out", into, source)

    def _copy(self, way: str, into: torch.Tensor, source: torch.Tensor) -> SimpleNamespace:
        check_copy(into, source)
        self.blocks[way] += 1
        into.copy_(source)
        return SimpleNamespace(wait=lambda: None)


def test_a_link_is_measured_each_way_and_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: None))
    tier = CopyingTier()
    rates = measure._device_link(tier, measure.anonymous_run(64 * MIB, "a test"), 4)  # type: ignore[arg-type]
    assert min(rates.read_bytes_s, rates.write_bytes_s, rates.both_bytes_s) > MIB
    # Two to begin with, then five rounds of four alone and four beside the other way.
    assert tier.blocks == {"in": 2 + 5 * 8, "out": 2 + 5 * 8}


@pytest.mark.gpu
def test_a_device_has_rates_and_keeps_nothing() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    allocated, state = torch.cuda.memory_allocated(device), torch.cuda.get_rng_state(device)
    rates = measure_device(device)
    assert rates.update_params_s > 0
    assert rates.read_bytes_s > 0
    torch.cuda.synchronize(device)
    assert torch.cuda.memory_allocated(device) == allocated
    assert torch.equal(torch.cuda.get_rng_state(device), state)


@pytest.mark.gpu
def test_a_refused_pin_leaves_the_pageable_link(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: int, nbytes: int) -> None:
        raise OSError("cudaHostRegister failed with CUDA error 2")

    monkeypatch.setattr(measure, "register_pinned", refuse)
    rates = measure_device(torch.device("cuda"))
    assert rates.both_bytes_s > 0


@pytest.mark.gpu
def test_the_limit_on_the_card_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *arguments: limits.append(arguments))
    measure_device(torch.device("cuda"))
    assert limits == []
