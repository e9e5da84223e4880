"""Safetensors files that several ranks write together: each its own ranges, at their places in the whole tensors.

The first rank makes the files with their headers, so that they are the same whatever the number of ranks is. Nothing
is gathered. Every rank says which bytes it has written and their CRCs, and the first one puts these together: a byte
that nobody or two have written is an error. The header is written last: without it nobody takes zeros for weights.
"""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch

from ptm_accel.checkpoint.crc import PIECE_BYTES, FileSum, combine, threads
from ptm_accel.checkpoint.shards import Described, header, octets
from ptm_accel.distributed.ranks import Ranks
from ptm_accel.distributed.together import on_each, on_first
from ptm_accel.errors import CheckpointError, DiskError

_HEAD = 0
"""Where the header begins."""


class Run(NamedTuple):
    """Elements of a sharded tensor that follow one another in a file.

    Attributes:
        source: the name of the tensor.
        start, stop: the first element, and the one behind the last.
        at: the byte of the file at which they begin.
    """

    source: str
    start: int
    stop: int
    at: int


class Owned(NamedTuple):
    """What a rank owns of a tensor.

    Attributes:
        start: the first element.
        values: the elements, on the CPU, 1-D.
    """

    start: int
    values: torch.Tensor


class Written(NamedTuple):
    """Bytes of a file that a rank has written, within one piece of it.

    Attributes:
        start: the first byte.
        nbytes: how many.
        crc: their CRC-32.
    """

    start: int
    nbytes: int
    crc: int


@dataclass(frozen=True)
class SharedFile:
    """A file that ranks write together.

    Attributes:
        path: of the file, the same on all ranks.
        nbytes: its size.
        runs: what ranks own of it.
        wholes: what the first rank writes, by the byte at which it begins: the header, and tensors that are not
            sharded. Other ranks are not told of it.
    """

    path: Path
    nbytes: int
    runs: list[Run]
    wholes: dict[int, memoryview] = field(default_factory=dict)

    def __getstate__(self) -> tuple[Path, int, list[Run]]:
        return self.path, self.nbytes, self.runs

    def __setstate__(self, state: tuple[Path, int, list[Run]]) -> None:
        for name, value in zip(("path", "nbytes", "runs", "wholes"), (*state, {}), strict=True):
            object.__setattr__(self, name, value)


class Pieces(NamedTuple):
    """A sharded tensor of a file, as parts of others that lie one behind another.

    Attributes:
        described: its shape and dtype.
        parts: source, first element and number of elements of each part.
    """

    described: Described
    parts: Sequence[tuple[str, int, int]]


def make_file(path: Path, tensors: Mapping[str, torch.Tensor | Pieces], metadata: Mapping[str, str]) -> SharedFile:
    """Makes a file of its full size, of which nothing is written yet.

    Args:
        path: where.
        tensors: by name; those that are not sharded are contiguous and on the CPU.
        metadata: texts for the header.

    Raises:
        OSError: there is no room for it.
    """
    described = {
        name: each.described if isinstance(each, Pieces) else Described.of(each) for name, each in tensors.items()
    }
    head, places = header(described, metadata)
    file = SharedFile(path, len(head) + sum(each.nbytes for each in described.values()), [])
    file.wholes[_HEAD] = memoryview(head)
    for name, begin in places.items():
        tensor, at = tensors[name], len(head) + begin
        if isinstance(tensor, Pieces):
            for source, start, count in tensor.parts:
                file.runs.append(Run(source, start, start + count, at))
                at += count * tensor.described.dtype.itemsize
        elif tensor.nbytes:
            file.wholes[at] = octets(tensor)
    # Readable as well: where a file system cannot reserve room, the C library reads and writes to do so.
    with path.open("w+b") as opened:
        # A disk that is full is met before anybody has written.
        os.posix_fallocate(opened.fileno(), 0, file.nbytes)
    return file


