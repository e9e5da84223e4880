"""Checkpoint directories: complete or not there, whatever fails or is killed."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from huggingface_hub.utils import filter_repo_objects

from ptm_accel.checkpoint.directory import is_complete, remove, remove_incomplete, staged
from ptm_accel.errors import DiskError


def write(directory: Path, text: str) -> None:
    (directory / "sub").mkdir()
    (directory / "sub" / "a").write_text(text)


def save_failing(final: Path, error: BaseException) -> None:
    with staged(final) as staging:
        (staging / "big").write_bytes(bytes(4096))
        raise error


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_directory_appears_as_a_whole(tmp_path: Path) -> None:
    final = tmp_path / "run" / "checkpoint-1"
    with staged(final) as staging:
        assert staging.parent.parent == final.parent
        assert staging.name == final.name
        assert re.fullmatch(r"_incomplete-checkpoint-1-x[0-9a-f]{16}", staging.parent.name)
        write(staging, "one")
        assert not final.exists()
        assert not is_complete(staging)
    assert (final / "sub" / "a").read_text() == "one"
    assert is_complete(final)
    assert names(final.parent) == ["checkpoint-1"]


def test_everything_is_synced_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def note_sync(descriptor: int) -> None:
        events.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(self: Path, target: Path) -> Path:
        events.append("rename")
        return rename(self, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "rename", note_rename)
    with staged(tmp_path / "c") as staging:
        write(staging, "one")
    before = {Path(e).relative_to(staging).as_posix() for e in events[: events.index("rename")]}
    assert before == {".", "sub", "sub/a"}
    assert events[events.index("rename") + 1 :] == [str(tmp_path)]


def test_an_existing_directory_is_replaced(tmp_path: Path) -> None:
    final = tmp_path / "c"
    for text in ("one", "two"):
        with staged(final) as staging:
            write(staging, text)
    assert (final / "sub" / "a").read_text() == "two"
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_failed_save_leaves_the_old_one(tmp_path: Path, error: BaseException) -> None:
    final = tmp_path / "c"
    with staged(final) as staging:
        write(staging, "one")
    with pytest.raises(type(error)):
        save_failing(final, error)
    assert (final / "sub" / "a").read_text() == "one"
    assert names(tmp_path) == ["c"]


def test_a_failed_rename_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "c"
    with staged(final) as staging:
        write(staging, "one")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.parent.name.startswith("_incomplete") and self.name == "c":
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(DiskError, match="cannot save c: Input/output error"), staged(final) as staging:
        write(staging, "two")
    assert (final / "sub" / "a").read_text() == "one"
    assert names(tmp_path) == ["c"]


@pytest.mark.parametrize("older", [True, False])
def test_renames_that_are_not_synced_are_taken_back(
    older: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "c"
    if older:
        with staged(final) as staging:
            write(staging, "one")
    fsync = os.fsync

    def fail(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}") == str(tmp_path):
            raise OSError(errno.EIO, "broken")
        fsync(descriptor)

    kept = "The checkpoint that was there before is" if older else "Earlier checkpoints are"
    message = rf"cannot save c: Input/output error after 3 B, .*\. {kept} intact; what was written is removed\."
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(DiskError, match=message), staged(final) as staging:
            write(staging, "two")
    assert names(tmp_path) == (["c"] if older else [])
    if older:
        assert (final / "sub" / "a").read_text() == "one"


def test_renames_that_cannot_be_taken_back_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "c"
    with staged(final) as staging:
        write(staging, "one")
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name.startswith("_incomplete") or target.name == "c":
            raise OSError(errno.EIO, "broken")
        return rename(self, target)

    message = r"cannot sync c to disk: \[Errno 5\] broken, and its renames cannot be undone: broken\. After a power cut"
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(DiskError, match=message), staged(final) as staging:
            write(staging, "two")
    # The one before is put back when there is a disk again.
    remove_incomplete(tmp_path)
    assert (final / "sub" / "a").read_text() == "one"


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:862] PytorchStreamWriter failed writing file data/0"),
    ],
)
def test_a_full_disk_is_said_with_numbers(tmp_path: Path, error: BaseException) -> None:
    final = tmp_path / "checkpoint-7"
    with staged(final) as staging:
        write(staging, "one")
    message = (
        r"cannot save checkpoint-7: No space left on device after 4096 B, with .* free then\. The checkpoint that was "
        r"there before is intact; what was written is removed\. Free space, lower save_total_limit, or set output_dir"
    )
    with pytest.raises(DiskError, match=message) as caught:
        save_failing(final, error)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(final)
    assert (final / "sub" / "a").read_text() == "one"
    assert names(tmp_path) == ["checkpoint-7"]


def test_is_complete(tmp_path: Path) -> None:
    assert not is_complete(tmp_path / "missing")
    (tmp_path / "empty").mkdir()
    assert not is_complete(tmp_path / "empty")
    aside = tmp_path / "_replaced-c-12"
    aside.mkdir()
    (aside / "a").touch()
    assert not is_complete(aside)


KILLED = """
import os, signal, sys
from pathlib import Path
from ptm_accel.checkpoint import directory
final = Path(sys.argv[1])
def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "renaming":
    rename = Path.rename
    Path.rename = lambda self, target: kill() if self.parent.name.startswith("_incomplete") else rename(self, target)
with directory.staged(final) as staging:
    (staging / "a").write_text("two")
    if sys.argv[2] == "writing":
        kill()
