"""The updates of a step as part of the pass that they are carried out beside.

An overlapped update brings in a parameter's gradient and state just before the next forward reads the parameter; where
nothing can come between a gradient and its update, right after the gradient has arrived. Whoever plans the pass must
know: what an update has used is wanted again only a whole step later, and what it will use is
wanted soon. State is gone through in the same order in each step; kept by recency, none of it would ever be there.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ptm_accel.schedule.trace import Access, Item, Trace, Use

GRAD_SUFFIX = ".grad"
"""Suffix of a parameter's name in that of its gradient."""

MORE_SUFFIX = f"{GRAD_SUFFIX}.more"
"""Suffix of a group's name for the block with what is to be added to its gradients below a device."""

LAG = 24
"""Gradients that wait for their updates in backward may take this part of the budget; then compute waits for the disk.
Otherwise they would fill the room that the plan has for state.
"""


class UpdateTiming(enum.Enum):
    """Time at which the updates of a step are carried out, as a pass sees it."""

    APART = "apart"
    """Between two passes."""
    FORWARD = "forward"
    """Updates of the step before, beside its forward."""
    BACKWARD = "backward"
    """Its own, beside its backward."""


class GradientSums(enum.Enum):
    """What becomes of the present sums of gradients when the next gradients arrive."""

    NONE = "none"
    """No sums yet: the next gradients become the sums."""
    WIDENED = "widened"
    """Converted to fp32 first, in other memory."""
    ADDED_TO = "added to"
    ON_HOST = "on host"
    """The CPU adds to them, below a device."""


def with_updates(
    trace: Trace,
    updates: Mapping[str, Sequence[Item]],
    *,
    most_bytes: int,
    overwritten: Collection[str] = (),
) -> Trace:
    """`trace` with the accesses of each parameter's update before the first read of the parameter.

    Args:
        trace: a forward, with its backward if there is one, that begins with updates still to be done.
        updates: what the update of a parameter uses beside it, by the name of the parameter; the gradient last.
        overwritten: parameters that their updates write without having read them: nothing is loaded for that.
        most_bytes: updates that need more, parameter included, are left out: they are carried out in parts.
    """
    items = _Items(trace)
    accesses: list[Access] = []
    seen: set[int] = set()
    for access in trace.accesses:
        parameter = trace.items[access.item]
        used = updates.get(parameter.name, ()) if access.item not in seen and not access.backward else ()
        seen.add(access.item)
        if used and parameter.nbytes + sum(item.nbytes for item in used) <= most_bytes:
            template = replace(access, use=Use.READ, compute_s=0.0, update=True)
            gathered = [replace(template, item=items.number(item)) for item in used]
            accesses += _update(gathered)
            if parameter.name in overwritten:
                accesses.append(replace(template, item=access.item, use=Use.CREATE))
        accesses.append(access)
    return replace(trace, items=items.all(), accesses=tuple(accesses))


def with_updates_in_backward(
    trace: Trace,
    updates: Mapping[str, Sequence[Item]],
    *,
    most_bytes: int,
    overwritten: Collection[str] = (),
) -> Trace:
    """`trace` with the accesses of each parameter's update behind the arrival of its gradient, where that is the last.

    Args:
        trace: a forward with its backward.
        updates: as for `with_updates`.
        overwritten: as for `with_updates`.
        most_bytes: as for `with_updates`.
    """
    items = _Items(trace)
    final = final_gradients(trace)
    numbers = {item.name: number for number, item in enumerate(trace.items)}
    accesses: list[Access] = []
    gone: set[int] = set()
    for index, access in enumerate(trace.accesses):
        if access.item in gone:
            # Its norm, which is taken as it arrives now.
            continue
        accesses.append(access)
        used = updates.get(final.get(index, ""), ())
        if not used:
            continue
        name = final[index]
        if trace.items[numbers[name]].nbytes + sum(item.nbytes for item in used) > most_bytes:
            continue
        gone.add(access.item)
        template = replace(access, use=Use.READ, compute_s=0.0, update=True)
        gathered = [replace(template, item=items.number(item)) for item in used]
        parameter = replace(template, item=numbers[name])
        if name in overwritten:
            accesses += [*_update(gathered), replace(parameter, use=Use.CREATE)]
        else:
            accesses += _update([replace(parameter, use=Use.WRITE), *gathered])
    return replace(trace, items=items.all(), accesses=tuple(accesses))


