"""Forecasts a step of a model on this machine, and which of its layers would stay, before anything is run.

The pass is made up, not recorded: each group of parameters is read in the model's order, and again in reverse, and
takes the arithmetic of its products. From there on it is planned and simulated as any other.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ptm_accel.config import DEFAULT_PAGE_SIZE
from ptm_accel.errors import BudgetError
from ptm_accel.estimate import estimate
from ptm_accel.hardware.profile import LinkRates, side_by_side
from ptm_accel.hardware.rates import device_rates, disk_rates
from ptm_accel.model.attach import small_bytes
from ptm_accel.model.grouping import group_sizes, groups_of
from ptm_accel.optim.update_rate import cpu_update_rate
from ptm_accel.schedule.choice import Choice, choose_plan
from ptm_accel.schedule.standing import describe
from ptm_accel.schedule.trace import Access, Item, Trace, Use
from ptm_accel.schedule.updates import GRAD_SUFFIX
from ptm_accel.units import format_bytes, format_least, parse_bytes

_WIDTH = 2048
_PRODUCTS = 5


@dataclass(frozen=True, slots=True)
class Speeds:
    """Rates of this machine.

    Attributes:
        flops: of products of matrices, in the dtype of the model.
        link: the link between the tier that computes and the one below.
        update_params: parameters that are updated where passes are computed.
        host_params: parameters that are updated on the CPU beside a device; None without one.
    """

    flops: float
    link: LinkRates
    update_params: float
    host_params: float | None = None


def measured_speeds(
    device: torch.device, dtype: torch.dtype, disk: Sequence[Path], *, master_weights: bool = False
) -> Speeds | None:
    """What this machine does; None where its link, or its updates, cannot be measured.

    Args:
        device: where passes are computed.
        dtype: of the model.
        disk: folders; used where there is no device.
        master_weights: whether narrower parameters get fp32 masters.
    """
    cpu = cpu_update_rate(dtype, masters=master_weights)
    card = device_rates(device)
    flops = _products_s(device, dtype)
    if card is not None:
        return Speeds(flops, card, card.update_params_s, cpu)
    link = side_by_side(disk_rates(disk)) if disk else None
    return None if link is None or cpu is None else Speeds(flops, link, cpu)


def _products_s(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of products of large matrices."""
    left, right = (torch.ones(_WIDTH, _WIDTH, dtype=dtype, device=device) for _ in range(2))
    # The first one loads kernels; reading an element waits for a device.
    (left @ right)[0, 0].item()
    begin = time.perf_counter()
    for _ in range(_PRODUCTS):
        product = left @ right
    product[0, 0].item()
    return _PRODUCTS * 2 * _WIDTH**3 / (time.perf_counter() - begin)


@dataclass(frozen=True, slots=True)
class Outlook:
    """Forecast of a step.

    Attributes:
        step_s: seconds, simulated.
        arithmetic_s: of that, arithmetic of the pass and of updates where passes are computed.
        in_bytes: what is moved into the tier that computes, in a step.
        out_bytes: what is moved out of it.
        layers: which stay and which leave, in words.
    """

    step_s: float
    arithmetic_s: float
    in_bytes: int
    out_bytes: int
    layers: str


