"""Describes what a plan leaves in the compute tier, layer by layer: the granular offload of M6-10T, as planned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from ptm_accel.schedule.actions import Move
from ptm_accel.schedule.choice import Choice
from ptm_accel.schedule.trace import Trace, Use
from ptm_accel.units import format_bytes

_LAYER = re.compile(r"^(.*?\.)?(\d+)(?=[.\[]|$)")
"""The first number in a name is that of the layer."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What a plan leaves in the compute tier.

    Attributes:
        stay: the layers, and other groups, whose parameters stay through a pass.
        in_part: those of which a part stays and a part leaves.
        leave: those whose parameters leave.
        on_cpu: the groups that the CPU updates beside a device.
        state_stays_bytes: of optimizer state that never leaves.
        state_bytes: of all of it.
    """

    stay: str
    in_part: str
    leave: str
    on_cpu: str
    state_stays_bytes: int
    state_bytes: int

    def rows(self) -> dict[str, str]:
        """The same as names and values."""
        rows = {"parameters that stay": self.stay or "none", "that leave": self.leave or "none"}
        if self.in_part:
            rows["that stay in part"] = self.in_part
        if self.state_bytes:
            stays, of = format_bytes(self.state_stays_bytes), format_bytes(self.state_bytes)
            rows["optimizer state that stays"] = f"{stays} of {of}"
        if self.on_cpu:
            rows["updated on the CPU"] = self.on_cpu
        return rows


def standing_of(choice: Choice, recorded: Trace) -> Standing | None:
    """Tells which parameters stay through a pass, which leave, and how much state stays; None without a plan.

    Args:
        choice: a plan with its trace, whose further items are optimizer state.
        recorded: the pass without updates: parameters and gradients.
    """
    if choice.plan is None:
        return None
    items = choice.trace.items
    moved = {action.item for actions in choice.plan.starts for action in actions if action.move is Move.EVICT}
    gradients = {access.item for access in choice.trace.accesses if access.use is not Use.READ and not access.update}
    stays: list[str] = []
    leaves: list[str] = []
    state: Counter[bool] = Counter()
    for number, item in enumerate(items):
        if number >= len(recorded.items):
            state[number not in moved] += item.nbytes
        elif number not in gradients:
            (leaves if number in moved else stays).append(item.name)
    both = {_layer(name) for name in stays} & {_layer(name) for name in leaves}
    return Standing(
        stay=_ranges(name for name in stays if _layer(name) not in both),
        in_part=_ranges(name for name in stays if _layer(name) in both),
        leave=_ranges(name for name in leaves if _layer(name) not in both),
        on_cpu=_ranges(choice.on_host),
        state_stays_bytes=state[True],
        state_bytes=state.total(),
    )


def all_stay(names: Iterable[str], state_bytes: int) -> Standing:
    """Where nothing ever leaves.

    Args:
        names: of the groups.
        state_bytes: of optimizer state.
    """
    return Standing(_ranges(names), "", "", "", state_bytes, state_bytes)


def none_stays(names: Iterable[str], state_bytes: int) -> Standing:
    """Where everything leaves after each use.

    Args:
        names: of the groups.
        state_bytes: of optimizer state.
    """
    return Standing("", "", _ranges(names), "", 0, state_bytes)


def describe(choice: Choice, recorded: Trace) -> str | None:
    """Says the same in one line; None without a plan.

    Args:
        choice: as for `standing_of`.
        recorded: as for `standing_of`.
    """
    found = standing_of(choice, recorded)
    return None if found is None else "; ".join(f"{name}: {value}" for name, value in found.rows().items())


def _layer(name: str) -> str:
    """The layer that a group is a part of, or the group itself."""
    found = _LAYER.match(name)
    return name if found is None else found[0]


def _ranges(names: Iterable[str]) -> str:
    """Names with those of layers put together: `model.layers.0-11, lm_head.weight`."""
    layers: dict[str, set[int]] = {}
    others = []
    for name in names:
        found = _LAYER.match(name)
        if found is None:
            others.append(name)
        else:
            layers.setdefault(found[1] or "", set()).add(int(found[2]))
    shown = [f"{prefix}{_numbers(sorted(numbers))}" for prefix, numbers in layers.items()]
    return ", ".join([*shown, *sorted(others)])


def _numbers(numbers: list[int]) -> str:
    """Ascending numbers, with those that follow one another as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
