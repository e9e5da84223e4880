"""ptm_accel beside its peers on one machine: same model, data and numerics, each in a process capped by the kernel.

    OMP_WAIT_POLICY=passive python tests/benchmarks/peers.py DIRECTORY_ON_AN_SSD [--model 222m|1b] [--cap MIB ...]
        [--deepspeed-python PYTHON] [--only NAME ...] [--rounds 3] [--steps 12]
        [--fp32] [--batch ROWS LENGTH] [--beside MIB]
    ... --largest --cap 2048 [--try-s 300]

Processes that were alive together would share memory and cores. So each round starts every contender for a few steps,
one after the other, the order rotated by one each round, and ratios are taken between runs of the same round. What has
failed once is not started again. DeepSpeed wants a Python of its own, with torch, transformers, accelerate and
deepspeed installed, and a compiler for its operators.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import capping
import psutil
from machine_facts import facts
from peer_common import CHECKPOINTED, DROPPED_STEPS, REPORT, SHAPES, Spec, parameters_of
from peer_roster import (
    BF16_ONLY,
    BY_NAME,
    DEFAULT_CAPS,
    DISK_BYTES_PER_PARAMETER,
    FP32,
    LARGEST,
    Contender,
    host_memory,
)

HERE = Path(__file__).resolve().parent
MIB, GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Outcome:
    """How one process ended: what it reported, or why it reported nothing."""

    report: dict[str, Any] | None
    failure: str
    peak_bytes: int


@dataclass(frozen=True)
class Course:
    """Where and how processes are started.

    Attributes:
        directory: an empty folder of ours.
        deepspeed_python: None to leave DeepSpeed out.
        timeout_s: for one process.
        uncapped_note: why nothing can be capped here; None if it can.
    """

    directory: Path
    deepspeed_python: str | None
    timeout_s: float
    uncapped_note: str | None

    def run(self, contender: Contender, cap_mib: int | None, spec: Spec) -> Outcome:
        """One process, in a group with a cap (None: as large as the machine), in a folder of its own."""
        if contender.deepspeed and self.deepspeed_python is None:
            return Outcome(None, "left out: no --deepspeed-python", 0)
        room = self.directory / "contender"
        room.mkdir()
        python = self.deepspeed_python if contender.deepspeed else sys.executable
        spec = replace(spec, directory=str(room), kind=contender.name, clip=contender.clip, extra=contender.extra)
        if contender.ours:
            spec = replace(spec, host_memory=host_memory(contender, spec, cap_mib))
        try:
            return self._start([str(python), str(HERE / contender.script), spec.text()], cap_mib)
        except subprocess.TimeoutExpired:
            return Outcome(None, f"not done after {self.timeout_s:.0f} s", 0)
        finally:
            shutil.rmtree(room)

    def _start(self, command: list[str], cap_mib: int | None) -> Outcome:
        # A compiler's tools, ninja among them, are found beside the interpreter of an environment.
        path = f"{Path(command[0]).parent}:{os.environ.get('PATH', '')}"
        env = {**os.environ, "PATH": path}
        if cap_mib is not None:
            # Else glibc keeps freed blocks of up to 32 MiB, which cost the mapped script and DeepSpeed their lives.
            env["MALLOC_MMAP_THRESHOLD_"] = "1048576"
        if self.uncapped_note is None:
            limit = psutil.virtual_memory().total if cap_mib is None else cap_mib * MIB
            done = capping.run_capped(limit, command, env=env, timeout_s=self.timeout_s)
            code, out, complaints = done.returncode, done.stdout, done.stderr
            peak, kills = done.peak_bytes, done.kills
        else:
            bare = subprocess.run(command, env=env, timeout=self.timeout_s, capture_output=True, text=True, check=False)
            code, out, complaints, peak, kills = bare.returncode, bare.stdout, bare.stderr, 0, 0
        lines = [line for line in out.splitlines() if line.startswith(REPORT)]
        if lines:
            note = f"then ended with exit status {code}" if code else ""
            return Outcome(json.loads(lines[-1].removeprefix(REPORT)), note, peak)
        if kills:
            return Outcome(None, f"killed by the kernel at cap {cap_mib} MiB", peak)
        return Outcome(None, last_line(complaints) or f"exit status {code}, no message", peak)


def last_line(text: str) -> str:
    """What a failed process said last, fit for a table: the exception's line where there is one."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.split(":", 1)[0].endswith(("Error", "Exception", "Interrupt"))]
    return "".join((errors or lines)[-1:]).replace("|", "/")[:300]


