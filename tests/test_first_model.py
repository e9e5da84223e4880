"""docs/first-model.md, typed off from top to bottom: its files, its commands, and what it says of their output."""

from __future__ import annotations

import ast
import filecmp
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands import launch
from ptm_accel.integrations.accelerate.launching import add_flags
from typer.testing import CliRunner

import ptm_accel
from ptm_accel import cli
from ptm_accel.config import PTMConfig
from ptm_accel.environment import TEXT_OPTIONS, overridden

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "first-model.md"
TEXT = PAGE.read_text(encoding="utf-8")
_FILE = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)


def _blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)


def _write_files(folder: Path) -> None:
    for name, code in _FILE.findall(TEXT):
        (folder / name).write_text(code, encoding="utf-8")


def _commands() -> list[str]:
    """What a reader types, but for the installation."""
    lines = [line for block in _blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    assert lines[0] == 'pip install -e ".[examples]"'
    return lines[1:]


def _logged(start: str) -> str:
    """The block of output that begins so, on one line."""
    return " ".join(next(block for block in _blocks("text") if block.startswith(start)).split())


class Reader:
    """Types the commands, each in this process, since starting one takes longer than all that they do.

    Args:
        monkeypatch: for what a script finds where it is started.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.entries: list[dict[str, Any]] = []
        self.shown = ""

    def type(self, command: str) -> None:
        program, *words = shlex.split(command)
        if program == "export":
            assert all(re.fullmatch(r"(OMP_NUM_THREADS=\d+|OMP_WAIT_POLICY=passive)", word) for word in words)
        elif program == "cmp":
            assert filecmp.cmp(*words, shallow=False), command
        elif program == "ptm-accel":
            found = CliRunner().invoke(cli.app, words, catch_exceptions=False)
            assert found.exit_code == 0
            self.shown = " ".join(found.output.split())
        elif program == "python":
            self._run(words)
        else:
            assert (program, words.pop(0)) == ("accelerate", "launch")
            parser = launch.launch_command_parser()
            add_flags(parser)
            given = parser.parse_args(words)
            options = {option: text for option in TEXT_OPTIONS if (text := getattr(given, f"ptm_{option}")) is not None}
            assert given.use_ptm
            with ptm_accel.enable(overridden(PTMConfig(), options)):
                names = self._run([given.training_script, *given.training_script_args])
            self.entries = self.entries or [e for e in names["trainer"].state.log_history if "ptm_faults" in e]

    def _run(self, words: list[str]) -> dict[str, Any]:
        self._patch.setattr(sys, "argv", words)
        return runpy.run_path(words[0], run_name="__main__")


def test_the_page_is_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    _write_files(tmp_path)
    reader = Reader(monkeypatch)
    for command in _commands():
        reader.type(command)
    # The last row depends on what this torch keeps for backward.
    for row in _blocks("text")[0].splitlines()[:-1]:
        assert " ".join(row.split()) in reader.shown
    shown = ast.literal_eval(_logged("{'loss'"))
    assert len(reader.entries) == 2
    assert shown.keys() | {"step"} == reader.entries[1].keys()
    table = {line.split(" | ")[0] for line in TEXT.splitlines() if line.startswith("| `ptm_")}
    assert {key for cell in table for key in re.findall(r"`(\w+)`", cell)} == {k for k in shown if k[:4] == "ptm_"}
    assert reader.entries[1]["ptm_disk_written_gib"] > 0, "it fits, and nothing moves"


@pytest.mark.wide
def test_the_commands_as_a_shell_runs_them(tmp_path: Path) -> None:
    _write_files(tmp_path)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PTM_", "ACCELERATE_", "PYTEST_"))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-e", "-c", "\n".join(_commands())],
        cwd=tmp_path,
        env={**kept, "PATH": path, "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path / "hf")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for option in ast.literal_eval(_logged("{'loss'")):
        assert f"'{option}'" in done.stdout
    for line in _logged("[ptm_accel] device").split("[ptm_accel] ")[1:]:
        assert f"[ptm_accel] {line.partition(':')[0]}: " in done.stderr


def test_only_this_page_has_files() -> None:
    """The Python of other pages is run by tests/test_docs.py, which does not look at what has a title."""
    pages = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").rglob("*.md")]
    titled = [page for page in pages if re.search(r"^```python .", page.read_text(encoding="utf-8"), re.MULTILINE)]
    assert titled == [PAGE]
    assert len(_FILE.findall(TEXT)) == len(re.findall(r"^```python .", TEXT, re.MULTILINE)) == 3
