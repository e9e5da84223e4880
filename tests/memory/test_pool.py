"""The pool: any order of accesses gives the right bytes, under any budget, and everything is accounted for."""

from __future__ import annotations

import errno
import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.errors import BudgetError, DeviceBudgetError, DiskError
from ptm_accel.memory.block import Block, Place, placeholder
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.memory.windows import WINDOW_ALIGN, Windows
from tests.tiers import PAGE, evict_and_wait, open_memory

KINDS = ("host+disk", "mock+host", "mock+host+disk")


@contextmanager
def pool_of(pages: int, directory: Path, kind: str = "host+disk", host_bytes: int = 1 << 22) -> Iterator[Pool]:
    """A pool with room for `pages` pages beside what its tiers hold."""
    probe = open_memory(kind, 1 << 20, directory, host_bytes=host_bytes)
    held = probe.pool.budget.used_bytes
    probe.close()
    memory = open_memory(kind, pages * PAGE + held, directory, host_bytes=host_bytes)
    try:
        yield memory.pool
        memory.check_integrity()
    finally:
        memory.close()
    assert sum(memory.pool.budget.used_by_tag().values()) == 0


def made(pool: Pool, name: str, elements: int = 1024, fill: float = 0.0, **options: Any) -> Block:
    return pool.create(name, Tag.PARAM, torch.Size([elements]), torch.float32, fill=fill, **options)


class Told:
    """Keeps what an occupant is told."""

    def __init__(self) -> None:
        self.news: list[tuple[str, float]] = []
        self.writes = 0

    @property
    def views(self) -> int:
        return 0

    def was_written(self) -> bool:
        written, self.writes = self.writes > 0, 0
        return written

    def arrived(self, tensor: torch.Tensor) -> None:
        self.news.append(("arrived", float(tensor[0])))

    def leaving(self, tensor: torch.Tensor) -> None:
        self.news.append(("leaving", float(tensor[0])))


@pytest.mark.parametrize("kind", KINDS)
def test_the_life_of_a_tensor(kind: str, tmp_path: Path) -> None:
    with pool_of(1, tmp_path, kind) as pool:
        tensor, other = made(pool, "a", fill=3.0), made(pool, "b")
        tensor.occupant = told = Told()
        assert tensor.place is Place.BLANK
        assert (pool.fault(tensor) == 3.0).all()
        assert tensor.place is Place.DIRTY
        pool.fault(tensor, write=True).fill_(5.0)
        pool.fault(other)
        assert tensor.place is Place.AWAY
        assert (pool.fault(tensor) == 5.0).all()
        assert tensor.place is Place.CLEAN
        stored = pool.stats.stored_bytes
        pool.fault(other)
        assert pool.stats.stored_bytes == stored  # both were clean
        pool.fault(tensor, write=True)
        assert tensor.place is Place.DIRTY
        assert told.news == [("arrived", 3.0), ("leaving", 5.0), ("arrived", 5.0), ("leaving", 5.0), ("arrived", 5.0)]
        pool.drop(tensor)
        assert tensor.place is Place.BLANK
        assert (pool.fault(tensor) == 3.0).all()
        pool.forget(tensor)
        assert tensor not in pool.tensors()


