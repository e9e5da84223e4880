"""Divides updates: on the device, with their state streamed through it, or on the CPU beside it.

On the device an update moves its state in and out. On the CPU, where the state lies, it moves its gradient out and the
parameter in, and takes time of the CPU. Both go on at the same time, so the step is shortest where they end together
(Deep Optimizer States splits each update; here whole groups are dealt out). The device has what the next forward reads
first: its gradients come last, and the CPU would be waited for; it begins with the rest meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ptm_accel.schedule.trace import Item, Trace
from ptm_accel.schedule.updates import GRAD_SUFFIX

SHARES = (0.25, 0.5, 0.75, 1.0)
"""The shares of the updates that are tried on the CPU, by the bytes of their gradients; then those halfway."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The updates on the CPU, as one pass sees them. Empty where there is no device.

    Attributes:
        seconds: of the CPU for each update, by the parameter's item, in the order of the pass.
        gradients: the parameter's item, by that of its gradient where one arrives in the pass.
        in_backward: whether an update follows its gradient; otherwise all of them follow the pass.
    """

    seconds: Mapping[int, float] = field(default_factory=dict)
    gradients: Mapping[int, int] = field(default_factory=dict)
    in_backward: bool = False


NONE_ON_HOST = Placement()


def behind(trace: Trace, updates: Mapping[str, Sequence[Item]], share: float) -> frozenset[str]:
    """Parameters with a share of the updates, those that the pass reads last.

    Args:
        trace: the pass.
        updates: what the update of each parameter uses beside it, the gradient last.
        share: of the bytes of all gradients, at the most; 1 takes all.
    """
    order = dict.fromkeys(trace.items[access.item].name for access in trace.accesses)
    names = [name for name in order if name in updates]
    left = (1 - share) * sum(updates[name][-1].nbytes for name in names)
    while names and left > 0:
        left -= updates[names.pop(0)][-1].nbytes
    return frozenset(names)


def placed(
    trace: Trace,
    updates: Mapping[str, Sequence[Item]],
    names: frozenset[str],
    host_s: float,
    *,
    in_backward: bool,
    ends_step: bool = True,
) -> Placement:
    """Describes `names` on the CPU as a pass sees them.

    Args:
        trace: the pass.
        updates: as for `behind`.
        names: the parameters.
        host_s: seconds of the CPU for each byte of gradient.
        in_backward: see `Placement`.
        ends_step: whether the step follows this pass; otherwise more is added to its gradients.
    """
    if not names:
        return NONE_ON_HOST
    numbers = {item.name: number for number, item in enumerate(trace.items)}
    order = dict.fromkeys(trace.items[access.item].name for access in trace.accesses)
    on_host = [name for name in order if name in names]
    leaving = [name for name in on_host if ends_step and f"{name}{GRAD_SUFFIX}" in numbers]
    return Placement(
        {numbers[name]: updates[name][-1].nbytes * host_s for name in on_host},
        {numbers[f"{name}{GRAD_SUFFIX}"]: numbers[name] for name in leaving},
        in_backward,
    )