def key(contender: Contender, cap_mib: int | None) -> tuple[str, int | None]:
    return contender.name, cap_mib


def rounds(
    course: Course, entries: list[tuple[Contender, int | None]], spec: Spec, count: int
) -> dict[Any, list[Outcome]]:
    """All rounds; what failed is not tried again."""
    found: dict[Any, list[Outcome]] = {key(*entry): [] for entry in entries}
    for turn in range(count):
        begin = turn % len(entries)
        for contender, cap in entries[begin:] + entries[:begin]:
            before = found[key(contender, cap)]
            if before and before[-1].report is None:
                continue
            outcome = course.run(contender, cap, spec)
            before.append(outcome)
            said = f"{outcome.report['step_s']:.2f} s a step" if outcome.report else outcome.failure
            print(f"round {turn + 1}, {contender.name} at {cap or 'no cap'}: {said}", file=sys.stderr, flush=True)
    return found


def row(contender: Contender, cap: int | None, spec: Spec, outcomes: Sequence[Outcome]) -> str:
    """A line of the table."""
    budget = host_memory(contender, spec, cap) if contender.ours else ""
    clip = f"clip {contender.clip:g}" if contender.clip else "no clipping"
    numerics = FP32 if spec.fp32 else contender.numerics
    head = f"| {contender.title} | {numerics}, {clip} | {cap or 'none'} | {budget} |"
    reports = [outcome.report for outcome in outcomes if outcome.report is not None]
    if not reports:
        return f"{head} {outcomes[-1].failure} | | | | | | | |"

    def middle(name: str) -> float:
        return statistics.median(report[name] for report in reports)

    notes = {outcome.failure for outcome in outcomes if outcome.failure}
    count = f"{len(reports)}" + (f" ({'; '.join(sorted(notes))})" if notes else "")
    peak = max(outcome.peak_bytes for outcome in outcomes) / MIB
    of_bound = f"{middle('of_bound'):.2f}" if all(report["of_bound"] for report in reports) else ""
    return (
        f"{head} {middle('step_s'):.2f} s | {of_bound} | {peak:.0f} | {middle('rss_bytes') / MIB:.0f} | "
        f"{middle('anonymous_bytes') / MIB:.0f} | {middle('read_bytes') / GIB:.2f} / "
        f"{middle('written_bytes') / GIB:.2f} | {reports[-1]['loss']:.5f} | {count} |"
    )


def ratio(title: str, ours: Sequence[Outcome], theirs: Sequence[Outcome]) -> str | None:
    """How many times longer theirs takes, round by round: median and middle half."""
    pairs = [
        b.report["step_s"] / a.report["step_s"]
        for a, b in zip(ours, theirs, strict=False)
        if a.report is not None and b.report is not None
    ]
    if not pairs:
        return None
    quarters = statistics.quantiles(pairs, n=4, method="inclusive") if len(pairs) > 1 else [pairs[0]] * 3
    return f"| {title} | {statistics.median(pairs):.2f} | {quarters[0]:.2f} to {quarters[2]:.2f} | {len(pairs)} |"


def ratios(found: dict[Any, list[Outcome]], caps: Sequence[int | None], *, fp32: bool) -> list[str]:
    """All comparisons of equals, and plain's time as the reference."""
    lines = []
    clipped, unclipped = ("ptm", "ptm-noclip") if fp32 else ("ptm-masters", "ptm-masters-noclip")
    for cap in caps:
        under = "no cap" if cap is None else f"{cap} MiB"
        for ours, theirs in (
            (clipped, "ds-nvme"),
            (clipped, "ds-cpu"),
            (clipped, "fsdp2"),
            (unclipped, "mapped"),
        ):
            lines.append(
                ratio(
                    f"throughput, {ours} / {theirs}, {under}", found.get((ours, cap), []), found.get((theirs, cap), [])
                )
            )
        for ours in ("ptm", "ptm-masters"):
            other = " (other numerics)" if ours != "ptm" else ""
            lines.append(
                ratio(
                    f"step time, {ours} under {under} / plain without a cap{other}",
                    found.get(("plain", None), []),
                    found.get((ours, cap), []),
                )
            )
    return [line for line in lines if line is not None]


