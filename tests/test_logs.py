"""Messages are seen by default, and leave a program's own logging alone."""

from __future__ import annotations

import os
import subprocess
import sys


def run(setup: str, **env: str) -> str:
    lines = ["import logging", setup, "from ptm_accel.environment import speak", "speak()", "speak()"]
    code = "\n".join([*lines, "logging.getLogger('ptm_accel.engine').info('options')"])
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**os.environ, **env}
    )
    return done.stderr


def test_messages_are_seen_once_without_any_configuration() -> None:
    assert run("") == "[ptm_accel] options\n"


def test_a_programs_own_logging_is_left_alone() -> None:
    assert run("logging.basicConfig(level=logging.WARNING)") == ""
    assert run("logging.getLogger('ptm_accel').setLevel(logging.ERROR)") == ""


def test_of_several_processes_the_first_one_tells_and_each_warns() -> None:
    warns = "import atexit; atexit.register(lambda: logging.getLogger('ptm_accel').warning('late'))"
    assert run(warns, RANK="0") == "[ptm_accel] options\n[ptm_accel] late\n"
    assert run(warns, RANK="3") == "[ptm_accel] late\n"


def test_a_line_stands_above_a_progress_bar() -> None:
    bar = "import tqdm; bar = tqdm.tqdm(total=2, desc='training', ncols=60); bar.update()"
    shown = [line.rpartition("\r")[2] for line in run(bar).split("\n")]
    at = shown.index("[ptm_accel] options")
    assert next(line for line in shown[at + 1 :] if line).startswith("training:  50%"), shown
