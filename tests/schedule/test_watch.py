"""When a pass calls for a new plan, and what the link is taken for then."""

from __future__ import annotations

import pytest

from ptm_accel.hardware.profile import LinkRates
from ptm_accel.schedule.watch import LinkUse, Watch, rates_as_seen

RATES = LinkRates(4e9, 8e9, 5e9)
START = LinkUse(7, 11, 13.0)


def warm() -> Watch:
    """One whose second plan has been made."""
    watch = Watch()
    assert [watch.calls(False, recorded=True) for _ in range(3)] == [False, False, True]
    return watch


def test_the_first_plan_is_followed_by_one_from_warm_memory() -> None:
    watch = Watch()
    assert not watch.settled, "the second plan is made from what is recorded"
    assert warm().settled


def test_what_comes_true_calls_for_nothing() -> None:
    watch = warm()
    assert not any(watch.calls(False, recorded=False) for _ in range(30))
    assert watch.settled


def test_several_passes_in_a_row_call_for_a_new_plan_and_ever_rarer() -> None:
    watch = warm()
    calls = [number for number in range(1, 3000) if watch.calls(True, recorded=True)]
    assert calls[:4] == [3, 9, 21, 45]
    assert calls[-1] - calls[-2] == 256, "and never stops: something may have changed"


def test_there_is_no_new_plan_before_a_pass_has_been_recorded() -> None:
    watch = warm()
    assert not any(watch.calls(True, recorded=False) for _ in range(5))
    assert watch.calls(True, recorded=True)


def test_a_pass_that_came_true_in_between_is_noise() -> None:
    watch = warm()
    assert not any(watch.calls(number % 3 > 0, recorded=True) for number in range(31))
    watch.calls(True, recorded=True)
    assert not watch.settled


@pytest.mark.parametrize("moved", [(8_000_000_000, 0), (0, 8_000_000_000), (3_000_000_000, 5_000_000_000)])
@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_rates_make_what_was_seen_take_as_long_as_it_took(moved: tuple[int, int], factor: float) -> None:
    busy_s = RATES.seconds(*moved) / factor
    seen = rates_as_seen(RATES, START, LinkUse(7 + moved[0], 11 + moved[1], 13.0 + busy_s))
    assert seen.seconds(*moved) == pytest.approx(busy_s)
    assert seen.read_bytes_s == pytest.approx(RATES.read_bytes_s * factor)


@pytest.mark.parametrize("shared", [0.0, 0.4, 1.0])
def test_a_link_is_not_slower_where_its_directions_take_turns(shared: float) -> None:
    rates = LinkRates(2e9, 2e9, 4e9 / (1 + shared))
    assert rates.shared == pytest.approx(shared)
    # 4 s of reading and 2 s of writing, first apart, then as far at the same time as can be.
    for both_s in (0.0, 2.0 * (1 + shared)):
        busy_s = 6.0 if not both_s else rates.seconds(8e9, 4e9)
        begin = LinkUse(7, 11, 13.0, 1.0)
        use = LinkUse(7 + 8_000_000_000, 11 + 4_000_000_000, 13.0 + busy_s, 1.0 + both_s)
        assert rates_as_seen(rates, begin, use).read_bytes_s == pytest.approx(rates.read_bytes_s)
    # Not known: as if at the same time.
    seen = rates_as_seen(rates, LinkUse(0, 0, 0.0), LinkUse(8_000_000_000, 4_000_000_000, 6.0))
    assert seen.read_bytes_s == pytest.approx(rates.read_bytes_s * rates.seconds(8e9, 4e9) / 6.0)


def test_a_link_that_was_idle_says_nothing() -> None:
    assert rates_as_seen(RATES, START, START) == RATES
    assert rates_as_seen(RATES, START, LinkUse(7, 11, 14.0)) == RATES


def test_rates_stay_within_reason() -> None:
    slow = rates_as_seen(RATES, START, LinkUse(7 + 4096, 11, 13.0 + 60))
    fast = rates_as_seen(RATES, START, LinkUse(7 + 8_000_000_000, 11, 13.0 + 1e-9))
    assert slow.read_bytes_s == RATES.read_bytes_s / 16
    assert fast.write_bytes_s == RATES.write_bytes_s * 16