def compare(course: Course, options: argparse.Namespace, caps: list[int | None]) -> None:
    """The comparison, printed as Markdown."""
    shape = options.model
    everyone = [name for name in BY_NAME if not options.fp32 or name not in BF16_ONLY]
    chosen = [BY_NAME[name] for name in options.only or everyone]
    entries = [(c, cap) for cap in caps for c in chosen if cap or not options.no_uncapped or c.name == "plain"]
    rows, length = options.batch
    spec = Spec("", shape, options.steps, "", batch=rows, length=length, fp32=options.fp32, beside_mib=options.beside)
    found = rounds(course, entries, spec, options.rounds)
    print("# ptm_accel beside its peers\n")
    print(heading(options, course, found))
    checkpointing = "activation checkpointing" if shape in CHECKPOINTED else "no activation checkpointing"
    print(
        f"* model: Llama, {parameters_of(shape) / 1e6:.0f}M parameters, {SHAPES[shape]}, vocabulary 8192, batch "
        f"{spec.batch} x {spec.length}, computing in {FP32 if spec.fp32 else 'bf16'}, AdamW, {checkpointing}; same "
        "initial weights, same data"
    )
    print(
        f"* {options.rounds} rounds, each contender {options.steps} steps in a process of its own, order rotated; the "
        f"first {min(DROPPED_STEPS, options.steps - 1)} steps are left out; step: median of the rounds' medians\n"
    )
    print(
        "| contender | numerics | cap, MiB | host_memory | step | of its own bound | group's peak, MiB | peak RSS, MiB "
        "| of it anonymous | disk read / written a step, GiB | last loss | rounds |\n" + "| --- " * 12 + "|"
    )
    for contender, cap in entries:
        print(row(contender, cap, spec, found[key(contender, cap)]))
    print(
        "\nThe group's peak counts page cache, so it reaches the cap wherever files are read or written through it.\n"
    )
    print("| ratio, round by round | median | middle half | rounds |\n| --- | --- | --- | --- |")
    print("\n".join(ratios(found, caps, fp32=spec.fp32)))


def heading(options: argparse.Namespace, course: Course, found: dict[Any, list[Outcome]]) -> str:
    """Command, machine and versions."""
    words = " ".join(word for word in sys.argv[1:] if word != str(options.directory)).replace(
        str(options.deepspeed_python), "PYTHON"
    )
    versions = {
        o.report["version"] for outcomes in found.values() for o in outcomes if o.report and "version" in o.report
    }
    capped = "cgroup-v1 group for each process" if course.uncapped_note is None else f"none: {course.uncapped_note}"
    lines = [
        facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/peers.py DIRECTORY {words}"),
        f"* peers: {', '.join(sorted(versions)) or 'DeepSpeed not run'}",
        f"* memory caps: {capped}, page cache counted; under a cap everyone has MALLOC_MMAP_THRESHOLD_=1048576",
    ]
    return "\n".join(lines)


def attempt(course: Course, contender: Contender, cap: int, layers: int, shape: str) -> str:
    """Two steps with so many layers; empty when they were done, else why not."""
    needed = DISK_BYTES_PER_PARAMETER * parameters_of(shape, layers)
    free = shutil.disk_usage(course.directory).free
    if needed > free:
        return f"not tried: {needed / GIB:.0f} GiB on disk needed, {free / GIB:.0f} GiB free"
    outcome = course.run(contender, cap, Spec(kind="", shape=shape, steps=2, directory="", layers=layers))
    said = "done" if outcome.report is not None else outcome.failure
    print(f"{contender.name}, {layers} layers at {cap} MiB: {said}", file=sys.stderr, flush=True)
    return "" if outcome.report is not None else outcome.failure