@pytest.mark.parametrize("how", ["evicted", "sent away", "flushed", "looked at"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_only_its_occupant_knows_to_be_changed_is_stored(how: str, kind: str, tmp_path: Path) -> None:
    with pool_of(2, tmp_path, kind) as pool:
        tensor = made(pool, "a", fill=3.0)
        tensor.occupant = told = Told()
        pool.fault(tensor)
        evict_and_wait(pool, tensor)
        pool.fault(tensor).fill_(5.0)
        assert tensor.place is Place.CLEAN
        told.writes = 1
        if how == "evicted" or how == "sent away":
            pool.admission.evict(tensor)
        elif how == "flushed":
            pool.flush(tensor)
        else:
            assert (pool.snapshot(tensor) == 5.0).all()
        assert (pool.snapshot(tensor) == 5.0).all()
        if tensor.place.resident:
            evict_and_wait(pool, tensor)
        assert (pool.fault(tensor) == 5.0).all()


def test_the_least_recently_used_leaves_first(tmp_path: Path) -> None:
    with pool_of(3, tmp_path) as pool:
        a, b, c, d = (made(pool, name) for name in "abcd")
        for tensor in (a, b, c):
            pool.fault(tensor)
        pool.fault(a)
        pool.fault(d)
        assert [t.name for t in (a, b, c, d) if t.place.resident] == ["a", "c", "d"]
        with pool.pin(c):
            pool.fault(b)
            pool.fault(a)
            pool.fault(d)
        assert c.place.resident
        pool.fault(b)
        assert c.place.resident, "its pin made it the most recently used"


def test_pins_nest_and_end_once(tmp_path: Path) -> None:
    with pool_of(1, tmp_path) as pool:
        tensor, other = made(pool, "a"), made(pool, "b")
        first, second = pool.pin(tensor), pool.pin(tensor)
        assert pool.tenants.pinned() == [tensor]
        assert first.tensor.data_ptr() == second.tensor.data_ptr()
        first.release()
        first.release()
        with pytest.raises(AssertionError, match="pin used after its end"):
            _ = first.tensor
        with pytest.raises(BudgetError):
            pool.fault(other)
        with pytest.raises(AssertionError, match="is pinned"):
            pool.drop(tensor)
        second.release()
        pool.fault(other)
        assert not pool.tenants.pinned()


def test_a_refusal_names_the_largest_holders(tmp_path: Path) -> None:
    with pool_of(4, tmp_path) as pool:
        pinned, viewed = made(pool, "layer.weight", 2048), made(pool, "layer.bias")
        view = pool.fault(viewed)
        pin = pool.pin(pinned)
        with pytest.raises(BudgetError) as caught:
            pool.fault(made(pool, "head.weight", 2048))
        text = str(caught.value)
        assert text.startswith("host budget: cannot place 8192 B for head.weight: ")
        assert text.endswith(
            "and none of it can be moved away now; set host_memory higher. Largest holders: layer.weight (8192 B, "
            "pinned), layer.bias (4096 B, a view is alive)."
        )
        del view
        pool.fault(viewed)
        pin.release()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_whole_is_not_loaded(kind: str, tmp_path: Path) -> None:
    with pool_of(4, tmp_path, kind) as pool:
        tensor = made(pool, "w")
        pool.fault(tensor, write=True).fill_(1.0)
        for value in (2.0, 3.0):
            evict_and_wait(pool, tensor)
            loaded = pool.stats.loaded_bytes
            pool.occupy(tensor)
            with pool.pin(tensor, write=True) as there:
                there.fill_(value)
            del there
            assert pool.stats.loaded_bytes == loaded
            evict_and_wait(pool, tensor)
            assert bool((pool.fault(tensor) == value).all())
        evict_and_wait(pool, tensor)
        pool.occupy(tensor)
        pool.vacate(tensor)
        assert tensor.place is Place.AWAY
        assert bool((pool.fault(tensor) == 3.0).all()), "nothing was written: it is as it was"


def test_without_a_backing_store_nothing_leaves() -> None:
    memory = build_memory(Capacities(page_bytes=PAGE, host_bytes=2 * PAGE), torch.device("cpu"))
    pool = memory.pool
    a, b, c = (made(pool, name) for name in "abc")
    pool.fault(a)
    pool.fault(b)
    with pytest.raises(BudgetError, match="There is no tier below: set disk to a directory on an SSD"):
        pool.fault(c)
    pool.drop(a)
    pool.fault(c)
    assert pool.eviction.nbytes == 0
    memory.check_integrity()
    memory.close()


def test_a_device_that_is_full_says_so(tmp_path: Path) -> None:
    refused = pytest.raises(DeviceBudgetError, match="the device is out of memory")
    with pool_of(1, tmp_path, "mock+host") as pool, pool.pin(made(pool, "a")), refused:
        pool.fault(made(pool, "b"))


def test_what_is_not_movable_stays(tmp_path: Path) -> None:
    with pool_of(2, tmp_path) as pool:
        fixed = made(pool, "a", movable=False)
        pool.fault(fixed)
        for name in "bcd":
            pool.fault(made(pool, name))
        assert fixed.place.resident
        assert fixed not in pool.eviction


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_that_outlives_its_extent_is_charged_and_keeps_its_values(kind: str, tmp_path: Path) -> None:
    with pool_of(2, tmp_path, kind) as pool:
        tensor, other, third = (made(pool, name) for name in "abc")
        view = pool.fault(tensor, write=True)[10:20]
        view.fill_(7.0)
        evict_and_wait(pool, tensor)
        pool.fault(other, write=True).fill_(1.0)
        assert pool.admission.released.nbytes == PAGE
        with pool.pin(other), pytest.raises(BudgetError, match="a view is alive"):
            pool.fault(third)
        assert (view == 7.0).all()
        del view
        pool.fault(third)
        assert (pool.fault(tensor)[10:20] == 7.0).all()


def test_memory_of_others_is_adopted_without_a_copy(tmp_path: Path) -> None:
    with pool_of(2, tmp_path) as pool:
        data = torch.arange(700.0)
        tensor = made(pool, "a", 700)
        pool.adopt(tensor, data)
        assert pool.fault(tensor).data_ptr() == data.data_ptr()
        assert pool.budget.used_by_tag()[Tag.PARAM] == 2800
        del data
        evict_and_wait(pool, tensor)
        assert torch.equal(pool.fault(tensor), torch.arange(700.0))


@pytest.mark.parametrize("data", [torch.arange(1400.0)[::2], torch.arange(1400.0)[:700], torch.zeros(1).expand(700)])
def test_memory_that_is_shared_is_copied(data: torch.Tensor, tmp_path: Path) -> None:
    with pool_of(2, tmp_path) as pool:
        tensor = made(pool, "a", 700)
        pool.adopt(tensor, data)
        assert pool.fault(tensor).data_ptr() != data.data_ptr()
        assert torch.equal(pool.fault(tensor), data)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", Place)
def test_snapshots_cost_nothing_and_are_true(place: Place, kind: str, tmp_path: Path) -> None:
    with pool_of(2, tmp_path, kind) as pool:
        tensor = made(pool, "a", fill=2.0)
        if place is not Place.BLANK:
            pool.fault(tensor, write=True).copy_(torch.arange(1024.0))
        if place in (Place.AWAY, Place.CLEAN, Place.ARRIVING):
            evict_and_wait(pool, tensor)
        if place is Place.CLEAN:
            pool.fault(tensor)
        if place is Place.ARRIVING:
            assert pool.prefetch(tensor)
        assert tensor.place is place
        pool.admission.released.collect()
        used = pool.budget.used_bytes
        snapshot = pool.snapshot(tensor)
        expected = torch.full((1024,), 2.0) if place is Place.BLANK else torch.arange(1024.0)
        assert torch.equal(snapshot, expected)
        pool.admission.released.collect()
        assert pool.budget.used_bytes == used
        del snapshot


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["whole", "in parts", "dropped"])
def test_a_snapshot_stays_what_it_is(how: str, kind: str, tmp_path: Path) -> None:
    with pool_of(20, tmp_path, kind) as pool:
        tensor = made(pool, "a", 2 * WINDOW_ALIGN)
        values = torch.arange(2.0 * WINDOW_ALIGN)
        pool.fault(tensor, write=True).copy_(values)
        evict_and_wait(pool, tensor)
        assert pool.backing is not None
        used = pool.backing.budget.used_bytes  # type: ignore[attr-defined]
        snapshot = pool.snapshot(tensor)
        if how == "whole":
            pool.fault(tensor, write=True).fill_(1.0)
            evict_and_wait(pool, tensor)
        elif how == "in parts":
            window = Windows(pool).open(tensor, WINDOW_ALIGN, 2 * WINDOW_ALIGN)
            Windows(pool).ready(window).fill_(1.0)
            Windows(pool).close(window, wrote=True)
        else:
            pool.drop(tensor)
            other = made(pool, "b", 2 * WINDOW_ALIGN, fill=1.0)
            pool.fault(other)
            evict_and_wait(pool, other)
        assert torch.equal(snapshot, values)
        if how != "dropped":
            expected = torch.cat(
                [torch.ones(WINDOW_ALIGN) if how == "whole" else values[:WINDOW_ALIGN], torch.ones(WINDOW_ALIGN)]
            )
            assert torch.equal(pool.fault(tensor), expected)
            evict_and_wait(pool, tensor)
            assert torch.equal(pool.snapshot(tensor), expected)
            assert pool.backing.budget.used_bytes == used + tensor.slot_bytes  # type: ignore[attr-defined]
        del snapshot
        # What was kept for it is free with the next new tensor.
        more = made(pool, "c")
        pool.fault(more, write=True)
        evict_and_wait(pool, more)
        assert pool.backing.budget.used_bytes == used + more.slot_bytes  # type: ignore[attr-defined]


def test_no_room_beside_a_snapshot_is_a_refusal(tmp_path: Path) -> None:
    with pool_of(4, tmp_path, "mock+host", host_bytes=PAGE) as pool:
        tensor = made(pool, "a")
        pool.fault(tensor, write=True).fill_(1.0)
        evict_and_wait(pool, tensor)
        snapshot = pool.snapshot(tensor)
        pool.fault(tensor, write=True).fill_(2.0)
        with pytest.raises(BudgetError) as refused:
            evict_and_wait(pool, tensor)
        assert str(refused.value).startswith(
            "a: a value of state_dict() is kept, and takes 4096 B in addition to the new value. Drop it, or keep a "
            "copy of it (`value.clone()`). (host frames: cannot place 4096 B for a: "
        )
        assert (snapshot == 1.0).all()
        assert (pool.fault(tensor) == 2.0).all()
        del snapshot
        evict_and_wait(pool, tensor)
        assert (pool.fault(tensor) == 2.0).all()


def test_flushing_leaves_a_tensor_where_it_is(tmp_path: Path) -> None:
    with pool_of(2, tmp_path) as pool:
        tensor = made(pool, "a")
        pool.fault(tensor, write=True).fill_(4.0)
        pool.flush(tensor)
        assert tensor.place is Place.CLEAN
        stored = pool.stats.stored_bytes
        pool.flush(tensor)
        evict_and_wait(pool, tensor)
        assert pool.stats.stored_bytes == stored
        assert (pool.fault(tensor) == 4.0).all()


def test_a_load_that_fails_leaves_the_tensor_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(2, tmp_path) as pool:
        tensor = made(pool, "a")
        pool.fault(tensor, write=True).fill_(4.0)
        evict_and_wait(pool, tensor)
        assert pool.backing is not None

        def broken(*args: Any) -> Any:
            raise DiskError(errno.EIO, "broken")

        with monkeypatch.context() as patched:
            patched.setattr(pool.backing, "load", broken)
            with pytest.raises(DiskError, match="broken"):
                pool.fault(tensor)
        assert tensor.place is Place.AWAY
        pool.admission.released.collect()
        assert Tag.PARAM not in pool.budget.used_by_tag()
        assert (pool.fault(tensor) == 4.0).all()


def test_a_store_that_fails_leaves_the_tensor_unharmed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(1, tmp_path) as pool:
        tensor = made(pool, "a")
        pool.fault(tensor, write=True).fill_(4.0)
        assert pool.backing is not None

        def full(*args: Any) -> Any:
            raise DiskError(errno.ENOSPC, "full")

        with monkeypatch.context() as patched:
            patched.setattr(pool.backing, "store", full)
            with pytest.raises(DiskError, match="full"):
                pool.fault(made(pool, "b"))
        assert tensor.place is Place.DIRTY
        assert (pool.fault(tensor) == 4.0).all()


def test_charges_for_memory_of_torchs_last_as_long_as_the_memory(tmp_path: Path) -> None:
    with pool_of(2, tmp_path) as pool:
        with pool.admission.charged(100, Tag.CAST, "a") as keep:
            kept = torch.zeros(25)
            keep(kept)
        view = kept[3:]
        del kept
        pool.admission.released.collect()
        assert pool.budget.used_by_tag()[Tag.CAST] == 100
        del view
        pool.admission.released.collect()
        assert Tag.CAST not in pool.budget.used_by_tag()
        with pytest.raises(ZeroDivisionError), pool.admission.charged(100, Tag.CAST, "a"):
            raise ZeroDivisionError
        assert Tag.CAST not in pool.budget.used_by_tag()


@pytest.mark.parametrize("kind", KINDS)
def test_windows_write_what_they_show(kind: str, tmp_path: Path) -> None:
    elements = 2 * WINDOW_ALIGN + 100
    bounds = [(0, WINDOW_ALIGN), (WINDOW_ALIGN, 2 * WINDOW_ALIGN), (2 * WINDOW_ALIGN, elements)]
    with pool_of(12, tmp_path, kind) as pool:
        tensor = made(pool, "a", elements, fill=1.0)
        for sweep in range(2):
            for start, stop in bounds:
                window = Windows(pool).open(tensor, start, stop)
                assert (Windows(pool).ready(window) == 1.0 + 2 * sweep).all()
                Windows(pool).ready(window).add_(2.0)
                Windows(pool).close(window, wrote=True)
            assert tensor.place is Place.AWAY
        assert (pool.fault(tensor) == 5.0).all()
        window = Windows(pool).open(tensor, *bounds[1])
        Windows(pool).ready(window).fill_(9.0)
        Windows(pool).close(window, wrote=True)
        expected = torch.full((elements,), 5.0)
        expected[slice(*bounds[1])] = 9.0
        evict_and_wait(pool, tensor)
        assert torch.equal(pool.fault(tensor), expected)


def test_a_tensor_that_comes_in_under_a_window_gets_what_is_written(tmp_path: Path) -> None:
    elements = WINDOW_ALIGN + 100
    with pool_of(20, tmp_path) as pool:
        tensor = made(pool, "a", elements, fill=1.0)
        window = Windows(pool).open(tensor, 0, WINDOW_ALIGN)
        Windows(pool).ready(window).fill_(2.0)
        assert (pool.fault(tensor) == 1.0).all()
        Windows(pool).close(window, wrote=True)
        expected = torch.full((elements,), 1.0)
        expected[:WINDOW_ALIGN] = 2.0
        assert torch.equal(pool.fault(tensor), expected)


def test_a_window_whose_load_fails_gives_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(4, tmp_path) as pool:
        tensor = made(pool, "a")
        pool.fault(tensor, write=True).fill_(4.0)
        evict_and_wait(pool, tensor)
        assert pool.backing is not None

        class Broken:
            def done(self) -> bool:
                return True

            def wait(self) -> None:
                raise DiskError(errno.EIO, "broken")

            order = wait

        monkeypatch.setattr(pool.backing, "load", lambda *args: Broken())
        window = Windows(pool).open(tensor, 0, 1024)
        with pytest.raises(DiskError, match="broken"):
            Windows(pool).close(window, wrote=False)
        pool.admission.released.collect()
        assert pool.budget.used_by_tag() == {Tag.STAGING: pool.budget.used_bytes}


def test_a_window_whose_load_cannot_begin_gives_its_room_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(4, tmp_path) as pool:
        tensor = made(pool, "a")
        pool.fault(tensor, write=True).fill_(4.0)
        evict_and_wait(pool, tensor)
        pool.admission.released.settle()
        before = pool.budget.used_by_tag()

        def refuse(*args: object) -> None:
            raise DiskError(errno.EIO, "lost")

        with monkeypatch.context() as patched:
            patched.setattr(pool.backing, "load", refuse)
            with pytest.raises(DiskError, match="lost"):
                Windows(pool).open(tensor, 0, 1024)
        pool.admission.released.collect()
        assert pool.budget.used_by_tag() == before
        window = Windows(pool).open(tensor, 0, 1024)
        assert Windows(pool).ready(window).unique().tolist() == [4.0]
        Windows(pool).close(window, wrote=False)


def test_closing_drops_what_comes_after_a_pin(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    memory = open_memory("host+disk", 1 << 20, tmp_path)
    pool = memory.pool
    tensors = [made(pool, name) for name in "abcd"]
    for tensor in tensors:
        pool.fault(tensor, write=True)
    pins = [pool.pin(tensors[1]), pool.pin(tensors[2])]
    with pytest.raises(AssertionError, match="'b', .* is pinned"):
        memory.close()
    assert "'c'" in caplog.text
    assert [tensor.place for tensor in (tensors[0], tensors[3])] == [Place.BLANK] * 2
    for pin in pins:
        pin.release()


def test_what_could_be_had(tmp_path: Path) -> None:
    with pool_of(4, tmp_path) as pool:
        a, b = made(pool, "a"), made(pool, "b")
        whole = pool.admission.available_bytes()
        assert whole == 4 * PAGE
        pool.fault(a)
        with pool.pin(b):
            assert pool.eviction.nbytes == PAGE
            assert (a in pool.eviction, b in pool.eviction) == (True, False)
            assert pool.admission.available_bytes() == 3 * PAGE
        view = pool.fault(a)
        evict_and_wait(pool, a)
        assert pool.admission.available_bytes() == 3 * PAGE
        del view
        assert pool.admission.available_bytes() == whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int8, torch.int64, torch.bool])
