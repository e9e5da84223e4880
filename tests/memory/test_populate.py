"""Memory is made resident by several threads, and keeps what it holds."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from ptm_accel.memory import populate as populate_module
from ptm_accel.memory.own_threads import OwnThread
from ptm_accel.memory.pinned import register_pinned
from ptm_accel.memory.populate import populate

PAGES = 1000


class Shared:
    """A memory file, mapped, of which nothing is resident but its second page."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("test")
        os.ftruncate(self.fd, PAGES * mmap.PAGESIZE)
        self.memory = mmap.mmap(self.fd, PAGES * mmap.PAGESIZE)
        self.memory.madvise(mmap.MADV_NOHUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self.memory))
        self.memory[mmap.PAGESIZE : mmap.PAGESIZE + 3] = b"abc"

    @property
    def resident_pages(self) -> int:
        return os.fstat(self.fd).st_blocks * 512 // mmap.PAGESIZE


def kernel_can() -> bool:
    with mmap.mmap(-1, mmap.PAGESIZE) as memory:
        view = ctypes.c_ubyte.from_buffer(memory)
        can = populate(ctypes.addressof(view), mmap.PAGESIZE)
        del view
    return can


needs_populate = pytest.mark.skipif(not kernel_can(), reason="needs Linux 5.14")


@pytest.fixture
def shared() -> Iterator[Shared]:
    made = Shared()
    yield made
    os.close(made.fd)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of threads that are started; small ranges are worth some."""
    started: list[str] = []

    class Noted(OwnThread):
        def start(self) -> None:
            started.append(self.name)
            super().start()

    monkeypatch.setattr(populate_module, "OwnThread", Noted)
    monkeypatch.setattr(populate_module.os, "sched_getaffinity", lambda process: frozenset(range(3)))
    monkeypatch.setattr(populate_module, "_LEAST_BYTES", 100 * mmap.PAGESIZE)
    return started


@needs_populate
def test_all_of_a_range_is_resident_and_holds_what_it_held(shared: Shared, threads: list[str]) -> None:
    assert shared.resident_pages == 1
    assert populate(shared.address, PAGES * mmap.PAGESIZE)
    assert shared.resident_pages == PAGES
    assert len(threads) == 2, "the calling thread does its part"
    assert shared.memory[:] == b"\0" * mmap.PAGESIZE + b"abc" + b"\0" * ((PAGES - 1) * mmap.PAGESIZE - 3)


@needs_populate
def test_only_the_range_is_made_resident_by_no_more_threads_than_it_is_worth(
    shared: Shared, threads: list[str]
) -> None:
    assert populate(shared.address + 10 * mmap.PAGESIZE, 150 * mmap.PAGESIZE)
    assert shared.resident_pages == 151
    assert not threads


@needs_populate
def test_fewer_threads_do_it_where_no_more_can_be_started(
    shared: Shared, threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = populate_module.OwnThread.start

    def refused(thread: OwnThread) -> None:
        if threads:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(populate_module.OwnThread, "start", refused)
    assert populate(shared.address, PAGES * mmap.PAGESIZE)
    assert shared.resident_pages == PAGES
    assert len(threads) == 1


def test_a_kernel_that_cannot_is_told_from_one_that_can(
    shared: Shared, threads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(populate_module, "_POPULATE_WRITE", 9999)
    assert not populate(shared.address, PAGES * mmap.PAGESIZE)
    assert shared.resident_pages == 1


@needs_populate
def test_what_is_pinned_is_resident_before(shared: Shared, threads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def register(address: int, nbytes: int, flags: int) -> int:
        seen.append(shared.resident_pages)
        return 0

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: None)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    register_pinned(shared.address, PAGES * mmap.PAGESIZE)()
    assert seen == [PAGES]
