"""Checkpoint directories that are either complete or not there.

Everything is written into a folder beside the final one, synced, and renamed. So a directory that has its own name
is complete, whatever was killed when; what a killed save leaves behind has a name that nobody looks for, and the next
save of that name, or `remove_incomplete`, tidies it up.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ptm_accel.checkpoint.crc import threads
from ptm_accel.checkpoint.manifest import Sums, completed, covered, write_manifest
from ptm_accel.checkpoint.staging import PREFIX, RANDOM, StagingFolder
from ptm_accel.checkpoint.writers import is_running
from ptm_accel.errors import DiskError
from ptm_accel.units import format_bytes

_LEFTOVER = re.compile(rf"^{PREFIX}-(?P<name>.+)-{RANDOM}$")
_FORMER_LEFTOVER = re.compile(r"^[._](?P<kind>incomplete|replaced)-(?P<name>.+)-(?P<pid>\d+)$")
"""As versions up to 0.1 named them: what was moved aside had a directory of its own."""
_REPORTED = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS)


@contextmanager
def staged(final: Path, *, outdated: re.Pattern[str] | None = None, sums: Sums | None = None) -> Iterator[Path]:
    """Writes a directory so that it appears complete under its name, or not at all.

    An existing `final` is replaced as a whole, or but for what others have put there. If the save fails or is killed,
    it is still there (after a kill between two renames, once `remove_incomplete` has put it back).

    Args:
        final: where the directory is to be.
        outdated: names of what is not taken over from an existing `final`, beside what was written anew; None for all.
        sums: what is known of files that are written, by their paths, when the block ends; with it the directory gets a
            manifest, for which others are read. None for no manifest.

    Yields:
        an empty directory on the same file system to write into.

    Raises:
        DiskError: the file system is full or failed; what was written is removed, an older `final` is intact.
    """
    final = Path(final)
    folder: StagingFolder | None = None
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        remove_incomplete(final.parent, final.name)
        folder = StagingFolder.make(final.parent, final.name)
        staging = folder.written
        staging.mkdir()
        yield staging
        written = [] if sums is None else covered(staging)
        if outdated is not None and final.is_dir():
            _take_over(final, staging, outdated)
        with ThreadPoolExecutor(1) as beside, threads() as pool:
            # The disk writes while files are read that are still in memory.
            synced = beside.submit(_sync_tree, staging)
            found = completed(staging, written, sums or {}, pool)
            synced.result()
        if sums is not None:
            _sync(write_manifest(staging, found))
            _sync(staging)
        _publish(folder, final)
    except BaseException as error:
        refusal = _failure(error, folder, final)
        _discard(folder)
        if refusal is not None:
            raise refusal from error
        raise


def _take_over(before: Path, staging: Path, outdated: re.Pattern[str]) -> None:
    """Has what lies in `before`, and was not written anew, in `staging` as well; files are linked where possible."""
    for path in before.iterdir():
        place = staging / path.name
        if outdated.fullmatch(path.name) or os.path.lexists(place):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, place, symlinks=True, copy_function=_link)
        else:
            _link(path, place)


def _link(source: str | Path, place: str | Path) -> None:
    try:
        os.link(source, place, follow_symlinks=False)
    except OSError:
        # Not every file system has links.
        shutil.copy2(source, place, follow_symlinks=False)


def is_complete(path: Path) -> bool:
    """Whether `path` is a directory that was published as a whole: one that has its own name and is not empty."""
    path = Path(path)
    leftover = _LEFTOVER.match(path.name) or _FORMER_LEFTOVER.match(path.name) or _LEFTOVER.match(path.parent.name)
    return path.is_dir() and leftover is None and any(path.iterdir())


def remove_incomplete(run_dir: Path, name: str | None = None) -> list[Path]:
    """Tidies up after saves that were killed.

    Directories of saves that still run in another process are left alone. A complete checkpoint that such a save had
    moved aside, without getting to put the new one in its place, is put back.

    Args:
        run_dir: the directory that holds the checkpoints; it may be missing.
        name: of the one checkpoint whose leftovers are looked for; by default of all.

    Returns:
        the leftovers that are gone now: removed, or renamed back.

    Raises:
        DiskError: one of them cannot be removed.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        return []
    gone = []
    for path in sorted(run_dir.iterdir()):
        found = _LEFTOVER.match(path.name) or _FORMER_LEFTOVER.match(path.name)
        if found is None or name not in (None, found["name"]) or path.is_symlink() or not path.is_dir():
            continue
        final = run_dir / found["name"]
        try:
            tidied = _tidy_former(path, final, found) if found.re is _FORMER_LEFTOVER else _tidy(path, final)
        except OSError as error:
            raise DiskError(
                error.errno,
                f"cannot tidy up {path.name}, which a killed save has left: {error.strerror}. Remove it by hand",
                str(path),
            ) from error
        if tidied:
            gone.append(path)
    if gone:
        _sync(run_dir)
    return gone


