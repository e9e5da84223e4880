from __future__ import annotations

import ctypes
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ptm_accel.errors import DiskError
from ptm_accel.memory import background
from ptm_accel.memory.background import NEVER_STARTED, CLibrary
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.channels import Channels
from ptm_accel.memory.disk import GRAIN_BYTES, DiskTier
from ptm_accel.memory.disk_transfer import Piece
from ptm_accel.memory.mapping import anonymous_run
from ptm_accel.memory.scratch import Io
from tests.descriptors import open_files
from tests.memory.played_background import PlayedBackground

MIB = 1 << 20
BLOCK = 16 * GRAIN_BYTES
NBYTES = 4 * BLOCK


def bytes_of(value: int, nbytes: int = NBYTES) -> torch.Tensor:
    return anonymous_run(nbytes, "a test").tensor().fill_(value)


# ---- the C library ---------------------------------------------------------------------------------------------------


@pytest.fixture
def library() -> CLibrary:
    return CLibrary()


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield opened
    os.close(opened)


def started(library: CLibrary, fd: int, data: torch.Tensor, offset: int = 0, *, writes: bool = False) -> object:
    request = library.prepared(fd, writes=writes, address=data.data_ptr(), offset=offset, nbytes=data.numel())
    library.start(request)
    return request


def end_of(library: CLibrary, request: object) -> int:
    deadline = time.monotonic() + 30
    while (result := library.result(request)) is None:
        assert time.monotonic() < deadline
        library.wait([request])
    return result


def test_bytes_are_written_and_read(library: CLibrary, fd: int) -> None:
    data, back = bytes_of(0).random_(0, 256), bytes_of(0)
    assert end_of(library, started(library, fd, data, writes=True)) == NBYTES
    half = NBYTES // 2
    assert end_of(library, started(library, fd, back, half)) == half, "the file ends there"
    assert torch.equal(back[:half], data[half:])


def test_an_error_is_its_number_and_ends_the_transfer(library: CLibrary, tmp_path: Path) -> None:
    read_only = os.open(tmp_path, os.O_RDONLY)
    data = bytes_of(1)
    assert end_of(library, started(library, read_only, data, writes=True)) == -errno.EBADF
    os.close(read_only)


def test_what_cannot_be_started_is_an_error(library: CLibrary, fd: int) -> None:
    # The library looks at this in what it was given, and at nothing else before it starts.
    request = library.prepared(fd, writes=True, address=0, offset=0, nbytes=1)
    assert library.result(request) == NEVER_STARTED
    request.reqprio = -1
    with pytest.raises(OSError, match="Invalid argument"):
        library.start(request)


def test_a_wait_for_what_does_not_end_is_short(library: CLibrary) -> None:
    out, into = os.pipe()
    room = bytes_of(0)
    read = started(library, out, room)
    begin = time.monotonic()
    if library.result(read) is None:
        library.wait([read])
        assert time.monotonic() - begin < 10
    os.write(into, b"x")
    # A pipe has no offsets: an error, or the byte.
    assert end_of(library, read) in (1, -errno.ESPIPE)
    os.close(out)
    os.close(into)


def test_another_c_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other:
        def __init__(self, name: object, use_errno: bool) -> None: ...

    monkeypatch.setattr(background.ctypes, "PyDLL", Other)
    with pytest.raises(OSError, match="Function not implemented"):
        CLibrary()


def test_the_structure_is_that_of_the_library() -> None:
    request = background._Request
    assert (ctypes.sizeof(request), request.buf.offset, request.sigevent.offset, request.offset.offset) == (
        168,
        16,
        32,
        128,
    )


# ---- a tier over it --------------------------------------------------------------------------------------------------


def test_what_is_aligned_goes_there_and_the_rest_to_threads(tmp_path: Path) -> None:
    played, moved = PlayedBackground(), []

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        moved.append(len(views[0]))
        return os.pwritev(fd, views, offset)

    io = Io(pwritev=pwritev, background=lambda: played)
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK, io=io)
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    tier.store(slot, 0, bytes_of(1)).wait()
    assert (played.started, moved) == (4, [])
    tier.store(slot, 0, bytes_of(2, BLOCK + 8)[8:]).wait()
    assert played.started == 4
    assert moved
    assert int(tier.snapshot(slot)[:BLOCK].max()) == 2
    tier.close()


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EINVAL])
def test_what_is_refused_there_goes_to_threads(number: int, tmp_path: Path) -> None:
    played = PlayedBackground()
    played.refuses = OSError(number, os.strerror(number))
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK, io=Io(background=lambda: played))
    slot, back = tier.new(NBYTES, Tag.PARAM, "w"), bytes_of(0)
    tier.store(slot, 0, bytes_of(3)).wait()
    tier.load(slot, 0, back).wait()
    assert (int(back.min()), played.started) == (3, 0)
    tier.close()


