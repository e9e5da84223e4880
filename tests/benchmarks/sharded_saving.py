"""What it costs to save a model that is sharded over two processes, beside FSDP2: on the clock, and in memory.

    OMP_WAIT_POLICY=passive chrt -f 5 python tests/benchmarks/sharded_saving.py FOLDER [--rounds 10]

Starts itself by torchrun, in processes of one thread each (gloo). Weights and AdamW's state of one Llama are saved into
FOLDER: by ptm_accel, each process its ranges, in memory and from a disk; by ptm_accel as for code that looks at values;
by FSDP2 and DCP, which plain code cannot read; by FSDP2 gathered in the first process. All bring the files to the disk,
and take turns. Prints Markdown.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from machine_facts import facts, ratio_line
from ptm_accel.integrations.accelerate.sharded_saving import save_cut
from safetensors.torch import save_file
from sharding_contenders import PROCESSES, Trained
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict

from ptm_accel.checkpoint.training_state import save_optimizer_state
from tests.anonymous_memory import Peak

WARM_UP = 2


def by_ranges(trained: Trained, folder: Path, *, is_known: bool = True) -> None:
    """Each process writes what it owns."""
    engine = trained.engine
    assert engine is not None
    assert engine.training.shards is not None
    assert engine.optimizer is not None
    save = trained.called.save_pretrained
    with engine.saving():
        save_cut(engine, lambda state: save(folder, state_dict=state), folder, is_known=is_known)
        save_optimizer_state(engine.optimizer, folder, {}, engine.training.shards.ranks)
    if not is_known and not dist.get_rank():
        sync(folder)


def by_dcp(trained: Trained, folder: Path) -> None:
    """Each process writes a file of its own."""
    model, optimizer = trained.called, trained.optimizer
    state = {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=folder)


def by_first(trained: Trained, folder: Path) -> None:
    """The first process gathers and writes all, as the Trainer has it with a full state dictionary."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(trained.called, options=options)
    state = get_optimizer_state_dict(trained.called, trained.optimizer, options=options)
    if not dist.get_rank():
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        torch.save(state, folder / "optimizer.pt")
        sync(folder)


def by_bytes(trained: Trained, folder: Path) -> None:
    """The floor: each process writes as many bytes of memory to its half of one file."""
    nbytes = 3 * sum(param.numel() * 4 for param in trained.called.parameters()) // PROCESSES
    descriptor = os.open(folder / "bytes", os.O_WRONLY | os.O_CREAT)
    content = memoryview(torch.zeros(64 << 20, dtype=torch.uint8).numpy())
    at, end = dist.get_rank() * nbytes, (dist.get_rank() + 1) * nbytes
    while at < end:
        at += os.pwrite(descriptor, content[: end - at], at)
    os.fsync(descriptor)
    os.close(descriptor)


def sync(folder: Path) -> None:
    """Brings what this process has written to the disk."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def timed(save: Callable[[Path], None], folder: Path) -> tuple[float, float]:
    """Seconds of the slowest process, and the most anonymous memory that a process takes, in MiB."""
    if not dist.get_rank():
        folder.mkdir()
    dist.barrier()
    with Peak() as peak:
        begin = time.perf_counter()
        save(folder)
        took = time.perf_counter() - begin
    dist.barrier()
    every: list[Any] = [None] * PROCESSES
    dist.all_gather_object(every, (took, peak.grown / 2**20))
    if not dist.get_rank():
        shutil.rmtree(folder)
    dist.barrier()
    return max(each for each, _ in every), max(each for _, each in every)


def measure(asked: argparse.Namespace) -> None:
    """All ways in turns; of one part."""
    in_memory = asked.part == "memory"
    # From a disk: weights and state stay there, but for a layer or two.
    pages = Trained("ptm_accel", asked) if in_memory else Trained("ptm_accel", asked, "320MiB", disk=asked.folder)
    ways: dict[str, Callable[[Path], None]] = {
        "ptm_accel": partial(by_ranges, pages),
        "bytes alone": partial(by_bytes, pages),
    }
    all_trained = [pages]
    if in_memory:
        fsdp = Trained("FSDP2", asked)
        all_trained.append(fsdp)
        ways |= {
            "ptm_accel, values gathered": partial(by_ranges, pages, is_known=False),
            "FSDP2 and DCP": partial(by_dcp, fsdp),
            "FSDP2, gathered": partial(by_first, fsdp),
        }
    for trained in all_trained:
        for _ in range(WARM_UP):
            trained.step()
    took: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(asked.rounds + 1):
        for name in list(ways)[:: 1 if number % 2 else -1]:
            seconds, mib = timed(ways[name], Path(asked.folder, "saved"))
            if number:
                took[name].append(seconds)
                memory[name].append(mib)
    if not dist.get_rank():
        report(pages, took, memory)


def report(pages: Trained, took: dict[str, list[float]], memory: dict[str, list[float]]) -> None:
    """Prints the tables of one part."""
    assert pages.engine is not None
    numel = sum(slot.value.numel for slot in pages.engine.slots)
    largest = max(slot.group.numel * 4 for slot in pages.engine.slots if slot.sharded)
    disk = pages.engine.pool.backing is not None
    print(f"## Pages {'on a disk' if disk else 'in memory'}\n")
    print(f"{numel / 1e6:.1f}M parameters in fp32, {numel * 12 / 2**20:.0f} MiB with AdamW's state. Of the largest")
    print(f"group a process has {largest / 2**20:.1f} MiB.\n")
    print("| | median | middle half | most memory beside, a process |\n| --- | --- | --- | --- |")
    for name, times in took.items():
        low, _, high = statistics.quantiles(times, n=4)
        middle, most = f"{low:.3f} to {high:.3f} s", f"{max(memory[name]):.0f} MiB"
        print(f"| {name} | {statistics.median(times):.3f} s | {middle} | {most} |")
    print(f"\n| ratio | first | second | median of rounds | middle half | rounds |\n| --- {'| --- ' * 5}|")
    for name in list(took)[1:]:
        print(ratio_line(f"ptm_accel / {name}", took["ptm_accel"], took[name]))
    print()


def main() -> None:
    """Starts the processes, or is one of them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--dtype", default="fp32")
    parser.add_argument("--length", type=int, default=16)
    parser.add_argument("--part", choices=["memory", "disk"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        measure(asked)
        dist.destroy_process_group()
        return
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
    found = []
    for part in ("memory", "disk"):
        command = [*start, __file__, *sys.argv[1:], "--part", part]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        found.append(subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE).stdout.decode())
    print("# Saving a model that is sharded\n")
    print(facts(f"python tests/benchmarks/{Path(__file__).name} FOLDER --rounds {asked.rounds}") + "\n")
    print("".join(found))


if __name__ == "__main__":
    main()
