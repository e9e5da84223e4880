"""Forecasts a step of a model at given rates, and which of its layers would stay, before anything is run.

The pass is followed on fake tensors: which groups of parameters its operations use, in which order, and the arithmetic
between. From there on it is planned and simulated as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ptm_accel.config import DEFAULT_PAGE_SIZE
from ptm_accel.errors import BudgetError
from ptm_accel.estimate import Estimate, Grouped, MovingGroup, estimate, grouped
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.activation_reserve import MARGIN
from ptm_accel.memory.disk import bounce_bytes
from ptm_accel.model.floor import FUSED_ADAMW, OptimizerMemory
from ptm_accel.model.touches import Touched, touches_of
from ptm_accel.schedule.actions import Move
from ptm_accel.schedule.bound import Resource, StepCost, lower_bound
from ptm_accel.schedule.choice import Choice, choose_plan
from ptm_accel.schedule.simulate import Simulation
from ptm_accel.schedule.standing import Standing, all_stay, none_stays, standing_of
from ptm_accel.schedule.trace import Access, Item, Trace, Use
from ptm_accel.schedule.updates import GRAD_SUFFIX
from ptm_accel.speeds import Speeds, while_all_fits
from ptm_accel.units import format_bytes, format_least, parse_bytes


@dataclass(frozen=True, slots=True)
class Outlook:
    """Forecast of a step.

    Attributes:
        step_s: seconds, simulated.
        cost: the work of it.
        bound: what it cannot go below, and the resource that it is busy with then.
        link_s: seconds of transfers between a device and host memory.
        disk_s: seconds of transfers of a disk.
        in_bytes: what is moved into the tier that computes, in a step.
        out_bytes: what is moved out of it.
        pass_bytes: what batch and activations take at their peak.
        pages_bytes: what pages take at their peak, where passes are computed.
        away_bytes: what has a place below, which a block keeps: what ever leaves, and all optimizer state, of which a
            run plans nothing before it has seen a step.
        standing: which layers stay and which leave; None where nothing ever moves.
    """

    step_s: float
    cost: StepCost
    bound: tuple[float, Resource]
    link_s: float
    disk_s: float
    in_bytes: int
    out_bytes: int
    pass_bytes: int
    pages_bytes: int
    away_bytes: int
    standing: Standing | None

    @property
    def arithmetic_s(self) -> float:
        """Arithmetic of the pass, and of updates where passes are computed."""
        return self.cost.forward_s + self.cost.backward_s + self.cost.update_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A training step to be foreseen: with clipping, and one micro-batch.

    Attributes:
        model: it may be on the meta device, and is not changed.
        batch: its keyword arguments, of which only shapes count.
        autocast_dtype: the dtype of `torch.autocast`; None without it.
        master_weights: whether narrower parameters get fp32 masters.
        optimizer_memory: of the optimizer.
        page_size: as in the configuration.
        processes: how many the model is sharded over.
    """

    model: nn.Module
    batch: Mapping[str, Any]
    autocast_dtype: torch.dtype | None = None
    master_weights: bool = False
    optimizer_memory: OptimizerMemory = FUSED_ADAMW
    page_size: str | int = DEFAULT_PAGE_SIZE
    processes: int = 1

    def estimate(self) -> Estimate:
        """What it needs of memory, without the batch."""
        return estimate(
            self.model,
            master_weights=self.master_weights,
            optimizer_memory=self.optimizer_memory,
            page_size=self.page_size,
            processes=self.processes,
        )

    def grouped(self, capacity_bytes: int) -> Grouped:
        """Its parameters as a run under a budget divides them."""
        return grouped(
            self.model,
            capacity_bytes,
            master_weights=self.master_weights,
            optimizer_memory=self.optimizer_memory,
            page_size=self.page_size,
            processes=self.processes,
        )

    def touched(self) -> Touched:
        """Its pass."""
        return touches_of(self.model, self.batch, autocast_dtype=self.autocast_dtype)


def outlook(
    work: Work,
    capacity_bytes: int,
    speeds: Speeds,
    *,
    counts_activations: bool,
    needs: Estimate | None = None,
    touched: Touched | None = None,
) -> Outlook:
    """Plans and simulates a step.

    Args:
        work: the step.
        capacity_bytes: the budget of the tier that computes.
        speeds: of the machine.
        counts_activations: whether batch and activations are of the budget: on a device.
        needs: what it needs of memory, if that is known already.
        touched: its pass, if that is known already.

    Raises:
        BudgetError: less than the least budget that it can train under.
    """
    needs = work.estimate() if needs is None else needs
    touched = work.touched() if touched is None else touched
    reserved = int(touched.pass_bytes * MARGIN) if counts_activations else 0
    division = work.grouped(capacity_bytes)
    if division.whole_bytes + reserved <= capacity_bytes:
        return _all_fits(division, touched, while_all_fits(speeds), needs)
    refuse_less(capacity_bytes, needs, touched.pass_bytes if counts_activations else 0)
    return _planned(work, touched, speeds, needs, max(capacity_bytes - reserved, needs.least_bytes))


