"""The lines that every benchmark result begins with: command, date, machine and how much of it was there, versions."""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import accelerate
import psutil
import torch
import transformers


def _spent_s() -> tuple[float, float]:
    """Seconds, of all cores since the machine's start: those in which something ran or wanted to, and those taken away.

    What a hypervisor gives to somebody else while a core had something to do counts as taken away (steal time).
    """
    spent = psutil.cpu_times()
    # Not every system has it.
    steal = getattr(spent, "steal", 0.0)
    return spent.user + spent.system + steal, steal


_BEGAN = _spent_s()


def _taken_away() -> str:
    """The part of the time that this machine's cores wanted to work, and could not, since the benchmark began."""
    wanted, steal = (now - then for now, then in zip(_spent_s(), _BEGAN, strict=True))
    return f"{steal / wanted:.0%}" if wanted > 0 else "0%"


def facts(command: str) -> str:
    """A Markdown list that says where and how a result was made."""
    cpu = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    memory = psutil.virtual_memory().total / 2**30
    return "\n".join(
        [
            f"* command: `{command}`",
            f"* date: {datetime.date.today().isoformat()}",
            f"* machine: {os.cpu_count()} cores of {cpu}, {memory:.0f} GiB, Linux {platform.release()}; "
            f"neighbours took {_taken_away()} of the time in which its cores had something to do",
            f"* versions: Python {sys.version.split()[0]}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, accelerate {accelerate.__version__}; "
            f"{torch.get_num_threads()} threads, OMP_WAIT_POLICY={os.environ.get('OMP_WAIT_POLICY', 'unset')}",
        ]
    )


def ratio_line(name: str, ours: Sequence[float], theirs: Sequence[float]) -> str:
    """A table row: both medians, and the median and middle half of the ratios taken pair by pair."""
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    quarter = statistics.quantiles(ratios, n=4)
    return (
        f"| {name} | {statistics.median(ours):.4g} s | {statistics.median(theirs):.4g} s | "
        f"{statistics.median(ratios):.3f} | {quarter[0]:.3f} to {quarter[2]:.3f} | {len(ratios)} |"
    )