def largest(course: Course, options: argparse.Namespace, cap: int) -> None:
    """Searches the most layers that each contender trains under the cap; prints Markdown."""
    shape = "tiny" if options.model == "tiny" else "1b"
    print(f"# The largest model that trains under {cap} MiB\n")
    print(heading(options, course, {}))
    print(
        f"* model: Llama, {SHAPES[shape]} but for the number of layers, vocabulary 8192, batch 4 x 128; "
        f"two steps, at most {course.timeout_s:.0f} s with building and start\n"
    )
    print("| contender | numerics | layers | parameters | the next size tried |\n| --- | --- | --- | --- | --- |")
    for name in [name for name in options.only or LARGEST if name in LARGEST]:
        contender = BY_NAME[name]
        good, bad, why = 0, 0, ""
        layers = 2 if shape == "tiny" else options.first_layers
        while bad == 0 or bad - good > max(1, good // 16):
            failure = attempt(course, contender, cap, layers, shape)
            if failure:
                bad, why = layers, failure
            else:
                good = layers
            layers = 2 * good if bad == 0 else (good + bad) // 2
            if bad == 0 and layers > options.most_layers:
                why = "not tried: --most-layers"
                break
        size = f"{parameters_of(shape, good) / 1e9:.2f}B" if good else "none"
        at = f"{bad} layers: {why}" if bad else why
        print(f"| {contender.title} | {contender.numerics} | {good or 'none'} | {size} | {at} |", flush=True)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="a folder on a fast disk")
    parser.add_argument("--model", choices=SHAPES, default="222m")
    parser.add_argument(
        "--tiny", action="store_const", const="tiny", dest="model", help="a model of seconds, to try out"
    )
    parser.add_argument("--cap", type=int, nargs="*", help="MiB; besides, everyone runs without a cap")
    parser.add_argument("--no-uncapped", action="store_true", help="only the caps; plain still runs without one")
    parser.add_argument("--deepspeed-python", help="an interpreter that has DeepSpeed")
    parser.add_argument("--only", nargs="+", choices=BY_NAME, help="these contenders")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--fp32", action="store_true", help="in fp32, where the cores are too slow at bf16")
    parser.add_argument("--batch", type=int, nargs=2, default=(4, 128), metavar=("ROWS", "LENGTH"))
    parser.add_argument("--beside", type=int, metavar="MIB", help="what ptm_accel takes beside its budget")
    parser.add_argument("--try-s", type=float, help="limit of one process; 1200, or 300 with --largest")
    parser.add_argument("--largest", action="store_true", help="search the largest model under the first cap")
    parser.add_argument("--first-layers", type=int, default=8, help="where the search begins")
    parser.add_argument("--most-layers", type=int, default=512)
    return parser.parse_args()


def main() -> None:
    """Compares, or searches."""
    options = parsed()
    if options.fp32 and (options.largest or BF16_ONLY & {*(options.only or ())}):
        raise SystemExit(f"--fp32 goes neither with --largest nor with {', '.join(sorted(BF16_ONLY))}")
    caps = DEFAULT_CAPS[options.model] if options.cap is None else options.cap
    reason = capping.available()
    if reason is not None and caps:
        raise SystemExit(f"memory cannot be capped here: {reason}; run with an empty --cap to compare without caps")
    directory = options.directory / f"ptm_peers_{os.getpid()}"
    directory.mkdir(parents=True)
    timeout_s = options.try_s or (300.0 if options.largest else 1200.0)
    course = Course(directory, options.deepspeed_python, timeout_s, reason)
    try:
        if options.deepspeed_python is not None:
            # DeepSpeed compiles its operators at first use, which would be charged to whoever came first; a compiler
            # killed by a cap leaves a lock on which every later run waits.
            tiny = Spec(kind="", shape="tiny", steps=2, directory="")
            for name in ("ds-nvme", "ds-cpu"):
                outcome = replace(course, timeout_s=1200.0).run(BY_NAME[name], None, tiny)
                if outcome.report is None:
                    print(f"{name} in small: {outcome.failure}", file=sys.stderr, flush=True)
        if options.largest:
            largest(course, options, (caps or [2048])[0])
        else:
            compare(course, options, [None, *caps])
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