def final_gradients(trace: Trace) -> dict[int, str]:
    """Returns the arrivals of gradients after which a backward has no more to do with the parameter.

    In the last micro-batch each part of them arrives once (of a shared weight whose uses are recomputed one by one
    there are several arrivals), and the parameter is not read any more.

    Returns:
        the name of the parameter, by the access that is the arrival of the last part.
    """
    parameters = {f"{item.name}{GRAD_SUFFIX}": number for number, item in enumerate(trace.items)}
    ends = max((index for index, access in enumerate(trace.accesses) if access.backward), default=-1)
    places: dict[int, list[int]] = {}
    # Layers that are run again for their backward are read outside of it.
    for index, access in enumerate(trace.accesses[: ends + 1]):
        places.setdefault(access.item, []).append(index)
    final: dict[int, str] = {}
    for number, item in enumerate(trace.items):
        parameter, used = parameters.get(item.name), places.get(number, [])
        if parameter is None or not used or trace.accesses[used[0]].use is not Use.CREATE:
            continue
        if places.get(parameter, [-1])[-1] < used[-1] and _arrivals(trace, used) == item.parts:
            final[used[-1]] = trace.items[parameter].name
    return dict(sorted(final.items()))


def _arrivals(trace: Trace, used: Sequence[int]) -> int:
    """Returns how many parts of a gradient arrive in the last micro-batch; 0 if others come after those."""
    last = [trace.accesses[index].use for index in used if trace.accesses[index].last]
    if not trace.accesses[used[-1]].last:
        return 0
    # A sum that is read is read to be made anew in fp32, which is no arrival.
    return len(last) - 2 * last.count(Use.READ)


class _Items:
    """The items of a trace, and more of them."""

    def __init__(self, trace: Trace) -> None:
        self._items = list(trace.items)
        self._numbers = {item.name: number for number, item in enumerate(trace.items)}

    def number(self, item: Item) -> int:
        """Returns the item's index, by its name.

        What an update uses up is the sum of several passes' gradients, and may be wider than the one that this pass
        makes; it counts as the wider, since updates are what is waited for.
        """
        number = self._numbers.setdefault(item.name, len(self._items))
        if number == len(self._items):
            self._items.append(item)
        elif self._items[number].nbytes < item.nbytes:
            self._items[number] = item
        return number

    def all(self) -> tuple[Item, ...]:
        """Returns all of them, in order."""
        return tuple(self._items)


def _update(gathered: list[Access]) -> list[Access]:
    """The accesses of one update, the gradient's last. Twice each: none of them may leave before all are there."""
    return [*gathered, *gathered[:-1], replace(gathered[-1], use=Use.CONSUME)]


def spread_state(trace: Trace, nbytes: int) -> list[int]:
    """Items of state, `nbytes` in all at the most, spread over the pass: so all of it has as much to move.

    Args:
        trace: with the updates in it.
        nbytes: how much.

    Returns:
        the items, all or none of what one update uses.
    """
    groups: list[list[int]] = []
    begun = False
    for access in trace.accesses:
        if access.update and access.use is Use.CONSUME:
            begun = False
        elif access.update and access.use is Use.READ:
            if not begun:
                groups.append([])
                begun = True
            if access.item not in groups[-1]:
                groups[-1].append(access.item)
    consumed = {access.item for access in trace.accesses if access.use is Use.CONSUME}
    groups = [[item for item in group if item not in consumed] for group in groups]
    sizes = [sum(trace.items[item].nbytes for item in group) for group in groups]
    total, passed, taken = sum(sizes), 0, 0
    chosen: list[int] = []
    for group, size in zip(groups, sizes, strict=True):
        passed += size
        # An optimizer without state has nothing to spread.
        if total and taken + size <= nbytes * passed // total:
            chosen += group
            taken += size
    return chosen
