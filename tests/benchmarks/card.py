"""A CUDA card that is too small: training on pages under `device_memory`, beside the plain Trainer with the whole card.

    OMP_WAIT_POLICY=passive python tests/benchmarks/card.py 1b 8b [--device-memory 16GB] [--profile]
    OMP_WAIT_POLICY=passive python tests/benchmarks/card.py --smoke

Each run is a process of its own, and plain and paged ones alternate. The small card is emulated: in the paged processes
torch's allocator is forbidden to reserve more than `device_memory`. Both train the same bf16 weights with AdamW in bf16
(`--masters`: the paged ones with fp32 masters, after which losses are not the same). `--profile` adds a process that
traces one paged step. `--smoke` runs all of it on a tiny model without a card, and checks it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainerCallback, TrainingArguments, initialization

import ptm_accel
from ptm_accel.units import parse_bytes

WARM_UP = 2
"""Steps that are left out: optimizer state is made, host memory is pinned, and pages learn what is left to them."""
MARK = "card result: "
GIB = float(1 << 30)
SHAPES = {
    "1b": ((2048, 5632, 20, 16, 16, 8192), 2048, 2),
    "8b": ((4096, 14336, 32, 32, 8, 128256), 2048, 1),
    "tiny": ((256, 512, 4, 2, 1, 1024), 128, 1),
}
"""Hidden and MLP size, layers, heads, KV heads, vocabulary; the sequence's length; how many pairs by default."""
WATCHED = ("Synchronize", "cudaMalloc", "cudaFree", "cudaHostRegister", "cudaHostAlloc")
Interval = tuple[float, float]
Result = dict[str, Any]


def united(intervals: Iterable[Interval]) -> list[Interval]:
    """The same points as disjoint intervals, ascending."""
    whole: list[Interval] = []
    for begin, end in sorted(intervals):
        if whole and begin <= whole[-1][1]:
            whole[-1] = whole[-1][0], max(whole[-1][1], end)
        else:
            whole.append((begin, end))
    return whole


def length(intervals: Iterable[Interval]) -> float:
    """How long at least one of them lasts."""
    return sum(end - begin for begin, end in united(intervals))


def shared_length(ones: Iterable[Interval], others: Iterable[Interval]) -> float:
    """How long at least one of each kind lasts at once."""
    left, right, total = united(ones), united(others), 0.0
    while left and right:
        total += max(0.0, min(left[-1][1], right[-1][1]) - max(left[-1][0], right[-1][0]))
        (left if left[-1][0] > right[-1][0] else right).pop()
    return total


def digest(events: Iterable[Result]) -> Result:
    """What a chrome trace says of copies under kernels, and of calls that wait or allocate. Times are microseconds."""
    spans: dict[str, list[Interval]] = {"kernel": [], "HtoD": [], "DtoH": []}
    nbytes, kinds, calls = dict.fromkeys(spans, 0), {}, {}
    for event in events:
        if event.get("ph") != "X":
            continue
        name, category = str(event["name"]), str(event.get("cat"))
        span = float(event["ts"]), float(event["ts"]) + float(event["dur"])
        if category == "kernel":
            spans["kernel"].append(span)
        elif category == "gpu_memcpy":
            kinds[name] = kinds.get(name, 0) + 1
            for direction in (d for d in ("HtoD", "DtoH") if d in name):
                spans[direction].append(span)
                nbytes[direction] += int(event["args"].get("bytes", 0))
        elif category in ("cuda_runtime", "cuda_driver") and any(word in name for word in WATCHED):
            count, us = calls.get(name, (0, 0.0))
            calls[name] = count + 1, us + span[1] - span[0]
    every = united(span for those in spans.values() for span in those)
    found: Result = {"whole_us": every[-1][1] - every[0][0] if every else 0.0, "busy_us": length(every)}
    for key, those in spans.items():
        under = shared_length(those, spans["kernel"])
        found[key] = {"count": len(those), "bytes": nbytes[key], "us": length(those), "under_us": under}
    return {**found, "kinds": kinds, "calls": calls}


def check_digest() -> None:
    """The reading of traces, on one that is known."""
    assert united([(5, 6), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 6)]
    assert shared_length([(0, 4), (2, 6), (8, 9)], [(1, 3), (5, 8.5)]) == 3.5
    assert shared_length([], [(0, 1)]) == length([]) == 0
    known = [("kernel", "gemm", 0), ("gpu_memcpy", "Memcpy HtoD", 5), ("gpu_memcpy", "Memcpy DtoH", 20)]
    known += [("cuda_runtime", "cudaStreamSynchronize", 1), ("cuda_runtime", "cudaLaunchKernel", 1)]
    found = digest({"ph": "X", "cat": c, "name": n, "ts": t, "dur": 10, "args": {"bytes": 7}} for c, n, t in known)
    assert found["HtoD"] == {"count": 1, "bytes": 7, "us": 10, "under_us": 5}, found
    assert (found["DtoH"]["under_us"], found["whole_us"], found["busy_us"]) == (0, 30, 25), found
    assert found["calls"] == {"cudaStreamSynchronize": (1, 10)}, found


