"""Describes what a plan leaves in the compute tier, layer by layer: the granular offload of M6-10T, as planned."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from ptm_accel.schedule.actions import Move
from ptm_accel.schedule.choice import Choice
from ptm_accel.schedule.trace import Trace, Use
from ptm_accel.units import format_bytes

_LAYER = re.compile(r"^(.*?\.)?(\d+)(?=[.\[]|$)")
"""The first number in a name is that of the layer."""


def describe(choice: Choice, recorded: Trace) -> str | None:
    """Says which parameters stay through a pass, which leave, and how much state stays; None without a plan.

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
    parts = [f"parameters that stay: {_ranges(stays)}", f"that leave: {_ranges(leaves)}"]
    if state:
        parts.append(f"optimizer state that stays: {format_bytes(state[True])} of {format_bytes(state.total())}")
    if choice.on_host:
        parts.append(f"updated on the CPU: {_ranges(choice.on_host)}")
    return "; ".join(parts)


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
    return ", ".join([*shown, *sorted(others)]) or "none"


def _numbers(numbers: list[int]) -> str:
    """Ascending numbers, with those that follow one another as a range."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1][1:] = [number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs)
