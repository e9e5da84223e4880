"""Running totals of what passes and updates took, in seconds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Tally:
    """Totals of training since the beginning; differences of two of them describe what lies between.

    What an evaluation takes is no part of them.

    Attributes:
        passes: forwards, each with the backward that followed it, if there was one.
        passes_s: from their begin to their end, waiting and updates beside them included.
        compute_s: of that, without waiting and updates: what plans count with.
        own_s: of that, the work of `ptm_accel` on the thread that computes; the rest is arithmetic.
        update_s: the arithmetic of updates, beside a pass or between two.
        beside_s: of that, since passes are planned, with updates that follow the reading order.
        host_s: the arithmetic of updates on the CPU beside a device, in a thread of its own.
        updated_bytes: of the gradients that those used up.
        foretold: passes that had been simulated.
        foretold_s: what the simulation said of those.
        foretold_took_s: what they took.
    """

    passes: int = 0
    passes_s: float = 0.0
    compute_s: float = 0.0
    own_s: float = 0.0
    update_s: float = 0.0
    beside_s: float = 0.0
    host_s: float = 0.0
    updated_bytes: int = 0
    foretold: int = 0
    foretold_s: float = 0.0
    foretold_took_s: float = 0.0

    def update_s_per_byte(self, before: Tally) -> float:
        """Seconds of an update for each byte of gradient that it uses up, since `before`; 0 if there was none."""
        nbytes, seconds = self.updated_bytes - before.updated_bytes, self.beside_s - before.beside_s
        return seconds / nbytes if nbytes else 0.0