def _tidy(path: Path, final: Path) -> bool:
    """Tidies up the folder of a save, unless that still runs; returns whether."""
    folder = StagingFolder.left(path, final.name)
    if folder is None:
        return False
    try:
        if folder.put_back(final):
            # Before anything else of it is gone, its name must be on the disk.
            _sync(final.parent)
    finally:
        folder.discard()
    return True


def _tidy_former(path: Path, final: Path, found: re.Match[str]) -> bool:
    """The same for what an earlier version has left."""
    if _still_written(path, int(found["pid"])):
        return False
    if found["kind"] == "replaced" and not final.exists():
        path.rename(final)
    else:
        shutil.rmtree(path)
    return True


def remove(path: Path) -> None:
    """Removes a directory so that it is never seen in part under its name.

    Raises:
        OSError: it is a link, or cannot be removed; if that shows only after it was renamed, what is left is tidied up
            later.
    """
    path = Path(path)
    if path.is_symlink():
        # Renamed, it would be a leftover that cannot be tidied up.
        raise OSError(errno.ENOTDIR, "it is a link to a directory", str(path))
    StagingFolder.taking(path).discard()


def _publish(folder: StagingFolder, final: Path) -> None:
    """Gives what was written its name, moving what was there aside for as long as that takes."""
    staging, aside = folder.written, folder.before
    had = final.exists()
    if had:
        final.rename(aside)
    try:
        staging.rename(final)
        # Until then the names may not be on the disk, and the files of the one before must not go.
        _sync(final.parent)
    except BaseException as error:
        _take_back(staging, final, aside, error)
        raise
    if had:
        folder.give_up_before()
    _discard(folder)


def _discard(folder: StagingFolder | None) -> None:
    """Removes a folder; what cannot be removed is a leftover then, which is tidied up later."""
    if folder is not None:
        with suppress(OSError):
            folder.discard()


def _take_back(staging: Path, final: Path, aside: Path, error: BaseException) -> None:
    """Undoes the renames of a directory that could not be published.

    Raises:
        DiskError: that fails as well.
    """
    try:
        if not staging.exists():
            final.rename(staging)
        if aside.exists():
            aside.rename(final)
    except OSError as again:
        raise DiskError(
            again.errno,
            f"cannot sync {final.name} to disk: {error}, and its renames cannot be undone: {again.strerror}. After a "
            "power cut that name may be another directory's. Check the disk, or set output_dir elsewhere",
            str(final),
        ) from error


def _still_written(path: Path, pid: int) -> bool:
    """Returns whether the process of an earlier version that was writing `path` is alive, and not this one."""
    if pid == os.getpid() or not is_running(pid):
        return False
    try:
        # A process that is younger than the directory only has its number from the one that wrote it.
        return bool(psutil.Process(pid).create_time() <= path.stat().st_ctime)
    except (psutil.Error, OSError):
        return True


def _sync_tree(top: Path) -> None:
    """Brings every file and directory under `top` to the disk."""
    for folder, _, files in os.walk(top):
        for name in files:
            path = os.path.join(folder, name)
            if not stat.S_ISREG(os.lstat(path).st_mode):
                # A link is part of its directory; to open anything else of somebody's may block.
                continue
            _sync(path)
        _sync(folder)


def _sync(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems do not sync directories; their renames are as safe as they make them.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _failure(error: BaseException, folder: StagingFolder | None, final: Path) -> DiskError | None:
    """What a failed save is reported as, where the file system is the reason; None for any other error."""
    number = _number_of(error)
    if isinstance(error, DiskError) or number not in _REPORTED:
        return None
    kept = "The checkpoint that was there before is intact" if final.exists() else "Earlier checkpoints are intact"
    files = () if folder is None else folder.written.rglob("*")
    written = sum(path.stat().st_size for path in files if path.is_file())
    free = _free_bytes(final.parent)
    return DiskError(
        number,
        f"cannot save {final.name}: {os.strerror(number)} after {format_bytes(written)}, with {format_bytes(free)} "
        f"free then. {kept}; what was written is removed. Free space, lower save_total_limit, or set output_dir "
        "elsewhere",
        str(final),
    )


def _number_of(error: BaseException) -> int | None:
    """Returns the system's number of an error, which safetensors and `torch.save` tell in their text."""
    if isinstance(error, OSError) and error.errno:
        return error.errno
    if found := re.search(r"os error (\d+)", str(error)):
        return int(found[1])
    return errno.ENOSPC if re.search("no space left on device|PytorchStreamWriter failed", str(error), re.I) else None


def _free_bytes(folder: Path) -> int:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return 0
