"""Whether it matters on which cores threads of our own run: steps that hardly compute, bound and not bound.

    OMP_WAIT_POLICY=passive python tests/benchmarks/cores.py DIRECTORY_ON_AN_SSD [--rounds 3] [--steps 14]

Llama of 222M parameters with a batch of 1 x 32, so that updates and the disk are most of a step. OpenMP binds its
threads (`OMP_PROC_BIND=true`) or does not; our threads run where `ptm_accel.memory.cores` lets them, or on the cores
that they inherit, or, placed by hand, each on a core of its own. Each run is a process, the order rotated by one each
round; ratios are taken between runs of the same round.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from machine_facts import facts
from peer_common import DROPPED_STEPS, REPORT, Spec

BUDGETS = {"all in RAM": "12GiB", "state on disk": "1420MiB"}


@dataclass(frozen=True)
class Way:
    """How threads run.

    Attributes:
        title: in words.
        environment: of OpenMP.
        cores: `ours`, `inherited` or `placed`; see `place`.
    """

    title: str
    environment: dict[str, str]
    cores: str


FREE = Way("not bound", {}, "ours")
WAYS = (
    FREE,
    Way("not bound, ours placed by hand", {}, "placed"),
    Way("OMP_PROC_BIND=true, ours on inherited cores", {"OMP_PROC_BIND": "true"}, "inherited"),
    Way("OMP_PROC_BIND=true", {"OMP_PROC_BIND": "true"}, "ours"),
)


def place(how: str) -> None:
    """Has threads of our own run elsewhere than the library lets them, in this process."""
    from ptm_accel.memory import own_threads

    turns = itertools.cycle(sorted(os.sched_getaffinity(0)))

    def placed(count: int, own: object) -> None:
        os.sched_setaffinity(0, {next(turns)})

    def inherited(count: int, own: object) -> None:
        return

    own_threads.leave_inherited_cores = {"placed": placed, "inherited": inherited}[how]


def child(text: str) -> None:
    """Trains and reports."""
    import peer_trainer

    spec = Spec.parse(text)
    if spec.extra["cores"] != "ours":
        place(spec.extra["cores"])
    peer_trainer.ours(spec)


def step_s(way: Way, host_memory: str, options: argparse.Namespace) -> float:
    """The median step of one process."""
    room = options.directory / "run"
    room.mkdir()
    extra: dict[str, Any] = {"masters": True, "cores": way.cores}
    spec = Spec("ptm-masters", "222m", options.steps, str(room), None, host_memory, 1.0, 1, 32, extra)
    try:
        done = subprocess.run(
            [sys.executable, __file__, "--child", spec.text()],
            env={**os.environ, **way.environment},
            stdout=subprocess.PIPE,
            text=True,
            timeout=1200,
            check=True,
        )
    finally:
        shutil.rmtree(room)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(REPORT)]
    return float(json.loads(line.removeprefix(REPORT))["step_s"])


def main() -> None:
    """All rounds, and the table."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="a folder on a fast disk")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=14)
    options = parser.parse_args()
    entries = [(way, budget) for budget in BUDGETS for way in WAYS]
    found: dict[tuple[str, str], list[float]] = {(way.title, budget): [] for way, budget in entries}
    for turn in range(options.rounds):
        begin = turn % len(entries)
        for way, budget in entries[begin:] + entries[:begin]:
            seconds = step_s(way, BUDGETS[budget], options)
            found[way.title, budget].append(seconds)
            print(f"round {turn + 1}, {budget}, {way.title}: {seconds:.2f} s a step", file=sys.stderr, flush=True)
    print("# On which cores threads of our own run\n")
    print(
        facts(
            f"OMP_WAIT_POLICY=passive python tests/benchmarks/cores.py DIRECTORY --rounds {options.rounds} "
            f"--steps {options.steps}"
        )
    )
    print(
        f"* model: Llama, 222M parameters, bf16 with fp32 masters, batch 1 x 32, clipped; host_memory "
        f"{' or '.join(BUDGETS.values())}; {options.steps} steps a process, the first {DROPPED_STEPS} left out\n"
    )
    print("| | threads | step | of not bound, round by round |\n| --- | --- | --- | --- |")
    for way, budget in entries:
        steps, free = found[way.title, budget], found[FREE.title, budget]
        each = [a / b for a, b in zip(steps, free, strict=True)]
        print(
            f"| {budget} | {way.title} | {statistics.median(steps):.2f} s | {statistics.median(each):.2f} "
            f"({min(each):.2f} to {max(each):.2f}) |"
        )


if __name__ == "__main__":
    main()
