"""Predicted beside measured: a step's time and peak under budgets that nothing was calibrated on.

    OMP_WAIT_POLICY=passive python tests/benchmarks/predict.py DIRECTORY_ON_AN_SSD [--steps 9] [--rounds 3]

One process trains under a budget of 1 GiB, clipped, and from what it recorded there (the trace of a pass, the rate of
its updates, the disk's rates) says what a step will take under others. Then one of those is run, in a process of its
own, and then the first again; and so on. Shared machines are faster at one time than at another, so each measured step
stands beside the mean of what was foretold just before and just after it, and the ratio is the median of the rounds'.
Llama, 222M parameters, bf16 with fp32 masters, batch 4 x 128. Prints the result as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts
from random_tokens import Tokens
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback, TrainingArguments

CALIBRATION = ("1024MiB", 1.0)
OTHERS = (("640MiB", 1.0), ("768MiB", 1.0), ("896MiB", 1.0), ("1280MiB", 1.0), ("1536MiB", 1.0), ("896MiB", 0.0))
WARM_UP = 4
MIB = 1 << 20


class Clock(TrainerCallback):
    """Times from the end of one step to the end of the next."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.last: float | None = None
        self.warm: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        import ptm_accel

        now = time.perf_counter()
        if self.last is not None:
            self.times.append(now - self.last)
        self.last = now
        if state.global_step == WARM_UP + 1:
            engine = ptm_accel.engine_of(kwargs["model"])
            assert engine is not None
            self.warm = replace(engine.run_ahead.tally)


def child(directory: Path, steps: int, host_memory: str, clip: float, foretold: list[str]) -> None:
    """Trains under one budget, and foretells others."""
    from ptm_accel.integrations.transformers import Trainer

    import ptm_accel

    shape = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=16,
        num_attention_heads=16,
        vocab_size=8192,
        use_cache=False,
    )
    dials = {"host_memory": host_memory, "disk": str(directory), "master_weights": "fp32"}
    torch.manual_seed(0)
    model = ptm_accel.from_config(AutoModelForCausalLM, shape, dials, dtype=torch.bfloat16)
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
        max_grad_norm=clip,
    )
    clock = Clock()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Tokens(256, 128, 8192), callbacks=[clock], ptm_config=dials
    )
    trainer.train()
    step_s = statistics.median(clock.times[WARM_UP:])
    engine = ptm_accel.engine_of(model)
    assert engine is not None
    (tier,) = (tier for tier in engine.metrics.peaks() if tier.value == "host")
    said = foretell(engine, foretold, step_s, clock.warm) if foretold else {}
    print(
        json.dumps(
            {
                "step_s": step_s,
                "peak_mib": engine.metrics.peaks()[tier] / MIB,
                "stall_s": trainer.state.log_history[-2]["ptm_stall_s"],
                "times": engine.metrics.times(),
                "said": said,
            }
        ),
        flush=True,
    )


def foretell(engine: Any, others: list[str], step_s: float, warm: Any) -> dict[str, dict[str, float]]:
    """What a step takes under other budgets, by the trace that was recorded under this one."""
    from ptm_accel.schedule.choice import choose_plan
    from ptm_accel.schedule.updates import Updates
    from ptm_accel.units import parse_bytes

    run_ahead, pool = engine.run_ahead, engine.pool
    (route,) = (route for route in run_ahead.routes.values() if route.updates is Updates.FORWARD)
    tally = run_ahead.tally
    update_s = tally.update_s_per_byte(warm)
    # What lies between two passes, and in holes of the heap, is the same under each budget.
    pass_s = (tally.foretold_took_s - warm.foretold_took_s) / (tally.foretold - warm.foretold)
    outside_s = max(step_s - pass_s, 0.0)
    # The pass that was recorded is one of many; its arithmetic is what all of them took.
    excess_s = route.recorded.compute_s - (tally.compute_s - warm.compute_s) / (tally.passes - warm.passes)

    said: dict[str, dict[str, float]] = {}
    for other in others:
        budget, clip = other.split(":")
        capacity = parse_bytes(budget) - (pool.room.limit_bytes - pool.budget.capacity_bytes)
        choice = choose_plan(
            route.recorded,
            capacity_bytes=capacity,
            updates=run_ahead.updates,
            overwritten=run_ahead.overwritten,
            in_backward=not float(clip),
            repeats=True,
            rates=run_ahead.rates,
            update_s=update_s,
        )
        assert choice.simulated is not None, f"no plan for {budget}"
        peak = choice.simulated.peak_bytes + parse_bytes(budget) - capacity
        said[other] = {"step_s": choice.simulated.seconds - excess_s + outside_s, "peak_mib": peak / MIB}
    return said


