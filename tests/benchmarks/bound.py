"""A step beside its own lower bound, with host memory for a quarter of the states and the rest on disk.

    OMP_WAIT_POLICY=passive python tests/benchmarks/bound.py DIRECTORY_ON_AN_SSD [--rounds 2] [--steps 14] [--fp32]

Llama, 222M parameters, bf16 with fp32 masters or all in fp32 (16 bytes a parameter with its gradient), batch 4 x 128;
clipped, not clipped (updates begin during backward, unless a callback looks at the step), with 8 micro-batches a step,
and with so few tokens that there is next to nothing but the disk to wait for. Each run is a process of its own. The
bound of a step is its arithmetic, or its bytes over the disk's measured rates, whichever is longer. Prints the result
as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts
from random_tokens import Tokens
from small_llama import VOCABULARY, numerics, small_llama
from transformers import TrainerCallback, TrainingArguments


@dataclass(frozen=True)
class Kind:
    """What is trained.

    Attributes:
        clip: the greatest norm; 0 for no clipping.
        micro: micro-batches a step.
        rows: of a micro-batch.
        length: of a row, in tokens.
        looked_at: a callback looks at the step before its update, so that no update begins in backward.
    """

    clip: float = 1.0
    micro: int = 1
    rows: int = 4
    length: int = 128
    looked_at: bool = False


KINDS = {
    "clipped": Kind(),
    "not clipped": Kind(clip=0.0),
    "not clipped, looked at": Kind(clip=0.0, looked_at=True),
    "8 micro-batches": Kind(micro=8),
    "32 tokens, clipped": Kind(rows=1, length=32),
    "32 tokens, not clipped": Kind(clip=0.0, rows=1, length=32),
}

WARM_UP = 6
"""Memory has been touched, and the second plan has been made."""

HOST_MEMORY = "847MiB"


class Watch(TrainerCallback):
    """Times from the end of one step to the end of the next, and the totals of the disk when memory is warm."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.warm: tuple[int, int, float] | None = None
        self._last: float | None = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self.times.append(now - self._last)
        self._last = now
        if state.global_step == WARM_UP:
            self.warm = totals(kwargs["model"])


class Looks(TrainerCallback):
    """Keeps updates out of backward."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        pass


def totals(model: torch.nn.Module) -> tuple[int, int, float]:
    """Bytes read and written, and seconds in which something was moved."""
    import ptm_accel

    engine = ptm_accel.engine_of(model)
    assert engine is not None
    assert engine.memory.disk is not None
    disk = engine.memory.disk
    return disk.bytes_read, disk.bytes_written, disk.busy_s


def child(kind: str, directory: Path, steps: int, *, fp32: bool) -> None:
    """One run."""
    from ptm_accel.integrations.transformers import Trainer

    import ptm_accel

    what = KINDS[kind]
    model, options = small_llama(HOST_MEMORY, directory, fp32=fp32)
    arguments = TrainingArguments(
        output_dir=str(directory / "run"),
        max_steps=steps,
        per_device_train_batch_size=what.rows,
        gradient_accumulation_steps=what.micro,
        max_grad_norm=what.clip,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        learning_rate=1e-4,
        lr_scheduler_type="constant",
    )
    watch = Watch()
    callbacks = [watch, *([Looks()] if what.looked_at else [])]
    tokens = Tokens(512, what.length, VOCABULARY)
    trainer = Trainer(model=model, args=arguments, train_dataset=tokens, callbacks=callbacks, ptm_config=options)
    trainer.train()
    engine = ptm_accel.engine_of(model)
    assert engine is not None
    assert engine.metrics.rates is not None
    assert watch.warm is not None
    read, written, busy_s = (b - a for a, b in zip(watch.warm, totals(model), strict=True))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    result = {
        "steps_s": watch.times[WARM_UP - 1 :],
        "logs": logs[WARM_UP:],
        "disk": engine.metrics.rates.seconds(read, written) / busy_s,
        "busy": busy_s / sum(watch.times[WARM_UP - 1 :]),
    }
    print(json.dumps(result), flush=True)


def run(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """One process."""
    # A step of several micro-batches is long, and its passes are warm after few steps.
    steps = options.steps if KINDS[kind].micro == 1 else max(WARM_UP + 2, options.steps // 2)
    command = [sys.executable, __file__, str(options.directory), "--child", kind, "--steps", str(steps)]
    command += ["--fp32"] if options.fp32 else []
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{kind} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """Runs all rounds and prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--fp32", action="store_true", help="in fp32, where the cores are too slow at bf16")
    parser.add_argument("--child", choices=KINDS)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.directory, options.steps, fp32=options.fp32)
        return
    results: dict[str, list[dict[str, Any]]] = {kind: [] for kind in options.only}
    for _ in range(options.rounds):
        for kind in options.only:
            results[kind].append(run(kind, options))
            print(kind, statistics.median(results[kind][-1]["steps_s"]), file=sys.stderr, flush=True)
    print("# A step beside its lower bound\n")
    chosen = "" if options.only == list(KINDS) else " --only " + " ".join(f"'{kind}'" for kind in options.only)
    command = f"bound.py DIRECTORY --rounds {options.rounds}{' --fp32' if options.fp32 else ''}{chosen}"
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/{command}"))
    print(
        f"* model: Llama, 222M parameters, {numerics(fp32=options.fp32)}, batch 4 x 128 if nothing else is said, "
        f"host_memory {HOST_MEMORY} (a quarter of parameters, gradients, masters and moments); the first {WARM_UP} "
        "steps left out\n"
    )
    print("| | step | bound | step / bound | of each step | waiting | read | written | disk busy | its rate then |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for kind, runs in results.items():
        pairs = [
            (step, entry) for result in runs for step, entry in zip(result["steps_s"], result["logs"], strict=True)
        ]
        ratios = sorted(step / entry["ptm_bound_s"] for step, entry in pairs)
        quarter = statistics.quantiles(ratios, n=4)
        stall, bound, read, written = (
            statistics.median(entry[key] for _, entry in pairs)
            for key in ("ptm_stall_s", "ptm_bound_s", "ptm_disk_read_gib", "ptm_disk_written_gib")
        )
        busy, rate = (statistics.median(result[key] for result in runs) for key in ("busy", "disk"))
        print(
            f"| {kind} | {statistics.median(step for step, _ in pairs):.2f} s | {bound:.2f} s "
            f"| {statistics.median(ratios):.2f} | {quarter[0]:.2f} to {quarter[2]:.2f} ({len(pairs)}) | {stall:.2f} s "
            f"| {read:.2f} GiB | {written:.2f} GiB | {busy:.0%} of the time | {rate:.0%} of measured |"
        )


if __name__ == "__main__":
    main()
