"""What the time of steps goes to, each second once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Parts(NamedTuple):
    """Running totals of one moment, in seconds; the difference of two is what a step was made of.

    None has a part of another, but for the last.

    Attributes:
        compute_s: arithmetic of passes.
        update_s: that of updates, where passes are computed.
        stall_s: waiting for pages.
        network_s: waiting for other ranks; 0 where a device computes, which waits by itself.
        own_s: our own work on the thread that trains; 0 where a device computes.
        kernel_s: of all of it, what that thread was in the kernel of the system; 0 where a device computes.
    """

    compute_s: float
    update_s: float
    stall_s: float
    network_s: float = 0.0
    own_s: float = 0.0
    kernel_s: float = 0.0


@dataclass(slots=True)
class StepParts:
    """What steps were made of whose time is known.

    Attributes:
        steps: how many.
        steps_s: what they took.
        sums: of their parts.
        before: the totals at the end of the last step; None before the first.
    """

    steps: int = 0
    steps_s: float = 0.0
    sums: Parts = field(default_factory=lambda: Parts(0.0, 0.0, 0.0))
    before: Parts | None = None

    @property
    def mean(self) -> Parts:
        """Of one step."""
        return Parts(*(seconds / self.steps for seconds in self.sums))

    def rows(self, *, on_thread: bool, ranks: bool) -> dict[str, str]:
        """Returns what a step was made of on average; empty where no step is known.

        Args:
            on_thread: passes are computed by the thread that calls for them, and not by a device.
            ranks: other ranks are waited for.
        """
        if not self.steps:
            return {}
        each = self.mean
        # Not -0.000.
        rest_s = round(self.steps_s / self.steps - sum(each[:-1]), 3) + 0.0
        waited = f"{each.stall_s:.3f} s for pages"
        rows = {"compute": f"{each.compute_s:.3f} s in forward and backward, {each.update_s:.3f} s in updates"}
        if not on_thread:
            return rows | {"waited": waited, "the rest": f"{rest_s:.3f} s outside of forward, backward and updates"}
        rows["waited"] = waited + (f", {each.network_s:.3f} s for other ranks" if ranks else "")
        rows["own work"] = f"{each.own_s:.3f} s of ptm_accel on the thread that trains; {rest_s:.3f} s for all else"
        rows["kernel"] = f"of all these, that thread was in the system's kernel for {each.kernel_s:.3f} s"
        return rows
