"""The measurements: a disk, a device. Each takes about a second and leaves nothing behind.

Disk and link are measured through the tiers that move pages, with the same blocks and threads. The memory for it comes
on top of all budgets, so it is small, and less where little is available. torch's random numbers are not drawn.
"""

from __future__ import annotations

import logging
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch.optim.adamw import adamw

from ptm_accel.hardware.profile import DeviceRates, LinkRates
from ptm_accel.machine import available_bytes
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.device import CudaTier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.mapping import MappedRun, anonymous_run
from ptm_accel.memory.pinned import register_pinned
from ptm_accel.units import MIB, format_bytes

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 4 * MIB
"""A page of the default size, which is the greatest piece that tiers move at a time."""
_BUFFER_BYTES = 32 * MIB
_LEAST_BUFFER_BYTES = 4 * _BLOCK_BYTES
_AREA_BYTES = 256 * MIB
"""More measures the same, and takes longer to free where the file system discards blocks."""
LEAST_ROOM_BYTES = 64 * MIB
"""Free space without which no disk is measured."""
_SLICE_S = 0.02
_DISK_S = 0.5
_LEAST_SLICE, _GREATEST_SLICE, _PILOT = 2, 16, 4
_ROUNDS = 16
_DEVICE_UPDATE_BYTES = 256 * MIB
_UPDATE_PASSES = 9
_RATES: dict[str, Any] = {"lr": 1e-4, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}
_LINK_ROUNDS, _LINK_COPIES = 5, 64


# ---- disk ----------------------------------------------------------------------------------------------------------


