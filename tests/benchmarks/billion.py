"""A Llama of 1.06 billion parameters under a 2 GiB kernel cap: training, checkpoint, resume in a new process.

    OMP_WAIT_POLICY=passive python tests/benchmarks/billion.py DIRECTORY_ON_AN_SSD [--steps 6] [--host-memory 1100MiB]

bf16 parameters with fp32 masters and moments (17 GB of states with gradients), activation checkpointing. Trains some
steps and saves (one capped process), resumes for as many more (another), and prints the result as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capping
import torch
from machine_facts import facts
from random_tokens import Tokens
from transformers import AutoModelForCausalLM, LlamaConfig, TrainerCallback, TrainingArguments

CAP_BYTES = 2 << 30


class Clock(TrainerCallback):
    """Times each step, update included."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.begin = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.times.append(time.perf_counter() - self.begin)


def child(directory: Path, steps: int, host_memory: str, *, resume: bool) -> None:
    """Trains to `steps`, saves at the end."""
    from ptm_accel.integrations.transformers import Trainer

    import ptm_accel

    shape = LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=20,
        num_attention_heads=16,
        vocab_size=8192,
        use_cache=False,
    )
    config = {"host_memory": host_memory, "disk": str(directory), "master_weights": "fp32"}
    torch.manual_seed(0)
    begin = time.perf_counter()
    model = ptm_accel.from_config(AutoModelForCausalLM, shape, config, dtype=torch.bfloat16)
    built_s = time.perf_counter() - begin
    arguments = TrainingArguments(
        output_dir=str(directory / "run"),
        max_steps=steps,
        per_device_train_batch_size=4,
        save_strategy="steps",
        save_steps=steps,
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        gradient_checkpointing=True,
        dataloader_pin_memory=False,
        learning_rate=1e-4,
        save_total_limit=1,
        lr_scheduler_type="constant",
    )
    clock = Clock()
    trainer = Trainer(
        model=model, args=arguments, train_dataset=Tokens(256, 128, 8192), callbacks=[clock], ptm_config=config
    )
    begin = time.perf_counter()
    trainer.train(resume_from_checkpoint=resume)
    total_s = time.perf_counter() - begin
    engine = ptm_accel.engine_of(model)
    assert engine is not None
    print(
        json.dumps(
            {
                "parameters": sum(p.numel() for p in model.parameters()),
                "built_s": built_s,
                "steps_s": clock.times,
                "rest_s": total_s - sum(clock.times),
                "losses": [e["loss"] for e in trainer.state.log_history if "loss" in e],
                "logs": [e for e in trainer.state.log_history if "loss" in e][-1],
                "summary": engine.metrics.summary(),
            }
        ),
        flush=True,
    )


def run(directory: Path, steps: int, host_memory: str, *, resume: bool) -> tuple[capping.Capped, dict[str, Any]]:
    """One capped process."""
    command = [sys.executable, __file__, str(directory), "--child", "--steps", str(steps), "--host-memory", host_memory]
    if resume:
        command.append("--resume")
    capped = capping.run_capped(CAP_BYTES, command, env=dict(os.environ), timeout_s=3000)
    lines = [line for line in capped.stdout.splitlines() if line.startswith('{"parameters"')]
    if capped.returncode != 0 or not lines:
        raise SystemExit(f"the capped process ended with {capped.returncode}:\n{capped.stderr[-4000:]}")
    return capped, dict(json.loads(lines[-1]))


def main() -> None:
    """Runs both processes and prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=6, help="more than two")
    parser.add_argument("--host-memory", default="1100MiB")
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()
    if options.child:
        child(options.directory, options.steps, options.host_memory, resume=options.resume)
        return
    reason = capping.available()
    if reason is not None:
        raise SystemExit(f"memory cannot be capped here: {reason}")
    directory = options.directory / "ptm_billion"
    directory.mkdir(parents=True)
    try:
        first, trained = run(directory, options.steps, options.host_memory, resume=False)
        second, resumed = run(directory, 2 * options.steps, options.host_memory, resume=True)
    finally:
        shutil.rmtree(directory)
    # The first step of a process ends with its update; the second one's update runs beside the third.
    steps = [*trained["steps_s"][2:], *resumed["steps_s"][2:]]
    print("# 1.06 billion parameters under 2 GiB\n")
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/billion.py DIRECTORY --steps {options.steps}"))
    print(
        f"* model: Llama, {trained['parameters'] / 1e9:.3f}B parameters, bf16 with fp32 masters, batch 4 x 128, "
        f"activation checkpointing, host_memory {options.host_memory}\n"
    )
    print("| | first process | resumed process |\n| --- | --- | --- |")
    print(
        f"| cap / peak of the group / kills | 2048 MiB / {first.peak_bytes >> 20} MiB / {first.kills} "
        f"| 2048 MiB / {second.peak_bytes >> 20} MiB / {second.kills} |"
    )
    print(f"| building the model | {trained['built_s']:.0f} s | {resumed['built_s']:.0f} s |")
    print(f"| loading and saving checkpoints | {trained['rest_s']:.0f} s | {resumed['rest_s']:.0f} s |")
    print(f"| losses | {trained['losses']} | {resumed['losses'][options.steps :]} |")
    print(
        f"\nStep time: median {statistics.median(steps):.1f} s over {len(steps)} steps (first two of each process "
        f"left out), range {min(steps):.1f} to {max(steps):.1f}."
    )
    print(f"\nLast step: {json.dumps(resumed['logs'])}\n\n{resumed['summary']}")


if __name__ == "__main__":
    main()
