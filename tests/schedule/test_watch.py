"""When a pass calls for a new plan, and what the link is taken for then."""

from __future__ import annotations

import pytest

from ptm_accel.hardware.profile import LinkRates
from ptm_accel.schedule.watch import Backoff, LinkUse, Watch, rates_as_seen

RATES = LinkRates(4e9, 8e9, 5e9)
START = LinkUse(7, 11, 13.0)


def warm() -> Watch:
    """One whose second plan has been made."""
    watch = Watch()
    assert [watch.departs(1.0, 1.0) for _ in range(3)] == [False, False, True]
    return watch


def test_the_first_plan_is_followed_by_one_from_warm_memory() -> None:
    assert warm().calm


def test_what_comes_true_calls_for_nothing() -> None:
    watch = warm()
    assert not any(watch.departs(1.0, took) for took in (0.81, 1.0, 1.19) * 10)
    assert watch.calm


@pytest.mark.parametrize("took", [0.5, 1.5])
def test_several_passes_in_a_row_call_for_a_new_plan_and_ever_rarer(took: float) -> None:
    watch = warm()
    calls = [number for number in range(1, 22) if watch.departs(1.0, took)]
    assert calls == [3, 9, 21]


def test_there_is_no_new_plan_before_a_pass_has_been_written_down() -> None:
    watch = warm()
    assert not any(watch.departs(1.0, 2.0, written=False) for _ in range(5))
    assert watch.departs(1.0, 2.0)


def test_what_is_expected_to_come_true_need_not_be_written_down() -> None:
    watch = Watch()
    assert not watch.settled, "the second plan is made from what is written down"
    watch = warm()
    assert watch.settled
    watch.departs(1.0, 2.0, written=False)
    assert not watch.settled
    watch.departs(1.0, 1.0)
    assert watch.settled
    watch.strayed = True
    assert not watch.settled


def test_a_pass_that_came_true_in_between_is_noise() -> None:
    watch = warm()
    assert not any(watch.departs(1.0, took) for took in (2.0, 2.0, 1.0) * 10)
    watch.departs(1.0, 2.0)
    assert not watch.calm


def test_what_goes_on_departing_calls_for_new_plans_ever_rarer() -> None:
    backoff = Backoff()
    calls = [number for number in range(1, 2000) if backoff.calls(True)]
    assert calls[:6] == [1, 3, 7, 15, 31, 63]
    assert calls[-1] - calls[-2] == 256, "and never stops: something may have changed"


def test_a_plan_that_holds_makes_the_next_departure_count_at_once() -> None:
    backoff = Backoff()
    assert [backoff.calls(True) for _ in range(3)] == [True, False, True]
    assert not any(backoff.calls(False) for _ in range(3))
    assert not backoff.calls(True), "it has not held for as long as is waited for"
    assert not any(backoff.calls(False) for _ in range(4))
    assert backoff.calls(True)


def test_one_pass_in_two_that_departs_is_planned_for_ever_rarer() -> None:
    backoff = Backoff()
    calls = [number for number in range(1000) if backoff.calls(bool(number % 2))]
    assert len(calls) <= 9


@pytest.mark.parametrize("moved", [(8_000_000_000, 0), (0, 8_000_000_000), (3_000_000_000, 5_000_000_000)])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_rates_make_what_was_seen_take_as_long_as_it_took(moved: tuple[int, int], factor: float) -> None:
    busy_s = RATES.seconds(*moved) / factor
    seen = rates_as_seen(RATES, START, LinkUse(7 + moved[0], 11 + moved[1], 13.0 + busy_s))
    assert seen.seconds(*moved) == pytest.approx(busy_s)
    assert seen.read_bytes_s == pytest.approx(RATES.read_bytes_s * factor)


def test_a_link_that_was_idle_says_nothing() -> None:
    assert rates_as_seen(RATES, START, START) == RATES
    assert rates_as_seen(RATES, START, LinkUse(7, 11, 14.0)) == RATES


def test_rates_stay_within_reason() -> None:
    slow = rates_as_seen(RATES, START, LinkUse(7 + 4096, 11, 13.0 + 60))
    fast = rates_as_seen(RATES, START, LinkUse(7 + 8_000_000_000, 11, 13.0 + 1e-9))
    assert slow.read_bytes_s == RATES.read_bytes_s / 16
    assert fast.write_bytes_s == RATES.write_bytes_s * 16
