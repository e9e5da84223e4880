"""A pipeline of stages, simulated: when each stage computes what, with links between them that take time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """Work of a stage on one slice.

    Attributes:
        forward_s: seconds of its forward.
        backward_s: of its backward.
        link_s: until what it hands to the next stage has arrived there, and gradients as long on their way back.
    """

    forward_s: float
    backward_s: float
    link_s: float = 0.0


def simulate(work: Sequence[Work], stages: int) -> float:
    """Seconds of a step: all slices forward, in order, then all backward, in reverse (GPipe's order, as TeraPipe's).

    A transfer runs beside compute; a stage begins a slice when it is done with the one before and has its input.

    Args:
        work: of each slice, the same in all stages.
        stages: how many.
    """
    arrived = [0.0] * len(work)
    free = [0.0] * stages
    for stage in range(stages):
        for number, each in enumerate(work):
            free[stage] = max(free[stage], arrived[number]) + each.forward_s
            arrived[number] = free[stage] + each.link_s
    # The last stage goes on at once.
    ready = [0.0] * len(work)
    for stage in reversed(range(stages)):
        for number in reversed(range(len(work))):
            free[stage] = max(free[stage], ready[number]) + work[number].backward_s
            ready[number] = free[stage] + work[number].link_s
    return free[0]
