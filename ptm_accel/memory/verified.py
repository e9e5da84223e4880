"""Checksums of what scratch files hold, compared when it is read (`disk.verify`).

A unit is what one CRC-32 covers: a page of a slot's segment, or the rest of the segment. A part of a unit is read as
the whole unit, and written as the whole unit with the part changed, so transfers of one unit run one after another.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import zlib

from ptm_accel.memory.mapping import MappedRun, view_at
from ptm_accel.memory.scratch import Direction, ScratchFile
from ptm_accel.memory.slots import Segment

UnitSums = dict[Segment, int]
"""The CRC-32 of each unit of a slot that has been written."""


def move_verified(
    file: ScratchFile,
    direction: Direction,
    address: int,
    part: Segment,
    unit: Segment,
    sums: UnitSums,
    bounce: MappedRun,
) -> None:
    """Moves a part of a unit between memory and the file; notes the unit's CRC, or compares what is read with it.

    Args:
        file: where the unit lies.
        direction: which way.
        address: of the memory; the caller keeps it alive.
        part: what is moved.
        unit: what it is a part of, or the same.
        sums: of the slot.
        bounce: memory of at least a unit.

    Raises:
        OSError: what the system said, or that what is read is not what was written.
    """
    at, whole = bounce.address, part == unit
    if whole:
        at = address
    if direction is Direction.READ or not whole:
        file.move(Direction.READ, at, unit.offset, unit.nbytes, bounce)
        _compare(view_at(at, unit.nbytes), unit, sums)
    inside = at + part.offset - unit.offset
    if direction is Direction.READ:
        if not whole:
            ctypes.memmove(address, inside, part.nbytes)
        return
    if not whole:
        ctypes.memmove(inside, address, part.nbytes)
    found = zlib.crc32(view_at(at, unit.nbytes))
    file.move(Direction.WRITE, at, unit.offset, unit.nbytes, bounce)
    sums[unit] = found


def verify_mapped(file: ScratchFile, unit: Segment, sums: UnitSums) -> None:
    """Compares a unit with its CRC as a mapping of the file gives it, and leaves it in the page cache.

    Raises:
        OSError: what the system said, or that it is not what was written.
    """
    with mmap.mmap(file.fd, unit.nbytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=unit.offset) as mapped:
        _compare(mapped, unit, sums)


def _compare(octets: memoryview | mmap.mmap, unit: Segment, sums: UnitSums) -> None:
    written = sums.get(unit)
    if written is None:
        return
    found = zlib.crc32(octets)
    if found != written:
        raise OSError(errno.EIO, f"the bytes read are not those written, CRC-32 {found:08x} and {written:08x}")
