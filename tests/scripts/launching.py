"""Starts a script as a person would, plain or on pages, and waits for its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from cases import Case
from outcomes import Outcome, collect

_TIME_LIMIT_S = 600
_GRACE_S = 30


@dataclass(frozen=True)
class Place:
    """Where scripts run.

    Attributes:
        scripts: the folder with the checkouts.
        folder: the working directory of all runs, with models and data under the names that scripts use.
        outputs: what runs write, one folder each.
    """

    scripts: Path
    folder: Path
    outputs: Path

    def environment(self) -> dict[str, str]:
        """Offline, on the CPU, one thread, and caches of its own."""
        return os.environ | {
            "HF_HOME": str(self.outputs / "hf_home"),
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "HF_EVALUATE_OFFLINE": "1",
            "NLTK_DATA": str(self.folder / "nltk_data"),
            "PTM_ACCEL_CACHE": str(self.outputs / "ptm_cache"),
            "CUDA_VISIBLE_DEVICES": "",
            "ACCELERATE_USE_CPU": "true",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
        }


@dataclass(frozen=True)
class Run:
    """One script, run once.

    Attributes:
        label: `plain`, `again` or `ptm`.
        seconds: how long it took.
        outcome: what it came to; none if it failed.
        log: where its command lines and all that it printed lie.
    """

    label: str
    seconds: float
    outcome: Outcome | None
    log: Path


def run(place: Place, case: Case, processes: int, label: str) -> Run:
    """Runs one script to its end and, where that is part of the case, once more from what it has saved."""
    folder = place.outputs / f"{Path(case.name).stem}-{processes}-{label}"
    disk, output, log = folder / "pages", folder / "results", folder / "log.txt"
    disk.mkdir(parents=True)
    launcher = _launcher(label, case, processes, disk)
    begin = time.perf_counter()
    good = all(
        _start(place, [*launcher, *command], log, case.last_words if label != "ptm" else "")
        for command in case.commands(place.scripts, output)
    )
    seconds = time.perf_counter() - begin
    return Run(label, seconds, collect(output, log.read_text()) if good else None, log)


def _launcher(label: str, case: Case, processes: int, disk: Path) -> list[str]:
    """What comes before the script on the command line."""
    tools = Path(sys.executable).parent
    if label == "ptm":
        budget = ["--ptm_host_memory", case.host_memory, "--ptm_disk", str(disk)]
        where = ["--cpu"] if processes == 1 else []
        return [str(tools / "accelerate"), "launch", *where, "--num_processes", str(processes), "--use_ptm", *budget]
    if processes == 1:
        return [str(tools / "accelerate"), "launch", "--cpu", "--num_processes", "1"]
    # Without a GPU, plain `accelerate launch --num_processes 2` starts one process, or two that do not meet.
    return [str(tools / "torchrun"), "--standalone", "--nproc_per_node", str(processes)]


def _start(place: Place, command: list[str], log: Path, last_words: str) -> bool:
    """Runs one command line; whether it went well."""
    with log.open("a") as sink:
        begin = sink.write(" ".join(command) + "\n")
        sink.flush()
        process = subprocess.Popen(
            command,
            cwd=place.folder,
            env=place.environment(),
            stdout=sink,
            stderr=subprocess.STDOUT,
            # A group of its own, so that all of it can be ended.
            start_new_session=True,
        )
    said = False
    deadline = time.monotonic() + _TIME_LIMIT_S
    try:
        while process.poll() is None and time.monotonic() < deadline:
            if last_words and not said and last_words in log.read_text()[begin:]:
                said = True
                deadline = time.monotonic() + _GRACE_S
            time.sleep(0.2)
        return said if process.returncode is None else process.returncode == 0
    finally:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a run. Launchers have to be asked: they give their children groups of their own."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
