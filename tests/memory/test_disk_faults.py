"""Faults of the disk: errors of system calls, disks that are full, threads that cannot start, forks."""

from __future__ import annotations

import errno
import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ptm_accel.errors import DiskError
from ptm_accel.memory import scratch
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import GRAIN_BYTES, DiskTier
from ptm_accel.memory.diskio import DiskTransfer, Lanes
from ptm_accel.memory.mapping import FilePiece, anonymous_run, private_run
from ptm_accel.memory.scratch import Io
from tests.descriptors import open_files

MIB = 1 << 20
BLOCK = 16 * GRAIN_BYTES
NBYTES = 4 * BLOCK

Call = Callable[[int, list[memoryview], int], int]


def bytes_of(value: int, nbytes: int = NBYTES) -> torch.Tensor:
    return anonymous_run(nbytes, "a test").tensor().fill_(value)


class Faults:
    """System calls that fail as told: `error` is what to raise `left` times, `most` the most bytes to move at once."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.left = 1 << 30
        self.most: int | None = None
        self.interrupts = 0
        self.gate = threading.Event()
        self.gate.set()

    def io(self) -> Io:
        return Io(self._wrap(os.preadv), self._wrap(os.pwritev))

    def _wrap(self, call: Call) -> Call:
        def faulty(fd: int, views: list[memoryview], offset: int) -> int:
            assert self.gate.wait(30)
            if self.interrupts:
                self.interrupts -= 1
                raise InterruptedError
            if self.error is not None and self.left:
                self.left -= 1
                raise self.error
            if self.most == 0:
                return 0
            if self.most is not None and self.most < len(views[0]):
                # What a direct call moves is a multiple of blocks; what it says it moved need not be.
                call(fd, views, offset)
                return self.most
            return call(fd, views, offset)

        return faulty


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def tier(tmp_path: Path, faults: Faults) -> object:
    descriptors = open_files()
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), block_bytes=BLOCK, io=faults.io())
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


@pytest.mark.parametrize("shift", [0, 1])
def test_what_fails_once_is_moved_once_more(
    tier: DiskTier, faults: Faults, tmp_path: Path, caplog: pytest.LogCaptureFixture, shift: int
) -> None:
    slot, data, back = tier.new(NBYTES, Tag.PARAM, "w"), bytes_of(0).random_(0, 256)[shift:], bytes_of(0)[shift:]
    faults.error = OSError(errno.EIO, "Input/output error")
    for transfer in (tier.store, tier.load):
        faults.left = 1
        transfer(slot, shift, data if transfer == tier.store else back).wait()
        (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        what = "write" if transfer == tier.store else "read"
        assert said == f"a {what} of w in {tmp_path} has failed, and is tried once more: [Errno 5] Input/output error"
        caplog.clear()
    assert torch.equal(data, back)


def test_a_tier_whose_transfer_failed_twice_raises_that_error_at_every_call(
    tier: DiskTier, faults: Faults, tmp_path: Path
) -> None:
    slot, other = tier.new(NBYTES, Tag.PARAM, "layers.0.weight"), tier.new(NBYTES, Tag.PARAM, "other")
    sound = tier.store(slot, 0, bytes_of(1))
    sound.wait()
    faults.error = OSError(errno.ENOSPC, "No space left on device")
    faults.gate.clear()
    failed, behind, beside = (
        tier.store(slot, 0, bytes_of(2)),
        tier.load(slot, 0, bytes_of(0)),
        tier.load(other, 0, bytes_of(0)),
    )
    faults.gate.set()
    text = (
        rf"(write of layers\.0\.weight|read of other) failed: {BLOCK // 1024}\.00 KiB at offset \d+ of the scratch "
        rf"file in {tmp_path}: No space left on device \(errno 28\), .* free on \w+; set disk\.paths to a folder on a "
        r"sound disk with enough room, and start again from the last checkpoint\."
    )
    with pytest.raises(DiskError, match=text) as first:
        failed.wait()
    assert (first.value.errno, first.value.filename) == (errno.ENOSPC, str(tmp_path))
    assert first.value.__cause__ is faults.error
    faults.error = None
    for call in (
        failed.wait,
        behind.wait,
        beside.wait,
        lambda: tier.new(BLOCK, Tag.PARAM, "v"),
        lambda: tier.store(other, 0, bytes_of(1)),
        lambda: tier.load(other, 0, bytes_of(1)),
        lambda: tier.snapshot(slot),
    ):
        with pytest.raises(DiskError) as caught:
            call()
        assert str(caught.value) == str(first.value)
        assert caught.value is not first.value
    sound.wait()
    tier.free(other)


@pytest.mark.parametrize("error", [ValueError("odd"), SystemExit("odd")])
def test_no_error_ends_a_thread(tier: DiskTier, faults: Faults, error: BaseException) -> None:
    faults.error = error
    with pytest.raises(DiskError, match=r"\('odd'\) \(errno 5\)") as caught:
        tier.load(tier.new(NBYTES, Tag.PARAM, "w"), 0, bytes_of(1)).wait()
    assert caught.value.__cause__ is error
    assert all(thread.is_alive() for thread in tier._lanes._threads)


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


def test_a_tensor_is_held_until_the_end_and_not_longer(tier: DiskTier, faults: Faults) -> None:
    slot, data = tier.new(NBYTES, Tag.PARAM, "w"), bytes_of(3)
    storage = torch.multiprocessing.reductions.StorageWeakRef(data.untyped_storage())
    faults.gate.clear()
    transfer = tier.store(slot, 0, data)
    del data
    assert not storage.expired()
    faults.gate.set()
    transfer.wait()
    assert storage.expired()


def test_freeing_and_closing_wait_for_what_runs(tier: DiskTier, faults: Faults) -> None:
    slots = [tier.new(NBYTES, Tag.PARAM, f"w{index}") for index in range(4)]
    faults.gate.clear()
    transfers = [tier.store(slot, 0, bytes_of(1)) for slot in slots]
    order = []
    threads = [
        threading.Thread(target=lambda: (tier.free(slots[0]), order.append("freed"))),
        threading.Thread(target=lambda: (tier.close(), order.append("closed"))),
    ]
    for thread in threads:
        thread.start()
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
    text = rf"cannot finish .*: the disk tier in {tmp_path} has been closed; keep the engine open"
    for call in (
        lambda: tier.new(NBYTES, Tag.PARAM, "v"),
        lambda: tier.store(slot, 0, bytes_of(1)),
        lambda: tier.load(slot, 0, bytes_of(1)),
        lambda: tier.snapshot(slot),
    ):
        with pytest.raises(DiskError, match=text):
            call()
    assert tier.closed


NOBODY = r"cannot finish .* of w: no thread of the disk tier in {} works on it; start the run again from the last"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_waiting_for_threads_that_are_gone_raises(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: object) -> None:
        raise SystemExit

    monkeypatch.setattr(Lanes, "_finish", die)
    transfer = tier.load(tier.new(NBYTES, Tag.PARAM, "w"), 0, bytes_of(0))
    with pytest.raises(DiskError, match=NOBODY.format(tmp_path)):
        transfer.wait()


def test_a_transfer_that_was_never_queued_is_an_error_and_no_hang(
    tier: DiskTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C can fall between noting a transfer and queueing it."""

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    slot, other = tier.new(NBYTES, Tag.PARAM, "w"), tier.new(NBYTES, Tag.PARAM, "v")
    with monkeypatch.context() as patch:
        patch.setattr(Lanes, "_enqueue", interrupt)
        with pytest.raises(KeyboardInterrupt):
            tier.store(slot, 0, bytes_of(1))
    with pytest.raises(DiskError, match=NOBODY.format(tmp_path)):
        tier.load(slot, 0, bytes_of(0)).wait()
    tier.store(other, 0, bytes_of(1)).wait()


