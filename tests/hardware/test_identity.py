"""The fingerprint of a machine, and the names of disks."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from ptm_accel.hardware.cache import disk_key, machine_fingerprint


def test_this_machine_is_the_same_each_time_and_starts_no_cuda() -> None:
    found = machine_fingerprint()
    assert found == machine_fingerprint()
    assert found["cpu"]
    assert found["kernel"] == os.uname().release
    assert found["torch"] == torch.__version__
    assert found["cores"] == len(os.sched_getaffinity(0))


def test_gpus_and_driver_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Abacus  9\nmodel name\t: Other\n")
    driver = tmp_path / "driver/nvidia"
    for number, model in enumerate(("Card Y", "Card X")):
        folder = driver / f"gpus/0000:{number}"
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA {model}\nIRQ:   \t\t 7\n")
    (driver / "version").write_text("NVRM version: NVIDIA UNIX Kernel Module  550.54\nGCC version:  gcc 12\n")
    found = machine_fingerprint(tmp_path)
    assert (found["cpu"], found["gpus"]) == ("Abacus 9", "NVIDIA Card X, NVIDIA Card Y")
    assert found["driver"] == "NVIDIA UNIX Kernel Module 550.54"


def test_a_machine_that_tells_nothing_has_a_fingerprint_too(tmp_path: Path) -> None:
    found = machine_fingerprint(tmp_path)
    assert (found["gpus"], found["driver"]) == ("", "")
    assert found["cpu"]


def test_folders_of_one_disk_have_one_key(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(inner)
    number = tmp_path.stat().st_dev
    assert disk_key(inner) == disk_key(tmp_path) == disk_key(link)
    assert disk_key(tmp_path).startswith(f"{os.major(number)}:{os.minor(number)} ")
    assert disk_key(tmp_path) != disk_key(Path("/proc"))


def test_the_innermost_mount_counts_and_of_several_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = psutil.disk_partitions(all=True)[0]
    mounts = [
        part._replace(mountpoint=str(tmp_path), fstype="hidden", device="under"),
        part._replace(mountpoint=str(tmp_path), fstype="xfs", device="/dev/one"),
        part._replace(mountpoint="/", fstype="ext4", device="/dev/root"),
        part._replace(mountpoint=f"{tmp_path}-not", fstype="nfs", device="elsewhere"),
    ]
    monkeypatch.setattr(psutil, "disk_partitions", lambda **options: mounts)
    assert disk_key(tmp_path).endswith(" xfs /dev/one")
    assert disk_key(tmp_path.parent).endswith(" ext4 /dev/root")
    monkeypatch.setattr(psutil, "disk_partitions", lambda **options: [])
    assert disk_key(tmp_path).endswith(" unknown unknown")


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        disk_key(tmp_path / "missing")
