"""What sharding over two processes costs beside DDP and FSDP2, in bytes, in memory and on the clock.

    OMP_WAIT_POLICY=passive chrt -f 5 python tests/benchmarks/sharding.py [--rounds 10] [--dtype fp32] [--length 512]

Starts itself by torchrun, in processes of one thread each (gloo). One Llama, clipped AdamW: as DDP, as DDP that sends
nothing, sharded on pages with room for everything, by FSDP2 layer by layer, and the collectives of the third alone.
They take turns in the same processes. Peak memory is that of processes which train one of them only. Prints Markdown.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import torch.distributed as dist
from machine_facts import facts, ratio_line
from sharding_contenders import DTYPES, LAYERS, PROCESSES, STEPS, Replayed, Trained, counted

from ptm_accel.errors import BudgetError

WARM_UP = 4
STATES = 4
"""Tensors of a parameter's size: itself, its gradient, two moments."""
TIGHT = 0.75
"""A budget without a disk that one process is refused, as a share of all states."""


def resident(name: str) -> float:
    """A figure of this process's memory in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


# ---- the parts, each in processes of its own -------------------------------------------------------------------------


def report_bytes(trained: Trained) -> None:
    """Prints what a step moves and what a rank keeps, beside what the formula says."""
    engine = trained.engine
    assert engine is not None
    assert engine.training.shards is not None
    assert engine.optimizer is not None
    before = replace(engine.training.shards.stats)
    trained.step()
    engine.settle()
    after = engine.training.shards.stats
    cut = [slot for slot in engine.slots if slot.sharded]
    size, mib = cut[0].own.dtype.itemsize, 2**20
    padded = {slot: slot.group.pieces[slot.member].cut.padded * size for slot in cut}
    # Backward uses layers again, but for the last one, which is still there, and so is the head.
    again = [slot for slot in cut if ".layers." in slot.name and f".layers.{LAYERS - 1}." not in slot.name]
    groups, twice = (len({slot.group for slot in slots}) for slots in (cut, again))
    forward, backward = (sum(padded[slot] for slot in slots) / mib for slots in (cut, again))
    gathered, reduced = after.gathered_bytes - before.gathered_bytes, after.reduced_bytes - before.reduced_bytes
    own = sum(block.nbytes for block in {slot.own.block for slot in engine.slots}) / mib
    states = sum(part.nbytes for state in engine.optimizer.states for part in state.paged.values()) / mib
    numel = sum(param.numel() for param in trained.called.parameters())
    share = numel * size / PROCESSES / mib
    print("## Bytes\n")
    whole = f"{numel / 1e6:.1f}M parameters, {numel * size / mib:.1f} MiB"
    print(f"{whole}; {len(cut)} tensors are cut, in {groups} groups.\n")
    print("| of a rank, a step | counted | by formula |\n| --- | --- | --- |")
    gathers = f"{after.gathers - before.gathers}, {gathered / mib:.1f} MiB"
    print(f"| gathers | {gathers} | {groups} + {twice}, {forward:.1f} + {backward:.1f} MiB |")
    sums = f"{after.reductions - before.reductions}, {reduced / mib:.1f} MiB"
    print(f"| reductions | {sums} | {groups}, {forward:.1f} MiB |")
    print(f"| accesses agreed on | {after.agreed - before.agreed} | 0 |")
    print(f"| kept: parameters | {own:.1f} MiB | {share:.1f} MiB |")
    print(f"| kept: moments | {states:.1f} MiB | {2 * share:.1f} MiB |")


def report_calls(trained: Trained) -> None:
    """Prints how often a step enters our functions."""
    calls = counted(trained)
    params = len(list(trained.called.parameters()))
    print(f"\n## Calls\n\nFor each parameter in a step {calls.total() / params:.1f} calls of our functions:\n")
    print("| calls | of |\n| --- | --- |")
    for name, count in calls.most_common(12):
        print(f"| {count / params:.2f} | {name} |")


def speed(asked: argparse.Namespace) -> None:
    """All contenders in turns."""
    ddp, pages, fsdp = (Trained(kind, asked) for kind in ("DDP", "ptm_accel", "FSDP2"))
    for _ in range(WARM_UP):
        losses = [trained.step() for trained in (ddp, pages, fsdp)]
    replayed = Replayed(pages)
    turns: dict[str, Callable[[], float]] = {
        "DDP": ddp.timed,
        "nothing sent": partial(ddp.timed, sends=False),
        "ptm_accel": pages.timed,
        "its collectives": replayed.timed,
        "FSDP2": fsdp.timed,
        "DDP again": ddp.timed,
    }
    took: dict[str, list[float]] = {name: [] for name in turns}
    for number in range(asked.rounds):
        for name in list(turns)[:: 1 if number % 2 else -1]:
            took[name].append(turns[name]())
    if dist.get_rank():
        return
    sent = [a + b for a, b in zip(took["nothing sent"], took["its collectives"], strict=True)]
    print(f"\n## Time\n\nLosses of the last step before: {', '.join(f'{loss:.6f}' for loss in losses)}.\n")
    print("| | median of a step | middle half of rounds |\n| --- | --- | --- |")
    for name, times in took.items():
        low, _, high = statistics.quantiles(times, n=4)
        print(f"| {name} | {statistics.median(times):.3f} s | {low:.3f} to {high:.3f} s |")
    print(f"\n| ratio | first | second | median of rounds | middle half | rounds |\n| --- {'| --- ' * 5}|")
    print(ratio_line("ptm_accel / (nothing sent + its collectives)", took["ptm_accel"], sent))
    print(ratio_line("ptm_accel / FSDP2", took["ptm_accel"], took["FSDP2"]))
    print(ratio_line("ptm_accel / DDP", took["ptm_accel"], took["DDP"]))
    print(ratio_line("FSDP2 / DDP", took["FSDP2"], took["DDP"]))
    print(ratio_line("DDP again / DDP", took["DDP again"], took["DDP"]))


def counts(asked: argparse.Namespace) -> None:
    """Bytes and calls of what is on pages."""
    trained = Trained("ptm_accel", asked)
    for _ in range(WARM_UP):
        trained.step()
    # All ranks take part; one prints.
    if dist.get_rank():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    report_bytes(trained)
    report_calls(trained)


def memory(asked: argparse.Namespace) -> None:
    """Peak of a process that trains one contender, once it has warmed up."""
    before = resident("VmRSS")
    trained = Trained(asked.kind, asked)
    for _ in range(WARM_UP):
        trained.step()
    Path("/proc/self/clear_refs").write_text("5")
    for _ in range(STEPS):
        trained.step()
    peak = resident("VmHWM") - before
    ctypes.CDLL(None).malloc_trim(0)
    every: list[Any] = [None] * PROCESSES
    dist.all_gather_object(every, (peak, resident("VmRSS") - before))
    if not dist.get_rank():
        shown = [" and ".join(f"{figure:.0f}" for figure in each) for each in zip(*every, strict=True)]
        budget = "" if trained.engine is None else f"{trained.engine.pool.budget.peak_bytes / 2**20:.0f} MiB"
        print(f"| {asked.kind} | {shown[0]} MiB | {shown[1]} MiB | {budget} |")


def tight(asked: argparse.Namespace) -> None:
    """A budget that is too small for one process."""
    budget = int(TIGHT * STATES * DTYPES[asked.dtype].itemsize * 69.22e6)
    try:
        trained = Trained("ptm_accel", asked, budget)
    except BudgetError as error:
        print(f"\n## A budget of {budget / 2**20:.0f} MiB without a disk\n\nOne process: `{error}`")
        return
    losses = [trained.step() for _ in range(STEPS)]
    if not dist.get_rank():
        print(f"\nEach of {dist.get_world_size()} processes: trains, losses {', '.join(map(str, losses))}.")


def main() -> None:
    """Starts the parts, or is one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", choices=DTYPES, default="fp32")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--part", choices=["counts", "memory", "tight", "speed"])
    parser.add_argument("--kind", default="ptm_accel")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.part and "RANK" in os.environ:
        dist.init_process_group("gloo")
        {"counts": counts, "memory": memory, "tight": tight, "speed": speed}[asked.part](asked)
        dist.destroy_process_group()
    elif asked.part:
        tight(asked)
    else:
        start_all(asked)


def start_all(asked: argparse.Namespace) -> None:
    """Runs every part in processes of its own."""
    given = ["--rounds", str(asked.rounds), "--dtype", asked.dtype, "--length", str(asked.length)]
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]

    def run(*part: str, start: Sequence[str] = ranks) -> None:
        sys.stdout.flush()
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*start, __file__, "--part", *part, *given], check=True, env=environment)

    print("# What sharding costs\n")
    run("counts")
    print("\n## Memory\n\nOf each process, beside what it had imported.\n")
    print("| | peak in steps | behind them, without free heap | peak of what is charged |")
    print("| --- | --- | --- | --- |")
    for kind in ("DDP", "FSDP2", "ptm_accel"):
        run("memory", "--kind", kind)
    run("tight", start=[sys.executable])
    run("tight")
    run("speed")
    print(f"\n{facts('OMP_WAIT_POLICY=passive chrt -f 5 python tests/benchmarks/sharding.py ' + ' '.join(given))}")


if __name__ == "__main__":
    main()
