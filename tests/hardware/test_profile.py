"""The time that two directions take together, and the form of rates in a file."""

from __future__ import annotations

import json
from dataclasses import astuple, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ptm_accel.hardware.profile import LinkRates, are_rates, in_a_row
from tests.hardware.machines import CARD, DISK

RATE = st.floats(1e6, 1e12)
AMOUNT = st.floats(0, 1e12)
LINKS = st.builds(LinkRates, RATE, RATE, RATE)
JUST_ABOVE = 1 + 1e-9


@given(LINKS, AMOUNT, AMOUNT)
def test_both_take_between_the_longer_and_one_after_the_other(link: LinkRates, read: float, written: float) -> None:
    reading, writing = read / link.read_bytes_s, written / link.write_bytes_s
    assert max(reading, writing) <= link.seconds(read, written) <= (reading + writing) * JUST_ABOVE


@given(LINKS, AMOUNT)
def test_one_direction_alone_takes_its_own_rate(link: LinkRates, amount: float) -> None:
    assert link.seconds(amount, 0) == amount / link.read_bytes_s
    assert link.seconds(0, amount) == amount / link.write_bytes_s


@given(LINKS, LINKS)
def test_what_passes_two_links_is_as_fast_as_the_slower(first: LinkRates, second: LinkRates) -> None:
    row = in_a_row([first, second])
    assert row is not None
    assert row.read_bytes_s == min(first.read_bytes_s, second.read_bytes_s)
    assert row.write_bytes_s == min(first.write_bytes_s, second.write_bytes_s)
    assert row.both_bytes_s == min(first.both_bytes_s, second.both_bytes_s)
    assert in_a_row([first, None]) is None
    assert in_a_row([]) is None


@given(LINKS, AMOUNT, AMOUNT, AMOUNT)
def test_more_never_takes_less(link: LinkRates, read: float, written: float, more: float) -> None:
    least = link.seconds(read, written)
    assert link.seconds(read + more, written) * JUST_ABOVE >= least
    assert link.seconds(read, written + more) * JUST_ABOVE >= least


@given(LINKS, AMOUNT, AMOUNT, AMOUNT, AMOUNT)
def test_two_moves_together_never_take_longer_than_apart(
    link: LinkRates, read: float, written: float, read_too: float, written_too: float
) -> None:
    apart = link.seconds(read, written) + link.seconds(read_too, written_too)
    assert link.seconds(read + read_too, written + written_too) <= apart * JUST_ABOVE


@given(RATE, RATE, st.floats(0, 1), st.floats(1, 1e12))
def test_equal_amounts_take_what_was_measured(read: float, write: float, shared: float, amount: float) -> None:
    """Whatever a link can do between duplex and turns, `both_bytes_s` says it, and comes back."""
    longer, shorter = max(1 / read, 1 / write), min(1 / read, 1 / write)
    both = 2 / (longer + shared * shorter)
    link = LinkRates(read, write, both)
    assert link.seconds(amount, amount) == pytest.approx(2 * amount / both)


@given(LINKS, AMOUNT, AMOUNT)
def test_the_fastest_rate_bounds_the_total(link: LinkRates, read: float, written: float) -> None:
    fastest = max(link.read_bytes_s + link.write_bytes_s, link.both_bytes_s)
    assert link.seconds(read, written) * JUST_ABOVE >= (read + written) / fastest


@given(LINKS, AMOUNT, AMOUNT)
def test_a_link_no_faster_with_both_takes_turns(link: LinkRates, read: float, written: float) -> None:
    turns = 2 / (1 / link.read_bytes_s + 1 / link.write_bytes_s)
    slow = replace(link, both_bytes_s=min(link.both_bytes_s, turns * (1 - 1e-9)))
    assert slow.seconds(read, written) == pytest.approx(read / link.read_bytes_s + written / link.write_bytes_s)


@pytest.mark.parametrize(
    ("link", "read", "written", "seconds"),
    [
        # Duplex: the shorter hides.
        (LinkRates(2.0, 2.0, 4.0), 8, 6, 4.0),
        (LinkRates(1.0, 10.0, 2.0), 5, 50, 5.0),
        # Half way: 8 of each take 6 s where 4 would be duplex and 8 would be turns.
        (LinkRates(2.0, 2.0, 16 / 6), 8, 8, 6.0),
        (LinkRates(2.0, 2.0, 16 / 6), 8, 4, 5.0),
        # A disk: turns, although the rate of both lies above that of reading.
        (LinkRates(4.0, 8.0, 16 / 3), 8, 8, 3.0),
        (LinkRates(4.0, 8.0, 16 / 3), 8, 0, 2.0),
    ],
)
def test_examples(link: LinkRates, read: int, written: int, seconds: float) -> None:
    assert link.seconds(read, written) == pytest.approx(seconds)


def test_rates_that_cannot_be_are_refused() -> None:
    with pytest.raises(AssertionError, match="rates of a link"):
        LinkRates(1e9, 0.0, 1e9)


def test_rates_come_back_from_json() -> None:
    for rates in (astuple(CARD), astuple(DISK), (2e9,)):
        found = json.loads(json.dumps(rates))
        assert are_rates(found, len(rates))
        assert tuple(found) == rates


@pytest.mark.parametrize("bad", [0, 0.0, -1.0, "fast", None, True, [1], float("nan"), float("inf"), 10**400])
def test_entries_that_make_no_sense_are_no_rates(bad: Any) -> None:
    assert not are_rates(bad, 1)
    assert not are_rates([1e9, bad, 1e9], 3)
    assert not are_rates([1e9], 3)