def measure_disk(folder: Path) -> LinkRates | None:
    """Returns the rates of the disk that holds `folder`, of bytes that were written before.

    At most 256 MiB, and half of what is free, are written to an unlinked file. Where the file system refuses direct
    transfers the page cache is emptied in between, so that its speed is not taken for the disk's.

    Returns:
        None where there is too little room, on the disk or in memory; the log says which.

    Raises:
        DiskError: the folder cannot be used, or a transfer failed.
        BudgetError: the machine gives no memory.
        OSError: there is no such folder.
    """
    room, memory = shutil.disk_usage(folder).free, available_bytes()
    for there, least, words, remedy in (
        (room, LEAST_ROOM_BYTES, "are free", "free space there, or set disk.paths to a folder with more room"),
        (memory, 4 * _LEAST_BUFFER_BYTES, "of memory are available", "give the process more memory"),
    ):
        if there < least:
            shown = f"{format_bytes(there)} {words} and {format_bytes(least)} are needed; {remedy}"
            logger.info("the speed of the disk path %s is not measured: %s.", folder, shown)
            return None
    buffer_bytes = min(_BUFFER_BYTES, memory // 4 // _LEAST_BUFFER_BYTES * _LEAST_BUFFER_BYTES)
    blocks = min(_AREA_BYTES, room // 2) // _BLOCK_BYTES
    with warnings.catch_warnings():
        # The tier that trains warns about the folder.
        warnings.simplefilter("ignore")
        tier = DiskTier([folder], Budget(Tier.DISK, blocks * _BLOCK_BYTES), block_bytes=_BLOCK_BYTES)
    try:
        return _disk_rates(_DiskCourse(tier, blocks, buffer_bytes))
    finally:
        tier.close()


class _DiskCourse:
    """Transfers of the blocks of one disk slot, from and to buffers that are used in turns."""

    def __init__(self, tier: DiskTier, blocks: int, buffer_bytes: int) -> None:
        self.blocks = blocks
        self._tier = tier
        self._slot = tier.new(blocks * _BLOCK_BYTES, Tag.STAGING, "the measurement of the disk")
        buffers = anonymous_run(buffer_bytes, "the measurement of the disk").tensor().view(-1, _BLOCK_BYTES)
        # Bytes that do not compress, in memory that has been touched.
        buffers.copy_(torch.frombuffer(bytearray(os.urandom(_BLOCK_BYTES)), dtype=torch.uint8))
        self._read_into, self._written_from = buffers.chunk(2)

    def seconds(self, read: range, written: range) -> float:
        """Returns the time to read and to write these blocks, block by block in turns if both."""
        self._settle()
        begin = time.perf_counter()
        transfers = []
        for into, out in zip_longest(read, written):
            if out is not None:
                source = self._written_from[out % len(self._written_from)]
                transfers.append(self._tier.store(self._slot, out * _BLOCK_BYTES, source))
            if into is not None:
                target = self._read_into[into % len(self._read_into)]
                transfers.append(self._tier.load(self._slot, into * _BLOCK_BYTES, target))
        for transfer in transfers:
            transfer.wait()
        self._settle()
        return time.perf_counter() - begin

    def _settle(self) -> None:
        """Sends what the page cache holds to the disk and empties it; there is nothing in it of direct transfers."""
        if not self._tier.direct:
            for piece in self._tier.pieces(self._slot):
                os.fdatasync(piece.fd)
                os.posix_fadvise(piece.fd, piece.offset, piece.nbytes, os.POSIX_FADV_DONTNEED)


def _disk_rates(course: _DiskCourse) -> LinkRates:
    nothing = range(0)
    # Slices of about the same duration on any disk, judged by the first blocks.
    wish = _PILOT * _SLICE_S / course.seconds(nothing, range(_PILOT))
    size = max(_LEAST_SLICE, min(_GREATEST_SLICE, course.blocks // 2, int(wish)))
    # A very slow disk gets two slices: one to read and one to write at the same time.
    slices = course.blocks // size if wish >= 1 else 2
    # Fresh blocks are slower to write than those that have been written, and cannot be read.
    course.seconds(nothing, range(_PILOT, size * slices))
    times: list[tuple[float, float, float]] = []
    deadline = time.perf_counter() + _DISK_S
    while not times or (len(times) < _ROUNDS and time.perf_counter() < deadline):
        first, second = (range(at % slices * size, (at % slices + 1) * size) for at in (len(times), len(times) + 1))
        times.append((course.seconds(first, nothing), course.seconds(nothing, first), course.seconds(first, second)))
    return _link_rates(times, size * _BLOCK_BYTES)


def _link_rates(times: list[tuple[float, float, float]], nbytes: int) -> LinkRates:
    """Returns the median rates of rounds in which `nbytes` were read, then written, then both."""
    read, write, both = (statistics.median(column) for column in zip(*times, strict=True))
    return LinkRates(nbytes / read, nbytes / write, 2 * nbytes / both)


# ---- device --------------------------------------------------------------------------------------------------------


def measure_device(device: torch.device) -> DeviceRates:
    """Returns the rates of a CUDA device: its link, pinned if that is possible, and updates on it.

    Raises:
        BudgetError: the machine gives no memory.
        RuntimeError: the device has no memory left (`torch.OutOfMemoryError`), or failed.
    """
    # Never closed: that would lift the limit on the card which the tier that trains has set.
    tier = CudaTier(device)
    run = anonymous_run(2 * _BUFFER_BYTES, "the measurement of a device link")
    with ExitStack() as cleanup:
        try:
            cleanup.callback(register_pinned(run.address, run.nbytes))
        except OSError as error:
            logger.info("the link of %s is measured with pageable memory: %s.", tier.device, error)
        link = _device_link(tier, run, _LINK_COPIES)
    rates = DeviceRates(**asdict(link), update_params_s=_device_update_rate(tier.device))
    # The memory that this took must not count as memory beside the pages.
    tier.memory.trim()
    return rates


def _device_link(tier: CudaTier, run: MappedRun, copies: int) -> LinkRates:
    into, out = run.tensor().fill_(1).view(2, -1, _BLOCK_BYTES)
    on_device = torch.ones(2, _BLOCK_BYTES, dtype=torch.uint8, device=tier.device)

    def seconds(read: int, written: int) -> float:
        torch.cuda.current_stream(tier.device).synchronize()
        begin = time.perf_counter()
        transfers = []
        for index in range(max(read, written)):
            if index < read:
                transfers.append(tier.copy_in(on_device[0], into[index % len(into)]))
            if index < written:
                transfers.append(tier.copy_out(out[index % len(out)], on_device[1]))
        for transfer in transfers:
            transfer.wait()
        return time.perf_counter() - begin

    # The first time, streams are made and memory is touched.
    seconds(2, 2)
    times = [(seconds(copies, 0), seconds(0, copies), seconds(copies, copies)) for _ in range(_LINK_ROUNDS)]
    return _link_rates(times, copies * _BLOCK_BYTES)


def _device_update_rate(device: torch.device) -> float:
    parts = torch.empty(_DEVICE_UPDATE_BYTES // 4, dtype=torch.float32, device=device).chunk(4)
    for tensor, value in zip(parts, (0.1, 1e-3, 1e-4, 1e-6), strict=True):
        tensor.fill_(value)
    columns = [[part] for part in parts]
    steps = [torch.zeros((), dtype=torch.float32, device=device)]
    with torch.cuda.device(device), torch.no_grad():
        fused_adamw(columns, steps)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(_UPDATE_PASSES):
            fused_adamw(columns, steps)
        end.record()
        end.synchronize()
    return parts[0].numel() * _UPDATE_PASSES / (float(begin.elapsed_time(end)) / 1e3)


def fused_adamw(columns: Sequence[list[torch.Tensor]], steps: list[torch.Tensor]) -> None:
    """One update by torch's fused AdamW; the columns are parameters, gradients and both moments."""
    params, grads, averages, squares = columns
    # The function and not the class: hooks that others have put on all optimizers must not run.
    adamw(params, grads, averages, squares, [], steps, fused=True, amsgrad=False, maximize=False, **_RATES)
