"""Forecasts of `ptm-accel estimate` beside real runs on this machine, and beside published figures.

    OMP_WAIT_POLICY=passive python tests/benchmarks/forecast.py DIRECTORY_ON_AN_SSD [--only NAME ...] [--published]

Each run is a training of its own, in a process of its own. Its rates (products of matrices, updates, the disk) are
measured before, in the middle and after, and the forecast is made of their medians: it knows the shapes, the budget
and the rates, and nothing of the run. The figures of `ptm_accel.speeds` were fitted to `tuned` and six other steps,
which the result does not count. Prints the result as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
import transformers
from forecast_published import published
from machine_facts import facts
from ptm_accel.integrations.transformers import Trainer
from ptm_accel.integrations.transformers.estimating import text_batch
from random_tokens import Tokens
from transformers import TrainerCallback, TrainingArguments

import ptm_accel
from ptm_accel.fitting import RAM, SSD, Budgets, Fitting, fitting, update_bytes
from ptm_accel.hardware.described import Hardware
from ptm_accel.hardware.measure import measure_disk
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.budget import Tier
from ptm_accel.optim.update_rate import measure_cpu_update
from ptm_accel.outlook import Work
from ptm_accel.speeds import products_s
from ptm_accel.units import MIB, parse_bytes

WARM_UP, SETTLE, MEASURED = 5, 2, 5
"""Steps before the first turn, those left out after each measurement of rates, and those of each of two turns."""


@dataclass(frozen=True)
class Run:
    """What is trained, and under which budget.

    Attributes:
        kind: the model's class in transformers.
        shape: of its configuration.
        rows, length: of a batch.
        host_memory: the budget.
        dtype: of its parameters; fp32 masters beside bf16.
        checkpointing: whether activations are checkpointed.
        lora: the rank of adapters; 0 for none.
    """

    kind: str
    shape: dict[str, Any]
    rows: int
    length: int
    host_memory: str
    dtype: str = "float32"
    checkpointing: bool = False
    lora: int = 0

    @property
    def words(self) -> str:
        """In a cell of a table."""
        layers = self.shape.get("num_hidden_layers", self.shape.get("n_layer"))
        width = self.shape.get("hidden_size", self.shape.get("n_embd"))
        more = [", checkpointed"] * self.checkpointing + [f", LoRA r={self.lora}"] * bool(self.lora)
        more += [", bf16 with fp32 masters"] * (self.dtype == "bfloat16")
        return f"{self.kind.removesuffix('ForCausalLM').removesuffix('LMHeadModel')} {layers} x {width}{''.join(more)}"


def _llama(layers: int, width: int, vocabulary: int, heads: int = 8, **more: Any) -> dict[str, Any]:
    wide = int(width * 2.75)
    return {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": wide,
        "vocab_size": vocabulary,
        "num_attention_heads": heads,
        **more,
    }


RUNS = {
    "tuned": Run("LlamaForCausalLM", _llama(16, 1024, 8192, 16), 4, 128, "1024MiB"),
    "narrow": Run("LlamaForCausalLM", _llama(14, 448, 10000, 7), 3, 160, "288MiB"),
    "deep": Run("LlamaForCausalLM", _llama(32, 512, 4096), 4, 128, "400MiB"),
    "vocabulary": Run("LlamaForCausalLM", _llama(6, 768, 32000, 12, num_key_value_heads=4), 2, 256, "640MiB"),
    "gpt2": Run("GPT2LMHeadModel", {"n_layer": 8, "n_embd": 768, "n_head": 12, "vocab_size": 16000}, 4, 128, "512MiB"),
    "checkpointed": Run(
        "Qwen2ForCausalLM", _llama(10, 768, 8192, 12, num_key_value_heads=12), 4, 256, "512MiB", checkpointing=True
    ),
    "fits": Run("LlamaForCausalLM", _llama(8, 640, 8192, 10), 4, 128, "2GiB"),
    "tight": Run("LlamaForCausalLM", _llama(10, 768, 8192, 12), 8, 128, "192MiB"),
    "lora": Run("LlamaForCausalLM", _llama(12, 1024, 8192, 16), 4, 128, "288MiB", lora=16),
}


@dataclass
class Turns(TrainerCallback):
    """Times steps, and measures rates around them.

    Attributes:
        dtype: of the parameters.
        masters: whether they have fp32 masters.
        disk: a folder on the disk.
    """

    dtype: torch.dtype
    masters: bool
    disk: Path
    times: list[float] = field(default_factory=list)
    rates: list[tuple[float, float, LinkRates]] = field(default_factory=list)
    peaks: dict[str, int] = field(default_factory=dict)
    step: int = 0
    ended_s: float = 0.0

    def measure(self) -> None:
        """Takes the rates of the machine as it is now."""
        disk = measure_disk(self.disk)
        assert disk is not None
        flops = products_s(torch.device("cpu"), self.dtype)
        self.rates.append((flops, measure_cpu_update(self.dtype, masters=self.masters), disk))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Takes the time from the end of one step to the end of the next."""
        now = time.perf_counter()
        self.step += 1
        place = self.step - WARM_UP
        turn = SETTLE + MEASURED
        if place > 0 and (place - 1) % turn >= SETTLE:
            self.times.append(now - self.ended_s)
        if place >= 0 and place % turn == 0:
            engine = ptm_accel.engine_of(kwargs["model"])
            assert engine is not None
            self.peaks = {tier.name: budget.peak_bytes for tier, budget in engine.memory.budgets.items()}
            self.measure()
        self.ended_s = time.perf_counter()


