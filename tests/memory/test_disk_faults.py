from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from ptm_accel.errors import DiskError
from ptm_accel.memory import scratch
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import GRAIN_BYTES, DiskTier
from ptm_accel.memory.disk_transfer import DiskTransfer
from ptm_accel.memory.diskio import Lanes
from ptm_accel.memory.mapping import FilePiece, anonymous_run, private_run
from ptm_accel.memory.scratch import Io
from tests.descriptors import open_files
from tests.memory.played_background import PlayedBackground

MIB = 1 << 20
BLOCK = 16 * GRAIN_BYTES
NBYTES = 4 * BLOCK

Call = Callable[[int, list[memoryview], int], int]


def bytes_of(value: int, nbytes: int = NBYTES) -> torch.Tensor:
    return anonymous_run(nbytes, "a test").tensor().fill_(value)


class Faults:
    """System calls that fail as told: `error` is what to raise, `most` the most bytes to move at once."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.most: int | None = None
        self.on_write = self.on_read = True
        self.interrupts = 0
        self.gate = threading.Event()
        self.gate.set()
        self.inside = 0

    def io(self, *, background: bool = False) -> Io:
        """Calls that fail so, in threads; or in the background, and when threads try again what has failed there."""
        calls = self._wrap(os.preadv, "on_read"), self._wrap(os.pwritev, "on_write")
        return Io(*calls, background=(lambda: PlayedBackground(*calls)) if background else None)

    def _wrap(self, call: Call, when: str) -> Call:
        def faulty(fd: int, views: list[memoryview], offset: int) -> int:
            assert self.gate.wait(30)
            if self.interrupts:
                self.interrupts -= 1
                raise InterruptedError
            if getattr(self, when) and self.error is not None:
                raise self.error
            if self.most == 0:
                return 0
            if self.most is not None and self.most < len(views[0]):
                # What a direct call moves is a multiple of blocks; what it says it moved need not be.
                call(fd, views, offset)
                return self.most
            self.inside += 1
            try:
                return call(fd, views, offset)
            finally:
                self.inside -= 1

        return faulty


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture(params=["threads", "background"])
def tier(request: pytest.FixtureRequest, tmp_path: Path, faults: Faults) -> object:
    descriptors = open_files()
    io = faults.io(background=request.param == "background")
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK, io=io)
    yield tier
    faults.gate.set()
    tier.check_integrity()
    tier.close()
    assert tier.budget.used_bytes == 0
    tier.check_integrity()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("ptm-disk-")]
    assert not open_files() - descriptors


@pytest.mark.parametrize("most", [GRAIN_BYTES, GRAIN_BYTES + 1, 3 * GRAIN_BYTES - 1])
def test_short_and_interrupted_calls_are_gone_on_with(tier: DiskTier, faults: Faults, most: int) -> None:
    faults.most, faults.interrupts = most, 5
    data = bytes_of(0).random_(0, 256)
    slot, back = tier.new(NBYTES, Tag.PARAM, "w"), bytes_of(0)
    tier.store(slot, 0, data).wait()
    tier.load(slot, 0, back).wait()
    assert torch.equal(data, back)
    assert faults.interrupts == 0


def test_calls_that_move_nothing_end_in_an_error(tier: DiskTier, faults: Faults) -> None:
    faults.most = 0
    with pytest.raises(DiskError, match=rf"only 0 of {BLOCK} bytes were moved, then none in 3 tries"):
        tier.store(tier.new(BLOCK, Tag.PARAM, "w"), 0, bytes_of(1, BLOCK)).wait()


def test_a_failed_read_is_named_every_time(tier: DiskTier, faults: Faults, tmp_path: Path) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "layers.0.weight")
    faults.error = OSError(errno.EIO, "Input/output error")
    transfer = tier.load(slot, 0, bytes_of(0))
    text = (
        rf"read of layers\.0\.weight failed: {BLOCK // 1024}\.00 KiB at offset \d+ of the scratch file in {tmp_path}: "
        rf"Input/output error \(errno 5\), .* free on \w+; set disk\.paths to a folder on a sound disk"
    )
    caught = []
    for _ in range(3):
        with pytest.raises(DiskError, match=text) as info:
            transfer.wait()
        caught.append(info.value)
    assert caught[0] is not caught[1]
    assert (caught[0].errno, caught[0].filename) == (errno.EIO, str(tmp_path))
    assert caught[0].__cause__ is faults.error
    assert transfer.done()
    # Reading again may work; the bytes themselves are not known to be lost.
    faults.error = None
    tier.load(slot, 0, bytes_of(0)).wait()


def test_a_store_that_fails_as_its_load_begins_is_told(
    tier: DiskTier, faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    faults.error = OSError(errno.EIO, "Input/output error")
    faults.on_read = False
    faults.gate.clear()
    store = tier.store(slot, 0, bytes_of(1))
    submit = Lanes.submit

    def late(lanes: Lanes, transfer: DiskTransfer) -> None:
        # All has been looked at that is looked at before.
        faults.gate.set()
        lanes.wait_until(store.done, "the test")
        submit(lanes, transfer)

    monkeypatch.setattr(Lanes, "submit", late)
    with pytest.raises(DiskError, match="write of w failed"):
        tier.load(slot, 0, bytes_of(2)).wait()


def test_a_failed_background_write_surfaces_at_the_next_call(tier: DiskTier, faults: Faults) -> None:
    slot, other = tier.new(NBYTES, Tag.PARAM, "w"), tier.new(NBYTES, Tag.PARAM, "other")
    calls: list[Callable[[], object]] = [
        lambda: tier.new(BLOCK, Tag.PARAM, "v"),
        lambda: tier.store(other, 0, bytes_of(1)),
        lambda: tier.load(other, 0, bytes_of(1)),
    ]
    for call in calls:
        faults.error = OSError(errno.ENOSPC, "No space left on device")
        transfer = tier.store(other, 0, bytes_of(2))
        tier._lanes.wait_until(transfer.done, "the test")
        faults.error = None
        with pytest.raises(DiskError, match=r"write of other failed: .*No space left on device \(errno 28\)"):
            call()
        # Told once to the tier, ...
        tier.store(slot, 0, bytes_of(1)).wait()
        # ... but what it lost stays lost, and only room for it can be had again.
        for again in (partial(tier.load, other, 0, bytes_of(0)), partial(tier.snapshot, other), transfer.wait):
            with pytest.raises(DiskError, match="write of other failed"):
                again()
        tier.free(other)
        other = tier.new(NBYTES, Tag.PARAM, "other")


def test_what_a_failed_store_was_to_write_can_be_read_once_it_is_stored(tier: DiskTier, faults: Faults) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    tier.store(slot, 0, bytes_of(1)).wait()

    def fails(begin: int, nbytes: int) -> None:
        faults.error = OSError(errno.EIO, "Input/output error")
        with pytest.raises(DiskError, match="write of w failed"):
            tier.store(slot, begin, bytes_of(2, nbytes)).wait()
        faults.error = None

    def lost(begin: int, nbytes: int) -> bool:
        try:
            tier.load(slot, begin, bytes_of(0, nbytes)).wait()
        except DiskError:
            return True
        return False

    fails(BLOCK, 2 * BLOCK)
    assert [lost(at, BLOCK) for at in range(0, NBYTES, BLOCK)] == [False, True, True, False]
    with pytest.raises(DiskError, match="write of w failed"):
        tier.snapshot(slot)
    # A part of what was lost, beside what was not; then the middle of it; then an end that is no whole unit.
    tier.store(slot, 0, bytes_of(3, BLOCK + GRAIN_BYTES)).wait()
    assert (lost(0, BLOCK + GRAIN_BYTES), lost(BLOCK + GRAIN_BYTES, GRAIN_BYTES)) == (False, True)
    tier.store(slot, 2 * BLOCK, bytes_of(4, GRAIN_BYTES)).wait()
    assert [lost(at, GRAIN_BYTES) for at in (2 * BLOCK - GRAIN_BYTES, 2 * BLOCK, 2 * BLOCK + GRAIN_BYTES)] == [
        True,
        False,
        True,
    ]
    tier.store(slot, BLOCK, bytes_of(5, 2 * BLOCK - 1)).wait()
    assert (lost(0, 3 * BLOCK - GRAIN_BYTES), lost(3 * BLOCK - 1, 1)) == (False, True)
    tier.store(slot, 0, bytes_of(6)).wait()
    assert int(tier.snapshot(slot).min()) == 6


def test_a_tier_need_not_announce_what_whoever_stores_looks_at(tmp_path: Path, faults: Faults) -> None:
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), io=faults.io(), announces=False)
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    faults.error = OSError(errno.EIO, "Input/output error")
    transfer = tier.store(slot, 0, bytes_of(2))
    tier._lanes.wait_until(transfer.done, "the test")
    faults.error = None
    other = tier.new(NBYTES, Tag.PARAM, "v")
    tier.store(other, 0, bytes_of(1)).wait()
    with pytest.raises(DiskError, match="write of w failed"):
        transfer.wait()
    tier.close()


def test_an_error_that_was_raised_by_wait_does_not_surface_again(tier: DiskTier, faults: Faults) -> None:
    faults.error = OSError(errno.EIO, "Input/output error")
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    with pytest.raises(DiskError, match="write of w failed"):
        tier.store(slot, 0, bytes_of(1)).wait()
    tier.new(NBYTES, Tag.PARAM, "v")


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit("odd")])
def test_no_error_ends_a_thread(tier: DiskTier, faults: Faults, error: BaseException) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    faults.error = error
    with pytest.raises(DiskError, match=r"\('odd'\) \(errno 5\)") as caught:
        tier.load(slot, 0, bytes_of(1)).wait()
    assert caught.value.__cause__ is error
    faults.error = None
    tier.load(slot, 0, bytes_of(1)).wait()


def test_conflicting_transfers_keep_their_order(tier: DiskTier, faults: Faults) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    tier.store(slot, 0, bytes_of(1)).wait()
    faults.gate.clear()
    before, after = bytes_of(0), bytes_of(0)
    first, write, last = (
        tier.load(slot, 0, before),
        tier.store(slot, 0, bytes_of(2)),
        tier.load(slot, 0, after),
    )
    assert not first.done()
    assert not last.done()
    faults.gate.set()
    last.wait()
    assert first.done()
    assert write.done()
    assert (int(before.max()), int(after.min())) == (1, 2)


def test_a_load_behind_a_store_that_fails_fails_too(tier: DiskTier, faults: Faults) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    faults.gate.clear()
    faults.on_read, faults.error = False, OSError(errno.EIO, "Input/output error")
    store = tier.store(slot, 0, bytes_of(2))
    load = tier.load(slot, 0, bytes_of(0))
    faults.gate.set()
    for transfer in (load, store):
        with pytest.raises(DiskError, match="write of w failed"):
            transfer.wait()


def test_a_tensor_is_held_until_the_end_and_not_longer(tier: DiskTier, faults: Faults) -> None:
    slot, data = tier.new(NBYTES, Tag.PARAM, "w"), bytes_of(3)
    faults.gate.clear()
    transfer = tier.store(slot, 0, data)
    storage = torch.multiprocessing.reductions.StorageWeakRef(data.untyped_storage())
    del data
    assert not storage.expired()
    faults.gate.set()
    transfer.wait()
    assert storage.expired()
    back = bytes_of(0)
    tier.load(slot, 0, back).wait()
    assert int(back.min()) == 3


def test_freeing_and_closing_wait_for_what_runs(tier: DiskTier, faults: Faults) -> None:
    slots = [tier.new(NBYTES, Tag.PARAM, f"w{index}") for index in range(4)]
    faults.gate.clear()
    transfers = [tier.store(slot, 0, bytes_of(1)) for slot in slots]
    order = []
    threads = [
        threading.Thread(target=lambda: (tier.free(slots[0]), order.append("freed"))),
        threading.Thread(target=lambda: (tier.close(), order.append("closed"))),
    ]
    threads[0].start()
    time.sleep(0.1)
    threads[1].start()
    time.sleep(0.1)
    assert not order
    faults.gate.set()
    for thread in threads:
        thread.join(30)
    assert sorted(order) == ["closed", "freed"]
    for transfer in transfers:
        transfer.wait()
    tier.free(slots[1])


def test_nothing_can_be_started_after_close(tier: DiskTier, tmp_path: Path) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    tier.close()
    text = rf"cannot finish .*: the disk tier in {tmp_path} has been closed, with 0 transfers running; keep the engine"
    for call in (
        lambda: tier.new(NBYTES, Tag.PARAM, "v"),
        lambda: tier.store(slot, 0, bytes_of(1)),
        lambda: tier.load(slot, 0, bytes_of(1)),
        lambda: tier.snapshot(slot),
        lambda: tier.preallocate(NBYTES),
    ):
        with pytest.raises(DiskError, match=text):
            call()
    assert tier.closed


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("tier", ["threads"], indirect=True)
def test_waiting_for_threads_that_are_gone_raises(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(*args: object) -> None:
        raise SystemExit

    slot = tier.new(NBYTES, Tag.PARAM, "w")
    monkeypatch.setattr(Lanes, "_finish", die)
    transfer = tier.load(slot, 0, bytes_of(0))
    with pytest.raises(
        DiskError, match=r"cannot finish read of w: all 2 threads of the disk tier .* have ended; start"
    ):
        transfer.wait()


def test_a_transfer_that_was_never_queued_is_an_error_and_no_hang(tmp_path: Path) -> None:
    """Ctrl-C can fall between noting a transfer and queueing it, where nothing puts it off."""
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK)
    slot, other = tier.new(NBYTES, Tag.PARAM, "w"), tier.new(NBYTES, Tag.PARAM, "v")
    enqueue, tier._lanes._enqueue = tier._lanes._enqueue, raise_interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        tier.store(slot, 0, bytes_of(1))
    tier._lanes._enqueue = enqueue  # type: ignore[method-assign]
    text = (
        rf"cannot finish .* w: nothing moves or is queued in the disk tier in {tmp_path}, and \d transfers are lost; "
        "save the model if it is needed, and start the run again from the last checkpoint"
    )
    for call in (partial(tier.pieces, slot), tier.load(slot, 0, bytes_of(0)).wait, partial(tier.free, slot)):
        with pytest.raises(DiskError, match=text):
            call()
    tier.store(other, 0, bytes_of(1)).wait()
    tier.close()
    assert not any(thread.is_alive() for thread in tier._lanes._threads)


def raise_interrupt(*args: object) -> None:
    raise KeyboardInterrupt


def test_a_thread_that_was_not_woken_is_woken_by_who_waits(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def enqueue(transfer: DiskTransfer) -> None:
        for piece in transfer.pieces:
            tier._lanes._lanes[piece.path].queue.append(piece)

    slot = tier.new(BLOCK, Tag.PARAM, "w")
    monkeypatch.setattr(tier._lanes, "_enqueue", enqueue)
    tier.store(slot, 0, bytes_of(1, BLOCK)).wait()
    assert tier.bytes_written == BLOCK


def test_a_forgotten_tier_closes_itself(tmp_path: Path) -> None:
    descriptors = open_files()
    tier = DiskTier([tmp_path], Budget(Tier.DISK, MIB))
    del tier
    gc.collect()
    assert not open_files() - descriptors


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_shows_when_room_is_asked_for(tmp_path: Path, number: int) -> None:
    def allocate(fd: int, offset: int, nbytes: int) -> None:
        if offset + nbytes > MIB:
            raise OSError(number, os.strerror(number))
        os.posix_fallocate(fd, offset, nbytes)

    tier = DiskTier([tmp_path], Budget(Tier.DISK, 1 << 40), io=Io(fallocate=allocate))
    tier.new(MIB // 2, Tag.PARAM, "v")
    text = (
        rf"the scratch file in {tmp_path} cannot grow by 1\.00 MiB to 1\.50 MiB: {os.strerror(number)}, .* free on .*; "
        rf"free space there, set disk\.limit lower, or set disk\.paths"
    )
    with pytest.raises(DiskError, match=text) as caught:
        tier.new(MIB, Tag.PARAM, "w")
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path))
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(DiskError, match=r"cannot grow by 1023\.50 MiB to 1\.00 GiB"):
        tier.preallocate(1 << 30)
    tier.check_integrity()
    tier.new(MIB // 2, Tag.PARAM, "w")
    assert tier.budget.used_bytes == MIB
    tier.close()


LIMITED = """
import resource, sys
from pathlib import Path
from ptm_accel.errors import DiskError
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import DiskTier
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
tier = DiskTier([Path(sys.argv[1])], Budget(Tier.DISK, 1 << 30))
tier.new(1 << 20, Tag.PARAM, "v")
try:
    tier.new(1 << 20, Tag.PARAM, "w")
