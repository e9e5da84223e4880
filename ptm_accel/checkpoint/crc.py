"""CRC-32 of files, by pieces of a fixed size: against damage, not against attackers.

A piece can be checked without reading the rest of its file, and pieces are computed beside one another: `zlib` lets
other threads of Python run meanwhile.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

PIECE_BYTES = 16 << 20
"""Bytes that one CRC covers; the last piece of a file may be shorter."""

_THREADS = 4
_READ_BYTES = 256 << 10
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31
"""The polynomial 1. The highest bit is the coefficient of the lowest power, as in a CRC-32."""


class FileSum(NamedTuple):
    """What a file is compared by.

    Attributes:
        nbytes: its size.
        crcs: CRC-32 of each piece.
    """

    nbytes: int
    crcs: tuple[int, ...]


def combine(first: int, second: int, second_bytes: int) -> int:
    """Returns the CRC-32 of two neighbouring ranges of bytes, from that of each.

    Several processes may so write parts of one piece, and a part that was read is checked against the whole.

    Args:
        first: of the range before.
        second: of the range behind.
        second_bytes: the length of the range behind.
    """
    return _product(_power(second_bytes), first) ^ second


@functools.lru_cache(1024)
def _power(nbytes: int) -> int:
    """Returns what so many bytes multiply a range before them by: x^8 each. Ranges of few lengths are combined."""
    power, square, left = _ONE, _ONE >> 8, nbytes
    while left:
        if left & 1:
            power = _product(power, square)
        square = _product(square, square)
        left >>= 1
    return power


def _product(one: int, other: int) -> int:
    """Returns the product of two polynomials, modulo that of CRC-32."""
    product = 0
    while one:
        if one & _ONE:
            product ^= other
        one = (one << 1) & 0xFFFFFFFF
        other = (other >> 1) ^ (_POLYNOMIAL if other & 1 else 0)
    return product


def threads() -> ThreadPoolExecutor:
    """Threads that compute CRCs, for as long as a `with` block lasts."""
    return ThreadPoolExecutor(min(_THREADS, len(os.sched_getaffinity(0))), thread_name_prefix="ptm_accel-crc")


def crc_of(parts: Iterable[memoryview]) -> int:
    """Returns the CRC-32 of parts that follow one another."""
    crc = 0
    for part in parts:
        crc = zlib.crc32(part, crc)
    return crc


def sum_file(path: Path, pool: Executor) -> FileSum:
    """Reads a file.

    Args:
        path: of the file.
        pool: where the CRCs are computed.

    Raises:
        OSError: it cannot be read, or is no regular file (to read a pipe would not end).
    """
    with regular_file(path) as descriptor:
        nbytes = os.fstat(descriptor).st_size
        starts = range(0, nbytes, PIECE_BYTES)
        return FileSum(nbytes, tuple(pool.map(lambda start: crc_of(_read(descriptor, start)), starts)))


def _read(descriptor: int, start: int) -> Iterator[memoryview]:
    """Yields the bytes of one piece; what was yielded before is overwritten."""
    buffer = memoryview(bytearray(_READ_BYTES))
    at, end = start, start + PIECE_BYTES
    while count := os.preadv(descriptor, [buffer[: end - at]], at) if at < end else 0:
        yield buffer[:count]
        at += count


@contextmanager
def regular_file(path: Path) -> Iterator[int]:
    """Opens a file for reading, and closes it; yields its descriptor.

    Raises:
        OSError: it cannot be opened, or is a folder, a pipe or a device.
    """
    # A pipe is opened without waiting for whoever may write to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        yield descriptor
    finally:
        os.close(descriptor)
