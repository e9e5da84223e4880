"""The rates that `ptm-accel doctor` gives a disk, beside fio's and those of plain loops.

    OMP_WAIT_POLICY=passive python tests/benchmarks/doctor.py DIRECTORY_ON_AN_SSD [--pairs 15]

Needs fio. Each pair is one run of the command, with an empty cache, and one of fio with what our transfers have:
blocks of 4 MiB, two threads that each have one transfer under way, direct, a file of 256 MiB that was written before,
buffers of huge pages. These fio has by `GLIBC_TUNABLES` (glibc 2.35); its figures with ordinary pages are given too.
fio uses the same two buffers again and again, which a cache of the processor may keep; the loop is the same with 16 MiB
of buffers in turns, as our measurement has. The copy is `dd`, direct: one transfer after the other. Who begins changes
with each pair. With a GPU, the link is compared with plain copies from and to a pinned tensor. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from machine_facts import facts

from ptm_accel.memory.mapping import anonymous_run, view_at

MIB = 1 << 20
BLOCK_BYTES = 4 * MIB
FILE_BYTES = 256 * MIB
BUFFER_BYTES = 16 * MIB
LOOP_S = 1.0
JOBS = 2
GOAL = 0.1
HUGE = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
NAMES = ("read", "written", "both at once")

Rates = tuple[float, ...]


def _run(*command: str, **environ: str) -> str:
    found = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    # The command ends with 1 where a line is bad, which need not be the disk's.
    if found.returncode not in ((0, 1) if "ptm_accel.cli" in command else (0,)):
        sys.exit(f"{' '.join(command)}: {found.stderr or found.stdout}")
    return found.stdout


def doctor(folder: Path) -> dict[str, Rates]:
    """The profile that the command has written: rates of each disk and device in bytes a second, by kind."""
    with tempfile.TemporaryDirectory() as cache:
        _run(sys.executable, "-m", "ptm_accel.cli", "doctor", "--disk", str(folder), PTM_ACCEL_CACHE=cache)
        (file,) = Path(cache).glob("hardware-*.json")
        return {key.split()[0]: tuple(found) for key, found in json.loads(file.read_text())["rates"].items()}


def fio(file: Path, **environ: str) -> Rates:
    """fio's rates of the same file."""
    rates = []
    for kind in ("read", "write", "rw"):
        told = _run(
            "fio",
            "--name=beside",
            f"--filename={file}",
            f"--rw={kind}",
            *("--bs=4m", "--direct=1", "--ioengine=psync", "--iomem_align=2m", "--overwrite=1"),
            *(f"--numjobs={JOBS}", "--thread", f"--size={FILE_BYTES // JOBS}"),
            f"--offset_increment={FILE_BYTES // JOBS}",
            *("--time_based", "--runtime=1", "--group_reporting", "--output-format=json"),
            **environ,
        )
        job = json.loads(told)["jobs"][0]
        rates.append(float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"]))
    return tuple(rates)


class Loop:
    """Two threads that read or write their halves of a file, with buffers in turns."""

    def __init__(self, file: Path) -> None:
        self._fd = os.open(file, os.O_RDWR | os.O_DIRECT)
        self._run = anonymous_run(BUFFER_BYTES, "a benchmark")
        self._run.tensor().random_(0, 256)

    def rates(self) -> Rates:
        """Bytes a second that it reads, writes, and reads and writes in turns."""
        return tuple(self._rate(calls) for calls in ([os.preadv], [os.pwritev], [os.preadv, os.pwritev]))

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _rate(self, calls: list[Callable[..., int]]) -> float:
        begin = time.perf_counter()
        with ThreadPoolExecutor(JOBS) as threads:
            moved = sum(threads.map(lambda job: self._half(job, calls, begin + LOOP_S), range(JOBS)))
        return moved / (time.perf_counter() - begin)

    def _half(self, job: int, calls: list[Callable[..., int]], end: float) -> int:
        blocks, buffers, number = FILE_BYTES // JOBS // BLOCK_BYTES, BUFFER_BYTES // JOBS // BLOCK_BYTES, 0
        while time.perf_counter() < end:
            view = view_at(self._run.address + (job * buffers + number % buffers) * BLOCK_BYTES, BLOCK_BYTES)
            # A block that was just read is not the one that is written.
            place = job * blocks + (number // len(calls) + number % len(calls) * (blocks // 2)) % blocks
            assert calls[number % len(calls)](self._fd, [view], place * BLOCK_BYTES) == BLOCK_BYTES
            number += 1
        return number * BLOCK_BYTES


def copied(file: Path) -> Rates:
    """Bytes a second that a plain copy reads and writes together."""
    begin = time.perf_counter()
    _run(
        *("dd", f"if={file}", f"of={file}.copy", "bs=4M", "iflag=direct", "oflag=direct", "conv=notrunc", "status=none")
    )
    return (2 * FILE_BYTES / (time.perf_counter() - begin),)


def copied_to_card() -> Rates:
    """Bytes a second of plain copies from a pinned tensor to a GPU, and back."""
    host = torch.ones(FILE_BYTES, dtype=torch.uint8).pin_memory()
    card = torch.ones(FILE_BYTES, dtype=torch.uint8, device="cuda")
    rates = []
    for into, out in ((card, host), (host, card)):
        times = []
        for _ in range(10):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            into.copy_(out, non_blocking=True)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begin)
        rates.append(FILE_BYTES / statistics.median(times))
    return tuple(rates)


def row(name: str, ours: list[float], theirs: list[float]) -> str:
    """A row: both medians in GB/s, and the median and middle half of the ratios taken pair by pair.

    What has other buffers or transfers than ours has no goal.
    """
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    quarter, middle = statistics.quantiles(ratios, n=4), statistics.median(ratios)
    goal = "" if name.startswith(("fio,", "copy:")) else "met" if abs(middle - 1) <= GOAL else "missed"
    return (
        f"| {name} | {statistics.median(ours) / 1e9:.2f} | {statistics.median(theirs) / 1e9:.2f} | {middle:.3f} | "
        f"{quarter[0]:.3f} to {quarter[2]:.3f} | {goal} |"
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.directory) as folder:
        file = Path(folder) / "file"
        for each in (file, Path(f"{file}.copy")):
            _run(*("dd", "if=/dev/urandom", f"of={each}", "bs=4M", f"count={FILE_BYTES // BLOCK_BYTES}", "status=none"))
            # Sent to the disk now, not beside what is measured.
            _run("sync", str(each))
        loop = Loop(file)
        kinds: dict[str, Callable[[], Rates]] = {
            "fio": lambda: fio(file, **HUGE),
            "loop": loop.rates,
            "fio, ordinary pages": lambda: fio(file),
            "copy": lambda: copied(file),
        }
        if torch.cuda.is_available():
            kinds["copy to the GPU"] = copied_to_card
        profiles: list[dict[str, Rates]] = []
        found: dict[str, list[Rates]] = {kind: [] for kind in kinds}

        for number in range(options.pairs):
            # fio and the loop begin, or end, next to the command.
            if number % 2:
                profiles.append(doctor(options.directory))
            for kind in kinds if number % 2 else [*kinds][::-1]:
                found[kind].append(kinds[kind]())
            if number % 2 == 0:
                profiles.append(doctor(options.directory))
        loop.close()
    _show(profiles, found, f"DIRECTORY --pairs {options.pairs}")


def _show(profiles: list[dict[str, Rates]], found: dict[str, list[Rates]], arguments: str) -> None:
    print("# The rates of `ptm-accel doctor` beside fio's\n")
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/doctor.py {arguments}"))
    print(f"* {_run('fio', '--version').strip()}, load {os.getloadavg()[0]:.1f} at the end; goal: within {GOAL:.0%}\n")
    print("| | doctor, GB/s | the other | ratio | middle half | goal |\n| --- | --- | --- | --- | --- | --- |")
    for kind, rates in found.items():
        part, names = ("device", ("to the GPU", "from it")) if "GPU" in kind else ("disk", NAMES)
        places = [2] if kind == "copy" else range(len(names))
        for column, place in enumerate(places):
            ours = [profile[part][place] for profile in profiles]
            print(row(f"{kind}: {names[place]}", ours, [each[column] for each in rates]))


if __name__ == "__main__":
    main()