except DiskError as error:
    print(error)
"""


@pytest.mark.filterwarnings("ignore:ptm_accel. the disk path")
def test_a_limit_of_the_system_on_files_is_told_of(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=True)
    assert "cannot grow by 1.00 MiB to 2.00 MiB: File too large" in done.stdout


def test_a_file_system_that_cannot_reserve_is_used_all_the_same(tmp_path: Path) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), io=Io(fallocate=refuse))
    slot, back = tier.new(NBYTES, Tag.PARAM, "w"), bytes_of(0)
    tier.store(slot, 0, bytes_of(5)).wait()
    tier.load(slot, 0, back).wait()
    assert int(back.min()) == 5
    tier.close()


def test_a_file_system_without_nameless_files_gets_an_unlinked_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain_open = os.open

    def refuse(path: object, flags: int, *args: object, **options: object) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return plain_open(path, flags, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refuse)
    tier = DiskTier([tmp_path], Budget(Tier.DISK, MIB))
    status = os.fstat(tier._files[0].fd)
    assert (status.st_mode & 0o777, status.st_nlink, list(tmp_path.iterdir())) == (0o600, 0, [])
    tier.close()


def test_a_file_system_without_direct_transfers_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "file_system_of", lambda path: "somefs")
    monkeypatch.setattr(scratch.os, "pwritev", lambda *args: raise_error(errno.EINVAL))
    text = rf"disk path {tmp_path} is on somefs, which refuses O_DIRECT: .*page cache.*; set disk\.paths"
    with pytest.warns(UserWarning, match=text):
        tier = DiskTier([tmp_path], Budget(Tier.DISK, MIB))
    assert not tier.direct
    tier.close()
    monkeypatch.setattr(scratch.os, "pwritev", lambda *args: raise_error(errno.EIO))
    with pytest.raises(DiskError, match=rf"cannot use {tmp_path} for a scratch file: Input/output error \(errno 5\)"):
        DiskTier([tmp_path], Budget(Tier.DISK, MIB))


@pytest.mark.parametrize("folder", ["plain", "with blank", "back\\slash", "Übung", "研究"])
def test_mount_points_of_any_name_are_known(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    escaped = folder.replace("\\", "\\134").replace(" ", "\\040")
    mounts.write_text(
        f"22 1 8:1 / / rw - ext4 /dev/a rw\n23 22 8:2 / {tmp_path}/{escaped} rw,noatime shared:1 - somefs /dev/b rw\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(scratch, "_MOUNTS", mounts)
    assert scratch.file_system_of(tmp_path / folder / "below") == "somefs"
    assert scratch.file_system_of(tmp_path / "elsewhere") == "ext4"


@pytest.mark.parametrize("started", [0, 1, 3])
def test_threads_that_cannot_be_started_end_the_others(
    started: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, descriptors = set(threading.enumerate()), open_files()
    budget, plain_start = Budget(Tier.HOST, 64 * MIB), threading.Thread.start
    calls: list[threading.Thread] = []

    def start(thread: threading.Thread) -> None:
        calls.append(thread)
        if len(calls) > started:
            raise RuntimeError("can't start new thread")
        plain_start(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    text = rf"the disk tier in {tmp_path} needs 4 threads, and the system let it start {started}: can't .*ulimit -u"
    with pytest.raises(DiskError, match=text) as caught:
        DiskTier([tmp_path], Budget(Tier.DISK, MIB), io_threads_per_path=4, staging=budget)
    assert caught.value.errno == errno.EAGAIN
    assert not [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]
    assert not open_files() - descriptors
    assert budget.used_bytes == 0


def raise_error(number: int) -> int:
    raise OSError(number, os.strerror(number))


def test_a_file_that_cannot_be_mapped_is_named(tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slot = tier.new(NBYTES, Tag.PARAM, "w")
    fd = os.open(tmp_path / "write-only", os.O_WRONLY | os.O_CREAT)
    monkeypatch.setattr("ptm_accel.memory.disk.private_run", lambda pieces: private_run([FilePiece(fd, 0, 4096)]))
    with pytest.raises(
        DiskError, match=rf"cannot map w, {NBYTES} bytes in 1 pieces, .*Permission denied.*max_map_count"
    ):
        tier.snapshot(slot)
    os.close(fd)


FORKED = """
import os, sys, time, torch
from pathlib import Path
from ptm_accel.errors import DiskError
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.scratch import Io

