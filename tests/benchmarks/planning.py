"""What planning and overlapped updating bring: the same run paged on demand, planned, and planned with overlap.

    OMP_WAIT_POLICY=passive python tests/benchmarks/planning.py DIRECTORY_ON_AN_SSD [--rounds 4] [--steps 6]

A Llama of 222M parameters, bf16 with fp32 masters (3.5 GB of states), batch 4 x 128, with `host_memory` at a fifth of
that and the rest on disk. Each round starts each kind once, in a process of its own, one after the other in rotated
order; the first two steps of each are left out. Beside each step stands what its compute alone took, waiting left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from machine_facts import facts, ratio_line
from random_tokens import Tokens
from small_llama import VOCABULARY, small_llama
from transformers import TrainerCallback, TrainingArguments

KINDS = {
    "demand": "paged on demand, update at `step()`",
    "planned": "planned passes, update at `step()`",
    "overlapped": "planned passes, update beside the next forward (the default)",
}
WARM_UP = 2


class Clock(TrainerCallback):
    """Times from the end of one step to the end of the next, so that an update that runs on is counted."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.last: float | None = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self.last is not None:
            self.times.append(now - self.last)
        self.last = now


def child(kind: str, directory: Path, steps: int, host_memory: str) -> None:
    """One run."""
    from ptm_accel.integrations.transformers import Trainer

    from ptm_accel.pages import Pages
    from ptm_accel.training import Training

    if kind == "demand":
        Pages.planned = False
    elif kind == "planned":
        Training._may_overlap = lambda self: False  # type: ignore[method-assign]
    model, options = small_llama(host_memory, directory)
    arguments = TrainingArguments(
        output_dir=str(directory / "run"),
        max_steps=steps,
        per_device_train_batch_size=4,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
    )
    clock = Clock()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Tokens(256, 128, VOCABULARY), callbacks=[clock], ptm_config=options
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps({"steps_s": clock.times, "logs": logs}), flush=True)


def run(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One process."""
    command = [sys.executable, __file__, str(options.directory), "--child", kind, "--steps", str(options.steps)]
    command += ["--host-memory", options.host_memory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{kind} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Runs all rounds and prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--host-memory", default="700MiB")
    parser.add_argument("--child", choices=KINDS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.directory, options.steps, options.host_memory)
        return
    names = list(KINDS)
    steps: dict[str, list[float]] = {name: [] for name in names}
    logs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    losses = set()
    for number in range(options.rounds):
        for name in names[number % 3 :] + names[: number % 3]:
            result = run(name, options)
            steps[name].append(statistics.median(result["steps_s"][WARM_UP - 1 :]))
            logs[name] += result["logs"][WARM_UP:]
            losses.add(tuple(entry["loss"] for entry in result["logs"]))
    print("# Planning and overlapped updating\n")
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/planning.py DIRECTORY --rounds {options.rounds}"))
    print(
        f"* model: Llama, 222M parameters, bf16 with fp32 masters, batch 4 x 128, host_memory {options.host_memory}, "
        "clipping at 1.0\n"
    )
    print("| | step | waiting for pages | faults | hits | disk read | disk written |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        figures = [
            statistics.median(entry[key] for entry in logs[name])
            for key in ("ptm_stall_s", "ptm_faults", "ptm_hits", "ptm_disk_read_gib", "ptm_disk_written_gib")
        ]
        print(
            f"| {KINDS[name]} | {statistics.median(steps[name]):.2f} s | {figures[0]:.2f} s | {figures[1]:.0f} "
            f"| {figures[2]:.0f} | {figures[3]:.2f} GiB | {figures[4]:.2f} GiB |"
        )
    print("\n| step time | first | second | median ratio | middle half | pairs |")
    print("| --- | --- | --- | --- | --- | --- |")
    print(ratio_line("planned / demand", steps["planned"], steps["demand"]))
    print(ratio_line("overlapped / demand", steps["overlapped"], steps["demand"]))
    print(f"\nLosses of all runs: {'bit-identical' if len(losses) == 1 else 'DIFFERENT'}.")


if __name__ == "__main__":
    main()