def new_trace() -> torch.profiler.profile:
    kinds = torch.profiler.ProfilerActivity
    return torch.profiler.profile(activities=[kinds.CUDA if torch.cuda.is_available() else kinds.CPU])


def ended(trace: torch.profiler.profile) -> Result:
    # Waits for the device, so that copies which are still under way belong to the trace.
    trace.stop()
    with tempfile.TemporaryDirectory() as directory:
        trace.export_chrome_trace(f"{directory}/trace.json")
        return digest(json.loads(Path(directory, "trace.json").read_text())["traceEvents"])


class Meter(TrainerCallback):
    """Notes time, memory and what has been moved at the beginning of each step; traces one, if asked."""

    def __init__(self, *, traces: bool) -> None:
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
        engine = ptm_accel.engine_of(kwargs["model"])
        if engine is not None:
            mark |= {**dataclasses.asdict(engine.metrics.read()), "hits": engine.pool.stats.hits}
        self.marks.append(mark)
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


def build(kind: str, name: str, dials: Result, device: torch.device) -> Any:
    """The model, with the same initial values on pages and off them."""
    torch.manual_seed(0)
    if kind != "plain":
        return ptm_accel.from_config(AutoModelForCausalLM, llama(name), dials, dtype=torch.bfloat16)
    with device, initialization.no_init_weights():
        model: Any = AutoModelForCausalLM.from_config(llama(name), dtype=torch.bfloat16)
    # Outside of `device`: buffers are computed on the CPU, as they are for the other.
    model.initialize_weights()
    return model


def train(kind: str, name: str, options: argparse.Namespace, directory: str) -> Result:
    """Trains some steps; returns what was seen."""
    from ptm_accel.integrations.transformers import Trainer as PagedTrainer

    cuda = not options.smoke
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    repeats = "not asked for" if options.nondeterministic else settle_determinism(device)
    dials: Result = {"device_memory": options.device_memory, "master_weights": "fp32" if options.masters else None}
    dials |= {} if cuda else {"host_memory": "10MiB", "disk": directory, "page_size": "64KiB"}
    dials |= dict(dial.split("=", 1) for dial in options.dial)
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    if cuda and kind != "plain":
        total = torch.cuda.get_device_properties(device).total_memory
        share = parse_bytes(options.device_memory, total_bytes=total) / total
        torch.cuda.set_per_process_memory_fraction(min(1.0, share), device)
    begin = time.perf_counter()
    model = build(kind, name, dials, device)
    seen: Result = {"repeats": repeats, "built_s": time.perf_counter() - begin}
    seen["parameters"] = sum(p.numel() for p in model.parameters())
    meter = Meter(traces=kind == "profile")
    fixed: Result = {"learning_rate": 1e-4, "lr_scheduler_type": "constant", "optim": "adamw_torch_fused"}
    fixed |= {"per_device_train_batch_size": 1, "gradient_checkpointing": True, "save_strategy": "no"}
    fixed |= {"logging_steps": 1, "logging_nan_inf_filter": False, "report_to": [], "disable_tqdm": True}
    fixed |= {"max_steps": options.steps, "use_cpu": not cuda, "dataloader_pin_memory": cuda}
    (*_, vocabulary), sequence, _ = SHAPES[name]
    random = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (options.steps, sequence), generator=random)
    common: Result = {"model": model, "args": TrainingArguments(output_dir=directory, **fixed), "callbacks": [meter]}
    common["train_dataset"] = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = Trainer(**common) if kind == "plain" else PagedTrainer(**common, ptm_config=dials)
    trainer.train()
    seen |= {"marks": meter.marks, "trace": meter.trace}
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
        "building; first step": f"{seen['built_s']:.1f} s; {marks[1]['at'] - marks[0]['at']:.1f} s",
        "peak host (VmHWM)": f"{seen['host'] / GIB:.2f} GiB",
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


