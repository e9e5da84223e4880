"""Tells whether a model trains on a machine that is described, what a step takes there, and what would make it fit.

Budgets are those that a run derives on such a machine. What does not fit a GPU lies in RAM, and what does not fit there
on the SSD; a run refuses the same (`ptm_accel.sizing`).
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace
from functools import partial

import torch

from ptm_accel.config import DEVICE_SHARE, DISK_SHARE, HOST_SHARE
from ptm_accel.errors import ConfigError, shown
from ptm_accel.estimate import Estimate, Grouped
from ptm_accel.hardware.cards import KERNEL_SHARE, MEMORY_SHARE
from ptm_accel.hardware.described import Hardware
from ptm_accel.memory.activation_reserve import MARGIN
from ptm_accel.memory.disk import bounce_bytes
from ptm_accel.memory.setup import Capacities, frame_bytes
from ptm_accel.memory.swap_space import SPARES
from ptm_accel.model.floor import FUSED_ADAMW, OptimizerMemory
from ptm_accel.outlook import Outlook, Work, outlook, overflowing
from ptm_accel.speeds import Speeds, on_cpu, products_s
from ptm_accel.units import parse_bytes

_DAY_S = 86400
OTHER_BYTES = 500_000_000
"""RAM for Python and torch, beside pages."""

_FRAME_SIZES = 4
"""Frames have up to eight pages where there is more host memory: 1, 2, 4 or 8."""

GPU, RAM, SSD = "GPU", "RAM", "SSD"


class Fit(enum.Enum):
    """Answer to whether it fits."""

    STAYS = "fits, and nothing moves"
    MOVES = "fits, and moves"
    NOT = "does not fit"


@dataclass(frozen=True, slots=True)
class Use:
    """Bytes of a tier that one process takes, and what the tier has for it.

    Attributes:
        pages_bytes: of parameters, gradients and optimizer state.
        pass_bytes: of batch and activations.
        budget_bytes: what a run gives to pages, and on a GPU to activations with them; 0 for a tier that there is not.
    """

    pages_bytes: int
    pass_bytes: int
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Budgets:
    """Bytes that one process may use of each tier, as a run derives them.

    Attributes:
        gpu: None without one.
        ram: of memory, for pages.
        ssd: 0 without one.
    """

    gpu: int | None
    ram: int
    ssd: int

    @property
    def computes(self) -> int:
        """Of the tier that computes."""
        return self.ram if self.gpu is None else self.gpu


@dataclass(frozen=True, slots=True)
class Fitting:
    """Forecast of training on a machine.

    Attributes:
        fit: whether it does.
        needs: what a process needs of memory.
        pass_bytes: batch and activations at their peak.
        budgets: what it may use.
        tiers: what each tier holds, by name.
        remedies: where it does not fit, ways to make it fit: for each the bytes that a process needs of tiers, by name.
        found: the step; None where it does not fit.
        in_ram: the step if what is on the SSD were in RAM; None where nothing is, or without a GPU.
    """

    fit: Fit
    needs: Estimate
    pass_bytes: int
    budgets: Budgets
    tiers: dict[str, Use]
    remedies: list[dict[str, int]]
    found: Outlook | None
    in_ram: Outlook | None = None

    @property
    def written_a_day_bytes(self) -> float:
        """Bytes that one process writes to the SSD in a day of training."""
        found = self.found
        return 0.0 if found is None else found.cost.written_bytes / found.step_s * _DAY_S


def budgets_of(machine: Hardware, pass_bytes: int) -> Budgets:
    """Returns what a run gives itself.

    Args:
        machine: what one process has.
        pass_bytes: of batch and activations, which on a CPU come on top.
    """
    ram = parse_bytes(HOST_SHARE, total_bytes=machine.ram_bytes)
    if machine.gpu is None:
        ram = max(min(ram, machine.ram_bytes - OTHER_BYTES - pass_bytes), 0)
    gpu = None if machine.gpu is None else parse_bytes(DEVICE_SHARE, total_bytes=machine.gpu.memory_bytes)
    return Budgets(gpu, ram, parse_bytes(DISK_SHARE, total_bytes=machine.ssd_bytes))


def total_of(tier: str, budget_bytes: int, pass_bytes: int, processes: int) -> int:
    """Returns how large a tier of a machine must be for a budget of each process: the inverse of `budgets_of`."""
    share = {GPU: DEVICE_SHARE, RAM: HOST_SHARE, SSD: DISK_SHARE}[tier]
    total = math.ceil(budget_bytes * 100 / int(share.removesuffix("%"))) + 1
    if tier == RAM:
        total = max(total, budget_bytes + pass_bytes + OTHER_BYTES)
    return total if tier == GPU else total * processes


def stays_from(work: Work, needs: Estimate, pass_bytes: int) -> int:
    """Returns the least budget of a GPU under which nothing ever moves; groups and their padding grow with budgets."""
    reserved = int(pass_bytes * MARGIN)
    capacity = needs.whole_bytes + reserved
    while (needed := work.grouped(capacity).whole_bytes + reserved) > capacity:
        capacity = needed
    return capacity


def fitting(work: Work, hardware: Hardware, budgets: Budgets | None = None) -> Fitting:
    """Forecasts training on a machine.

    Args:
        work: the step, of one process.
        hardware: the machine.
        budgets: what each process may use, if not what a run derives.
    """
    machine = hardware.shared_by(work.processes)
    needs, touched = work.estimate(), work.touched()
    pass_bytes = touched.pass_bytes
    budgets = budgets_of(machine, pass_bytes) if budgets is None else budgets
    division = work.grouped(budgets.computes)
    on_device = budgets.gpu is not None
    beside = int(pass_bytes * MARGIN) if on_device else _buffers(budgets, work)
    stays = division.whole_bytes + beside <= budgets.computes
    remedies = [] if stays else _remedies(needs, division, pass_bytes, budgets, work)
    if remedies:
        return Fitting(Fit.NOT, needs, pass_bytes, budgets, _needed(needs, pass_bytes, budgets), remedies, None)
    away = 0 if stays else division.below_bytes
    step = partial(outlook, work, budgets.computes, counts_activations=on_device, needs=needs, touched=touched)
    found = step(speeds=_speeds(work, machine, spills=away > (budgets.ram if on_device else 0)))
    tiers = _held(needs, found, budgets)
    in_ram = None
    if on_device and (missing := tiers[SSD].pages_bytes):
        assert machine.link is not None and machine.ssd is not None, machine
        found = overflowing(found, missing, machine.link, machine.ssd)
        in_ram = step(speeds=_speeds(work, replace(machine, ram_bytes=away), spills=False))
    return Fitting(Fit.STAYS if stays else Fit.MOVES, needs, pass_bytes, budgets, tiers, [], found, in_ram)


def _buffers(budgets: Budgets, work: Work) -> int:
    """Host memory of the buffers of a disk."""
    return bounce_bytes(1, parse_bytes(work.page_size)) if budgets.ssd else 0


def _remedies(
    needs: Estimate, division: Grouped, pass_bytes: int, budgets: Budgets, work: Work
) -> list[dict[str, int]]:
    """Ways to make it fit where it does not stay; none where it moves."""
    on_device, computes = budgets.gpu is not None, budgets.computes
    least = needs.least_bytes + (pass_bytes if on_device else 0)
    # Larger budgets have larger groups, with other padding.
    away = (division if computes >= least else work.grouped(least)).below_bytes
    if not on_device:
        missing = {} if computes >= least else {RAM: least}
        missing |= {} if away <= budgets.ssd else {SSD: away}
        return [missing, {RAM: needs.whole_bytes + _buffers(budgets, work)}] if missing else []
    larger = {} if computes >= least else {GPU: least}
    if away + _held_below(budgets, work) <= budgets.ram + budgets.ssd:
        return [larger] if larger else []
    ram = away - budgets.ssd
    for _ in range(_FRAME_SIZES):
        ram = away - budgets.ssd + _held_below(replace(budgets, ram=max(ram, 0)), work)
    held = _held_below(replace(budgets, ssd=1), work)
    # Buffers of a disk are in RAM, so that comes first.
    with_ssd = [{**larger, SSD: away + held - budgets.ram}] if budgets.ram > held else []
    return [{**larger, RAM: ram}, *with_ssd]


def _held_below(budgets: Budgets, work: Work) -> int:
    """What tiers below a GPU hold themselves: buffers of a disk, and frames for exchanges (`ptm_accel.sizing`)."""
    if budgets.gpu is None or not budgets.ssd:
        return 0
    page = parse_bytes(work.page_size)
    capacities = Capacities(page_bytes=page, host_bytes=budgets.ram, device_bytes=budgets.gpu)
    return bounce_bytes(1, page) + SPARES * frame_bytes(capacities)


def _needed(needs: Estimate, pass_bytes: int, budgets: Budgets) -> dict[str, Use]:
    """What would be held where it does not fit: the least where passes are computed, and all below."""
    if budgets.gpu is not None:
        return {
            GPU: Use(needs.least_bytes, pass_bytes, budgets.gpu),
            RAM: Use(needs.below_bytes, 0, budgets.ram),
            SSD: Use(0, 0, budgets.ssd),
        }
    return {RAM: Use(needs.least_bytes, pass_bytes, budgets.ram), SSD: Use(needs.below_bytes, 0, budgets.ssd)}


def _held(needs: Estimate, found: Outlook, budgets: Budgets) -> dict[str, Use]:
    """What each tier holds."""
    away = found.away_bytes
    if budgets.gpu is None:
        pages = budgets.ram if away else needs.whole_bytes
        return {RAM: Use(pages, found.pass_bytes, budgets.ram), SSD: Use(away, 0, budgets.ssd)}
    pages = budgets.gpu - found.pass_bytes if away else needs.whole_bytes
    in_ram = min(away, budgets.ram)
    return {
        GPU: Use(pages, found.pass_bytes, budgets.gpu),
        RAM: Use(in_ram, 0, budgets.ram),
        SSD: Use(away - in_ram, 0, budgets.ssd),
    }


def _speeds(work: Work, machine: Hardware, *, spills: bool) -> Speeds:
    """The rates of a machine, for a process."""
    trained = [param for param in work.model.parameters() if param.requires_grad]
    dtype = max(trained, key=lambda param: param.nbytes).dtype if trained else torch.float32
    moved = update_bytes(dtype, work)
    network = machine.network_bytes_s if work.processes > 1 else None
    updates = machine.ram_bytes_s / moved
    if machine.gpu is not None:
        update = machine.gpu.memory_bytes_s * MEMORY_SHARE / moved
        host = updates if machine.ram_bytes and not spills else None
        return Speeds(machine.gpu.flops * KERNEL_SHARE, update, machine.link, None, host, network)
    flops = products_s(torch.device("cpu"), dtype) if machine.cpu_flops is None else machine.cpu_flops
    return on_cpu(flops, updates, machine.ssd if spills else None, network)


def update_bytes(dtype: torch.dtype, work: Work) -> int:
    """Bytes of memory that the update of one parameter reads and writes."""
    states, size = work.optimizer_memory.state_tensors, dtype.itemsize
    if work.master_weights and size < 4:
        # Master and states in fp32, read and written; the gradient read; the parameter written.
        return 2 * 4 * (1 + states) + 4 + size
    return 2 * size * (1 + states) + size


OPTIMIZERS = {
    "adamw": FUSED_ADAMW,
    "adam": OptimizerMemory(2, scratch_tensors=3),
    "sgd": OptimizerMemory(0, scratch_tensors=3),
    "sgd-momentum": OptimizerMemory(1, scratch_tensors=3),
    "adagrad": OptimizerMemory(1, scratch_tensors=3),
    "adafactor": OptimizerMemory(0, scratch_tensors=3, whole=True),
}
"""Needs of optimizers, by the names for `--optim`; Adafactor's sums over rows and columns count as nothing."""


def optimizer_memory_named(name: str) -> OptimizerMemory:
    """Returns the needs of an optimizer.

    Raises:
        ConfigError: none of that name is known.
    """
    plain = name.strip().lower().replace("_", "-").removesuffix("-fused").removesuffix("-torch")
    if plain not in OPTIMIZERS:
        raise ConfigError(f"optim: {shown(name)} is not known here; write one of {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[plain]
