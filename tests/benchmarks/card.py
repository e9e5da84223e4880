"""A CUDA card that is too small: training on pages under `device_memory`, beside the plain Trainer with the whole card.

    OMP_WAIT_POLICY=passive python tests/benchmarks/card.py 1b 8b [--device-memory 16GB] [--batch 2] [--accum 4]
    OMP_WAIT_POLICY=passive python tests/benchmarks/card.py 1b --deterministic
    OMP_WAIT_POLICY=passive python tests/benchmarks/card.py --smoke

Each run is a process of its own, and plain and paged ones alternate. The small card is emulated: in the paged processes
torch's allocator is forbidden to reserve more than `device_memory`. Both train the same bf16 weights with AdamW in bf16
(`--masters`: the paged ones with fp32 masters, after which losses are not the same). Losses are compared bit for bit
with `--deterministic` only: kernels that repeat themselves are slower, and leave no updates to the CPU. `--deepspeed`
adds processes that train with DeepSpeed ZeRO-3, offloaded, on a card of `device_memory` (`card_deepspeed.py`).
`--profile` adds a process that traces one paged step. `--smoke` runs all of it on a tiny model without a card, and
checks it. What is known so far is on stderr, with the time of each step.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import psutil
import torch
from card_trace import GIB, Result, check_digest, ended, new_trace, report_trace
from machine_facts import facts
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments, initialization

import ptm_accel
from ptm_accel.units import parse_bytes

WARM_UP = 2
"""Steps that are left out: optimizer state is made, host memory is pinned, and pages learn what is left to them."""
MARK = "card result: "
SHAPES = {
    "1b": ((2048, 5632, 20, 16, 16, 8192), 2048, 2),
    "8b": ((4096, 14336, 32, 32, 8, 128256), 2048, 1),
    "tiny": ((256, 512, 4, 2, 1, 1024), 128, 1),
}
"""Hidden and MLP size, layers, heads, KV heads, vocabulary; the sequence's length; how many pairs by default."""


class Meter(TrainerCallback):
    """Notes time, memory and what has been moved at the beginning of each step; traces one, if asked."""

    def __init__(self, kind: str, *, traces: bool) -> None:
        self.kind = kind
        self.marks: list[Result] = []
        self.traces = traces
        self.trace: Any = None
        self._by_itself: Result = {}

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        mark: Result = {"at": time.perf_counter()}
        if torch.cuda.is_available():
            # Logging the loss waits for the same stream; copies for the step to come go on.
            torch.cuda.current_stream().synchronize()
            mark["at"] = time.perf_counter()
            free, total = torch.cuda.mem_get_info()
            # The engine starts new peaks all the time, so this is the peak only if nothing is ever given back
            # (no cudaFree); else the greatest of the readings is a lower bound.
            mark |= {"reserved": torch.cuda.max_memory_reserved(), "used": total - free}
        # Of the whole machine, since what a driver has pinned need not be counted as the process's own.
        mark["host_left"] = psutil.virtual_memory().available
        engine = ptm_accel.engine_of(kwargs["model"])
        if engine is not None:
            mark |= {**dataclasses.asdict(engine.metrics.read()), "hits": engine.pool.stats.hits}
        self.marks.append(mark)
        print(f"{time.strftime('%H:%M:%S')} {self.kind}: step {len(self.marks)}", file=sys.stderr, flush=True)
        if self.traces and len(self.marks) == 1:
            # Loads the tracing library, and shows which calls a trace adds by itself.
            empty = new_trace()
            empty.start()
            self._by_itself = ended(empty)["calls"]
        elif self.traces and len(self.marks) == WARM_UP + 2:
            self.trace = new_trace()
            self.trace.start()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.trace, torch.profiler.profile):
            self.trace = ended(self.trace)
            for name, (count, us) in list(self.trace["calls"].items()):
                self.trace["calls"][name] = count - self._by_itself.get(name, (0, 0.0))[0], us