def built(run: Run, *, meta: bool) -> Any:
    """The model of a run."""
    cls = getattr(transformers, run.kind)
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = cls(cls.config_class(**run.shape, use_cache=False)).to(getattr(torch, run.dtype))
    if run.checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    if run.lora:
        from ptm_accel.integrations.peft.estimating import with_lora

        model = with_lora(model, run.lora)
    return model


def trained(run: Run, directory: Path) -> Turns:
    """Trains, and returns what was measured."""
    dtype, masters = getattr(torch, run.dtype), run.dtype == "bfloat16"
    turns = Turns(dtype, masters, directory)
    options = {"host_memory": run.host_memory, "disk": str(directory)}
    if masters:
        options["master_weights"] = "fp32"
    arguments = TrainingArguments(
        output_dir=str(directory / "run"),
        max_steps=WARM_UP + 2 * (SETTLE + MEASURED),
        per_device_train_batch_size=run.rows,
        gradient_checkpointing=run.checkpointing,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        learning_rate=1e-4,
    )
    vocabulary = run.shape["vocab_size"]
    tokens = Tokens(32 * run.rows, run.length, vocabulary)
    model = built(run, meta=False)
    Trainer(model=model, args=arguments, train_dataset=tokens, callbacks=[turns], ptm_config=options).train()
    return turns


def foretold(run: Run, turns: Turns) -> Fitting:
    """The forecast, of the medians of the rates."""
    flops, updates = (statistics.median(each[number] for each in turns.rates) for number in (0, 1))
    names = ("read_bytes_s", "write_bytes_s", "both_bytes_s")
    disk = LinkRates(*(statistics.median(getattr(each[2], name) for each in turns.rates) for name in names))
    model = built(run, meta=True)
    batch = text_batch(model, run.rows, run.length)
    assert batch is not None
    work = Work(model=model, batch=batch, master_weights=turns.masters)
    ram_bytes_s = updates * update_bytes(turns.dtype, work)
    budget = parse_bytes(run.host_memory)
    hardware = Hardware(ram_bytes=2 * budget, ram_bytes_s=ram_bytes_s, ssd_bytes=1 << 40, ssd=disk, cpu_flops=flops)
    return fitting(work, hardware, Budgets(None, budget, 1 << 40))


def child(name: str, directory: Path) -> None:
    """One run in this process; prints its figures."""
    run = RUNS[name]
    turns = trained(run, directory)
    found = foretold(run, turns)
    assert found.found is not None
    told = {
        "step_s": [found.found.step_s, statistics.median(turns.times)],
        "times": turns.times,
        "ram": [found.tiers[RAM].pages_bytes, turns.peaks[Tier.HOST.name]],
        "ssd": [found.tiers[SSD].pages_bytes, turns.peaks.get(Tier.DISK.name, 0)],
        "arithmetic_s": found.found.arithmetic_s,
        "disk_s": found.found.disk_s,
        "parameters": found.needs.parameters,
        "rates": [[flops / 1e9, updates / 1e9, disk.both_bytes_s / 1e9] for flops, updates, disk in turns.rates],
    }
    print("RESULT", json.dumps(told))


def ratio(pair: list[float]) -> str:
    """Forecast over measured."""
    return "-" if not pair[1] else f"{pair[0] / pair[1]:.2f}"


def main() -> None:
    """Runs all, and prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path, nargs="?")
    parser.add_argument("--only", nargs="*", choices=RUNS, default=list(RUNS))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child")
    parser.add_argument("--published", action="store_true", help="the table of published settings alone")
    options = parser.parse_args()
    if options.published:
        published()
        return
    if options.child:
        child(options.child, options.directory)
        return
    titles = ("model", "parameters", "batch", "host_memory", "forecast step", "measured (range)", "ratio")
    titles += ("RAM forecast / measured", "SSD forecast / measured", "arithmetic, disk", "GFLOPS, G updates/s, GB/s")
    rows = []
    for _ in range(options.rounds):
        for name in options.only:
            run, command = RUNS[name], [sys.executable, __file__, str(options.directory), "--child", name]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
            assert lines, done.stderr[-2000:]
            told = json.loads(lines[0].removeprefix("RESULT "))
            rates = [statistics.median(each) for each in zip(*told["rates"], strict=True)]
            memory = (" / ".join(f"{n / MIB:.0f}" for n in told[tier]) + " MiB" for tier in ("ram", "ssd"))
            row = (
                f"{name}: {run.words}",
                f"{told['parameters'] / 1e6:.0f}M",
                f"{run.rows} x {run.length}",
                run.host_memory,
                f"{told['step_s'][0]:.2f} s",
                f"{told['step_s'][1]:.2f} s ({min(told['times']):.2f} to {max(told['times']):.2f})",
                f"**{ratio(told['step_s'])}**",
                *memory,
                f"{told['arithmetic_s']:.2f}, {told['disk_s']:.2f} s",
                ", ".join(f"{rate:.3g}" for rate in rates),
            )
            rows.append(f"| {' | '.join(row)} |")
            print(rows[-1], file=sys.stderr, flush=True)
    print(facts("OMP_WAIT_POLICY=passive python tests/benchmarks/forecast.py DIRECTORY"))
    print(f"\n| {' | '.join(titles)} |\n{'| --- ' * len(titles)}|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