def outlook(
    model: nn.Module,
    capacity_bytes: int,
    speeds: Speeds,
    *,
    tokens: int,
    pass_bytes: int = 0,
    checkpointing: bool = False,
    master_weights: bool = False,
    page_size: str | int = DEFAULT_PAGE_SIZE,
) -> Outlook:
    """Plans a step with AdamW and clipping.

    Args:
        model: it may be on the meta device, and is not changed.
        capacity_bytes: the budget of the tier that computes.
        speeds: of the machine.
        tokens: in a batch.
        pass_bytes: what batch and activations take of the budget: on a device.
        checkpointing: whether layers are recomputed in backward.
        master_weights: whether narrower parameters get fp32 masters.
        page_size: as in the configuration.

    Raises:
        BudgetError: less than the least budget that it can train under.
    """
    least = estimate(model, master_weights=master_weights, page_size=page_size)
    capacity = capacity_bytes - pass_bytes
    if capacity < least.least_bytes:
        needed = format_bytes(least.least_bytes)
        if pass_bytes:
            needed += f", and {format_bytes(pass_bytes)} for a batch"
        raise BudgetError(
            f"{format_bytes(capacity_bytes)} cannot train this model: it needs {needed} (for {least.reason}); give at "
            f"least {format_least(least.least_bytes + pass_bytes)}."
        )
    groups, small = _groups(model, capacity, parse_bytes(page_size))
    recorded, updates = _step(groups, speeds, tokens, checkpointing=checkpointing, masters=master_weights)
    trained = sum(group.numel for group in groups if group.trained)
    gradients = max(sum(items[-1].nbytes for items in updates.values()), 1)
    choice = choose_plan(
        recorded,
        capacity_bytes=capacity - small,
        updates=updates,
        repeats=True,
        rates=speeds.link,
        update_s=trained / speeds.update_params / gradients,
        host_s=None if speeds.host_params is None else trained / speeds.host_params / gradients,
    )
    return _outlook(choice, recorded)


@dataclass(frozen=True, slots=True)
class _MovingGroup:
    """A group that moves: its name, and how many elements of which size it has."""

    name: str
    numel: int
    element_bytes: int
    trained: bool


def _groups(model: nn.Module, capacity: int, page_bytes: int) -> tuple[list[_MovingGroup], int]:
    """Returns the groups that move, in the model's order, and the bytes of the states of those that never leave."""
    params = [param for param in model.parameters() if param.numel()]
    placed = groups_of(model, params, small=small_bytes(page_bytes), group_bytes=group_sizes(capacity)[0])
    moved: dict[str, _MovingGroup] = {}
    stay = 0
    for param, (group, _) in placed.items():
        if group.movable:
            moved.setdefault(
                group.name, _MovingGroup(group.name, group.numel, param.element_size(), param.requires_grad)
            )
        else:
            stay += 4 * param.nbytes
    return list(moved.values()), stay


def _step(
    groups: Sequence[_MovingGroup], speeds: Speeds, tokens: int, *, checkpointing: bool, masters: bool
) -> tuple[Trace, dict[str, list[Item]]]:
    """Returns the pass, and what updates use beside it; the gradient last."""
    count = len(groups)
    items = [Item(group.name, group.numel * group.element_bytes) for group in groups]
    items += [Item(f"{group.name}{GRAD_SUFFIX}", group.numel * group.element_bytes) for group in groups]
    forward_s = [2 * group.numel * tokens / speeds.flops for group in groups]
    accesses = [Access(number, Use.READ, seconds) for number, seconds in enumerate(forward_s)]
    for number in reversed(range(count)):
        backward_s = forward_s[number] * (3 if checkpointing else 2)
        accesses.append(Access(number, Use.READ, backward_s, backward=True))
        if groups[number].trained:
            accesses.append(Access(count + number, Use.CREATE, 0.0, backward=True))
    updates = {}
    for group, gradient in zip(groups, items[count:], strict=True):
        if not group.trained:
            continue
        wide = masters and group.element_bytes < 4
        kept = group.numel * (4 if wide else group.element_bytes)
        roles = [".exp_avg", ".exp_avg_sq", *([".master"] if wide else [])]
        updates[group.name] = [*(Item(f"{group.name}{role}", kept) for role in roles), gradient]
    return Trace("made", tuple(items), tuple(accesses)), updates


def _outlook(choice: Choice, recorded: Trace) -> Outlook:
    found, text = choice.simulated, describe(choice, recorded)
    if found is None or text is None:
        raise BudgetError("no plan fits what is left for pages; raise the budget, or use a smaller batch.")
    return Outlook(found.seconds, found.compute_s + found.update_s, found.read_bytes, found.written_bytes, text)