def run(options: argparse.Namespace, budget: str, clip: float, foretold: tuple[str, ...] = ()) -> dict[str, Any]:
    """One process."""
    command = [sys.executable, __file__, str(options.directory), "--child", budget, "--clip", str(clip)]
    command += ["--steps", str(options.steps), "--foretell", *foretold]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{budget} ended with {done.returncode}:\n{done.stderr[-4000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(options: argparse.Namespace) -> Iterator[tuple[str, Pair]]:
    """Runs all configurations, each between two calibrations: its name, what was foretold, and what came."""
    budget, clip = CALIBRATION
    names = tuple(f"{name}:{norm}" for name, norm in OTHERS)
    before = run(options, budget, clip, names)
    for turn in range(options.rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            host_memory, norm = name.split(":")
            seen = run(options, host_memory, float(norm))
            after = run(options, budget, clip, names)
            yield name, Pair(before, after, seen, name)
            before = after


class Pair:
    """A configuration, measured once, and what was foretold of it before and after."""

    def __init__(self, before: dict[str, Any], after: dict[str, Any], seen: dict[str, Any], name: str) -> None:
        self.calibration_s = (before["step_s"] + after["step_s"]) / 2
        self.foretold_s = (before["said"][name]["step_s"] + after["said"][name]["step_s"]) / 2
        self.foretold_mib = max(before["said"][name]["peak_mib"], after["said"][name]["peak_mib"])
        self.step_s, self.peak_mib = seen["step_s"], seen["peak_mib"]
        self.bound = seen["times"].split(" times its")[0].split(", ")[-1] if seen["times"] else "?"


def report(options: argparse.Namespace) -> None:
    """Measures, and prints the result."""
    pairs: dict[str, list[Pair]] = {}
    for name, pair in measure(options):
        pairs.setdefault(name, []).append(pair)
        print(f"{name} {pair.foretold_s:.2f} s {pair.step_s:.2f} s", file=sys.stderr, flush=True)
    command = f"predict.py DIRECTORY --steps {options.steps} --rounds {options.rounds}"
    print("# Predicted and measured steps\n")
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/{command}"))
    print(
        "* model: Llama, 222M parameters, bf16 with fp32 masters, batch 4 x 128; calibrated under "
        f"{CALIBRATION[0]}, clipped, before and after each run\n"
    )
    titles = ("calibration", "predicted step", "measured", "ratio", "rounds' ratios")
    print(f"| host_memory | clipping | {' | '.join(titles)} | predicted peak | measured | of its bound |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for name, norm in OTHERS:
        rounds = pairs[f"{name}:{norm}"]
        ratios = [pair.foretold_s / pair.step_s for pair in rounds]
        calibrated, foretold, seen = (
            statistics.median(getattr(pair, field) for pair in rounds)
            for field in ("calibration_s", "foretold_s", "step_s")
        )
        print(
            f"| {name} | {norm or 'none'} | {calibrated:.2f} s | {foretold:.2f} s | {seen:.2f} s "
            f"| {statistics.median(ratios):.2f} | {', '.join(f'{ratio:.2f}' for ratio in ratios)} "
            f"| {max(pair.foretold_mib for pair in rounds):.0f} MiB | {max(pair.peak_mib for pair in rounds):.0f} MiB "
            f"| {', '.join(pair.bound for pair in rounds)} |"
        )


def main() -> None:
    """Calibrates, runs the others, and prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child")
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--foretell", nargs="*", default=[])
    options = parser.parse_args()
    if options.child:
        child(options.directory, options.steps, options.child, options.clip, options.foretell)
        return
    report(options)


if __name__ == "__main__":
    main()
