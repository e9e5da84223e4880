"""Values that are read from the file they came in, a checkpoint, until they are first written to.

What comes onto pages and has no room there would otherwise be read, written to the home and read again before anything
is computed. Only a file that can be told to hold the very values that the tensor shows will do: one that is mapped, and
has not been written to through that mapping.
"""

from __future__ import annotations

import errno
import os
import stat
import weakref
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ptm_accel.errors import DiskError
from ptm_accel.memory.mapping import view_at
from ptm_accel.memory.page_map import page_map

_MANY_LOADS = 8
"""What has been read so often from its file without having been written to is better off in the home, which is read
beside compute: a file that is not read in aligned pieces is read by whoever waits for it."""

_COMPARED_BYTES = 64
"""Of the beginning of a tensor, beside the file's number: what tells apart files that have the same one by now."""

_sources: weakref.WeakSet[Source] = weakref.WeakSet()
"""All that there are, to be abandoned in children."""


class Source(ABC):
    """What values are read from."""

    def __init__(self) -> None:
        _sources.add(self)

    @abstractmethod
    def read(self, offset: int, into: memoryview) -> None:
        """Reads until `into` is full.

        Raises:
            DiskError: it cannot be read, or it is not what it was.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Lets go of it: in a child made by `fork`, which would keep files that have no name any more."""


def _abandon_all() -> None:
    for source in list(_sources):
        source.abandon()


os.register_at_fork(after_in_child=_abandon_all)


def no_source(path: str) -> DiskError:
    """The error of whoever reads from an abandoned source."""
    return DiskError(
        errno.EBADF, f"{path} is read in the process that made the model, not in those forked from it", path
    )


class OriginFile(Source):
    """A file that must stay as it is as long as values are to be read from it. It may lose its name.

    Args:
        path: where it is.

    Attributes:
        path: see above.
        identity: device and inode.
        regular: whether it is a file, and not a device or a pipe.

    Raises:
        OSError: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._fd)
        found = os.fstat(self._fd)
        self.identity = found.st_dev, found.st_ino
        self.regular = stat.S_ISREG(found.st_mode)
        self._version = found.st_size, found.st_mtime_ns

    def read(self, offset: int, into: memoryview) -> None:
        """See `Source`."""
        if not self._close.alive:
            raise no_source(self.path)
        done = 0
        try:
            while done < len(into):
                part = os.preadv(self._fd, [into[done:]], offset + done)
                if not part:
                    break
                done += part
            found = os.fstat(self._fd)
        except OSError as error:
            raise DiskError(error.errno, f"cannot read {self.path}: {error.strerror}", self.path) from error
        if done < len(into) or self._version != (found.st_size, found.st_mtime_ns):
            raise DiskError(
                errno.ESTALE,
                f"{self.path} was changed ({self._version[0]} bytes when it was loaded, {found.st_size} now), and "
                "values are still read from it. Do not write to a checkpoint that a run has been started from until "
                "each of its parameters has been updated, which the first step need not do; put it back, or save to "
                "another folder.",
                self.path,
            )

    def abandon(self) -> None:
        """See `Source`."""
        self._close()


class Origin:
    """Where in a file the values of a tensor begin.

    Args:
        source: the file.
        offset: of the first byte.
        nbytes: how many there are.
    """

    __slots__ = ("_loads", "_offset", "_source", "nbytes")

    def __init__(self, source: Source, offset: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self._source = source
        self._offset = offset
        self._loads = 0

    @property
    def suits(self) -> bool:
        """Whether what is read from here may be dropped, to be read from here again."""
        return self._loads < _MANY_LOADS

    def load(self, begin: int, into: torch.Tensor) -> OriginRead:
        """Loads the bytes from `begin` on, once somebody waits for them; what lies beyond the last is left as it is.

        Args:
            begin: the first byte, counted from that of the values.
            into: 1-D octets.
        """
        self._loads += begin == 0
        nbytes = max(0, min(into.numel(), self.nbytes - begin))
        return OriginRead(self._source, self._offset + begin, into[:nbytes])


class OriginRead:
    """A `Transfer` from a file, carried out by whoever waits for it: nothing moves before, nor without that."""

    __slots__ = ("_into", "_offset", "_source")

    def __init__(self, source: Source, offset: int, into: torch.Tensor) -> None:
        self._source = source
        self._offset = offset
        self._into: torch.Tensor | None = into

    def done(self) -> bool:
        """Whether nothing is being moved: always."""
        return True

    def wait(self) -> None:
        """Reads, the first time.

        Raises:
            DiskError: as `Source.read`; the next time it is tried again.
        """
        if self._into is not None:
            self._source.read(self._offset, view_at(self._into.data_ptr(), self._into.numel()))
            self._into = None

    def order(self) -> None:
        """As `wait`."""
        self.wait()


class _Mapped(NamedTuple):
    begin: int
    end: int
    offset: int
    identity: tuple[int, int]
    private: bool
    path: str


@dataclass(slots=True)
class Origins:
    """Finds the files that tensors are mapped from, as they are when this is made."""

    _mapped: list[_Mapped]
    _files: dict[str, OriginFile | None]

    @classmethod
    def now(cls) -> Origins:
        """Looks at the mappings of this process. There are none where the system does not show them."""
        with suppress(OSError):
            return cls(sorted(_mappings()), {})
        return cls([], {})

    def of(self, tensor: torch.Tensor) -> Origin | None:
        """Where a contiguous tensor of this machine's memory was read from; None if that is not known for certain."""
        if type(tensor) is not torch.Tensor or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        index = bisect_right(self._mapped, begin, key=lambda mapped: mapped.begin) - 1
        if index < 0 or not tensor.nbytes or tensor.is_conj() or tensor.is_neg():
            return None
        mapped = self._mapped[index]
        if end > mapped.end or not mapped.private:
            return None
        file, offset = self._file(mapped), mapped.offset + begin - mapped.begin
        # The comparison first: the page that it looks at has to be in the page map then.
        if file is None or not _begins_alike(file, offset, tensor) or _written(begin, end):
            return None
        return Origin(file, offset, tensor.nbytes)

    def _file(self, mapped: _Mapped) -> OriginFile | None:
        if mapped.path not in self._files:
            self._files[mapped.path] = None
            with suppress(OSError):
                found = OriginFile(mapped.path)
                if found.regular and found.identity == mapped.identity:
                    self._files[mapped.path] = found
        return self._files[mapped.path]


