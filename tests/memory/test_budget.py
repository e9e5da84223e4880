"""A charge is a value; what is charged, kept and free always adds up; refusals say the numbers and the option."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ptm_accel.errors import BudgetError, DeviceBudgetError
from ptm_accel.memory.budget import Budget, Reservation, Tag, Tier


def test_charging_and_giving_back() -> None:
    budget = Budget(Tier.HOST, 100)
    first = budget.reserve(60, Tag.PARAM, "a")
    second = budget.reserve(30, Tag.GRAD, "b")
    assert (budget.used_bytes, budget.free_bytes, budget.peak_bytes) == (90, 10, 90)
    assert budget.used_by_tag() == {Tag.PARAM: 60, Tag.GRAD: 30}
    first.release()
    assert not first.live
    assert second.live
    assert (budget.used_bytes, budget.peak_bytes) == (30, 90)
    assert budget.used_by_tag() == {Tag.GRAD: 30}
    budget.check_integrity()


def test_a_reservation_ends_with_its_block() -> None:
    budget = Budget(Tier.HOST, 100)
    with budget.reserve(60, Tag.PARAM, "a"):
        assert budget.used_bytes == 60
    assert budget.used_bytes == 0
    with budget.reserve(60, Tag.PARAM, "a") as held:
        held.release()
    assert budget.used_bytes == 0


def test_giving_back_twice_is_an_error_of_ours() -> None:
    reservation = Budget(Tier.HOST, 100).reserve(10, Tag.PARAM, "a")
    reservation.release()
    with pytest.raises(AssertionError, match="reservation 'a' released twice"):
        reservation.release()


@pytest.mark.parametrize(("tier", "option"), [(Tier.HOST, "host_memory"), (Tier.DISK, "disk")])
def test_a_refusal_has_the_numbers_and_the_option(tier: Tier, option: str) -> None:
    budget = Budget(tier, 4 << 20)
    budget.reserve(3 << 20, Tag.PARAM, "a")
    budget.reserve(1 << 19, Tag.STATE, "b")
    with pytest.raises(BudgetError) as caught:
        budget.reserve(1 << 20, Tag.GRAD, "layer.weight.grad")
    assert str(caught.value) == (
        f"{tier.value} budget: cannot place 1.00 MiB for layer.weight.grad: 3.50 MiB of 4.00 MiB are in use "
        f"(param 3.00 MiB, state 512.00 KiB) and none of it can be moved away now; set {option} higher."
    )
    assert not isinstance(caught.value, DeviceBudgetError)
    assert isinstance(caught.value, MemoryError)
    assert budget.used_bytes == 7 << 19


def test_a_refusal_of_a_device_reads_like_torchs() -> None:
    """`auto_find_batch_size` looks for the words."""
    with pytest.raises(DeviceBudgetError) as caught:
        Budget(Tier.DEVICE, 10).reserve(20, Tag.PARAM, "a")
    assert str(caught.value) == (
        "ptm_accel: the device is out of memory. device budget: cannot place 20 B for a: 0 B of 10 B are in use "
        "(nothing) and none of it can be moved away now; set device_memory higher, or use a smaller batch."
    )
    assert isinstance(caught.value, RuntimeError)


def test_kept_memory_is_freed_before_it_is_too_much() -> None:
    kept = [40]

    def reclaim(nbytes: int) -> int:
        freed = min(nbytes, kept[0])
        kept[0] -= freed
        return freed

    budget = Budget(Tier.HOST, 100)
    budget.set_reclaimer(lambda: kept[0], reclaim)
    budget.reserve(60, Tag.PARAM, "a")
    assert kept == [40]
    budget.reserve(30, Tag.PARAM, "b")
    assert kept == [10]
    budget.check_integrity()


def test_kept_memory_that_cannot_be_freed_counts_as_used() -> None:
    budget = Budget(Tier.HOST, 100)
    budget.set_reclaimer(lambda: 40, lambda nbytes: 0)
    with pytest.raises(BudgetError):
        budget.reserve(61, Tag.PARAM, "a")
    assert budget.used_bytes == 0
    assert budget.reserve(60, Tag.PARAM, "a").live


def test_a_budget_that_does_not_add_up_is_found() -> None:
    budget = Budget(Tier.HOST, 100)
    budget.reserve(10, Tag.PARAM, "a")
    budget.used_bytes += 1
    with pytest.raises(AssertionError, match=r"host budget: used 11, by tag .* = 10, kept 0, capacity 100"):
        budget.check_integrity()


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(Tag), st.booleans()), max_size=60))
def test_what_is_charged_always_adds_up(steps: list[tuple[int, Tag, bool]]) -> None:
    budget = Budget(Tier.HOST, 100)
    held: list[Reservation] = []
    peak = 0
    for nbytes, tag, give in steps:
        if give and held:
            held.pop(nbytes % len(held)).release()
        else:
            used = sum(r.nbytes for r in held)
            if used + nbytes <= 100:
                held.append(budget.reserve(nbytes, tag, "x"))
            else:
                with pytest.raises(BudgetError):
                    budget.reserve(nbytes, tag, "x")
        used = sum(r.nbytes for r in held)
        peak = max(peak, used)
        assert budget.used_bytes == used
        assert budget.free_bytes == 100 - used
        assert budget.peak_bytes == peak
        assert sum(budget.used_by_tag().values()) == used
        budget.check_integrity()


def test_threads_do_not_overdraw() -> None:
    budget = Budget(Tier.HOST, 50)
    most: list[int] = []

    def work() -> None:
        for _ in range(300):
            try:
                with budget.reserve(20, Tag.STAGING, "x"):
                    most.append(budget.used_bytes)
            except BudgetError:
                continue

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) <= 50
    assert budget.used_bytes == 0
    budget.check_integrity()