"""


@pytest.mark.parametrize("moment", ["writing", "renaming"])
@pytest.mark.parametrize("older", [True, False])
def test_a_killed_save_is_tidied_up(tmp_path: Path, moment: str, older: bool) -> None:
    final = tmp_path / "c"
    if older:
        with staged(final) as staging:
            (staging / "a").write_text("one")
    done = subprocess.run([sys.executable, "-c", KILLED, str(final), moment], check=False)
    assert done.returncode == -signal.SIGKILL
    assert any(name.startswith("_incomplete-c-") for name in names(tmp_path))
    gone = remove_incomplete(tmp_path)
    assert len(gone) == 1
    assert names(tmp_path) == (["c"] if older else [])
    if older:
        assert (final / "a").read_text() == "one"


def test_a_finished_replacement_is_removed(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    aside = tmp_path / f"_replaced-c-{os.getpid()}"
    aside.mkdir()
    assert remove_incomplete(tmp_path) == [aside]
    assert names(tmp_path) == ["c"]


def test_a_save_that_still_runs_elsewhere_is_left_alone(tmp_path: Path) -> None:
    code = "import sys; from ptm_accel.checkpoint.directory import staged\nfrom pathlib import Path\n"
    code += "with staged(Path(sys.argv[1])) as d:\n    print('open', flush=True); sys.stdin.read()\n    (d/'a').touch()"
    command = [sys.executable, "-c", code, str(tmp_path / "c")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"open\n"
        assert remove_incomplete(tmp_path) == []
    assert is_complete(tmp_path / "c")


def test_a_number_that_was_given_to_a_younger_process_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent = os.getppid()
    stale = tmp_path / f"_incomplete-c-{parent}"
    stale.mkdir()
    assert remove_incomplete(tmp_path) == []
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: time.time() + 60)
    assert remove_incomplete(tmp_path) == [stale]
    assert names(tmp_path) == []


def test_what_is_not_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "_incomplete-notes").mkdir()
    (tmp_path / f"_incomplete-c-{os.getpid()}").write_text("a file")
    before = names(tmp_path)
    assert remove_incomplete(tmp_path) == []
    assert names(tmp_path) == before
    assert remove_incomplete(tmp_path / "missing") == []


def test_a_leftover_that_cannot_be_removed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leftover = tmp_path / f"_incomplete-c-{os.getpid()}"
    leftover.mkdir()

    def fail(path: Path) -> None:
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("ptm_accel.checkpoint.directory.shutil.rmtree", fail)
    with pytest.raises(DiskError, match="cannot tidy up _incomplete-c-.*: Permission denied. Remove it by hand"):
        remove_incomplete(tmp_path)


@pytest.mark.parametrize("links", [True, False])
def test_what_others_have_put_there_stays(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:
        monkeypatch.setattr(os, "link", lambda *a, **k: (_ for _ in ()).throw(OSError(errno.EPERM, "no links here")))
    final = tmp_path / "c"
    (final / "theirs" / "deep").mkdir(parents=True)
    (final / "theirs" / "deep" / "a").write_text("a")
    (final / "notes").write_text("notes")
    (final / "nowhere").symlink_to("missing")
    (final / "state-1").write_text("old")
    (final / "both").write_text("old")
    with staged(final, outdated=re.compile(r"state-\d")) as staging:
        (staging / "both").write_text("new")
        (staging / "state-2").write_text("new")
    assert names(final) == ["both", "notes", "nowhere", "state-2", "theirs"]
    assert [(final / name).read_text() for name in ("both", "notes", "state-2")] == ["new", "notes", "new"]
    assert (final / "theirs" / "deep" / "a").read_text() == "a"
    assert os.readlink(final / "nowhere") == "missing"
    assert names(tmp_path) == ["c"]


def test_what_is_removed_is_never_there_in_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = tmp_path / "c"
    with staged(final) as staging:
        write(staging, "one")
    remove(final)
    assert names(tmp_path) == []
    with staged(final) as staging:
        write(staging, "two")
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda path: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            remove(final)
    assert not final.exists()
    assert [path.name[:14] for path in remove_incomplete(tmp_path)] == ["_incomplete-c-"]
    assert names(tmp_path) == []
    with pytest.raises(FileNotFoundError):
        remove(final)


def test_a_link_is_left_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "c").symlink_to("elsewhere")
    with pytest.raises(OSError, match="it is a link to a directory"):
        remove(tmp_path / "c")
    assert names(tmp_path) == ["c", "elsewhere"]


def test_leftovers_under_their_former_names_are_tidied_up(tmp_path: Path) -> None:
    (tmp_path / f".incomplete-c-{os.getpid()}").mkdir()
    aside = tmp_path / f".replaced-d-{os.getpid()}"
    aside.mkdir()
    (aside / "a").write_text("a")
    assert len(remove_incomplete(tmp_path)) == 2
    assert names(tmp_path) == ["d"]


def test_what_is_under_way_is_not_uploaded(tmp_path: Path) -> None:
    """The Trainer uploads the folder of a run but for what these patterns leave out."""
    with staged(tmp_path / "checkpoint-1") as staging:
        names = [f"{staging.relative_to(tmp_path)}/model.safetensors", "README.md"]
        assert list(filter_repo_objects(names, ignore_patterns=["_*", "checkpoint-*"])) == ["README.md"]
        write(staging, "one")
