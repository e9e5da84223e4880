"""Values that stay in the file they came in: found only where that is certain, and the same bytes whatever follows."""

from __future__ import annotations

import builtins
import errno
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.errors import DiskError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.origin import _MANY_LOADS, Origin, OriginFile, Origins
from ptm_accel.memory.paged import PagedTensor, Place
from ptm_accel.memory.pool import Pool
from tests.memory.test_pool import pool_of
from tests.tiers import PAGE

NUMEL = 3 * PAGE // 4
SKIPPED = 12
"""Bytes of the file before the values: no transfer past the page cache could begin there."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "values.bin"
    torch.manual_seed(0)
    path.write_bytes(bytes(SKIPPED) + torch.randn(4 * NUMEL).numpy().tobytes())
    return path


def mapped(file: Path, *, shared: bool = False) -> torch.Tensor:
    return torch.from_file(str(file), shared=shared, size=4 * NUMEL + SKIPPED // 4)[SKIPPED // 4 :]


def part(file: Path, index: int) -> torch.Tensor:
    return mapped(file)[index * NUMEL : (index + 1) * NUMEL]


def origin(file: Path, index: int = 0) -> Origin:
    return Origin(OriginFile(str(file)), SKIPPED + index * NUMEL * 4, NUMEL * 4)


def read(found: Origin | None, begin: int = 0, nbytes: int = NUMEL * 4) -> torch.Tensor:
    assert found is not None
    into = torch.zeros(nbytes, dtype=torch.uint8)
    found.load(begin, into).wait()
    return into.view(torch.float32)


# ---- which file a tensor is of -----------------------------------------------------------------------------------


@pytest.mark.parametrize("index", range(4))
def test_the_file_of_a_mapped_tensor_is_found(file: Path, index: int) -> None:
    values = part(file, index)
    found = Origins.now().of(values)
    assert torch.equal(read(found), values)
    assert torch.equal(read(found, 400, 800), values[100:300])


def test_what_was_written_to_is_not_in_its_file(file: Path) -> None:
    whole = mapped(file)
    parts = whole.split(NUMEL)
    parts[1][NUMEL // 2] = 7.0
    origins = Origins.now()
    found = [origins.of(values) is not None for values in parts]
    # Neighbours share the pages at their ends, which may have been written for either.
    assert found[1] is False
    assert found[3] is True
    parts[3][-1] += 1
    assert origins.of(parts[3]) is None


def test_a_shared_mapping_changes_with_whoever_writes(file: Path) -> None:
    assert Origins.now().of(mapped(file, shared=True)) is None


def test_ordinary_memory_has_no_file(file: Path) -> None:
    kept = mapped(file)
    origins = Origins.now()
    assert origins.of(torch.zeros(NUMEL)) is None
    assert origins.of(torch.zeros(0)) is None
    assert origins.of(kept.view(2, -1).t()) is None
    assert origins.of(torch.nn.Parameter(kept)) is None
    assert origins.of(kept.to("meta")) is None
    assert origins.of(kept.clone()) is None


@pytest.mark.parametrize("how", ["gone", "replaced", "of_the_same_inode", "a_device"])
def test_another_file_of_the_same_name(file: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    values = part(file, 0)
    other = tmp_path / "other"
    if how == "gone":
        file.unlink()
    elif how == "replaced":
        other.write_bytes(bytes(file.stat().st_size))
        other.rename(file)
    elif how == "of_the_same_inode":
        # As where another file system is mounted over the folder.
        other.write_bytes(bytes(file.stat().st_size))
        original = os.open
        monkeypatch.setattr(os, "open", lambda path, *rest: original(other if path == str(file) else path, *rest))
        shown = file.stat().st_dev, file.stat().st_ino
        monkeypatch.setattr(OriginFile, "identity", property(lambda self: shown, lambda self, _: None), raising=False)
    else:
        monkeypatch.setattr(
            OriginFile, "regular", property(lambda self: False, lambda self, regular: None), raising=False
        )
    assert Origins.now().of(values) is None
    monkeypatch.undo()


@pytest.mark.parametrize("hidden", ["/proc/self/maps", "/proc/self/pagemap", "/proc/self/mountinfo"])
def test_a_system_that_does_not_tell(file: Path, monkeypatch: pytest.MonkeyPatch, hidden: str) -> None:
    original: Any = builtins.open

    def refused(name: Any, *rest: Any, **options: Any) -> Any:
        if name == hidden:
            raise PermissionError(errno.EACCES, "hidden")
        return original(name, *rest, **options)

    values = part(file, 0)
    monkeypatch.setattr(builtins, "open", refused)
    assert Origins.now().of(values) is None


def test_a_file_system_in_layers(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of a lower layer that was mapped and then written to goes on being shown, and is another one by name."""
    original: Any = builtins.open
    device = file.stat().st_dev
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"22 1 {os.major(device)}:{os.minor(device)} / / rw shared:1 - overlay overlay rw\n")

    def layered(name: Any, *rest: Any, **options: Any) -> Any:
        return original(mounts if name == "/proc/self/mountinfo" else name, *rest, **options)

    values = part(file, 0)
    assert Origins.now().of(values) is not None
    monkeypatch.setattr(builtins, "open", layered)
    assert Origins.now().of(values) is None


