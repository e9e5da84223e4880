"""Whether passes take what was foretold of them, and what the link turned out to be worth.

A plan is chosen by a simulation, from the compute times of one pass and from rates that were measured once. Both can be
wrong: the pass was the first of its kind, in cold memory; a neighbour used the disk while it was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from ptm_accel.hardware.profile import LinkRates

_TOLERANCE = 0.2
"""How far the measured time of a pass may be from the foretold one, as a part of the latter."""

_PATIENCE = 3
"""How many passes in a row must be farther off before the first new plan."""

_MOST = 16.0
"""Rates are taken to be off by at most this factor, either way: what seems more is a moment with little to move."""


@dataclass(slots=True)
class Watch:
    """Compares the passes of one kind with what was foretold of them.

    The first plan is made from a pass in cold memory, so there is always a second.

    Attributes:
        patience: how many passes in a row must be off before a new plan is worth making. It doubles with each but the
            second, so that noise does not lead to planning without end.
    """

    patience: int = _PATIENCE
    _count: int = 0
    _warm: bool = False

    @property
    def calm(self) -> bool:
        """Whether the passes that the next new plan will be made from have not begun."""
        return not self._count

    def departs(self, foretold_s: float, took_s: float) -> bool:
        """Notes one pass.

        Args:
            foretold_s: seconds it should have taken.
            took_s: seconds it took.

        Returns:
            whether it is time for a new plan.
        """
        if self._warm and abs(took_s - foretold_s) <= _TOLERANCE * foretold_s:
            self._count = 0
            return False
        self._count += 1
        if self._count < self.patience:
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