def test_a_thread_that_was_not_woken_is_woken_by_who_waits(tier: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    def enqueue(lanes: Lanes, transfer: DiskTransfer) -> None:
        for piece in transfer.pieces:
            lanes._lanes[piece.path].queue.append(piece)

    monkeypatch.setattr(Lanes, "_enqueue", enqueue)
    tier.store(tier.new(BLOCK, Tag.PARAM, "w"), 0, bytes_of(1, BLOCK)).wait()
    assert tier.bytes_written == BLOCK


def test_a_forgotten_tier_closes_itself(tmp_path: Path) -> None:
    descriptors = open_files()
    tier = DiskTier([tmp_path], Budget(Tier.DISK, MIB))
    del tier
    gc.collect()
    assert not open_files() - descriptors


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
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
    tier.check_integrity()
    tier.new(MIB // 2, Tag.PARAM, "w")
    assert tier.budget.used_bytes == MIB
    tier.close()


def raise_error(number: int) -> int:
    raise OSError(number, os.strerror(number))


def test_a_file_system_that_cannot_reserve_is_used_all_the_same(tmp_path: Path) -> None:
    io = Io(fallocate=lambda fd, offset, nbytes: raise_error(errno.EOPNOTSUPP))
    tier = DiskTier([tmp_path], Budget(Tier.DISK, 64 * MIB), io=io)
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


@pytest.mark.parametrize("started", [0, 3])
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
import os, signal, sys, threading, torch
from pathlib import Path
from ptm_accel.errors import DiskError
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.mapping import anonymous_run
from ptm_accel.memory.scratch import Io

torch.set_num_threads(1)
inside, forked = threading.Event(), threading.Event()
def slow(fd, views, offset):
    inside.set()
    assert forked.wait(60)
    return os.preadv(fd, views, offset)

MIB = 1 << 20
tier = DiskTier([Path(sys.argv[1])], Budget(Tier.DISK, 1 << 30), block_bytes=4096, io=Io(preadv=slow))
slot = tier.new(4 * MIB, Tag.PARAM, "w")
data = torch.arange(MIB, dtype=torch.int32).view(torch.uint8)
tier.store(slot, 0, data).wait()
into = anonymous_run(4 * MIB, "a test").tensor()
gone = anonymous_run(4 * MIB, "a test")
transfer = tier.load(slot, 0, into)
assert inside.wait(60)
child = os.fork()
if child == 0:
    # What lies there now is not to be unmapped with what lay there before.
    mine = [anonymous_run(4 * MIB, "the child").tensor().fill_(7) for _ in range(4)]
    del gone
    assert all(int(each.min()) == 7 for each in mine)
    for call in (transfer.wait, lambda: tier.new(4096, Tag.PARAM, "v"), lambda: tier.free(slot)):
        try:
            call()
        except DiskError as error:
            print(error, flush=True)
    tier.close()
    sys.exit(0)
forked.set()
transfer.wait()
print("parent", os.waitpid(child, 0)[1], torch.equal(into, data))
# Neither large runs nor small ones are given to a child.
for shared in (into, anonymous_run(4096, "a test").tensor()):
    child = os.fork()
    if child == 0:
        os._exit(int(shared[0]))
    assert os.waitpid(child, 0)[1] & 127 == signal.SIGSEGV
"""


@pytest.mark.filterwarnings("ignore:ptm_accel. the disk path")
def test_a_fork_does_not_disturb_transfers_and_its_child_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", FORKED, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    *refusals, parent = done.stdout.splitlines()
    assert len(refusals) == 3, done.stdout
    assert all("belongs to process" in text and "use the model only in the process" in text for text in refusals)
    assert parent == "parent 0 True"