def report(name: str, pairs: list[dict[str, Result]], options: argparse.Namespace) -> None:
    """Prints what the runs of one shape have shown."""
    runs = [(f"{kind} {n}", pair[kind]) for n, pair in enumerate(pairs, 1) for kind in ("plain", "paged")]
    tokens = SHAPES[name][1]
    print(f"\n## {name}\n")
    for seen in [seen for _, seen in runs if "log" in seen][:1]:
        print(f"* card: {seen.get('card', 'none')}; kernels that repeat themselves: {seen['repeats']}")
        print(
            f"* model: Llama, {seen['parameters'] / 1e9:.3f}B parameters, bf16 "
            f"({'fp32 masters on pages' if options.masters else 'AdamW in bf16'}), 1 x {tokens} tokens, gradient "
            f"checkpointing, clipping at 1.0; {options.steps} steps, the first {WARM_UP} and the last left out\n"
        )
    columns = [column(seen, tokens) for _, seen in runs]
    print(f"| | {' | '.join(label for label, _ in runs)} |\n| --- |{' --- |' * len(runs)}")
    for row in dict.fromkeys(row for cells in columns for row in cells):
        print(f"| {row} | {' | '.join(cells.get(row, '-') for cells in columns)} |")
    both = [pair for pair in pairs if not any("error" in seen for seen in pair.values())]
    if both:
        ratios = [pair["plain"]["median_s"] / pair["paged"]["median_s"] for pair in both]
        each = ", ".join(f"{ratio:.3f}" for ratio in ratios)
        print(f"\nTokens/s, paged / plain: median {statistics.median(ratios):.3f} (each pair: {each}).")
        control = agreement(both[0]["plain"], both[1]["plain"]) if len(both) > 1 else "not run twice"
        same = "not comparable (fp32 masters)" if options.masters else agreement(both[0]["paged"], both[0]["plain"])
        print(f"\nLosses and gradient norms: paged and plain {same}; plain and plain again (control) {control}.")
    for label, seen in runs:
        if "error" in seen:
            print(f"\n{label} failed: {seen['error']}")
        else:
            print(f"\n{label}: losses {[loss for loss, _ in seen['log']]}. {seen['summary']}".rstrip())
        for warning in seen.get("warnings", []):
            print(f"\n{label} warned: {warning}")


def report_trace(seen: Result) -> None:
    """Prints what the trace of one paged step has shown."""
    trace = seen.get("trace")
    if trace is None:
        print(f"\nThe profiled run failed: {seen.get('error', 'no step was traced')}")
        return
    print(
        f"\nOne paged step, traced: {trace['whole_us'] / 1e6:.3f} s on the device from the first activity to the last; "
        f"{trace['kernel']['count']} kernels run for {trace['kernel']['us'] / 1e6:.3f} s of it, kernels or copies for "
        f"{trace['busy_us'] / 1e6:.3f} s.\n\n| copies | number | GiB | time | rate while copying | under kernels |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for key, name in (("HtoD", "host to device"), ("DtoH", "device to host")):
        copy, seconds = trace[key], trace[key]["us"] / 1e6
        rate, share = copy["bytes"] / GIB / (seconds or 1.0), copy["under_us"] / (copy["us"] or 1.0)
        print(f"| {name} | {copy['count']} | {copy['bytes'] / GIB:.2f} | {seconds:.3f} s | {rate:.1f} GiB/s | ", end="")
        print(f"{share:.1%} |")
    calls = {"cudaDeviceSynchronize": (0, 0.0), "cudaStreamSynchronize": (0, 0.0), **trace["calls"]}
    told = ", ".join(f"{name} {count} ({us / 1e3:.1f} ms)" for name, (count, us) in sorted(calls.items()))
    print(f"\nCopies by kind: {trace['kinds']}. Calls that wait or allocate (the trace's own are not counted): {told}.")


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--device-memory", default="16GB", help="budget of the paged runs, and size of their card")
    parser.add_argument("--dial", action="append", default=[], help="another dial, as in host_memory=64GiB")
    parser.add_argument("--masters", action="store_true", help="the paged runs update fp32 masters")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--nondeterministic", action="store_true", help="whatever kernels torch prefers")
    parser.add_argument("--limit", type=float, default=560.0, help="seconds after which everything is stopped")
    parser.add_argument("--smoke", action="store_true", help="small, without a card")
    parser.add_argument("--child", nargs=2, help="for its own processes")
    options = parser.parse_args()
    options.shapes = options.shapes or (["tiny"] if options.smoke else ["1b", "8b"])
    if not set(options.shapes) <= set(SHAPES) or options.steps < WARM_UP + 3:
        parser.error(f"shapes are {', '.join(SHAPES)}; --steps is at least {WARM_UP + 3}")
    return options


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
    for name in options.shapes:
        pairs: list[dict[str, Result]] = []
        for number in range(options.pairs or SHAPES[name][2]):
            order = ("paged", "plain") if number % 2 else ("plain", "paged")
            pairs.append({kind: launch(kind, name, options, deadline) for kind in order})
        report(name, pairs, options)
        if options.profile or options.smoke:
            report_trace(traced := launch("profile", name, options, deadline))
        sys.stdout.flush()
        if options.smoke:
            check_digest()
            assert agreement(pairs[0]["plain"], pairs[0]["paged"]) == "bit-identical", "the losses differ"
            assert per_step(pairs[0]["paged"], "loaded_bytes") > 0, "nothing was moved"
            assert traced["trace"] is not None, "no step was traced"


if __name__ == "__main__":
    main()
