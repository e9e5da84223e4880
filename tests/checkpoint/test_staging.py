"""Folders of saves: whose they are, and when they may be tidied up."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ptm_accel.checkpoint import staging as staging_module
from ptm_accel.checkpoint import writers
from ptm_accel.checkpoint.directory import is_complete, remove, remove_incomplete, staged
from ptm_accel.checkpoint.staging import StagingFolder

NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]

WRITER = """
import fcntl, os, sys
from pathlib import Path
from ptm_accel.checkpoint.directory import staged
def refuse(*_):
    raise OSError(95, "no locks here")
if sys.argv[2] == "no locks":
    fcntl.flock = refuse
with staged(Path(sys.argv[1])) as d:
    (d / "a").write_text("one")
    print(os.getpid(), flush=True)
    sys.stdin.read()
"""
TIDIER = """
import fcntl, os, sys
from pathlib import Path
from ptm_accel.checkpoint.directory import remove_incomplete, staged
def refuse(*_):
    raise OSError(95, "no locks here")
if sys.argv[2] == "no locks":
    fcntl.flock = refuse
final = Path(sys.argv[1])
gone = remove_incomplete(final.parent)
with staged(final) as d:
    (d / "a").write_text("two")
print(os.getpid(), len(gone))
"""


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.EOPNOTSUPP, "no locks here")


def start(code: str, *arguments: str, inside: bool = False) -> subprocess.Popen[str]:
    command = [*(NAMESPACE if inside else []), sys.executable, "-c", code, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def killed(folder: Path, *, locks: bool = True) -> Path:
    """What a save leaves that was killed before it was published."""
    with start(WRITER, str(folder / "c"), "locks" if locks else "no locks") as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        writer.kill()
    (left,) = folder.glob("_incomplete-c-*")
    return left


def unlocked(folder: Path) -> Path:
    """The same as by a process that could not lock."""
    left = folder / f"_incomplete-c-x{'0' * 16}"
    (left / "c").mkdir(parents=True)
    # No process has this number: it is above what the kernel gives out.
    (left / ".lock").write_text(json.dumps({**json.loads(writers.told()), "pid": 2**22 + 1}))
    return left


@pytest.fixture
def pid_namespaces() -> None:
    allowed = shutil.which("unshare") and subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True)
    if not allowed or allowed.returncode:
        pytest.skip("needs leave to make PID namespaces (unshare --pid)")


@pytest.mark.parametrize("locks", ["locks", "no locks"])
@pytest.mark.usefixtures("pid_namespaces")
def test_saves_of_equal_numbers_in_two_namespaces(locks: str, tmp_path: Path) -> None:
    final = tmp_path / "c"
    with start(WRITER, str(final), locks, inside=True) as writer:
        assert writer.stdout is not None
        assert writer.stdin is not None
        number = writer.stdout.readline().strip()
        with start(TIDIER, str(final), locks, inside=True) as tidier:
            assert tidier.communicate()[0] == f"{number} 0\n"
        # Neither does a process of this namespace take it for dead, where there is no such number or another's.
        assert remove_incomplete(tmp_path) == []
        assert (final / "a").read_text() == "two"
        writer.stdin.close()
        assert writer.wait() == 0
    assert (final / "a").read_text() == "one"
    assert names(tmp_path) == ["c"]


def test_a_save_in_another_thread_or_call_is_left_alone(tmp_path: Path) -> None:
    with staged(tmp_path / "c") as first:
        with staged(tmp_path / "c") as second:
            (second / "a").write_text("two")
        (first / "a").write_text("one")
        assert remove_incomplete(tmp_path) == []
    assert (tmp_path / "c" / "a").read_text() == "one"
    assert names(tmp_path) == ["c"]


def test_a_killed_save_goes_with_its_lock(tmp_path: Path) -> None:
    left = killed(tmp_path)
    assert not is_complete(left / "c")
    assert remove_incomplete(tmp_path) == [left]
    assert names(tmp_path) == []


def test_without_locks_the_file_says_who_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = killed(tmp_path, locks=False)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    with staged(tmp_path / "d") as staging:
        (staging / "a").touch()
        assert remove_incomplete(tmp_path, "d") == []
    assert remove_incomplete(tmp_path) == [left]
    assert names(tmp_path) == ["d"]


@pytest.mark.parametrize("key", ["host", "boot", "namespace"])
@pytest.mark.parametrize("unknown", [True, False])
def test_without_locks_a_process_of_elsewhere_counts_as_alive(
    key: str, unknown: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlocked(tmp_path)
    here = {**writers._place(), key: None if unknown else "another"}
    monkeypatch.setattr(writers, "_place", lambda: here)
    # As long as the one that writes could not lock, a lock that can be had says nothing.
    assert remove_incomplete(tmp_path) == []
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert remove_incomplete(tmp_path) == []


@pytest.mark.parametrize("said", ["", "[", "[]", "{}", '{"pid": "1"}', "[" * 1000, '{"pid": 1' + "0" * 900 + "}"])
def test_what_says_nothing_counts_as_alive(said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = unlocked(tmp_path)
    (left / ".lock").write_text(said)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert remove_incomplete(tmp_path) == []


def test_a_number_that_another_process_has_by_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = unlocked(tmp_path)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    said: dict[str, Any] = json.loads((left / ".lock").read_text())
    said["pid"] = os.getppid()
    started = writers._state(str(os.getppid()))[1]
    assert started is not None
    for ticks, gone in ((started, []), (started - 1, [left])):
        (left / ".lock").write_text(json.dumps({**said, "start": ticks}))
        assert remove_incomplete(tmp_path) == gone


def test_a_zombie_is_dead(tmp_path: Path) -> None:
    former = tmp_path / "_incomplete-c-0"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        assert writers.is_running(process.pid)
        left = former.with_name(f"_incomplete-c-{process.pid}")
        left.mkdir()
        assert remove_incomplete(tmp_path) == []
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert writers._state(str(process.pid))[0] == "Z"
        assert not writers.is_running(process.pid)
        assert remove_incomplete(tmp_path) == [left]


def test_of_another_users_process_it_is_only_known_that_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, number: int) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(os, "kill", refuse)
    assert writers.is_running(os.getpid())
    # Where /proc is hidden, or another namespace's, it says nothing of the number.
    monkeypatch.setattr(os, "readlink", lambda path: "1")
    assert writers.is_running(2**22 + 1)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_lock_that_is_no_file_is_left_alone(kind: str, tmp_path: Path) -> None:
    left = tmp_path / f"_incomplete-c-x{'0' * 16}"
    left.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("mine")
    {
        "link": lambda: (left / ".lock").symlink_to(victim),
        "pipe": lambda: os.mkfifo(left / ".lock"),
        "folder": lambda: (left / ".lock").mkdir(),
    }[kind]()
    (tmp_path / f"_incomplete-d-x{'0' * 16}").symlink_to(left)
    before = names(tmp_path)
    assert remove_incomplete(tmp_path) == []
    assert names(tmp_path) == before
    assert victim.read_text() == "mine"


def test_a_folder_that_is_tidied_up_while_it_is_made_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two of its steps another process may look: there is no lock yet, or it is not held yet."""
    opened, lock = os.open, staging_module._lock
    met = []

    def open_late(path: Any, flags: int, *mode: int) -> int:
        if str(path).endswith(".lock") and flags & os.O_CREAT and "open" not in met:
            met.append("open")
            assert remove_incomplete(tmp_path) == []
            assert names(tmp_path) == [], "an empty folder is no loss"
        return opened(path, flags, *mode)

    def lock_late(descriptor: int) -> staging_module._Lock:
        if "lock" not in met:
            met.append("lock")
            (path,) = tmp_path.iterdir()
            assert remove_incomplete(tmp_path) == [path]
        return lock(descriptor)

    monkeypatch.setattr(os, "open", open_late)
    monkeypatch.setattr(staging_module, "_lock", lock_late)
    folder = StagingFolder.make(tmp_path, "c")
    assert met == ["open", "lock"]
    assert remove_incomplete(tmp_path) == []
    assert names(folder.path) == [".lock"]
    folder.discard()
    assert names(tmp_path) == []


def test_a_part_of_what_was_replaced_is_never_put_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "c"
    for text in ("one", "two"):
        with staged(final) as staging:
            (staging / text).write_text(text)
            if text == "two":
                # As if it was killed while it removes the one before.
                monkeypatch.setattr(StagingFolder, "discard", lambda self: os.close(self._lock))
    monkeypatch.undo()
    (left,) = tmp_path.glob("_incomplete-c-*")
    shutil.rmtree(final)
    assert remove_incomplete(tmp_path) == [left]
    assert names(tmp_path) == []


def test_what_is_removed_needs_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is removed to make room, so no folder is made for that."""
    final = tmp_path / "c"
    with staged(final) as staging:
        (staging / "a").touch()

    def full(self: Path, *arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "mkdir", full)
    monkeypatch.setattr(fcntl, "flock", no_locks)
    remove(final)
    assert names(tmp_path) == []