@pytest.mark.parametrize("shown", ["/dev/null", "/dev/zero"], ids=["ends_early", "tells_nothing"])
def test_a_page_map_that_is_of_no_use(file: Path, monkeypatch: pytest.MonkeyPatch, shown: str) -> None:
    original: Any = builtins.open

    def other(name: Any, *rest: Any, **options: Any) -> Any:
        return original(shown if name == "/proc/self/pagemap" else name, *rest, **options)

    values = part(file, 0)
    assert Origins.now().of(values) is not None
    monkeypatch.setattr(builtins, "open", other)
    assert Origins.now().of(values) is None


# ---- reading -----------------------------------------------------------------------------------------------------


def test_a_file_may_lose_its_name(file: Path) -> None:
    values = part(file, 1).clone()
    found = origin(file, 1)
    file.unlink()
    assert torch.equal(read(found), values)


CHANGED = (
    r"values.bin was changed \(\d+ bytes when .* still read from it\. .* until each of its parameters has been "
    r"updated, which the first step need not do; put it back, or save to"
)


@pytest.mark.parametrize("how", ["shorter", "rewritten"])
def test_a_file_that_was_changed_is_refused(file: Path, how: str) -> None:
    before, found = file.read_bytes(), origin(file)
    load = found.load(0, torch.zeros(NUMEL * 4, dtype=torch.uint8))
    seen = file.stat()
    file.write_bytes(before[: SKIPPED + 100] if how == "shorter" else bytes(len(before)))
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns + 1))
    for _ in range(2):
        with pytest.raises(DiskError, match=CHANGED):
            load.wait()
    file.write_bytes(before)
    os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
    load.order()
    assert torch.equal(read(found), part(file, 0))


def test_what_has_been_read_is_not_read_again(file: Path) -> None:
    into = torch.zeros(NUMEL * 4, dtype=torch.uint8)
    load = origin(file).load(0, into)
    load.wait()
    into.fill_(1)
    load.wait()
    assert load.done()
    assert (into == 1).all()


def test_a_read_that_fails_says_so(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    found = origin(file)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(DiskError, match=r"cannot read .*values.bin: Input/output error"):
        read(found)


def test_what_the_system_reads_in_parts_is_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, into, offset: original(fd, [into[0][:1000]], offset))
    assert torch.equal(read(origin(file)), part(file, 0))