def write_together(
    ranks: Ranks,
    make: Callable[[], list[SharedFile]],
    owned: Callable[[str], Owned],
) -> dict[Path, FileSum]:
    """Writes files with all ranks; they come here together.

    Args:
        ranks: the ranks.
        make: makes the files; called on the first rank.
        owned: returns what this rank owns of a tensor. What it returns is let go of before the next one.

    Returns:
        what each file is to be compared by; on the first rank, and nothing on the others.

    Raises:
        DiskError: a disk is full or failed, here or at another rank.
        CheckpointError: not every byte was written once.
    """
    kept: list[SharedFile] = []

    def made() -> list[SharedFile]:
        kept.extend(make())
        return kept

    files = on_first(ranks, made)
    # Of those, the first rank has what is not sharded as well.
    files = kept or files

    def write() -> list[list[Written]]:
        with threads() as pool:
            return [_write(file, owned, pool) for file in files]

    here = on_each(ranks, "has written its part of a checkpoint", write)
    every = ranks.all_of(here)

    sums: dict[Path, FileSum] = {}

    def put_together() -> None:
        for number, file in enumerate(files):
            sums[file.path] = _sum_of(file, sorted(each for parts in every for each in parts[number]))
        for file in files:
            _write_head(file)

    on_first(ranks, put_together)
    return sums


def _write(file: SharedFile, owned: Callable[[str], Owned], pool: Executor) -> list[Written]:
    """Writes what this rank has of a file but for the header, and brings it to the disk.

    Raises:
        DiskError: the disk is full or failed.
    """
    written: list[Written] = []
    with _opened(file) as descriptor:
        for at, part in _parts(file, owned):
            written += _write_part(descriptor, at, part, pool)
    return written


@contextmanager
def _opened(file: SharedFile) -> Iterator[int]:
    """Opens a file that is there; what is written is brought to the disk.

    Raises:
        DiskError: the disk is full or failed.
    """
    try:
        descriptor = os.open(file.path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            yield descriptor
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if isinstance(error, DiskError):
            raise
        text = os.strerror(error.errno or errno.EIO)
        raise DiskError(error.errno or errno.EIO, f"cannot write {file.path.name}: {text}", str(file.path)) from error


def _write_head(file: SharedFile) -> None:
    """Writes the header of a file, of which all the rest is there.

    Raises:
        DiskError: the disk failed.
    """
    with _opened(file) as descriptor:
        _write_all(descriptor, file.wholes[_HEAD], _HEAD)


def _parts(file: SharedFile, owned: Callable[[str], Owned]) -> Iterator[tuple[int, memoryview]]:
    """Yields what this rank has of a file, with the byte at which it begins."""
    yield from file.wholes.items()
    source, have = None, None
    for run in sorted(file.runs):
        if have is None or run.source != source:
            # The one before goes first.
            have = None
            source, have = run.source, owned(run.source)
        start = max(run.start, have.start)
        stop = min(run.stop, have.start + have.values.numel())
        if start < stop:
            values = have.values[start - have.start : stop - have.start]
            yield run.at + (start - run.start) * values.itemsize, octets(values)


def _write_part(descriptor: int, at: int, part: memoryview, pool: Executor) -> Iterable[Written]:
    """Writes bytes, but for the header, cut where pieces of the file end; CRCs are computed beside."""
    is_head = at == _HEAD
    crcs, cuts = [], []
    done = 0
    while done < part.nbytes:
        cut = part[done : done + PIECE_BYTES - (at + done) % PIECE_BYTES]
        crcs.append(pool.submit(zlib.crc32, cut))
        cuts.append((at + done, cut.nbytes))
        if not is_head:
            _write_all(descriptor, cut, at + done)
        done += cut.nbytes
    return [Written(start, nbytes, crc.result()) for (start, nbytes), crc in zip(cuts, crcs, strict=True)]


def _write_all(descriptor: int, cut: memoryview, at: int) -> None:
    """Writes all of a cut: one call may write less."""
    while cut.nbytes:
        count = os.pwrite(descriptor, cut, at)
        cut, at = cut[count:], at + count


def _sum_of(file: SharedFile, written: Iterable[Written]) -> FileSum:
    """Puts the CRCs of all ranks together.

    Args:
        file: the file.
        written: by all ranks, in the order of the bytes.

    Raises:
        CheckpointError: not every byte was written once.
    """
    crcs: list[int] = []
    end = 0
    for part in written:
        if part.start != end:
            # Behind a gap, or written before.
            end = min(part.start, end)
            break
        if end % PIECE_BYTES:
            crcs[-1] = combine(crcs[-1], part.crc, part.nbytes)
        else:
            crcs.append(part.crc)
        end += part.nbytes
    if end != file.nbytes:
        raise CheckpointError(
            f"{file.path.name} was not written as a whole: byte {end} of {file.nbytes} was written by no rank, or by "
            "several. Nothing was saved. Please report it, with the model's class."
        )
    return FileSum(file.nbytes, tuple(crcs))
