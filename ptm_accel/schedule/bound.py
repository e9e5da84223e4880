"""The least time that a step can take on a machine, with buffers without end."""

from __future__ import annotations

from dataclasses import dataclass

from ptm_accel.hardware.profile import LinkRates


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """What a step has to do.

    Attributes:
        forward_s: seconds of arithmetic in its forwards.
        backward_s: seconds of arithmetic in its backwards, and in the norm.
        update_s: seconds of arithmetic in its update, where passes are computed.
        host_s: seconds of arithmetic in updates on the CPU beside a device.
        read_bytes: bytes that come in over the link.
        written_bytes: bytes that go out over it.
        clipped: no update may begin before the norm of all gradients is known.
    """

    forward_s: float
    backward_s: float
    update_s: float
    read_bytes: float
    written_bytes: float
    host_s: float = 0.0
    clipped: bool = True

    @property
    def work_s(self) -> float:
        """The longest chain of arithmetic from one step to the next.

        On the same cores everything follows everything. What is updated on others runs beside the rest: with clipping
        it begins as backward ends, and only what follows until the next backward is there to run beside.
        """
        if self.clipped:
            return self.backward_s + max(self.forward_s + self.update_s, self.host_s)
        return max(self.forward_s + self.backward_s + self.update_s, self.host_s)


def lower_bound_s(cost: StepCost, rates: LinkRates | None) -> float:
    """The least seconds a step takes: its arithmetic, or its bytes over the link, whichever is longer.

    Args:
        cost: what it does.
        rates: of the link, both directions at once as measured; None if nothing is moved, or nothing is known.
    """
    link_s = rates.seconds(cost.read_bytes, cost.written_bytes) if rates is not None else 0.0
    return max(cost.work_s, link_s)
