from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ptm_accel.errors import BudgetError, DiskError
from ptm_accel.memory.arena import HostArena
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import GRAIN_BYTES, DiskTier
from ptm_accel.memory.mapping import anonymous_run
from ptm_accel.memory.scratch import Io, file_system_of
from tests.anonymous_memory import anonymous_bytes
from tests.descriptors import mapped_from, open_files

MIB = 1 << 20
BLOCK = 16 * GRAIN_BYTES

Make = Callable[..., DiskTier]


def disk_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("ptm-disk-")]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes tiers, and holds each to its books, its threads and its descriptors at the end."""
    tiers: list[DiskTier] = []
    descriptors = open_files()
    threads = set(disk_threads())

    def make_tier(*paths: Path, limit: int = 64 * MIB, **options: object) -> DiskTier:
        options.setdefault("block_bytes", BLOCK)
        tier = DiskTier(list(paths) or [tmp_path], Budget(Tier.DISK, limit), **options)  # type: ignore[arg-type]
        tiers.append(tier)
        return tier

    yield make_tier
    for tier in tiers:
        tier.check_integrity()
        tier.close()
        tier.close()
        tier.check_integrity()
        assert tier.budget.used_bytes == 0
    assert not set(disk_threads()) - threads
    assert not open_files() - descriptors


def random_bytes(nbytes: int, shift: int = 0) -> torch.Tensor:
    """Random bytes, in memory that is aligned but for `shift`."""
    tensor = anonymous_run(nbytes + shift, "a test").tensor()[shift:]
    return tensor.random_(0, 256)


def stored(tier: DiskTier, data: torch.Tensor, name: str = "w") -> object:
    slot = tier.new(data.numel(), Tag.PARAM, name)
    tier.store(slot, 0, data).wait()
    return slot


@pytest.mark.parametrize("nbytes", [GRAIN_BYTES, BLOCK, BLOCK + GRAIN_BYTES, 8 * MIB])
@pytest.mark.parametrize("shift", [0, 1])
def test_what_was_stored_is_loaded(make: Make, nbytes: int, shift: int) -> None:
    tier = make()
    data, back = random_bytes(nbytes, shift), random_bytes(nbytes, shift)
    slot = tier.new(nbytes, Tag.PARAM, "w")
    tier.store(slot, 0, data).wait()
    transfer = tier.load(slot, 0, back)
    transfer.order()
    assert transfer.done()
    assert torch.equal(data, back)
    assert (tier.bytes_written, tier.bytes_read) == (nbytes, nbytes)
    tier.free(slot)
    assert tier.budget.used_bytes == 0


def test_the_time_of_moves_is_counted(make: Make) -> None:
    def slow(fd: int, buffers: list[memoryview], offset: int) -> int:
        time.sleep(0.01)
        return os.pwritev(fd, buffers, offset)

    tier = make(io=Io(pwritev=slow))
    begin = time.perf_counter()
    stored(tier, random_bytes(GRAIN_BYTES))
    busy_s = tier.busy_s
    assert 0.01 <= busy_s < time.perf_counter() - begin
    time.sleep(0.01)
    assert tier.busy_s == busy_s, "nothing moves"


def test_arena_blocks_and_the_disk_go_together(make: Make) -> None:
    tier, host = make(block_bytes=4 * MIB), Budget(Tier.HOST, 64 * MIB)
    arena = HostArena(host)
    buffer, other = arena.allocate(9 * MIB), arena.allocate(9 * MIB)
    assert buffer.octets is not None
    assert other.octets is not None
    buffer.octets.random_(0, 256)
    tier.load(stored(tier, buffer.octets), 0, other.octets).wait()
    assert torch.equal(buffer.octets, other.octets)


@pytest.mark.parametrize("folders", [["/dev/shm"], ["disk"], ["disk", "disk", "/dev/shm"]])
@pytest.mark.parametrize("verifies", [False, True])
@pytest.mark.filterwarnings("ignore:ptm_accel. the disk path")
def test_any_ranges_in_any_order_equal_memory(make: Make, tmp_path: Path, folders: list[str], verifies: bool) -> None:
    paths = [tmp_path if folder == "disk" else Path(folder) for folder in folders]
    tier = make(*paths, block_bytes=4 * GRAIN_BYTES, verifies=verifies)
    size = 23 * GRAIN_BYTES
    tier.new(3 * GRAIN_BYTES, Tag.PARAM, "before")
    slot = tier.new(size, Tag.PARAM, "w")
    twin = random_bytes(size)
    tier.store(slot, 0, twin).wait()
    source, target = random_bytes(size + 64), random_bytes(size + 64)
    step = st.tuples(st.booleans(), st.integers(0, size), st.integers(0, size), st.sampled_from([0, 1, 64]))

    @settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
    @given(steps=st.lists(step, min_size=1, max_size=6))
    def run(steps: list[tuple[bool, int, int, int]]) -> None:
        # All are started at once: transfers of the same bytes must run in the order in which they were started.
        loads, stores = [], []
        for writes, a, b, shift in steps:
            begin, end = min(a, b), max(a, b)
            if writes:
                data = (
                    source[shift : shift + end - begin].clone() if shift == 1 else source[shift : shift + end - begin]
                )
                stores.append(tier.store(slot, begin, data))
                twin[begin:end] = data
            else:
                into = target[shift : shift + end - begin]
                into = into.clone()
                loads.append((tier.load(slot, begin, into), into, twin[begin:end].clone()))
        for transfer, into, expected in loads:
            transfer.wait()
            assert torch.equal(into, expected)
        for transfer in stores:
            transfer.wait()

    run()
    back = torch.empty_like(twin)
    tier.load(slot, 0, back).wait()
    assert torch.equal(back, twin)
    assert torch.equal(tier.snapshot(slot), twin)


def test_a_store_to_one_slot_leaves_its_neighbours_alone(make: Make) -> None:
    tier = make()
    data = [random_bytes(GRAIN_BYTES - 7 * (index % 2), index % 2) for index in range(20)]
    slots = [tier.new(item.numel(), Tag.PARAM, f"w{index}") for index, item in enumerate(data)]
    for transfer in [tier.store(slot, 0, item) for slot, item in zip(slots, data, strict=True)]:
        transfer.wait()
    for slot, item in zip(slots, data, strict=True):
        back = torch.empty_like(item)
        tier.load(slot, 0, back).wait()
        assert torch.equal(back, item)


def test_slots_are_striped_by_weight(make: Make, tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    tier = make(*folders, weights=[3.0, 1.0])
    data = random_bytes(64 * BLOCK)
    slot = tier.new(data.numel(), Tag.PARAM, "w")
    shares = [sum(s.nbytes for s in slot.segments if s.path == path) for path in (0, 1)]
    assert shares == [48 * BLOCK, 16 * BLOCK]
    tier.store(slot, 0, data).wait()
    back = torch.empty_like(data)
    tier.load(slot, 0, back).wait()
    assert torch.equal(back, data)
    assert len(disk_threads()) == 4


def test_one_path_keeps_a_slot_in_one_piece(make: Make) -> None:
    tier = make()
    assert len(tier.new(20 * MIB, Tag.PARAM, "w").segments) == 1


def test_rooms_are_rounded_up_charged_and_given_back(make: Make) -> None:
    tier = make(limit=4 * GRAIN_BYTES)
    slot = tier.new(GRAIN_BYTES + 1, Tag.STATE, "exp_avg")
    assert (slot.nbytes, tier.budget.used_by_tag()) == (2 * GRAIN_BYTES, {Tag.STATE: 2 * GRAIN_BYTES})
    with pytest.raises(BudgetError, match=r"disk budget: cannot place .* for master"):
        tier.new(3 * GRAIN_BYTES, Tag.MASTER, "master")
    tier.check_integrity()
    tier.free(slot)
    tier.new(4 * GRAIN_BYTES, Tag.MASTER, "master")


def test_bytes_never_written_can_be_read(make: Make) -> None:
    tier = make()
    tier.load(tier.new(3 * BLOCK, Tag.PARAM, "w"), 0, torch.empty(3 * BLOCK, dtype=torch.uint8)).wait()
    assert tier.load(tier.new(BLOCK, Tag.PARAM, "v"), 0, torch.empty(0, dtype=torch.uint8)).done()


@pytest.mark.parametrize("repeat", range(2))
def test_a_snapshot_shows_the_newest_bytes_and_is_private(make: Make, tmp_path: Path, repeat: int) -> None:
    tier = make(tmp_path, tmp_path)
    slot = tier.new(9 * BLOCK, Tag.PARAM, "w")
    for _ in range(3):
        # Each snapshot fills the page cache, past which the next store goes.
        data = random_bytes(9 * BLOCK)
        tier.store(slot, 0, data).wait()
        snapshot = tier.snapshot(slot)
        assert torch.equal(snapshot, data)
        del snapshot
    snapshot = tier.snapshot(slot)
    snapshot.fill_(1)
    assert torch.equal(tier.snapshot(slot), data)
    back = torch.empty_like(data)
    tier.load(slot, 0, back).wait()
    assert torch.equal(back, data)
    tier.close()
    assert int(snapshot[-1]) == 1


def test_a_snapshot_costs_no_memory_of_ours_and_is_unmapped(make: Make) -> None:
    tier = make()
    slot = stored(tier, random_bytes(32 * MIB))
    inode = os.fstat(tier.pieces(slot)[0].fd).st_ino

    tier.snapshot(slot).sum()
    before, mapped = anonymous_bytes(), mapped_from(inode)
    snapshot = tier.snapshot(slot)
    assert mapped_from(inode) > mapped
    snapshot.sum()
    assert anonymous_bytes() - before < 4 * MIB
    del snapshot
    assert mapped_from(inode) == mapped


def test_bounce_buffers_are_charged(make: Make) -> None:
    host = Budget(Tier.HOST, 64 * MIB)
    tier = make(staging=host, io_threads_per_path=3)
    if not tier.direct:
        pytest.skip("this file system has no O_DIRECT")
    assert host.used_by_tag() == {Tag.STAGING: 3 * BLOCK}
    tier.close()
    assert host.used_bytes == 0
    with pytest.raises(BudgetError) as refused:
        make(staging=Budget(Tier.HOST, BLOCK))
    assert str(refused.value) == (
        "host_memory is 64.00 KiB, less than the bounce buffers of disk alone take (128.00 KiB, 2 pages of 64.00 KiB). "
        "Set host_memory higher than 128KiB, or lower page_size."
    )
    host = Budget(Tier.HOST, 3 * BLOCK)
    refused = pytest.raises(BudgetError, match="for the bounce buffers")
    with host.reserve(2 * BLOCK, Tag.STAGING, "what is there"), refused:
        make(staging=host)


def test_memory_posing_as_disk_is_warned_of(make: Make) -> None:
    assert file_system_of(Path("/dev/shm")) == "tmpfs"
    with pytest.warns(
        UserWarning, match="disk path /dev/shm is on tmpfs, which is memory and no disk.*disk.paths"
    ) as seen:
        tier = make(Path("/dev/shm"), staging=Budget(Tier.HOST, 0))
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert not tier.direct
    data, back = random_bytes(3 * BLOCK + 5, 1), torch.empty(3 * BLOCK + 5, dtype=torch.uint8)
    tier.load(stored(tier, data), 0, back).wait()
    assert torch.equal(data, back)


def test_growth_reserves_blocks(make: Make, tmp_path: Path) -> None:
    tier = make(limit=8 * MIB)
    tier.new(6 * MIB, Tag.PARAM, "w")
    fd = tier._files[0].fd
    assert os.fstat(fd).st_size == os.fstat(fd).st_blocks * 512 == 8 * MIB
    assert stat.S_IMODE(os.fstat(fd).st_mode) == 0o600
    assert os.fstat(fd).st_nlink == 0
    assert not list(tmp_path.iterdir())


def test_misuse_is_found(make: Make) -> None:
    tier = make()
    slot = tier.new(GRAIN_BYTES, Tag.PARAM, "w")
    with pytest.raises(AssertionError, match=r"\[0, 8192\) of w, which has 4096 bytes"):
        tier.store(slot, 0, torch.empty(8192, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="torch.float32"):
        tier.load(slot, 0, torch.empty(4))
    with pytest.raises(AssertionError, match="slot of 0 bytes"):
        tier.new(0, Tag.PARAM, "w")
    tier.free(slot)
    with pytest.raises(AssertionError, match="w freed twice"):
        tier.free(slot)
    with pytest.raises(AssertionError, match="w was freed"):
        tier.load(slot, 0, torch.empty(4096, dtype=torch.uint8))
    with pytest.raises(AssertionError, match="weights"):
        make(weights=[1.0, 2.0])
    with pytest.raises(AssertionError, match="block of 100 bytes"):
        make(block_bytes=100)


def test_integrity_shows_the_numbers(make: Make) -> None:
    tier = make()
    slot = tier.new(GRAIN_BYTES, Tag.PARAM, "w")
    slot.nbytes += 1
    with pytest.raises(AssertionError, match=f"slots hold {GRAIN_BYTES + 1}, charged {GRAIN_BYTES}, used in files"):
        tier.check_integrity()
    slot.nbytes -= 1


def test_a_folder_that_cannot_be_used_is_named(make: Make, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, reason in ((tmp_path / "nothing", "No such file or directory"), (file, "Not a directory")):
        with pytest.raises(
            DiskError, match=f"cannot use {path} for a scratch file: {reason}.*set disk.paths"
        ) as caught:
            make(tmp_path, path)
        assert caught.value.filename == str(path)
        assert caught.value.errno


KILLED = """
import sys, time, torch
from pathlib import Path
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.disk import DiskTier
tier = DiskTier([Path(sys.argv[1])], Budget(Tier.DISK, 1 << 24))
tier.store(tier.new(1 << 20, Tag.PARAM, "w"), 0, torch.ones(1 << 20, dtype=torch.uint8)).wait()
print("ready", flush=True)
time.sleep(60 if sys.argv[2] == "sleep" else 0)
"""


@pytest.mark.filterwarnings("ignore:ptm_accel. the disk path")
def test_nothing_is_left_after_a_kill_or_an_exit_without_close(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED, tmp_path, "sleep"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        assert not list(tmp_path.iterdir())
        process.send_signal(signal.SIGKILL)
        assert process.wait(timeout=200) == -signal.SIGKILL
    assert not list(tmp_path.iterdir())
    command = [sys.executable, "-c", KILLED, tmp_path, "exit"]
    assert subprocess.run(command, capture_output=True, timeout=200, check=False).returncode == 0
