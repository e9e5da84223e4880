"""What `card.py` reads from a trace of one step: copies under kernels, and calls that wait or allocate."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

GIB = float(1 << 30)
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
