"""Messages are seen by default, and leave a program's own logging alone."""

from __future__ import annotations

import subprocess
import sys


def run(setup: str) -> str:
    lines = ["import logging", setup, "from ptm_accel.environment import speak", "speak()", "speak()"]
    code = "\n".join([*lines, "logging.getLogger('ptm_accel.engine').info('options')"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stderr


def test_messages_are_seen_once_without_any_configuration() -> None:
    assert run("") == "[ptm_accel] options\n"


def test_a_programs_own_logging_is_left_alone() -> None:
    assert run("logging.basicConfig(level=logging.WARNING)") == ""
    assert run("logging.getLogger('ptm_accel').setLevel(logging.ERROR)") == ""
