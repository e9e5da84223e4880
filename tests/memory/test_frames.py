"""Frames over slabs: charges, kept memory, pinning, and mappings of any set of frames."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.frames import Frame, FramePool, default_slab_bytes
from ptm_accel.memory.mapping import private_run
from ptm_accel.units import GIB, MIB
from tests.descriptors import open_files

UNIT = 4096
FRAME = 4 * UNIT
SLAB = 4 * FRAME


class FakePin:
    """Pins on paper, and fails from a given slab on."""

    def __init__(self, fail_from: int | None = None) -> None:
        self.fail_from = fail_from
        self.pinned: dict[int, int] = {}
        self.calls = 0

    def __call__(self, address: int, nbytes: int) -> Callable[[], None]:
        number, self.calls = self.calls, self.calls + 1
        if self.fail_from is not None and number >= self.fail_from:
            raise OSError("cudaHostRegister failed with CUDA error 2")
        self.pinned[address] = nbytes

        def unpin() -> None:
            del self.pinned[address]

        return unpin


class Setup:
    def __init__(self, capacity: int = 4 * SLAB, pin: FakePin | None = None) -> None:
        self.budget = Budget(Tier.HOST, capacity)
        self.pool = FramePool(self.budget, FRAME, slab_bytes=SLAB, pin=pin)

    def take(self, nbytes: int = FRAME, name: str = "w") -> Frame:
        return self.pool.take(nbytes, Tag.PARAM, name)

    def fill(self, frame: Frame, value: int) -> None:
        frame.view(0, frame.nbytes).fill_(value)

    @property
    def resident(self) -> int:
        """What the kernel says the slabs take."""
        return sum(os.fstat(slab.fd).st_blocks * 512 for slab in self.pool._slabs)


@pytest.fixture
def descriptors() -> Iterator[None]:
    # What earlier tests have left for the garbage collector must not go in between.
    gc.collect()
    before = open_files()
    yield
    assert not open_files() - before


@pytest.mark.parametrize(
    ("capacity", "frame", "slab"),
    [
        (1500 * GIB, 4 * MIB, 4 * GIB),
        (12 * GIB, 4 * MIB, 512 * MIB),
        (1 * GIB, 4 * MIB, 64 * MIB),
        (100 * MIB, 4 * MIB, 4 * MIB),
        (1 * MIB, 4 * MIB, 4 * MIB),
        (0, 4 * MIB, 4 * MIB),
    ],
)
def test_default_slab_is_a_power_of_two_that_fits(capacity: int, frame: int, slab: int) -> None:
    assert default_slab_bytes(capacity, frame) == slab


@pytest.mark.usefixtures("descriptors")
def test_frames_are_charged_by_their_owner_and_kept_after_that() -> None:
    s = Setup()
    frame, small = s.take(), s.pool.take(UNIT, Tag.STATE, "bias")
    assert s.budget.used_by_tag() == {Tag.PARAM: FRAME, Tag.STATE: UNIT}
    assert s.pool.used_bytes == FRAME + UNIT
    assert s.pool.kept_bytes == SLAB - FRAME - UNIT
    s.pool.give(frame)
    s.pool.give(small)
    assert s.budget.used_bytes == 0
    assert s.pool.kept_bytes == SLAB
    s.pool.check_integrity()
    # What is kept is used again before anything else.
    s.take()
    assert s.pool.slab_count == 1
    s.pool.close()
    s.pool.close()
    assert s.budget.used_bytes == 0
    assert s.pool.kept_bytes == 0


def test_a_refused_frame_leaves_everything_as_it_was() -> None:
    s = Setup(capacity=2 * FRAME + UNIT)
    frames = [s.take(), s.take()]
    with pytest.raises(BudgetError, match=r"host budget: cannot place 16384 B for w: .* set host_memory higher"):
        s.take()
    assert s.pool.used_bytes == 2 * FRAME
    assert s.pool.kept_bytes == 0
    s.pool.check_integrity()
    s.pool.give(frames[0])
    s.take()
    s.pool.close()


def test_empty_slabs_make_way_for_a_larger_one() -> None:
    s = Setup(capacity=FRAME + UNIT)
    with s.budget.reserve(2 * UNIT, Tag.GRAD, "somebody else"):
        s.pool.give(s.take(2 * UNIT))
    assert s.pool.kept_bytes == 2 * UNIT
    s.take()
    assert s.pool.slab_count == 1
    s.pool.check_integrity()
    s.pool.close()


def test_any_frames_can_be_mapped_side_by_side_without_a_copy() -> None:
    s = Setup()
    frames = [s.take(), s.take(2 * UNIT), s.take(UNIT), *(s.take() for _ in range(5))]
    for number, frame in enumerate(frames):
        s.fill(frame, number + 1)
    chosen = [frames[7], frames[2], frames[0], frames[1]]
    resident = s.resident
    mapped = private_run([frame.piece for frame in chosen]).tensor()
    assert torch.equal(mapped, torch.cat([frame.view(0, frame.nbytes) for frame in chosen]))
    assert s.resident == resident
    mapped.fill_(99)
    assert (frames[7].view(0, FRAME) == 8).all()
    s.pool.close()
    # The mapping outlives the pool.
    assert (mapped == 99).all()


def test_only_wholly_free_slabs_are_released() -> None:
    pin = FakePin()
    s = Setup(capacity=2 * SLAB, pin=pin)
    frames = [s.take() for _ in range(5)]
    assert s.pool.slab_count == 2
    for number, frame in enumerate(frames):
        s.fill(frame, number + 1)
    s.pool.give(frames[4])
    # The second slab is free: it goes. The first is in use: it stays whole.
    other = s.budget.reserve(SLAB, Tag.GRAD, "somebody else")
    assert len(pin.pinned) == 1
    assert s.pool.slab_count == 1
    assert s.pool.kept_bytes == 0
    for number, frame in enumerate(frames[:4]):
        assert (frame.view(0, FRAME) == number + 1).all()
    s.pool.check_integrity()
    other.release()
    s.pool.close()


def test_a_slab_is_made_smaller_where_the_budget_ends() -> None:
    pin = FakePin()
    s = Setup(capacity=SLAB + 2 * FRAME + UNIT, pin=pin)
    for _ in range(6):
        s.take()
    assert sorted(pin.pinned.values()) == [2 * FRAME, SLAB]
    s.take(UNIT)
    assert sorted(pin.pinned.values()) == [UNIT, 2 * FRAME, SLAB]
    with pytest.raises(BudgetError, match="in use and 0 B are free in 3 slabs, but in no run"):
        s.take(UNIT)
    s.pool.check_integrity()
    s.pool.close()
    assert not pin.pinned


def test_room_in_pieces_is_refused_with_the_numbers() -> None:
    s = Setup(capacity=SLAB, pin=FakePin())
    small = [s.take(UNIT) for _ in range(16)]
    for frame in small[::2]:
        s.pool.give(frame)
    with pytest.raises(BudgetError) as caught:
        s.take(FRAME, "layers.3.weight")
    assert str(caught.value) == (
        "host budget: cannot place 16384 B for layers.3.weight: 32768 B of 64.00 KiB are in use and 32768 B are free "
        "in 1 slabs, but in no run that is long enough; set host_memory higher."
    )
    s.pool.check_integrity()
    s.pool.close()


def test_frames_of_several_pages_leave_no_gaps_that_pages_do_not_fit() -> None:
    budget = Budget(Tier.HOST, 16 * FRAME)
    pool = FramePool(budget, 4 * FRAME, page_bytes=FRAME, slab_bytes=16 * FRAME)
    tensors = [[pool.take(4 * FRAME, Tag.PARAM, "w"), pool.take(FRAME, Tag.PARAM, "w")] for _ in range(3)]
    assert all(whole.is_followed_by(rest) for whole, rest in tensors)
    pool.take(FRAME, Tag.PARAM, "the last")
    assert pool.slab_count == 1
    assert pool.used_bytes == 16 * FRAME
    pool.close()


def test_a_failed_pin_costs_one_warning_and_no_frame() -> None:
    pin = FakePin(fail_from=1)
    s = Setup(pin=pin)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        frames = [s.take() for _ in range(12)]
    assert len(caught) == 1
    assert caught[0].category is RuntimeWarning
    text = str(caught[0].message)
    assert "could not pin 64.00 KiB of host memory (cudaHostRegister failed with CUDA error 2)" in text
    assert "about a third of the speed" in text
    assert "ulimit -l" in text
    assert "host_memory lower" in text
    assert [frame.pinned for frame in frames] == [True] * 4 + [False] * 8
    assert pin.calls == 2
    s.pool.check_integrity()
    s.pool.close()
    assert not pin.pinned


@pytest.mark.usefixtures("descriptors")
@pytest.mark.parametrize("call", ["memfd_create", "ftruncate"])
def test_a_machine_without_memory_is_a_budget_error(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    s = Setup()
    monkeypatch.setattr(os, call, fail)
    text = r"cannot map 64.00 KiB of host memory for frames: .*Cannot allocate memory, .* set host_memory lower"
    with pytest.raises(BudgetError, match=text):
        s.take()
    assert s.budget.used_bytes == 0
    s.pool.close()


def test_misuse_is_caught() -> None:
    s = Setup()
    frame = s.take()
    s.pool.give(frame)
    with pytest.raises(AssertionError, match="frame of 16384 B given back twice"):
        s.pool.give(frame)
    for nbytes in (0, 100, FRAME + UNIT):
        with pytest.raises(AssertionError, match=f"frame of {nbytes} B for w"):
            s.take(nbytes)
    s.pool.close()
    with pytest.raises(AssertionError, match="closed frame pool"):
        s.take()


def test_integrity_sees_lost_frames_charges_and_kept_bytes() -> None:
    s = Setup()
    frame = s.take()
    del s.pool._frames[frame]
    with pytest.raises(AssertionError, match=r"slab of 65536 B: run 16384\+49152 after 0"):
        s.pool.check_integrity()
    s.pool._frames[frame] = None
    frame.reservation.release()
    with pytest.raises(AssertionError, match="frames 16384 B, charged 0 B"):
        s.pool.check_integrity()


def test_random_use_keeps_used_and_kept_within_the_capacity() -> None:
    step = st.tuples(st.sampled_from(["take", "give", "reserve", "release"]), st.integers(0, 63))

    @settings(max_examples=40, deadline=None)
    @given(st.lists(step, min_size=20, max_size=60))
    def check(steps: list[tuple[str, int]]) -> None:
        s = Setup(capacity=SLAB + 3 * FRAME + UNIT, pin=FakePin())
        frames: dict[Frame, int] = {}
        others = []
        for number, (what, pick) in enumerate(steps):
            if what == "take":
                try:
                    frame = s.take((pick % 4 + 1) * UNIT)
                except BudgetError:
                    continue
                frames[frame] = number % 251
                s.fill(frame, number % 251)
            elif what == "give" and frames:
                frame = list(frames)[pick % len(frames)]
                del frames[frame]
                s.pool.give(frame)
            elif what == "reserve":
                # A slab that is used in part is not released for it.
                with contextlib.suppress(BudgetError):
                    others.append(s.budget.reserve(pick * UNIT, Tag.GRAD, "somebody else"))
            elif what == "release" and others:
                others.pop(pick % len(others)).release()
            s.pool.check_integrity()
            assert s.resident <= s.pool.used_bytes + s.pool.kept_bytes
            assert s.budget.used_bytes + s.pool.kept_bytes <= s.budget.capacity_bytes
        assert all((frame.view(0, frame.nbytes) == value).all() for frame, value in frames.items())
        s.pool.close()

    check()


def test_threads_share_a_pool() -> None:
    s = Setup(capacity=4 * SLAB)
    errors: list[BaseException] = []

    def use_frames(value: int) -> None:
        try:
            for turn in range(60):
                frames = [s.take((turn + i) % 4 * UNIT + UNIT) for i in range(2)]
                for frame in frames:
                    s.fill(frame, value)
                for frame in frames:
                    assert (frame.view(0, frame.nbytes) == value).all()
                    s.pool.give(frame)
        except BaseException as error:
            errors.append(error)

    def use_budget() -> None:
        try:
            for _ in range(60):
                s.budget.reserve(SLAB, Tag.GRAD, "somebody else").release()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=use_frames, args=(value,)) for value in (1, 2)]
    threads.append(threading.Thread(target=use_budget))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not errors, errors
    assert s.budget.used_bytes == 0
    s.pool.check_integrity()
    s.pool.close()
