"""What pages cost when everything fits: step time and peak memory beside the plain Trainer.

    OMP_WAIT_POLICY=passive python tests/benchmarks/overhead.py [--pairs 20] [--tiny]

Three Trainers in three processes (plain, plain again as the control, and on pages) train the same 100M-parameter
Llama. They take turns, one step each in random order, so that each ratio is of two steps taken within seconds of each
other and only one process computes at a time. Beside the time by the clock stands what all threads of a process have
spent on processors, of which neighbours of this machine take less. With `--tiny` the layers have next to no elements:
what is left is bookkeeping, by layer and by parameter.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts, ratio_line
from random_tokens import Tokens
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

WARM_UP = 4


def _now() -> tuple[float, float]:
    """Seconds by the clock, and those that all threads of this process have spent on processors."""
    return time.perf_counter(), time.process_time()


class Turns(TrainerCallback):
    """Waits for its turn before each step and reports how long the step took."""

    def __init__(self) -> None:
        self.begin = (0.0, 0.0)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        print("ready", flush=True)
        sys.stdin.readline()
        self.begin = _now()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        step_s, cpu_s = (now - then for now, then in zip(_now(), self.begin, strict=True))
        print(json.dumps({"step_s": step_s, "cpu_s": cpu_s}), flush=True)


def shape(*, tiny: bool) -> LlamaConfig:
    """The model; the tiny one has as many modules and parameters."""
    if tiny:
        return LlamaConfig(
            hidden_size=24, intermediate_size=32, num_hidden_layers=12, num_attention_heads=12, vocab_size=128
        )
    return LlamaConfig(
        hidden_size=768, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=12, vocab_size=8192
    )


def child(kind: str, steps: int, *, tiny: bool) -> None:
    """Trains, one step whenever it is told to."""
    torch.manual_seed(0)
    config = shape(tiny=tiny)
    model = LlamaForCausalLM(config)
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            max_steps=steps,
            per_device_train_batch_size=4,
            save_strategy="no",
            use_cpu=True,
            logging_steps=steps,
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        data = Tokens(4 * steps, 8 if tiny else 128, config.vocab_size)
        if kind == "ptm":
            from ptm_accel.integrations.transformers import Trainer as PagedTrainer

            trainer: Trainer = PagedTrainer(
                model=model, args=arguments, train_dataset=data, callbacks=[Turns()], ptm_config={"host_memory": "8GiB"}
            )
        else:
            trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Turns()])
        trainer.train()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    losses = [entry["train_loss"] for entry in trainer.state.log_history if "train_loss" in entry]
    print(json.dumps({"peak_kib": int(status["VmHWM"].split()[0]), "loss": losses[-1]}), flush=True)


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next JSON line of a child; anything else it prints is passed over."""
    assert process.stdout is not None
    while line := process.stdout.readline():
        if line.startswith("{") and '"' in line and "'" not in line:
            return dict(json.loads(line))
    raise RuntimeError("a child ended early")


def main() -> None:
    """Runs the three children and prints the result as Markdown."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child")
    options = parser.parse_args()
    steps = options.pairs + WARM_UP
    if options.child:
        child(options.child, steps, tiny=options.tiny)
        return
    how = ["--pairs", str(options.pairs), *(["--tiny"] if options.tiny else [])]
    children = {
        name: subprocess.Popen(
            [sys.executable, __file__, *how, "--child", kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name, kind in (("plain", "plain"), ("control", "plain"), ("ptm", "ptm"))
    }
    times: dict[str, list[dict[str, float]]] = {name: [] for name in children}
    for _ in range(steps):
        for name in random.sample(list(children), 3):
            pipe = children[name].stdin
            assert pipe is not None
            pipe.write("go\n")
            pipe.flush()
            times[name].append(answer(children[name]))
    ends = {name: answer(process) for name, process in children.items()}
    for process in children.values():
        process.wait()
    print("# What pages cost when everything fits\n")
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/overhead.py {' '.join(how)}"))
    with torch.device("meta"):
        model = LlamaForCausalLM(shape(tiny=options.tiny))
    params = [param.numel() for param in model.parameters()]
    print(
        f"* model: Llama, {sum(params) / 1e6:.3g}M parameters in {len(params)} tensors, fp32, "
        f"batch 4 x {8 if options.tiny else 128}, `adamw_torch_fused`, clipping at 1.0\n"
    )
    print("| a step | ours | plain | median ratio | middle half | pairs |\n| --- | --- | --- | --- | --- | --- |")
    for key, what in (("step_s", "by the clock"), ("cpu_s", "on processors")):
        kept = {name: [step[key] for step in taken[WARM_UP:]] for name, taken in times.items()}
        print(ratio_line(f"ptm_accel / plain, {what}", kept["ptm"], kept["plain"]))
        print(ratio_line(f"plain / plain (control), {what}", kept["control"], kept["plain"]))
    peaks = {name: end["peak_kib"] / 1024 for name, end in ends.items()}
    print(
        f"\nPeak RSS: plain {peaks['plain']:.0f} MiB, control {peaks['control']:.0f} MiB, "
        f"ptm_accel {peaks['ptm']:.0f} MiB (ratio {peaks['ptm'] / peaks['plain']:.3f})."
    )
    same = ends["ptm"]["loss"] == ends["plain"]["loss"]
    print(f"\nTraining loss after {steps} steps: {'bit-identical' if same else 'DIFFERENT'}.")


if __name__ == "__main__":
    main()
