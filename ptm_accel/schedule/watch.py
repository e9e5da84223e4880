"""Whether passes are what was foretold of them, when new plans are worth making, and what the link turned out to be
worth.

A plan is chosen by a simulation, from the compute times of one pass and from rates that were measured once. Both can be
wrong: the pass was the first of its kind, in cold memory; a neighbour used the disk while it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ptm_accel.hardware.profile import LinkRates

_TOLERANCE = 0.2
"""How far the measured time of a pass may be from the foretold one, as a part of the latter."""

_PATIENCE = 3
"""How many passes in a row must be farther off before the first new plan."""

_MOST = 16.0
"""Rates are taken to be off by at most this factor, either way: what seems more is a moment with little to move."""


_LONGEST_WAIT = 256
"""So many passes that depart call for a new plan, however often that was of no use: something may have changed."""


@dataclass(slots=True)
class Backoff:
    """Says when a departure calls for a new plan: at once, and ever rarer where new plans depart as well.

    Attributes:
        wait: how many passes must depart before the next new plan. It doubles with each plan, and is one again when as
            many in a row have not departed.
    """

    wait: int = 1
    _departed: int = 0
    _kept: int = 0

    def calls(self, departs: bool) -> bool:
        """Notes one pass; returns whether it is time for a new plan.

        Args:
            departs: whether it departs from the plan there is.
        """
        if not departs:
            self._kept += 1
            if self._kept >= self.wait:
                self.wait, self._departed = 1, 0
            return False
        self._kept = 0
        self._departed += 1
        if self._departed < self.wait:
            return False
        self.wait, self._departed = min(2 * self.wait, _LONGEST_WAIT), 0
        return True


@dataclass(slots=True)
class Watch:
    """Compares the passes of one kind with what was foretold of them.

    The first plan is made from a pass in cold memory, so there is always a second.

    Attributes:
        patience: how many passes in a row must be off before a new plan is worth making. It doubles with each but the
            second, so that noise does not lead to planning without end.
        accesses: for passes whose accesses are others than those of the trace.
        strayed: the last pass had others.
        budget: for passes that meet another budget than the plan was made for.
    """

    patience: int = _PATIENCE
    accesses: Backoff = field(default_factory=Backoff)
    budget: Backoff = field(default_factory=Backoff)
    strayed: bool = False
    _count: int = 0
    _warm: bool = False

    @property
    def warm(self) -> bool:
        """Whether the second plan has been made."""
        return self._warm

    @property
    def calm(self) -> bool:
        """Whether the passes that the next new plan will be made from have not begun."""
        return not self._count

    @property
    def settled(self) -> bool:
        """Whether the next pass is expected to be as foretold, so that nothing of it need be written down.

        Where it is not, the one after it is written down: several in a row must be off before there is a new plan.
        """
        return self._warm and self.calm and not self.strayed

    def departs(self, foretold_s: float, took_s: float, *, written: bool = True) -> bool:
        """Notes one pass.

        Args:
            foretold_s: seconds it should have taken.
            took_s: seconds it took.
            written: whether it was written down, so that a plan can be made from it.

        Returns:
            whether it is time for a new plan.
        """
        if self._warm and abs(took_s - foretold_s) <= _TOLERANCE * foretold_s:
            self._count = 0
            return False
        self._count += 1
        if self._count < self.patience or not written:
            return False
        self._count = 0
        self.patience *= 2 if self._warm else 1
        self._warm = True
        return True


@dataclass(frozen=True, slots=True)
class LinkUse:
    """Running totals of a link.

    Attributes:
        read_bytes: bytes that came in.
        written_bytes: bytes that went out.
        busy_s: seconds in which something moved.
    """

    read_bytes: int
    written_bytes: int
    busy_s: float


def rates_as_seen(rates: LinkRates, before: LinkUse, after: LinkUse) -> LinkRates:
    """`rates`, all scaled alike, so that what was moved takes as long as the link was busy with it.

    Args:
        rates: as they were measured.
        before: the link's totals when what is looked at began.
        after: its totals now.
    """
    busy_s = after.busy_s - before.busy_s
    moved = after.read_bytes - before.read_bytes, after.written_bytes - before.written_bytes
    if busy_s <= 0 or not any(moved):
        return rates
    factor = min(max(rates.seconds(*moved) / busy_s, 1 / _MOST), _MOST)
    return LinkRates(rates.read_bytes_s * factor, rates.write_bytes_s * factor, rates.both_bytes_s * factor)
