"""A process that has imported the hosts, and runs scripts in forks of itself (`tests/prepared.py`).

A line of JSON tells the scripts to run side by side, each as `python` is given it: its arguments, its folder, its
environment, and the files for what it prints. The answer is a line of JSON with how each ended.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import signal
import sys
from pathlib import Path
from typing import Any

import accelerate.commands.accelerate_cli
import datasets
import peft
import torch
import transformers.modeling_utils
import transformers.trainer

HOSTS = (accelerate, datasets, peft, transformers)


def become(job: dict[str, Any]) -> None:
    """Makes this process look like the one that `python` starts for the job."""
    written = os.O_WRONLY | os.O_CREAT
    for number, path, flags in ((0, os.devnull, os.O_RDONLY), (1, job["out"], written), (2, job["err"], written)):
        opened = os.open(path, flags)
        os.dup2(opened, number)
        os.close(opened)
    # A crash tells in which line.
    faulthandler.enable()
    os.chdir(job["cwd"])
    if job["group"] is not None:
        Path(job["group"], "cgroup.procs").write_text("0")
    os.environ.clear()
    os.environ.update(job["env"])
    if (threads := os.environ.get("OMP_NUM_THREADS")) is not None:
        torch.set_num_threads(int(threads))
    # A script that hangs ends by this.
    signal.alarm(job["timeout_s"])
    sys.orig_argv = [sys.executable, *job["command"]]


def run(command: list[str]) -> None:
    """What `python` does with these arguments."""
    if command[0] == "-m":
        sys.argv, sys.path[0] = command[1:], os.getcwd()
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
    elif command[0] == "-c":
        sys.argv, sys.path[0] = ["-c", *command[2:]], ""
        exec(compile(command[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0] = command, os.path.dirname(os.path.abspath(command[0]))
        runpy.run_path(command[0], run_name="__main__")


def serve() -> list[str] | None:
    """Answers requests; in a fork, returns what it has to run."""
    # Standard output is for answers only.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        children = []
        for job in json.loads(line):
            child = os.fork()
            if child == 0:
                answers.close()
                become(job)
                return list(job["command"])
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        answers.write(json.dumps(codes) + "\n")
        answers.flush()
    return None


if __name__ == "__main__":
    command = serve()
    if command is not None:
        run(command)
