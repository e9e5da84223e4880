"""The file in the cache: where it lies, what is taken from it, and that nothing about it can fail a run."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ptm_accel.hardware import cache as store_module
from ptm_accel.hardware.cache import Fingerprint, RateCache, cache_directory
from tests.descriptors import open_files
from tests.hardware.machines import HERE

KEY = "disk 254:0 ext4 /dev/vda"
SHOWN = [4e9, 8e9, 6e9]


def _add(store: RateCache, key: str = KEY, rates: Sequence[float] = SHOWN) -> None:
    with store.alone():
        store.add(key, rates)


@pytest.fixture(autouse=True)
def _hear(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="ptm_accel.hardware")


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"PTM_ACCEL_CACHE": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"PTM_ACCEL_CACHE": "own"}, f"{Path.cwd()}/own"),
        ({"PTM_ACCEL_CACHE": "", "XDG_CACHE_HOME": "/xdg"}, "/xdg/ptm_accel"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/ada/.cache/ptm_accel"),
        ({}, "/home/ada/.cache/ptm_accel"),
    ],
)
def test_where_the_cache_is(environ: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PTM_ACCEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/ada", **environ}.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(folder)


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("PTM_ACCEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", none)
    assert cache_directory() is None
    store = RateCache(HERE, None)
    _add(store)
    assert store.read() == {}


def test_what_is_added_is_read_by_others_and_nothing_else_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    _add(RateCache(HERE, folder))
    store = RateCache(HERE, folder)
    assert store.read() == {KEY: SHOWN}
    _add(store, "cpu 2 threads", [3e9])
    assert RateCache(HERE, folder).read() == {KEY: SHOWN, "cpu 2 threads": [3e9]}
    assert store.path is not None
    assert {*folder.iterdir()} == {store.path, store.path.with_suffix(".lock")}


@pytest.mark.parametrize("other", [{**HERE, "cpu": "Abacus 10"}, {**HERE, "cores": 8}, {**HERE, "format": 1}])
def test_machines_that_share_a_folder_keep_their_own(tmp_path: Path, other: Fingerprint) -> None:
    _add(RateCache(HERE, tmp_path))
    _add(RateCache(other, tmp_path), "cpu 2 threads", [3e9])
    assert RateCache(HERE, tmp_path).read() == {KEY: SHOWN}
    assert RateCache(other, tmp_path).read() == {"cpu 2 threads": [3e9]}


DAMAGE = [b"", b"{", b"\xff\xfe", b'{"format": 0}', b"[]", b"7", b"null", b"[" * 100_000, b'{"machine": 1, "rates": 2}']


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_ignored_said_and_replaced(
    tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    store = RateCache(HERE, tmp_path)
    assert store.path is not None
    store.path.write_bytes(damage)
    assert store.read() == {}
    assert "measured again" in caplog.text
    assert str(store.path) in caplog.text
    _add(store)
    assert store.read() == {KEY: SHOWN}


def test_a_file_of_another_machine_is_ignored(tmp_path: Path) -> None:
    _add(RateCache(HERE, tmp_path))
    mine, theirs = RateCache({**HERE, "torch": "3.0"}, tmp_path), RateCache(HERE, tmp_path)
    assert mine.path is not None
    assert theirs.path is not None
    theirs.path.rename(mine.path)
    assert mine.read() == {}


def test_a_file_that_is_a_folder_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = RateCache(HERE, tmp_path)
    path = store.path
    assert path is not None
    path.mkdir()
    assert store.read() == {}
    _add(store)
    assert store.read() == {}
    assert "cannot be read" in caplog.text
    assert {*tmp_path.iterdir()} == {path, path.with_suffix(".lock")}


def test_a_folder_that_cannot_be_made_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    store = RateCache(HERE, blocked / "cache")
    entered = 0
    for _ in range(2):
        with store.alone():
            entered += 1
            store.add(KEY, SHOWN)
    assert entered == 2
    said = [record.getMessage() for record in caplog.records if "cannot be stored" in record.getMessage()]
    assert said == [
        f"the hardware profile cannot be stored in {blocked / 'cache'} (Not a directory), so each process measures "
        f"anew; set PTM_ACCEL_CACHE to a folder that can be written to."
    ]


@pytest.mark.parametrize("suffix", [".json", ".lock", ".tmp"])
@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_what_others_have_put_into_the_folder_is_neither_followed_nor_waited_for(
    suffix: str, kind: str, tmp_path: Path
) -> None:
    folder, victim = tmp_path / "shared", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    store = RateCache(HERE, folder)
    assert store.path is not None
    place = store.path.with_suffix(suffix)
    if kind == "pipe":
        os.mkfifo(place)
    else:
        place.symlink_to(victim if kind == "link" else "/dev/zero")
    assert store.find(KEY, "a disk", len(SHOWN), lambda: tuple(SHOWN)) == tuple(SHOWN)
    assert victim.read_text() == "mine"
    if suffix == ".lock":
        # Without a lock nothing is kept.
        assert {*folder.iterdir()} == {place}
        return
    assert RateCache(HERE, folder).read() == {KEY: SHOWN}
    assert victim.read_text() == "mine"


def _no_room(source: Path, target: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_leaves_the_old_file_and_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _add(RateCache(HERE, tmp_path))
    monkeypatch.setattr(Path, "replace", _no_room)
    _add(RateCache(HERE, tmp_path), "cpu 2 threads", [3e9])
    store = RateCache(HERE, tmp_path)
    assert store.path is not None
    assert store.read() == {KEY: SHOWN}
    assert {*tmp_path.iterdir()} == {store.path, store.path.with_suffix(".lock")}


def test_one_measures_at_a_time(tmp_path: Path) -> None:
    store = RateCache(HERE, tmp_path)
    assert store.path is not None
    with store.alone(), open(store.path.with_suffix(".lock")) as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with open(store.path.with_suffix(".lock")) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _never(fd: int, operation: int) -> None:
    raise BlockingIOError


def _unknown(fd: int, operation: int) -> None:
    raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))


@pytest.mark.parametrize("flock", [_never, _unknown])
def test_a_lock_that_cannot_be_had_does_not_stop_anyone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flock: Callable[[int, int], None]
) -> None:
    monkeypatch.setattr(fcntl, "flock", flock)
    monkeypatch.setattr(store_module, "_PATIENCE_S", 0.1)
    descriptors = open_files()
    store = RateCache(HERE, tmp_path)
    with store.alone():
        store.add(KEY, SHOWN)
    assert store.read() == {KEY: SHOWN}
    assert not open_files() - descriptors