def test_without_it_threads_move_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> CLibrary:
        raise OSError(errno.ENOSYS, "Function not implemented")

    with caplog.at_level("INFO"):
        tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), io=Io(background=refuse))
    assert "nothing is moved in the background ([Errno 38] Function not implemented)" in caplog.text
    slot, back = tier.new(NBYTES, Tag.PARAM, "w"), bytes_of(0)
    tier.store(slot, 0, bytes_of(3)).wait()
    tier.load(slot, 0, back).wait()
    assert int(back.min()) == 3
    tier.close()


def test_threads_that_are_bound_do_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ptm_accel.memory.disk.bound", lambda: True)
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB))
    assert tier._lanes._channels is None
    tier.close()


def test_descriptors_that_run_out_are_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, plain_dup, calls = open_files(), os.dup, []

    def dup(fd: int) -> int:
        calls.append(fd)
        if len(calls) > 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return plain_dup(fd)

    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(OSError, match="Too many open files"):
        Channels(PlayedBackground(), [opened], 2)
    os.close(opened)
    assert open_files() == before


def test_an_end_that_nobody_has_seen_is_noted_by_who_looks(tmp_path: Path) -> None:
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK)
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    store, load = tier.store(slot, 0, bytes_of(7)), tier.load(slot, 0, back := bytes_of(0))
    deadline = time.monotonic() + 30
    while not load.done():
        assert time.monotonic() < deadline, "the load follows the store, whose end somebody must note"
        time.sleep(0.001)
    assert store.done()
    assert int(back.min()) == 7
    assert (tier.bytes_written, tier.bytes_read) == (NBYTES, NBYTES)
    tier.close()


