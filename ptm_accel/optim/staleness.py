"""Counts how many steps the parameters of a forward lack, where updates run beside training."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Staleness:
    """Running totals of a run with `update: lock_free`.

    Attributes:
        lacking: steps that a group of parameters lacked in a forward, summed over groups and forwards.
        reads: how many groups and forwards that is.
        most: the most steps that a group lacked.
        waited_s: time that training waited for updates, in seconds.
    """

    lacking: int = 0
    reads: int = 0
    most: int = 0
    waited_s: float = 0.0

    def note(self, steps: int) -> None:
        """Counts a group that lacks so many steps in the next forward."""
        self.lacking += steps
        self.reads += 1
        self.most = max(self.most, steps)

    def mean_since(self, lacking: int, reads: int) -> float:
        """Returns the mean number of steps that groups lacked since the totals were `lacking` and `reads`."""
        return (self.lacking - lacking) / max(self.reads - reads, 1)