def overflowing(found: Outlook, missing_bytes: int, link: LinkRates, disk: LinkRates) -> Outlook:
    """Returns the same step where host memory under a device lacks room: what it lacks lies on the disk.

    Pages leave host memory by their next use, so a step reads and writes about as much as there is no room for. What no
    update changes is not written, and is read by forward and backward. The time is added to that of the step, since the
    thread that computes waits for pages to be written.

    Args:
        found: the step with all the host memory that it needs.
        missing_bytes: what there is no room for.
        link: the rates of the link to the device.
        disk: those of the disk.
    """
    written = min(missing_bytes, found.out_bytes)
    read = min(written + 2 * (missing_bytes - written), found.in_bytes)
    cost = replace(found.cost, read_bytes=read, written_bytes=written)
    disk_s = disk.seconds(read, written)
    return replace(found, step_s=found.step_s + disk_s, disk_s=disk_s, cost=cost, bound=lower_bound(cost, link, disk))


def refuse_less(capacity_bytes: int, needs: Estimate, pass_bytes: int) -> None:
    """Refuses less than the least budget.

    Args:
        capacity_bytes: the budget of the tier that computes.
        needs: what a model needs.
        pass_bytes: what batch and activations take of the budget.

    Raises:
        BudgetError: with the figures.
    """
    if capacity_bytes >= needs.least_bytes + pass_bytes:
        return
    needed = format_bytes(needs.least_bytes)
    if pass_bytes:
        needed += f", and {format_bytes(pass_bytes)} for a batch"
    raise BudgetError(
        f"{format_bytes(capacity_bytes)} cannot train this model: it needs {needed} (for {needs.reason}); give at "
        f"least {format_least(needs.least_bytes + pass_bytes)}."
    )


def _all_fits(division: Grouped, touched: Touched, speeds: Speeds, needs: Estimate) -> Outlook:
    """A step in which nothing moves: hooks are off, and arithmetic is all there is."""
    trained = sum(group.numel for group in division.groups if group.trained)
    cost = StepCost(
        forward_s=speeds.seconds(touch for touch in touched.touches if not touch.backward),
        backward_s=speeds.seconds(touch for touch in touched.touches if touch.backward),
        update_s=trained / speeds.update_params,
        network_s=_network_s(speeds, needs),
    )
    bound = lower_bound(cost)
    names = [group.name for group in division.groups]
    return Outlook(
        step_s=bound[0],
        cost=cost,
        bound=bound,
        link_s=0.0,
        disk_s=0.0,
        in_bytes=0,
        out_bytes=0,
        pass_bytes=touched.pass_bytes,
        pages_bytes=needs.states_bytes,
        away_bytes=0,
        standing=all_stay(names, needs.kept.masters_bytes + needs.kept.optimizer_bytes),
    )


def _planned(work: Work, touched: Touched, speeds: Speeds, needs: Estimate, capacity_bytes: int) -> Outlook:
    """A step of which something moves, under a budget for pages alone."""
    division = work.grouped(capacity_bytes)
    recorded, updates = _step(division.groups, touched, speeds, work)
    trained = sum(group.numel for group in division.groups if group.trained)
    gradients = max(sum(items[-1].nbytes for items in updates.values()), 1)
    host_s = 0.0 if speeds.host_params is None else trained / speeds.host_params / gradients
    # The buffers of a disk are of host memory, which computes where there is no device.
    buffers = bounce_bytes(1, parse_bytes(work.page_size)) if speeds.link is None else 0
    choice = choose_plan(
        recorded,
        capacity_bytes=capacity_bytes - division.fixed_bytes - buffers,
        updates=updates,
        repeats=True,
        rates=speeds.below,
        update_s=trained / speeds.update_params / gradients,
        host_s=host_s or None,
    )
    found, standing = choice.simulated, standing_of(choice, recorded)
    if found is None or standing is None:
        # The least budget has no room to plan with: each access is waited for.
        found = _on_demand(recorded, updates, trained / speeds.update_params, speeds.below)
        states = needs.kept.masters_bytes + needs.kept.optimizer_bytes
        standing = none_stays((group.name for group in division.groups), states)
    moved, beside = (found.read_bytes, found.written_bytes), (0, 0)
    on_link, on_disk = (beside if speeds.link is None else moved), (beside if speeds.disk is None else moved)
    cost = StepCost(
        forward_s=speeds.seconds(touch for touch in touched.touches if not touch.backward),
        backward_s=speeds.seconds(touch for touch in touched.touches if touch.backward),
        update_s=found.update_s,
        host_s=host_s * sum(updates[name][-1].nbytes for name in choice.on_host),
        in_bytes=on_link[0],
        out_bytes=on_link[1],
        read_bytes=on_disk[0],
        written_bytes=on_disk[1],
        network_s=_network_s(speeds, needs),
    )
    return Outlook(
        step_s=max(found.seconds, cost.network_s),
        cost=cost,
        bound=lower_bound(cost, speeds.link, speeds.disk),
        link_s=0.0 if speeds.link is None else speeds.link.seconds(*on_link),
        disk_s=0.0 if speeds.disk is None else speeds.disk.seconds(*on_disk),
        in_bytes=found.read_bytes,
        out_bytes=found.written_bytes,
        pass_bytes=touched.pass_bytes,
        pages_bytes=found.peak_bytes + division.fixed_bytes + buffers,
        away_bytes=_away_bytes(choice, updates),
        standing=standing,
    )


