"""The updates of a step as part of the pass that they are carried out beside.

An overlapped update brings in a parameter's gradient and state just before the forward reads the parameter. Whoever
plans the pass must know: what an update has used is wanted again only a whole step later, and what it will use is
wanted soon. State is gone through in the same order in each step; kept by recency, none of it would ever be there.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ptm_accel.schedule.trace import Access, Item, Trace, Use


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
    items = list(trace.items)
    numbers = {item.name: number for number, item in enumerate(items)}
    accesses: list[Access] = []
    seen: set[int] = set()
    for access in trace.accesses:
        parameter = trace.items[access.item]
        used = updates.get(parameter.name, ()) if access.item not in seen and not access.backward else ()
        seen.add(access.item)
        if used and parameter.nbytes + sum(item.nbytes for item in used) <= most_bytes:
            for item in used:
                if item.name not in numbers:
                    numbers[item.name] = len(items)
                    items.append(item)
            template = replace(access, use=Use.READ, compute_s=0.0, update=True)
            # Twice each: none of them may leave before all are there.
            gathered = [replace(template, item=numbers[item.name]) for item in used]
            accesses += [*gathered, *gathered[:-1], replace(gathered[-1], use=Use.CONSUME)]
            if parameter.name in overwritten:
                accesses.append(replace(template, item=access.item, use=Use.CREATE))
        accesses.append(access)
    return replace(trace, items=tuple(items), accesses=tuple(accesses))


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
        if taken + size <= nbytes * passed // total:
            chosen += group
            taken += size
    return chosen
