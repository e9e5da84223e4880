"""The tide: pages take what other memory leaves, and never more."""

from __future__ import annotations

import pytest

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.budget import Budget, Tag, Tier
from ptm_accel.memory.tide import Tide

MIB = 1 << 20


class Card:
    """A device whose allocator's peak the test sets."""

    def __init__(self) -> None:
        self.peak = 0

    def read(self) -> int:
        return self.peak


def make(total: int = 1000 * MIB, least: int = 100 * MIB) -> tuple[Tide, Budget, Card]:
    budget, card = Budget(Tier.DEVICE, total), Card()
    return Tide(budget, total, least, card.read), budget, card


def test_first_step_gets_the_least() -> None:
    _, budget, _ = make()
    assert budget.capacity_bytes == 100 * MIB


def test_after_a_step_pages_get_what_was_left() -> None:
    tide, budget, card = make()
    charge = budget.reserve(80 * MIB, Tag.PARAM, "w")
    card.peak = 480 * MIB
    tide.sample()
    assert budget.capacity_bytes == 100 * MIB, "one step has not been seen whole yet"
    tide.end_step()
    assert budget.capacity_bytes == 1000 * MIB - int(400 * MIB * 1.05)
    charge.release()


def test_a_rising_tide_lowers_the_capacity_at_once_and_a_falling_one_a_step_later() -> None:
    tide, budget, card = make()
    card.peak = 200 * MIB
    tide.end_step()
    card.peak = 600 * MIB
    tide.sample()
    assert budget.capacity_bytes == 1000 * MIB - int(600 * MIB * 1.05)
    card.peak = 100 * MIB
    tide.end_step()
    assert budget.capacity_bytes == 1000 * MIB - int(600 * MIB * 1.05)
    tide.end_step()
    assert budget.capacity_bytes == 1000 * MIB - int(100 * MIB * 1.05)


def test_a_glance_sees_what_rises_while_nothing_is_charged() -> None:
    tide, budget, card = make()
    charge = budget.reserve(90 * MIB, Tag.PARAM, "w")
    card.peak = 900 * MIB
    assert not tide.glance(), "the least is all that pages have before a step has been seen"
    card.peak = 290 * MIB
    tide.end_step()
    more = budget.reserve(600 * MIB, Tag.STATE, "m")
    card.peak = 690 * MIB + 200 * MIB
    assert not tide.glance(), "as in the step before"
    card.peak = 690 * MIB + 300 * MIB
    assert tide.glance()
    assert budget.capacity_bytes == 1000 * MIB - int(300 * MIB * 1.05)
    assert not tide.glance(), "no higher than it was"
    more.release()
    card.peak = 90 * MIB + 500 * MIB
    assert not tide.glance(), "pages have less than half, and are not in the way"
    charge.release()


def test_a_tide_that_leaves_too_little_is_an_error_with_numbers() -> None:
    tide, _, card = make()
    card.peak = 900 * MIB
    with pytest.raises(DeviceBudgetError, match=r" out of memory\..*took 900.00 MiB of 1000.00 MiB.*need 100.00 MiB"):
        tide.end_step()


def test_what_we_release_is_not_taken_for_the_tide() -> None:
    tide, budget, card = make()
    ours = budget.reserve(90 * MIB, Tag.PARAM, "w")
    card.peak = 90 * MIB + 10 * MIB
    ours.release()
    card.peak = 10 * MIB
    tide.sample()
    assert tide.high_water_bytes == 10 * MIB


def test_pages_that_need_more_get_it() -> None:
    tide, budget, card = make()
    tide.need(300 * MIB)
    assert budget.capacity_bytes == 300 * MIB
    card.peak = 750 * MIB
    with pytest.raises(DeviceBudgetError, match=r"need 300\.00 MiB"):
        tide.end_step()
    tide.need(5000 * MIB)
    assert budget.capacity_bytes == 1000 * MIB


def two(*, follows: bool = False) -> tuple[list[Tide], list[Budget], Card]:
    """Models that were given 900 MiB of a card together: the first two thirds of it."""
    card, budgets = Card(), [Budget(Tier.DEVICE, 600 * MIB), Budget(Tier.DEVICE, 300 * MIB)]
    tides = [
        Tide(budget, budget.capacity_bytes, 50 * MIB, card.read, follows=follows and budget is budgets[1])
        for budget in budgets
    ]
    for tide in tides:
        tide.join(900 * MIB, [other for other in tides if other is not tide])
    return tides, budgets, card


def test_pages_of_other_models_are_no_tide_and_each_gives_its_part_to_activations() -> None:
    tides, (first, second), card = two()
    with first.reserve(40 * MIB, Tag.PARAM, "w"), second.reserve(30 * MIB, Tag.PARAM, "w"):
        card.peak = (40 + 30 + 150) * MIB
        # Whoever reads the peak, both learn of it.
        tides[0].sample()
        card.peak = 70 * MIB
        for tide in tides:
            tide.end_step()
    assert first.capacity_bytes == 600 * MIB - int(150 * MIB * 1.05 * 600 / 900)
    assert second.capacity_bytes == 300 * MIB - int(150 * MIB * 1.05 * 300 / 900)


def test_what_one_model_has_given_back_is_no_tide_of_the_other() -> None:
    tides, (first, _), card = two()
    charge = first.reserve(40 * MIB, Tag.PARAM, "w")
    card.peak = 40 * MIB
    charge.release()
    card.peak = 0
    assert [tide.high_water_bytes for tide in tides] == [0, 0]


def test_a_model_that_is_only_evaluated_follows_the_steps_of_others() -> None:
    tides, (first, second), card = two(follows=True)
    card.peak = 90 * MIB
    tides[0].end_step()
    assert second.capacity_bytes == 300 * MIB - int(90 * MIB * 1.05 / 3)
    assert first.capacity_bytes == 600 * MIB - int(90 * MIB * 1.05 * 2 / 3)


def test_the_part_of_a_model_that_has_left() -> None:
    tides, (first, _), card = two()
    card.peak = 90 * MIB
    tides[0].end_step()
    tides[0].join(900 * MIB, [])
    tides[0].resize(900 * MIB)
    assert first.capacity_bytes == 900 * MIB - int(90 * MIB * 1.05)


def test_another_budget_before_and_after_the_first_step() -> None:
    tide, budget, card = make()
    tide.resize(500 * MIB)
    assert (tide.total_bytes, budget.capacity_bytes) == (500 * MIB, 100 * MIB)
    tide.resize(80 * MIB)
    assert budget.capacity_bytes == 80 * MIB
    tide.resize(500 * MIB)
    assert budget.capacity_bytes == 100 * MIB, "the least that was asked for is remembered"
    tide, budget, card = make()
    card.peak = 200 * MIB
    tide.end_step()
    tide.resize(500 * MIB)
    assert budget.capacity_bytes == 500 * MIB - int(200 * MIB * 1.05)
    with pytest.raises(DeviceBudgetError, match=r"activations and workspaces took 200.00 MiB of 300.00 MiB"):
        tide.resize(300 * MIB)