def _away_bytes(choice: Choice, updates: Mapping[str, Sequence[Item]]) -> int:
    """Bytes of blocks that have a place below; without a plan of all."""
    items = {item.name: item.nbytes for item in choice.trace.items}
    items |= {item.name: item.nbytes for used in updates.values() for item in used}
    if choice.plan is None:
        return sum(items.values())
    moved = {action.item for actions in choice.plan.starts for action in actions if action.move is Move.EVICT}
    away = {choice.trace.items[number].name for number in moved}
    away |= {item.name for used in updates.values() for item in used[:-1]}
    away |= {updates[name][-1].name for name in choice.on_host}
    return sum(items[name] for name in away)


def _on_demand(
    recorded: Trace, updates: Mapping[str, Sequence[Item]], update_s: float, below: LinkRates | None
) -> Simulation:
    """A step in which everything comes for each use, is waited for, and leaves again."""
    assert below is not None
    read = sum(recorded.items[access.item].nbytes for access in recorded.accesses if access.use is Use.READ)
    values = sum(item.nbytes for item in recorded.items if item.name in updates)
    gradients = sum(used[-1].nbytes for used in updates.values())
    states = sum(item.nbytes for used in updates.values() for item in used[:-1])
    read, written = read + values + gradients + states, values + gradients + states
    waited_s = below.seconds(read, written)
    return Simulation(
        seconds=recorded.compute_s + update_s + waited_s,
        compute_s=recorded.compute_s,
        update_s=update_s,
        load_stall_s=waited_s,
        room_stall_s=0.0,
        read_bytes=read,
        written_bytes=written,
        peak_bytes=max((item.nbytes for item in recorded.items), default=0),
    )


def _network_s(speeds: Speeds, needs: Estimate) -> float:
    """Seconds in which a process receives from others; beside arithmetic, as gathers are begun ahead."""
    return 0.0 if speeds.network_bytes_s is None else needs.network_bytes / speeds.network_bytes_s


def _step(
    groups: Sequence[MovingGroup], touched: Touched, speeds: Speeds, work: Work
) -> tuple[Trace, dict[str, list[Item]]]:
    """Returns the pass, and what updates use beside it; the gradient last."""
    count = len(groups)
    items = [Item(group.name, group.numel * group.element_bytes) for group in groups]
    items += [Item(f"{group.name}{GRAD_SUFFIX}", group.numel * group.element_bytes) for group in groups]
    accesses = []
    numbers = {name: number for number, group in enumerate(groups) for name in group.names}
    first, *touches = touched.by_group(numbers)
    for touch in touches:
        number, use = (count + touch.number, Use.CREATE) if touch.gradient else (touch.number, Use.READ)
        accesses.append(Access(number, use, speeds.seconds([touch]), backward=touch.backward))
    updates = {}
    for group, gradient in zip(groups, items[count:], strict=True):
        if not group.trained:
            continue
        wide = work.master_weights and group.element_bytes < 4
        kept = group.numel * (4 if wide else group.element_bytes)
        roles = [f".state{number}" for number in range(work.optimizer_memory.state_tensors)]
        roles += [".master"] if wide else []
        updates[group.name] = [*(Item(f"{group.name}{role}", kept) for role in roles), gradient]
    return Trace("made", tuple(items), tuple(accesses), speeds.seconds([first])), updates