def test_who_asks_holds_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has ended is taken off by other threads."""
    original, asked = Channels.ended, []
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK)

    def ended(channels: Channels) -> list[tuple[Piece, bool]]:
        asked.append(tier._lanes.lock._is_owned())  # type: ignore[attr-defined]
        return original(channels)

    monkeypatch.setattr(Channels, "ended", ended)
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    store, load = tier.store(slot, 0, bytes_of(7)), tier.load(slot, 0, bytes_of(0))
    deadline = time.monotonic() + 30
    while not load.done():
        assert time.monotonic() < deadline
    store.wait()
    tier.close()
    assert asked
    assert all(asked)


def test_time_in_which_nobody_looked_is_not_all_busy(tmp_path: Path) -> None:
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK)
    slot, data = tier.new(NBYTES, Tag.PARAM, "w"), bytes_of(1)
    for _ in range(20):
        tier.store(slot, 0, data).wait()
    rate_s = tier.busy_s / tier.bytes_written
    before, written = tier.busy_s, tier.bytes_written
    tier.store(slot, 0, data)
    time.sleep(1.0)
    assert tier.bytes_written == written, "nobody has looked"
    busy_s = tier.busy_s - before
    assert tier.bytes_written == written + NBYTES
    assert busy_s <= 3 * NBYTES * rate_s + 0.05
    tier.close()


def test_several_threads_wait_at_once(tmp_path: Path) -> None:
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 256 * MIB), block_bytes=BLOCK)
    wrong: list[object] = []

    def work(value: int) -> None:
        slot = tier.new(NBYTES, Tag.PARAM, f"w{value}")
        for turn in range(50):
            tier.store(slot, 0, bytes_of((value + turn) % 256)).wait()
            back = bytes_of(0)
            tier.load(slot, 0, back).wait()
            if int(back.min()) != (value + turn) % 256 or int(back.max()) != (value + turn) % 256:
                wrong.append((value, turn))

    threads = [threading.Thread(target=work, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong
    tier.check_integrity()
    tier.close()


def test_a_tier_that_is_closed_waits_for_what_is_under_way(tmp_path: Path) -> None:
    gate = threading.Event()

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        assert gate.wait(30)
        return os.pwritev(fd, views, offset)

    io = Io(background=lambda: PlayedBackground(pwritev=pwritev))
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK, io=io)
    store = tier.store(tier.new(NBYTES, Tag.PARAM, "w"), 0, bytes_of(1))
    closing = threading.Thread(target=tier.close)
    closing.start()
    time.sleep(0.1)
    assert closing.is_alive()
    gate.set()
    closing.join(30)
    assert not closing.is_alive()
    assert store.done()


def test_what_has_not_begun_holds_no_fork_up(tmp_path: Path) -> None:
    gate, inside = threading.Event(), threading.Event()

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        inside.set()
        assert gate.wait(30)
        return os.pwritev(fd, views, offset)

    played = PlayedBackground(pwritev=pwritev)
    io = Io(background=lambda: played)
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK, io=io)
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    store = tier.store(slot, 0, bytes_of(5))
    assert inside.wait(30)
    threading.Timer(0.1, gate.set).start()
    tier._lanes.hold_still()
    try:
        assert played.cancelled == 3
        assert not tier._lanes._is_moving()
        assert not store.done()
    finally:
        tier._lanes.go_on()
    store.wait()
    assert int(tier.snapshot(slot).min()) == 5
    tier.close()


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_what_fails_there_is_tried_by_a_thread_which_says_why_not(number: int, tmp_path: Path) -> None:
    fails = [True, True]

    def pwritev(fd: int, views: list[memoryview], offset: int) -> int:
        if fails[0]:
            raise OSError(number, os.strerror(number))
        return os.pwritev(fd, views, offset)

    def again(fd: int, views: list[memoryview], offset: int) -> int:
        if fails[1]:
            raise OSError(number, os.strerror(number))
        return os.pwritev(fd, views, offset)

    io = Io(pwritev=again, background=lambda: PlayedBackground(pwritev=pwritev))
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK, io=io)
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    with pytest.raises(DiskError, match=rf"write of w failed: .*errno {number}\)"):
        tier.store(slot, 0, bytes_of(1)).wait()
    fails[1] = False
    tier.store(slot, 0, bytes_of(2)).wait()
    assert int(tier.snapshot(slot).min()) == 2
    tier.close()


def test_what_was_never_started_is_an_error_and_no_hang(tmp_path: Path) -> None:
    """Ctrl-C can fall between noting a transfer and starting it, where nothing puts it off."""
    played = PlayedBackground()
    io = Io(background=lambda: played)
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=NBYTES, io=io, io_threads_per_path=1)
    slot, other = tier.new(NBYTES, Tag.PARAM, "w"), tier.new(NBYTES, Tag.PARAM, "v")
    played.refuses = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        tier.store(slot, 0, bytes_of(1))
    played.refuses = None
    text = r"cannot finish .* w: nothing moves or is queued in the disk tier in .*, and \d transfers are lost"
    for call in (lambda: tier.pieces(slot), tier.load(slot, 0, bytes_of(0)).wait, lambda: tier.free(slot)):
        with pytest.raises(DiskError, match=text):
            call()
    tier.store(other, 0, bytes_of(1)).wait()
    assert tier.bytes_written == NBYTES
    with pytest.raises(DiskError, match=text):
        tier.pieces(slot)
    tier.close()


def test_closing_waits_for_what_follows_a_transfer_of_a_thread(tmp_path: Path) -> None:
    """The load begins in the background as the store ends, when whoever closes has found nothing there."""
    begun = threading.Event()

    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        begun.set()
        time.sleep(0.3)
        return os.pwritev(fd, views, offset)

    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=MIB, io=Io(pwritev=slow, background=CLibrary))
    slot = tier.new(MIB, Tag.PARAM, "w")
    # Memory that is not aligned is stored by a thread.
    unaligned = bytes_of(7, MIB + 4096)[64 : 64 + MIB]
    into = bytes_of(0, MIB)
    store, load = tier.store(slot, 0, unaligned), tier.load(slot, 0, into)
    assert begun.wait(30)
    closing = threading.Thread(target=tier.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert not store.unfinished
    assert not load.unfinished
    assert (into == 7).all()


# Python prints what a function that it calls before a fork has raised, and goes on.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_while_a_fork_waits_holds_no_transfers_for_ever(tmp_path: Path) -> None:
    def slow(fd: int, views: list[memoryview], offset: int) -> int:
        time.sleep(0.6)
        return os.pwritev(fd, views, offset)

    tiers = [DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=MIB, io=Io(pwritev=slow)) for _ in range(2)]
    slots = [tier.new(MIB, Tag.PARAM, "w") for tier in tiers]
    for tier, slot in zip(tiers, slots, strict=True):
        tier.store(slot, 0, torch.ones(MIB, dtype=torch.uint8))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        timer.join()
    except KeyboardInterrupt:
        pass
    finally:
        signal.signal(signal.SIGINT, before)

    def store() -> None:
        for tier, slot in zip(tiers, slots, strict=True):
            tier.store(slot, 0, torch.ones(MIB, dtype=torch.uint8)).wait()

    storing = threading.Thread(target=store, daemon=True)
    storing.start()
    storing.join(30)
    assert not storing.is_alive()
    for tier in tiers:
        tier.close()