def _mappings() -> Iterator[_Mapped]:
    layered = _layered_devices()
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        for line in lines:
            addresses, permissions, offset, device, inode, *path = line.rstrip("\n").split(maxsplit=5)
            if inode == "0" or not path or device in layered:
                continue
            begin, end = (int(part, 16) for part in addresses.split("-"))
            major, minor = (int(part, 16) for part in device.split(":"))
            identity = os.makedev(major, minor), int(inode)
            yield _Mapped(begin, end, int(offset, 16), identity, permissions[3] == "p", path[0])


def _layered_devices() -> set[str]:
    """The devices whose files may be others than what was mapped under the same number: written to, they are copied."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape", newline="\n") as lines:
        mounts = [line.split() for line in lines]
    # As `major:minor`, in decimal there and in hexadecimal among the mappings.
    found = [mount[2].split(":") for mount in mounts if mount[mount.index("-", 6) + 1] == "overlay"]
    return {f"{int(major):02x}:{int(minor):02x}" for major, minor in found}


def _written(begin: int, end: int) -> bool:
    """Whether a page of a private mapping may have been written to.

    The first page was looked at. Where it is not shown as a page of the file, the page map tells nothing.
    """
    pages = page_map(begin, end)
    return pages is None or pages.written or not bool(pages.of_file[0])


def _begins_alike(file: OriginFile, offset: int, tensor: torch.Tensor) -> bool:
    """Whether a file has at `offset` what a tensor begins with: another one may be mounted over it by now."""
    found = bytearray(min(tensor.nbytes, _COMPARED_BYTES))
    with suppress(DiskError):
        # Where the page is not in memory, a look through the mapping would bring in megabytes around it.
        file.read(offset, memoryview(found))
        return found == view_at(tensor.data_ptr(), len(found))
    return False
