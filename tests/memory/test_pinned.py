"""Memory is made resident by several threads before it is pinned, and keeps what it holds."""

from __future__ import annotations

import ctypes
import mmap
import os
from types import SimpleNamespace

import pytest
import torch

from ptm_accel.memory import pinned
from ptm_accel.memory.pinned import populate, register_pinned

PAGES = 1000


def test_what_is_pinned_is_resident_before_and_holds_what_it_held(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = os.memfd_create("test")
    os.ftruncate(fd, PAGES * mmap.PAGESIZE)
    memory = mmap.mmap(fd, PAGES * mmap.PAGESIZE)
    memory.madvise(mmap.MADV_NOHUGEPAGE)
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(memory))
    memory[mmap.PAGESIZE : mmap.PAGESIZE + 3] = b"abc"

    def resident_pages() -> int:
        return os.fstat(fd).st_blocks * 512 // mmap.PAGESIZE

    monkeypatch.setattr(pinned, "_LEAST_BYTES", mmap.PAGESIZE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    populate(address, 10 * mmap.PAGESIZE)
    if resident_pages() == 1:
        pytest.skip("needs Linux 5.14")
    assert resident_pages() == 10
    seen: list[int] = []

    def register(at: int, nbytes: int, flags: int) -> int:
        seen.append(resident_pages())
        return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=register))
    register_pinned(address, PAGES * mmap.PAGESIZE)
    assert seen == [PAGES]
    assert memory[mmap.PAGESIZE : mmap.PAGESIZE + 3] == b"abc"
    os.close(fd)