def test_a_forked_child_lets_go_of_the_file(file: Path) -> None:
    found = origin(file)
    child = os.fork()
    if child == 0:
        try:
            read(found)
        except DiskError as error:
            os._exit(7 if error.errno == errno.EBADF else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert torch.equal(read(found), part(file, 0))


# ---- in a pool ---------------------------------------------------------------------------------------------------


@contextmanager
def two_of_four(file: Path, directory: Path) -> Iterator[tuple[Pool, list[PagedTensor]]]:
    """A pool with room for two of the four tensors that the file has the values of."""
    with pool_of(6, directory) as pool:
        tensors = [pool.create(f"t{i}", Tag.PARAM, torch.Size([NUMEL]), torch.float32) for i in range(4)]
        for index, tensor in enumerate(tensors):
            pool.leave_in_file(tensor, origin(file, index))
        yield pool, tensors


def test_what_is_only_read_is_never_stored(file: Path, tmp_path: Path) -> None:
    with two_of_four(file, tmp_path) as (pool, tensors):
        for _ in range(_MANY_LOADS - 1):
            for index, tensor in enumerate(tensors):
                assert torch.equal(pool.fault(tensor), part(file, index))
                assert tensor.place is Place.CLEAN
        assert pool.stats.stored_bytes == 0
        assert pool.stats.evictions > 0
        pool.check_integrity()


def test_what_is_read_again_and_again_is_taken_home(file: Path, tmp_path: Path) -> None:
    with two_of_four(file, tmp_path) as (pool, tensors):
        for _ in range(_MANY_LOADS + 2):
            for index, tensor in enumerate(tensors):
                assert torch.equal(pool.fault(tensor), part(file, index))
        assert pool.stats.stored_bytes == sum(tensor.slot_bytes for tensor in tensors)
        assert all(tensor.origin is None for tensor in tensors)


def test_what_was_looked_at_may_be_written_over_its_file(file: Path, tmp_path: Path) -> None:
    before = [part(file, index).clone() for index in range(4)]
    with two_of_four(file, tmp_path) as (pool, tensors):
        pool.fault(tensors[0])
        pool.lend(tensors[1])
        looked = [pool.snapshot(tensor) for tensor in tensors]
        assert all(torch.equal(values, each) for values, each in zip(looked, before, strict=True))
        del looked
        file.write_bytes(b"something else")
        for tensor, values in zip(tensors, before, strict=True):
            assert torch.equal(pool.fault(tensor), values)


def test_what_was_written_is_stored_and_leaves_its_file(file: Path, tmp_path: Path) -> None:
    with two_of_four(file, tmp_path) as (pool, tensors):
        pool.fault(tensors[0], write=True).add_(1)
        for tensor in tensors[1:]:
            pool.fault(tensor)
        assert tensors[0].place is Place.AWAY
        assert tensors[0].origin is None
        assert torch.equal(pool.fault(tensors[0]), part(file, 0) + 1)


def test_an_update_in_windows_that_breaks_off(file: Path, tmp_path: Path) -> None:
    with two_of_four(file, tmp_path) as (pool, tensors):
        half = NUMEL // 2 // 1024 * 1024
        window = pool.windows.open(tensors[0], 0, half)
        pool.windows.ready(window).add_(1)
        pool.windows.close(window, wrote=True)
        assert 0 < tensors[0].stored_bytes < tensors[0].nbytes
        expected = part(file, 0).clone()
        expected[:half] += 1
        assert torch.equal(pool.fault(tensors[0]), expected)
        assert tensors[0].place is Place.DIRTY, "the home lacks the end of it"
        pool.evict(tensors[0])
        assert torch.equal(pool.fault(tensors[0]), expected)


def test_room_that_was_made_for_nothing(file: Path, tmp_path: Path) -> None:
    with two_of_four(file, tmp_path) as (pool, tensors):
        pool.occupy(tensors[0])
        pool.vacate(tensors[0])
        assert torch.equal(pool.fault(tensors[0]), part(file, 0))


def test_a_file_that_was_changed_is_refused_and_can_be_put_back(file: Path, tmp_path: Path) -> None:
    with two_of_four(file, tmp_path) as (pool, tensors):
        seen, before = file.stat(), file.read_bytes()
        file.write_bytes(b"short")
        assert pool.ahead.prefetch(tensors[0])
        for tensor in tensors[:2]:
            with pytest.raises(DiskError, match="was changed"):
                pool.fault(tensor)
            assert tensor.place is Place.AWAY
        pool.check_integrity()
        file.write_bytes(before)
        os.utime(file, ns=(seen.st_atime_ns, seen.st_mtime_ns))
        assert torch.equal(pool.fault(tensors[0]), part(file, 0))


def test_what_was_sent_for_and_given_up_leaves_nothing_behind(file: Path, tmp_path: Path) -> None:
    with two_of_four(file, tmp_path) as (pool, tensors):
        held = pool.budget.used_bytes
        for _ in range(3):
            assert pool.ahead.prefetch(tensors[0])
            pool.evict(tensors[0])
            pool.room.collect()
            assert pool.budget.used_bytes == held


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_any_order_of_actions_gives_the_same_bytes(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    choose = random.Random(seed)
    directory = tmp_path_factory.mktemp("origin")
    file = directory / "values.bin"
    torch.manual_seed(seed)
    plain = list(torch.randn(4 * NUMEL).split(NUMEL))
    file.write_bytes(bytes(SKIPPED) + b"".join(values.numpy().tobytes() for values in plain))
    plain = [values.clone() for values in plain]
    with two_of_four(file, directory) as (pool, tensors):
        for _ in range(40):
            index = choose.randrange(4)
            tensor = tensors[index]
            action = choose.choice(["read", "write", "send", "evict", "window", "look", "renew", "lend", "away"])
            if action == "read":
                assert torch.equal(pool.fault(tensor), plain[index])
            elif action == "write":
                pool.fault(tensor, write=True).mul_(2)
                plain[index].mul_(2)
            elif action == "send":
                pool.ahead.prefetch(tensor)
            elif action in ("evict", "away"):
                if tensor in pool.shelf:
                    (pool.evict if action == "evict" else pool.ahead.evict)(tensor)
            elif action == "window":
                stop = choose.choice([NUMEL, NUMEL // 2 // 1024 * 1024])
                wrote = choose.random() < 0.7
                window = pool.windows.open(tensor, 0, stop)
                assert torch.equal(pool.windows.ready(window), plain[index][:stop])
                if wrote:
                    pool.windows.ready(window).add_(1)
                    plain[index][:stop] += 1
                pool.windows.close(window, wrote=wrote)
            elif action == "look":
                assert torch.equal(pool.snapshot(tensor), plain[index])
            elif action == "renew":
                plain[index] = torch.full((NUMEL,), float(choose.random()))
                pool.renew(tensor, plain[index].clone())
            else:
                lent = pool.lend(tensor)
                if choose.random() < 0.5:
                    lent.sub_(3)
                    plain[index].sub_(3)
                del lent
                pool.shelf.end_sparing()
            pool.check_integrity()
        for tensor, values in zip(tensors, plain, strict=True):
            assert torch.equal(pool.fault(tensor), values)