@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2)])
def test_placeholders(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    stand_in = placeholder(torch.Size(shape), dtype, torch.device("cpu"))
    assert (stand_in.shape, stand_in.dtype) == (torch.Size(shape), dtype)
    assert stand_in.untyped_storage().nbytes() == dtype.itemsize
    if dtype.is_floating_point or dtype.is_complex:
        assert stand_in.isnan().all()


Step = tuple[str, int, int]
KINDS_OF_STEP = (
    "read", "write", "pin", "unpin", "view", "unview", "drop", "window", "snapshot", "flush", "prefetch", "behind",
)  # fmt: skip
STEPS = st.lists(
    st.tuples(
        st.sampled_from(KINDS_OF_STEP),
        st.integers(0, 5),
        st.integers(0, 1 << 30),
    ),
    max_size=60,
)


class Twin:
    """The pool beside plain tensors that hold what it should hold."""

    def __init__(self, pool: Pool) -> None:
        sizes = [100, 1024, WINDOW_ALIGN, WINDOW_ALIGN + 7, 2 * WINDOW_ALIGN, 3]
        self.pool = pool
        self.tensors = [made(pool, f"t{n}", size, fill=float(n)) for n, size in enumerate(sizes)]
        self.truth = [torch.full((size,), float(n)) for n, size in enumerate(sizes)]
        self.pins: list[Any] = []
        self.views: list[torch.Tensor] = []
        self.snapshots: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.count = itertools.count(100)

    def step(self, what: str, which: int, number: int) -> None:
        tensor, truth = self.tensors[which], self.truth[which]
        if what == "unpin" and self.pins:
            self.pins.pop(number % len(self.pins)).release()
        elif what == "unview" and self.views:
            self.views.pop(number % len(self.views))
        elif what == "drop" and not tensor.pins:
            self.pool.drop(tensor)
            truth.fill_(float(which))
        elif what in ("read", "write", "pin", "view", "window", "snapshot", "flush", "prefetch", "behind"):
            getattr(self, what)(tensor, truth, number)

    def read(self, tensor: Block, truth: torch.Tensor, number: int) -> None:
        assert torch.equal(self.pool.fault(tensor), truth)

    def write(self, tensor: Block, truth: torch.Tensor, number: int) -> None:
        values = self.pool.fault(tensor, write=True)
        values[number % len(values)] = truth[number % len(truth)] = float(next(self.count))

    def pin(self, tensor: Block, truth: torch.Tensor, number: int) -> None:
        self.pins.append(self.pool.pin(tensor))

    def view(self, tensor: Block, truth: torch.Tensor, number: int) -> None:
        self.views.append(self.pool.fault(tensor)[: 1 + number % 50])

    def window(self, tensor: Block, truth: torch.Tensor, number: int) -> None:
        start = 0
        while start < tensor.numel:
            stop = min(start + WINDOW_ALIGN, tensor.numel)
            window = Windows(self.pool).open(tensor, start, stop)
            values = Windows(self.pool).ready(window)
            assert torch.equal(values, truth[start:stop])
            wrote = number % 3 > 0
            if wrote:
                values += 1.0
                truth[start:stop] += 1.0
            Windows(self.pool).close(window, wrote=wrote)
            start = stop

    def snapshot(self, tensor: Block, truth: torch.Tensor, number: int) -> None:
        taken = self.pool.snapshot(tensor)
        assert torch.equal(taken, truth)
        extent = tensor.extent
        if extent is None or taken.data_ptr() != extent.tensor.data_ptr():
            self.snapshots.append((taken, truth.clone()))
            if number % 3 == 0:
                self.snapshots.clear()

    def flush(self, tensor: Block, truth: torch.Tensor, number: int) -> None:
        if tensor.place.resident:
            self.pool.flush(tensor)

    def prefetch(self, tensor: Block, truth: torch.Tensor, number: int) -> None:
        there = self.pool.prefetch(tensor)
        assert there == (tensor.place in (Place.ARRIVING, Place.CLEAN, Place.DIRTY))

    def behind(self, tensor: Block, truth: torch.Tensor, number: int) -> None:
        if tensor in self.pool.eviction:
            self.pool.admission.evict(tensor)
            assert tensor.place is Place.AWAY

    def end(self) -> None:
        for pin in self.pins:
            pin.release()
        self.pins.clear()
        self.views.clear()
        assert all(torch.equal(taken, truth) for taken, truth in self.snapshots)
        for tensor, truth in zip(self.tensors, self.truth, strict=True):
            assert torch.equal(self.pool.fault(tensor), truth)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(steps=STEPS, pages=st.integers(10, 40))
def test_any_order_of_accesses(
    kind: str, steps: list[Step], pages: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pool_of(pages, tmp_path_factory.mktemp("pool"), kind) as pool:
        twin = Twin(pool)
        for what, which, number in steps:
            try:
                twin.step(what, which, number)
            except BudgetError:
                # Pins and views may hold everything; then a refusal is right, and nothing may have changed.
                assert twin.pins or twin.views
            pool.check_integrity()
        twin.end()


def test_many_tensors_in_random_order(tmp_path: Path) -> None:
    rng = random.Random(0)
    with pool_of(8, tmp_path, "mock+host+disk", host_bytes=1 << 17) as pool:
        tensors = [made(pool, f"t{n}", rng.choice([64, 1024, 3000])) for n in range(20)]
        truth = [torch.zeros(t.numel) for t in tensors]
        for step in range(400):
            which = rng.randrange(20)
            values = pool.fault(tensors[which], write=step % 3 == 0)
            assert torch.equal(values, truth[which])
            if step % 3 == 0:
                values.fill_(step)
                truth[which].fill_(step)
            del values
        assert pool.stats.evictions > 100


def test_what_is_spared_leaves_last(tmp_path: Path) -> None:
    with pool_of(3, tmp_path) as pool:
        first, second, third, fourth = (made(pool, name) for name in "abcd")
        for tensor in (first, second):
            pool.fault(tensor, write=True)
            pool.eviction.spare(tensor)
        pool.fault(third)
        assert pool.eviction.free() == [third]
        pool.fault(fourth)
        assert third.place is Place.AWAY
        pool.eviction.spare(first)
        pool.pin(fourth)
        pool.fault(third)
        assert [t.place for t in (first, second)] == [Place.DIRTY, Place.AWAY]
        assert pool.eviction.is_spared(first)
        pool.eviction.end_sparing()
        assert pool.eviction.free() == [first, third]
        pool.unpin(fourth)
