"""The folder that a save works in: nobody else may tidy it up as long as the process that made it lives.

That is told by a lock (`flock`) on a file in it, which the kernel lets go of when the process ends, in whatever PID
namespace it is. Where the file system has no locks, the file says which process it is. Names have a random part, so
that no two saves can have the same one.
"""

from __future__ import annotations

import enum
import fcntl
import os
import secrets
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from ptm_accel.checkpoint.writers import is_dead, told

# With an underscore the Trainer leaves them out where it uploads the run's directory.
PREFIX = "_incomplete"
RANDOM = r"x[0-9a-f]{16}"
"""Pattern of the random part of a name; never like a number of a process."""

_LOCK = ".lock"
_BEFORE = ".before"
_GONE = ".gone"
_SAID_BYTES = 1024


class _Lock(enum.Enum):
    OURS = "ours"
    TAKEN = "another process has it"
    NONE = "none: the file system has no locks"


class StagingFolder:
    """One folder `_incomplete-NAME-RANDOM`, whose lock this process holds.

    Attributes:
        path: the folder.
        written: what is to be published, within; not there yet.
        before: where a directory of that name is put for as long as it is replaced.
    """

    def __init__(self, path: Path, name: str, lock: int) -> None:
        self.path = path
        self.written = path / name
        self.before = path / _BEFORE
        self._lock = lock

    @classmethod
    def make(cls, parent: Path, name: str) -> StagingFolder:
        """Makes a new one.

        Args:
            parent: where.
            name: of what is to be written.

        Raises:
            OSError: it cannot be made.
        """
        while True:
            path = _unused(parent, name)
            path.mkdir()
            try:
                flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
                lock = os.open(path / _LOCK, flags, 0o600)
            except FileNotFoundError:
                # It was empty, and another process has tidied it up.
                continue
            state = _hold(lock)
            # Until it was locked, another process may have taken it for a leftover.
            if state is not _Lock.TAKEN and (path / _LOCK).exists():
                return cls(path, name, lock)
            os.close(lock)

    @classmethod
    def taking(cls, path: Path) -> StagingFolder:
        """Renames a directory that is to be removed, so that it is one; that needs no room on the disk.

        Args:
            path: the directory.

        Raises:
            OSError: it cannot be renamed.
        """
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _hold(lock)
            return cls(path.rename(_unused(path.parent, path.name)), path.name, lock)
        except BaseException:
            os.close(lock)
            raise

    @classmethod
    def left(cls, path: Path, name: str) -> StagingFolder | None:
        """Takes over one that a killed save has left; None if its process lives, or may live.

        Args:
            path: the folder.
            name: of what was written.
        """
        try:
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            # It is being made, or its removal was stopped at the very end.
            with suppress(OSError):
                path.rmdir()
            return None
        except OSError:
            return None
        if stat.S_ISREG(os.fstat(lock).st_mode):
            state = _lock(lock)
            said = os.pread(lock, _SAID_BYTES, 0).decode(errors="replace")
            # A process that has said which it is could not lock the file, where others perhaps can.
            ended = is_dead(said) if said else state is _Lock.OURS
            if ended and state is not _Lock.TAKEN:
                return cls(path, name, lock)
        os.close(lock)
        return None

    def put_back(self, final: Path) -> bool:
        """Gives what was moved aside its name again, unless there is another of that name by now; returns whether."""
        if not os.path.lexists(self.before):
            return False
        if not os.path.lexists(final):
            self.before.rename(final)
            return True
        self.give_up_before()
        return False

    def give_up_before(self) -> None:
        """Has what was moved aside removed with the rest; renamed first, since a part of it must never be put back."""
        with suppress(FileNotFoundError):
            self.before.rename(self.path / _GONE)

    def discard(self) -> None:
        """Removes the folder with all in it, but for what was moved aside and not put back; lets go of the lock.

        Raises:
            OSError: something cannot be removed.
        """
        try:
            for entry in list(self.path.iterdir()):
                if entry.name in (_LOCK, _BEFORE):
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    shutil.rmtree(entry)
                else:
                    entry.unlink()
        finally:
            # A network file system keeps a file's name as long as it is open.
            os.close(self._lock)
        if not os.path.lexists(self.before):
            # Last, since without it nobody can tell whose folder this is.
            (self.path / _LOCK).unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                self.path.rmdir()


def _unused(parent: Path, name: str) -> Path:
    return parent / f"{PREFIX}-{name}-x{secrets.token_hex(8)}"


def _hold(descriptor: int) -> _Lock:
    """Locks a file for as long as this process lives, or says in it which process that is."""
    state = _lock(descriptor)
    if state is _Lock.NONE:
        os.write(descriptor, told().encode())
    return state


def _lock(descriptor: int) -> _Lock:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _Lock.TAKEN
    except OSError:
        return _Lock.NONE
    return _Lock.OURS
