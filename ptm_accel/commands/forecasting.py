"""What `estimate` and `plan` say of a machine that is described."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ptm_accel.config import DEVICE_SHARE, DISK_SHARE, HOST_SHARE
from ptm_accel.fitting import GPU, RAM, SSD, Fit, Fitting, total_of
from ptm_accel.hardware.cards import KERNEL_SHARE
from ptm_accel.hardware.described import Hardware
from ptm_accel.outlook import Outlook
from ptm_accel.schedule.bound import Resource
from ptm_accel.speeds import CPU_SHARE
from ptm_accel.units import format_decimal, format_least_decimal, format_seconds

_BOUND = {
    Resource.COMPUTE: "compute",
    Resource.CPU: "updates on the CPU, which begin after the backward",
    Resource.LINK_IN: "the link to the GPU",
    Resource.LINK_OUT: "the link from the GPU",
    Resource.DISK_READ: "the SSD, mostly by reads",
    Resource.DISK_WRITE: "the SSD, mostly by writes",
    Resource.NETWORK: "the other processes",
}
_USUAL_SSD_RATE = "5GB/s"
_SHARES = {GPU: DEVICE_SHARE, RAM: HOST_SHARE, SSD: DISK_SHARE}


def remedies_of(found: Fitting, hardware: Hardware, processes: int) -> list[str]:
    """Options that would make it fit, each to be pasted in place of those of that name."""
    passing = 0 if hardware.gpu is not None else found.pass_bytes
    return [
        " ".join(_option(tier, total_of(tier, n, passing, processes), hardware) for tier, n in remedy.items())
        for remedy in found.remedies
    ]


def _option(tier: str, total_bytes: int, hardware: Hardware) -> str:
    size = format_least_decimal(total_bytes)
    if tier == GPU:
        assert hardware.gpu is not None
        return f"--gpu {size}@{hardware.gpu.flops / 1e12:g}TFLOPS"
    if tier == SSD:
        rate = _USUAL_SSD_RATE if hardware.ssd is None else f"{format_least_decimal(int(hardware.ssd.read_bytes_s))}/s"
        return f"--ssd {size}@{rate}"
    return f"--ram {size}"


def answer(found: Fitting, hardware: Hardware, processes: int, *, smaller: str) -> str:
    """Says in one line whether it fits.

    Args:
        found: the forecast.
        hardware: the machine.
        processes: how many train.
        smaller: what would make the batch smaller.
    """
    if found.found is None:
        ways = ", or ".join(remedies_of(found, hardware, processes))
        batch = smaller if any(GPU in remedy for remedy in found.remedies) else ""
        return f"It does not fit: {_reason(found, hardware)}. It would with {ways}{batch}."
    if found.fit is Fit.STAYS:
        where = "the GPU" if hardware.gpu is not None else "memory"
        return f"It fits: all of it stays in {where}, and nothing moves."
    into, out = format_decimal(found.found.in_bytes), format_decimal(found.found.out_bytes)
    between = "GPU and RAM" if hardware.gpu is not None else "memory and SSD"
    if hardware.gpu is not None and found.tiers[SSD].pages_bytes:
        between = "GPU, RAM and SSD"
    of = " of each process" if processes > 1 else ""
    said = f"It fits. Each step{of} moves {into} in and {out} out between {between}."
    written = format_decimal(processes * found.written_a_day_bytes)
    return f"{said} A day of training writes {written} to the SSD." if found.written_a_day_bytes else said


def _reason(found: Fitting, hardware: Hardware) -> str:
    needs = found.needs
    parts = []
    for tier, use in found.tiers.items():
        if any(tier in remedy for remedy in found.remedies) and use.pages_bytes:
            held = f"{format_decimal(use.pages_bytes)} of parameters, gradients and state"
            if (tier == GPU or hardware.gpu is None) and tier != SSD:
                held = f"{format_decimal(use.pages_bytes)} at least (for {needs.reason})"
            if tier == GPU:
                held += f" and {format_decimal(use.pass_bytes)} for a batch"
            has = f"has {format_decimal(use.budget_bytes)} for that" if use.budget_bytes else "is not there"
            parts.append(f"the {tier} has to hold {held}, and {has}")
    return "; ".join(parts)


def rows_of(found: Fitting, hardware: Hardware, tokens: int, processes: int) -> dict[str, str]:
    """The figures, by name."""
    rows = {}
    step = found.found
    if step is not None:
        rows["step (forecast)"] = _speed(step, processes * tokens)
        rows["time on"] = _parts(step)
        rows["bound by"] = bound_of(step)
        rows["assuming"] = _rates(hardware, processes)
    each = "" if processes == 1 else " of each process"
    rows[f"training state{each}"] = format_decimal(found.needs.states_bytes)
    for tier, use in found.tiers.items():
        if use.pages_bytes or use.budget_bytes:
            rows[f"{tier}{each}"] = _use(tier, use, found, hardware)
    if found.in_ram is not None:
        enough = format_least_decimal(total_of(RAM, found.needs.below_bytes, 0, processes))
        rows["faster"] = f"with --ram {enough} nothing goes to the SSD: {_speed(found.in_ram, processes * tokens)}"
    return rows


def _speed(step: Outlook, tokens: int) -> str:
    return f"{format_seconds(step.step_s)}, {_count(tokens / step.step_s)} tokens/s"


def bound_of(step: Outlook) -> str:
    """What a step cannot go below."""
    seconds, resource = step.bound
    return f"{_BOUND[resource]}: {format_seconds(seconds)} at the least"


def _parts(step: Outlook) -> str:
    """What a step does, much of it at the same time."""
    parts = {
        "compute": step.arithmetic_s,
        "link": step.link_s,
        "SSD": step.disk_s,
        "updates on the CPU": step.cost.host_s,
        "other processes": step.cost.network_s,
    }
    return ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts.items() if seconds)


def _use(tier: str, use: Any, found: Fitting, hardware: Hardware) -> str:
    computes = tier == (GPU if hardware.gpu is not None else RAM)
    least = "at least " if found.found is None and computes else ""
    shown = f"{least}{format_decimal(use.pages_bytes)} of pages"
    if use.pass_bytes:
        shown += f", {format_decimal(use.pass_bytes)} of batch and activations"
    of = f"{_SHARES[tier]} of it" if tier != RAM or hardware.gpu is not None else "the rest of it, at most 80%"
    return f"{shown}; limit for pages {format_decimal(use.budget_bytes)} ({of})" if use.budget_bytes else shown


def _rates(hardware: Hardware, processes: int) -> str:
    if hardware.gpu is None:
        rate = "the rate measured here" if hardware.cpu_flops is None else f"{hardware.cpu_flops / 1e12:g} TFLOPS"
        parts = [f"{CPU_SHARE:.0%} of {rate}"]
    else:
        parts = [f"{KERNEL_SHARE:.0%} of {hardware.gpu.flops / 1e12:g} TFLOPS"]
    if hardware.link is not None:
        parts.append(f"link {format_decimal(hardware.link.read_bytes_s)}/s each way")
    parts.append(f"RAM {format_decimal(hardware.ram_bytes_s)}/s")
    if hardware.ssd is not None:
        parts.append(f"SSD {format_decimal(hardware.ssd.read_bytes_s)}/s")
    if processes > 1:
        parts.append(f"other processes {format_decimal(hardware.network_bytes_s)}/s")
    return ", ".join(parts)


def _count(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}"


def as_data(found: Fitting, hardware: Hardware, tokens: int, processes: int) -> dict[str, Any]:
    """The same for programs; sizes in bytes, times in seconds, of one process but where it says otherwise."""
    step = found.found
    return {
        "fits": step is not None,
        "fit": found.fit.name.lower(),
        "remedies": remedies_of(found, hardware, processes),
        "hardware": asdict(hardware),
        "budgets": asdict(found.budgets),
        "tiers": {tier.lower(): asdict(use) for tier, use in found.tiers.items()},
        "step_s": None if step is None else step.step_s,
        "tokens_s": None if step is None else processes * tokens / step.step_s,
        "step_in_ram_s": None if found.in_ram is None else found.in_ram.step_s,
        "bound": None if step is None else step.bound[1].value,
        "bound_s": None if step is None else step.bound[0],
        "compute_s": None if step is None else step.arithmetic_s,
        "link_s": None if step is None else step.link_s,
        "ssd_s": None if step is None else step.disk_s,
        "cpu_update_s": None if step is None else step.cost.host_s,
        "network_s": None if step is None else step.cost.network_s,
        "moved_in_bytes": None if step is None else step.in_bytes,
        "moved_out_bytes": None if step is None else step.out_bytes,
        "ssd_written_a_day_bytes": processes * found.written_a_day_bytes,
        "standing": None if step is None or step.standing is None else step.standing.rows(),
    }