def llama(name: str) -> LlamaConfig:
    width, mlp, layers, heads, kv_heads, vocabulary = SHAPES[name][0]
    sizes = {"hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, use_cache=False)


def settle_determinism(device: torch.device) -> str:
    """Has torch use kernels that repeat themselves (attention's backward does not), if it has them all."""
    torch.use_deterministic_algorithms(True)
    # Else every block of memory would be filled as it is allocated.
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        with device:
            model: Any = AutoModelForCausalLM.from_config(llama("tiny"), dtype=torch.bfloat16)
            tokens = torch.ones(1, SHAPES["tiny"][1], dtype=torch.long)
        model(input_ids=tokens, labels=tokens).loss.backward()
    except RuntimeError as error:
        torch.use_deterministic_algorithms(False)
        return f"no, torch refused: {str(error).splitlines()[0][:120]}"
    return "yes"


def kinds_of(options: argparse.Namespace) -> tuple[str, ...]:
    """The kinds of processes that are timed."""
    return ("plain", "paged", "deepspeed") if options.deepspeed else ("plain", "paged")


def confine(options: argparse.Namespace, device: torch.device) -> None:
    """Makes the card as small as `device_memory`, if there is one: torch's allocator may reserve no more from here."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        total = torch.cuda.get_device_properties(device).total_memory
        share = parse_bytes(options.device_memory, total_bytes=total) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)


def build(kind: str, name: str, ptm_options: Result, options: argparse.Namespace, device: torch.device) -> Any:
    """The model, with the same initial values on pages and off them."""
    torch.manual_seed(0)
    if kind not in ("plain", "deepspeed"):
        confine(options, device)
        return ptm_accel.from_config(AutoModelForCausalLM, llama(name), ptm_options, dtype=torch.bfloat16)
    with device, initialization.no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(llama(name), dtype=torch.bfloat16)
    # Outside of `device`: buffers are computed on the CPU, as they are for the other.
    model.initialize_weights()
    if kind == "deepspeed":
        import card_deepspeed

        # Built by the whole card, so that it neither takes minutes nor begins with other values.
        card_deepspeed.partition(model, masters=options.masters)
        confine(options, device)
    return model


def trainer_of(
    kind: str, model: Any, options: argparse.Namespace, fixed: Result, ptm_options: Result, **common: Any
) -> Any:
    """The Trainer of that kind."""
    if kind == "deepspeed":
        import card_deepspeed

        fixed = {**fixed, **card_deepspeed.arguments(masters=options.masters)}
    if kind in ("plain", "deepspeed"):
        return Trainer(model, TrainingArguments(**fixed), **common)
    from ptm_accel.integrations.transformers import Trainer as PagedTrainer

    return PagedTrainer(model, TrainingArguments(**fixed), **common, ptm_config=ptm_options)


def train(kind: str, name: str, options: argparse.Namespace, directory: str) -> Result:
    """Trains some steps; returns what was seen."""
    cuda = not options.smoke
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    repeats = settle_determinism(device) if options.deterministic else "not asked for"
    ptm_options: Result = {
        "device_memory": options.device_memory,
        "master_weights": "fp32" if options.masters else None,
    }
    ptm_options |= {} if cuda else {"host_memory": "10MiB", "disk": directory, "page_size": "64KiB"}
    ptm_options |= dict(ptm_option.split("=", 1) for ptm_option in options.option)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    model = build(kind, name, ptm_options, options, device)
    seen: Result = {"repeats": repeats, "built_s": time.perf_counter() - begin}
    # What DeepSpeed has taken apart is empty, and says elsewhere how much it is.
    seen["parameters"] = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    meter = Meter(kind, traces=kind == "profile")
    fixed: Result = {"learning_rate": 1e-4, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused"}
    fixed |= {"per_device_train_batch_size": options.batch, "gradient_accumulation_steps": options.accum}
    fixed |= {"gradient_checkpointing": True, "save_strategy": "no"}
    fixed |= {"logging_steps": 1, "logging_nan_inf_filter": False, "report_to": [], "disable_tqdm": True}
    fixed |= {"max_steps": options.steps, "use_cpu": not cuda, "dataloader_pin_memory": cuda, "output_dir": directory}
    (*_, vocabulary), sequence, _ = SHAPES[name]
    random = torch.Generator().manual_seed(0)
    rows = options.steps * options.batch * options.accum
    tokens = torch.randint(0, vocabulary, (rows, sequence), generator=random)
    dataset = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = trainer_of(kind, model, options, fixed, ptm_options, train_dataset=dataset, callbacks=[meter])
    begin = time.perf_counter()
    trainer.train()
    seen |= {"marks": meter.marks, "trace": meter.trace, "prepared_s": meter.marks[0]["at"] - begin}
    seen["log"] = [[e["loss"], e.get("grad_norm")] for e in trainer.state.log_history if "loss" in e]
    engine = ptm_accel.engine_of(model)
    seen["summary"] = engine.metrics.summary() if engine is not None else ""
    if cuda:
        card, stats = torch.cuda.get_device_properties(device), torch.cuda.memory_stats()
        seen["card"] = f"{card.name}, {card.total_memory / GIB:.0f} GiB, CUDA {torch.version.cuda}"
        seen |= {"retries": stats.get("num_alloc_retries", 0), "frees": stats.get("num_device_free", 0)}
        seen["reserved"] = torch.cuda.max_memory_reserved()
    return seen


def child(kind: str, name: str, options: argparse.Namespace) -> None:
    """One run; whatever happens is told on the last line."""
    seen: Result = {}
    with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as directory:
        try:
            seen = train(kind, name, options, directory)
        except Exception as error:
            traceback.print_exc()
            seen["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
    seen["warnings"] = sorted({str(w.message) for w in caught if "host frames" in str(w.message)})
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
    seen["host"] = int(status["VmHWM"].split()[0]) << 10
    print(f"\n{MARK}{json.dumps(seen)}", flush=True)


def launch(kind: str, name: str, options: argparse.Namespace, deadline: float) -> Result:
    """One process; the result has `error` if it did not come to its end."""
    left = deadline - time.monotonic()
    if left < 20:
        return {"error": "not run, since no time was left"}
    left = min(left, options.each)
    # cuBLAS repeats itself only with such a workspace. Of several cards the plain Trainer would use all. Without a
    # card, none may be seen.
    env = {"CUDA_VISIBLE_DEVICES": "0", **os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    env |= {"CUDA_VISIBLE_DEVICES": ""} if options.smoke else {}
    command = [sys.executable, __file__, *sys.argv[1:], "--child", kind, name]
    try:
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=env, timeout=left, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"stopped after {left:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    seen: Result = json.loads(lines[-1][len(MARK) :]) if lines else {"error": f"ended with {done.returncode}"}
    # What is known is on stderr, should there be no time for the report.
    print(f"{name} {kind}: {json.dumps(seen)}", file=sys.stderr, flush=True)
    if "error" not in seen:
        seen["steps_s"] = [b["at"] - a["at"] for a, b in zip(seen["marks"], seen["marks"][1:], strict=False)][WARM_UP:]
        seen["median_s"] = statistics.median(seen["steps_s"])
    return seen


def per_step(seen: Result, key: str) -> float:
    """What a counter has grown by in a step, warm-up left out."""
    first, last = seen["marks"][WARM_UP], seen["marks"][-1]
    return float(last[key] - first[key]) / len(seen["steps_s"])


def column(seen: Result, tokens: int) -> dict[str, str]:
    """A run's cells of the table, by row."""
    if "error" in seen:
        return {"tokens/s": "failed"}
    marks, steps = seen["marks"], seen["steps_s"]
    cells = {
        "tokens/s": f"{tokens / seen['median_s']:.0f}",
        "step, median (range)": f"{seen['median_s']:.3f} s ({min(steps):.3f} to {max(steps):.3f})",
        "building; until the first step; it": f"{seen['built_s']:.1f} s; {seen['prepared_s']:.1f} s; "
        f"{marks[1]['at'] - marks[0]['at']:.1f} s",
        "peak host (VmHWM)": f"{seen['host'] / GIB:.2f} GiB",
        "least host memory left of the machine, between steps": f"{min(m['host_left'] for m in marks) / GIB:.1f} GiB",
    }
    if "reserved" in seen:
        peak = max(seen["reserved"], *(mark["reserved"] for mark in marks))
        used = max(mark["used"] for mark in marks)
        cells["peak reserved by torch (at least, if cudaFree was called)"] = f"{peak / GIB:.2f} GiB"
        cells["most used on the card between steps, context included"] = f"{used / GIB:.2f} GiB"
        cells["allocator: retries / cudaFree"] = f"{seen['retries']} / {seen['frees']}"
    if "faults" in marks[0]:
        gib = {key: f"{per_step(seen, key) / GIB:.2f}" for key in marks[0] if key.endswith("_bytes")}
        link = "host to device / device to host" if "reserved" in seen else "loaded / stored"
        cells[f"{link}, a step"] = f"{gib['loaded_bytes']} / {gib['stored_bytes']} GiB"
        cells["disk read / written, a step"] = f"{gib['disk_read_bytes']} / {gib['disk_written_bytes']} GiB"
        cells["faults / sent for ahead, a step"] = f"{per_step(seen, 'faults'):.0f} / {per_step(seen, 'hits'):.0f}"
        cells["stalled (the host thread), a step"] = f"{per_step(seen, 'stall_s'):.3f} s"
    return cells


def agreement(one: Result, other: Result) -> str:
    differing = [n for n, (a, b) in enumerate(zip(one["log"], other["log"], strict=True), 1) if a != b]
    return f"DIFFERENT from step {differing[0]} on" if differing else "bit-identical"


def ratio_line(pairs: list[dict[str, Result]], other: str) -> str:
    """Throughput beside another kind's, for the pairs in which both came to their end."""
    both = [pair for pair in pairs if not any("error" in pair[kind] for kind in ("paged", other))]
    if not both:
        return f"\nTokens/s, paged / {other}: not measured."
    ratios = [pair[other]["median_s"] / pair["paged"]["median_s"] for pair in both]
    each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    return f"\nTokens/s, paged / {other}: median {statistics.median(ratios):.3f} (each pair: {each})."


def report(name: str, pairs: list[dict[str, Result]], options: argparse.Namespace) -> None:
    """Prints what the runs of one shape have shown."""
    runs = [(f"{kind} {n}", pair[kind]) for n, pair in enumerate(pairs, 1) for kind in kinds_of(options)]
    sequence = SHAPES[name][1]
    tokens = sequence * options.batch * options.accum
    print(f"\n## {name}\n")
    for seen in [seen for _, seen in runs if "log" in seen][:1]:
        print(f"* card: {seen.get('card', 'none')}; kernels that repeat themselves: {seen['repeats']}")
        print(
            f"* model: Llama, {seen['parameters'] / 1e9:.3f}B parameters, bf16 "
            f"({'fp32 masters, but for plain' if options.masters else 'AdamW in bf16'}), "
            f"{options.accum} x ({options.batch} x {sequence}) tokens, gradient checkpointing, clipping at "
            f"1.0; {options.steps} steps, the first {WARM_UP} and the last left out\n"
        )
    columns = [column(seen, tokens) for _, seen in runs]
    print(f"| | {' | '.join(label for label, _ in runs)} |\n| --- |{' --- |' * len(runs)}")
    for row in dict.fromkeys(row for cells in columns for row in cells):
        print(f"| {row} | {' | '.join(cells.get(row, '-') for cells in columns)} |")
    for other in kinds_of(options):
        if other != "paged":
            print(ratio_line(pairs, other))
    both = [pair for pair in pairs if not any("error" in pair[kind] for kind in ("plain", "paged"))]
    if both:
        control = agreement(both[0]["plain"], both[1]["plain"]) if len(both) > 1 else "not run twice"
        same = "not comparable (fp32 masters)" if options.masters else agreement(both[0]["paged"], both[0]["plain"])
        same = same if options.deterministic else f"{same}, by kernels that need not repeat themselves"
        print(f"\nLosses and gradient norms: paged and plain {same}; plain and plain again (control) {control}.")
    for label, seen in runs:
        if "error" in seen:
            print(f"\n{label} failed: {seen['error']}")
        else:
            print(f"\n{label}: losses {[loss for loss, _ in seen['log']]}. {seen['summary']}".rstrip())
        for warning in seen.get("warnings", []):
            print(f"\n{label} warned: {warning}")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device-memory", default="16GB", help="budget of the paged runs, and size of their card")
    parser.add_argument("--option", action="append", default=[], help="another option, as in host_memory=64GiB")
    parser.add_argument("--masters", action="store_true", help="all but the plain runs update fp32 masters")
    parser.add_argument("--deepspeed", action="store_true", help="runs of DeepSpeed too, which must be installed")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--accum", type=int, default=1, help="micro-batches of a step")
    parser.add_argument("--deterministic", action="store_true", help="kernels that repeat themselves, for equal losses")
    parser.add_argument("--each", type=float, default=240.0, help="seconds after which one process is stopped")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds after which everything is stopped")
    parser.add_argument("--smoke", action="store_true", help="small, without a card")
    parser.add_argument("--child", nargs=2, help="for its own processes")
    options = parser.parse_args()
    options.deterministic |= options.smoke
    if options.deepspeed and (options.batch, options.accum) != (1, 1):
        parser.error("--deepspeed runs with a batch of 1, without accumulation")
    options.shapes = options.shapes or (["tiny"] if options.smoke else ["1b", "8b"])
    if not set(options.shapes) <= set(SHAPES) or options.steps < WARM_UP + 3:
        parser.error(f"shapes are {', '.join(SHAPES)}; --steps is at least {WARM_UP + 3}")
    return options


def check(pair: dict[str, Result], traced: Result, options: argparse.Namespace) -> None:
    """What must hold of a run on the tiny model."""
    check_digest()
    assert options.masters or agreement(pair["plain"], pair["paged"]) == "bit-identical", "the losses differ"
    assert per_step(pair["paged"], "loaded_bytes") > 0, "nothing was moved"
    assert traced["trace"] is not None, "no step was traced"
    if "deepspeed" in pair:
        # It rounds otherwise than torch's AdamW.
        both = zip(pair["deepspeed"]["log"], pair["paged"]["log"], strict=True)
        assert all(abs(theirs[0] - ours[0]) < 0.02 for theirs, ours in both), "DeepSpeed's losses are others"


def main() -> None:
    """Runs the processes and prints the result as Markdown."""
    options = parsed()
    if options.child:
        child(*options.child, options)
        return
    deadline = time.monotonic() + options.limit
    print("# A card that is too small\n")
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/card.py {' '.join(sys.argv[1:])}".rstrip()))
    print(
        f"* paged: device_memory {options.device_memory}, and torch's allocator may reserve no more; plain: the whole "
        f"card; PYTORCH_CUDA_ALLOC_CONF={os.environ.get('PYTORCH_CUDA_ALLOC_CONF', 'unset')}"
    )
    if options.deepspeed:
        print(
            f"* deepspeed: DeepSpeed {importlib.metadata.version('deepspeed')}, ZeRO-3, parameters and optimizer "
            "offloaded to pinned host memory; built by the whole card, then as small a card as for paged"
        )
    for name in options.shapes:
        pairs: list[dict[str, Result]] = []
        for number in range(options.pairs or SHAPES[name][2]):
            order: tuple[str, ...] = ("paged", "plain") if number % 2 else ("plain", "paged")
            order += ("deepspeed",) if options.deepspeed else ()
            pairs.append({kind: launch(kind, name, options, deadline) for kind in order})
        report(name, pairs, options)
        if options.profile or options.smoke:
            report_trace(traced := launch("profile", name, options, deadline))
        sys.stdout.flush()
        if options.smoke:
            check(pairs[0], traced, options)


if __name__ == "__main__":
    main()