inside, takes_s = 0, 0.02
def slow(fd, views, offset):
    global inside
    inside += 1
    time.sleep(takes_s)
    done = os.pwritev(fd, views, offset)
    inside -= 1
    return done

tier = DiskTier([Path(sys.argv[1])], Budget(Tier.DISK, 1 << 30), block_bytes=4096, io=Io(pwritev=slow))
# More calls than this process can be kept waiting for: ten seconds of them.
slot = tier.new(1 << 22, Tag.PARAM, "w")
transfer = tier.store(slot, 0, torch.ones(1 << 22, dtype=torch.uint8))
while not inside:
    time.sleep(0.001)
child = os.fork()
if child == 0:
    seen = [str(inside)]
    for call in (transfer.wait, lambda: tier.new(4096, Tag.PARAM, "v"), lambda: tier.free(slot)):
        try:
            call()
        except DiskError as error:
            seen.append(str(error))
    tier.close()
    print("\\n".join(seen), flush=True)
    sys.exit(0)
still = not transfer.done()
takes_s = 0.0
status = os.waitpid(child, 0)[1]
transfer.wait()
print("parent", status, still, tier.bytes_written)
"""


@pytest.mark.filterwarnings("ignore:ptm_accel. the disk path")
def test_a_fork_waits_for_system_calls_and_its_child_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    inside, *refusals, parent = done.stdout.splitlines()
    assert inside == "0"
    assert len(refusals) == 3
    assert all("belongs to process" in text and "use the model only in the process" in text for text in refusals)
    assert parent == f"parent 0 True {1 << 22}"
