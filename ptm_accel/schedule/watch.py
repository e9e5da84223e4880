"""Tells when new plans are worth making, and what the link turned out to be worth.

A plan is chosen by a simulation, from the compute times of one pass and from rates that were measured once. Both can be
wrong: the pass was the first of its kind, in cold memory; a neighbour used the disk while it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptm_accel.hardware.profile import LinkRates

_PATIENCE = 3
"""Passes in a row that must be off before the first new plan."""

_LONGEST_PATIENCE = 256
"""Passes that call for a new plan however often that was of no use: something may have changed."""

_MOST = 16.0
"""Rates are taken to be off by at most this factor, either way: what seems more is a moment with little to move."""


@dataclass(slots=True)
class Watch:
    """Counts the passes of one kind that were not what their plan was made for.

    The first plan is made from a pass in cold memory, so there is always a second.

    Attributes:
        patience: how many passes in a row must be off before a new plan is worth making. It doubles with each but the
            second, so that noise, or a model that never goes the same way, does not lead to planning without end.
        warm: whether the second plan has been made.
        off: how many passes in a row have been off.
        passes: how many have come, the first left out.
        repeated: how many of them came right after another of their kind.
    """

    patience: int = _PATIENCE
    warm: bool = False
    off: int = 0
    passes: int = 0
    repeated: int = 0

    def came(self, repeats: bool) -> None:
        """Counts a pass that begins, right after another of its kind or not."""
        self.passes += 1
        self.repeated += repeats

    @property
    def repeats(self) -> bool:
        """Whether such passes mostly follow one another."""
        return 2 * self.repeated >= self.passes

    @property
    def settled(self) -> bool:
        """Whether the next pass is expected to be as foretold, so that nothing of it need be recorded.

        Where it is not, the one after it is recorded: several in a row must be off before there is a new plan.
        """
        return self.warm and not self.off

    def calls(self, is_off: bool, *, recorded: bool) -> bool:
        """Notes one pass; returns whether it is time for a new plan.

        Args:
            is_off: whether its accesses, its time or its budget were others than those of the plan.
            recorded: whether a plan can be made from it.
        """
        if self.warm and not is_off:
            self.off = 0
            return False
        self.off += 1
        if self.off < self.patience or not recorded:
            return False
        self.off = 0
        if self.warm:
            self.patience = min(2 * self.patience, _LONGEST_PATIENCE)
        self.warm = True
        return True


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Running totals of a link.

    Attributes:
        read_bytes: bytes that came in.
        written_bytes: bytes that went out.
        busy_s: seconds in which something moved.
        both_s: of these, seconds in which bytes moved in both directions; None where that is not known.
    """

    read_bytes: int
    written_bytes: int
    busy_s: float
    both_s: float | None = None


def rates_as_seen(rates: LinkRates, before: LinkUse, after: LinkUse) -> LinkRates:
    """`rates`, all scaled alike, so that what was moved takes as long as the link was busy with it.

    Both directions of a link need not have been busy at the same time. Where that is not known, they are taken to have
    been as far as they could be.

    Args:
        rates: as they were measured.
        before: the link's totals when what is looked at began.
        after: its totals now.
    """
    busy_s = after.busy_s - before.busy_s
    moved = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
    if busy_s <= 0 or not any(moved):
        return rates
    expected_s = rates.seconds(*moved)
    if before.both_s is not None and after.both_s is not None:
        # While both directions move, a second does the work of 2 / (1 + shared) seconds of one after the other.
        busy_s += (after.both_s - before.both_s) * (1 - rates.shared) / (1 + rates.shared)
        expected_s = moved[0] / rates.read_bytes_s + moved[1] / rates.write_bytes_s
    factor = min(max(expected_s / busy_s, 1 / _MOST), _MOST)
    return LinkRates(rates.read_bytes_s * factor, rates.write_bytes_s * factor, rates.both_bytes_s * factor)
