"""An error of ours that nothing catches is one line; all other errors are shown as ever."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from ptm_accel import uncaught
from ptm_accel.errors import ConfigError
from tests.prepared import Run, run_alone, run_prepared

RAISES = """\
import torch
from ptm_accel.errors import BudgetError
{before}
raise BudgetError('too little:\\n set it to 2MiB.')
"""
LINE = "ptm_accel: BudgetError: too little: set it to 2MiB.\n"


def run(script: str, cwd: Path, *before: str, **env: str) -> Run:
    (cwd / "script.py").write_text(script)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PTM_", "TORCHELASTIC"))}
    return run_prepared("-m", "ptm_accel", "script.py", cwd=cwd, env={**kept, **env})


def test_an_error_of_ours_ends_a_script_with_its_text_alone(tmp_path: Path) -> None:
    found = run(RAISES.format(before=""), tmp_path)
    assert (found.code, found.err) == (1, LINE)


def test_the_traceback_can_be_asked_for(tmp_path: Path) -> None:
    found = run(RAISES.format(before=""), tmp_path, PTM_DEBUG="1")
    assert found.code == 1
    assert found.err.startswith("Traceback")
    assert 'script.py", line 4' in found.err
    assert found.err.endswith("BudgetError: too little:\n set it to 2MiB.\n")


def test_other_errors_are_shown_as_ever(tmp_path: Path) -> None:
    found = run("import torch\n1 / 0\n", tmp_path)
    assert found.code == 1
    assert found.err.startswith("Traceback")
    assert found.err.endswith("ZeroDivisionError: division by zero\n")


def test_what_a_script_does_about_errors_is_its_own_affair(tmp_path: Path) -> None:
    hook = "import sys\nsys.excepthook = lambda kind, error, traceback: print('HOOK', kind.__name__)"
    found = run(RAISES.format(before=hook), tmp_path)
    assert (found.code, found.out, found.err) == (1, "HOOK BudgetError\n", "")
    caught = "import traceback\ntry:\n    raise BudgetError('mine')\nexcept BudgetError:\n    traceback.print_exc()"
    found = run(RAISES.format(before=caught), tmp_path)
    assert found.err.startswith("Traceback")
    assert found.err.endswith("BudgetError: mine\n" + LINE)


def test_the_error_stands_behind_progress_bars(tmp_path: Path) -> None:
    found = run(RAISES.format(before="from tqdm.auto import tqdm\nbar = tqdm(total=4, desc='steps')"), tmp_path)
    assert "steps" in found.err
    assert found.err.splitlines(keepends=True)[-1] == LINE


def test_the_report_of_torchrun_names_the_error(tmp_path: Path) -> None:
    file = tmp_path / "error.json"
    for number in range(2):
        found = run(RAISES.format(before=""), tmp_path, TORCHELASTIC_ERROR_FILE=str(file))
        assert (found.code, found.err) == (1, LINE)
        told = json.loads(file.read_text())["message"]
        assert told["message"] == ("written by @record" if number else LINE.removeprefix("ptm_accel: ").strip())
        assert told["extraInfo"]["timestamp"].isdigit()
        told["message"] = "written by @record"
        file.write_text(json.dumps({"message": told}))


def test_the_hook_of_a_session_or_debugger_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    own = lambda *given: None  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", own)
    uncaught.install()
    assert sys.excepthook is own
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "ps1", ">>> ", raising=False)
        uncaught.install()
    assert sys.excepthook is sys.__excepthook__
    uncaught.install()
    assert sys.excepthook is uncaught.show


def test_a_command_that_is_refused_shows_its_traceback_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for value, starts in (("0", "it: error: 'x' is no size.\n"), ("1", "ptm_accel.errors.ConfigError: ")):
        monkeypatch.setenv("PTM_DEBUG", value)
        with pytest.raises(SystemExit) as ended:
            uncaught.refuse("it", ConfigError("'x' is\nno size."))
        said = capsys.readouterr().err
        assert ended.value.code == 2
        assert said.startswith(starts)
        assert said.endswith("it: error: 'x' is no size.\n")


@pytest.mark.process
@pytest.mark.parametrize("processes", [1, 2])
def test_accelerate_launch_adds_no_traceback(processes: int, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(RAISES.format(before=""))
    launcher = ["-m", "accelerate.commands.accelerate_cli", "launch", "--use_ptm", "--cpu", "--main_process_port", "0"]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PTM_", "ACCELERATE_"))}
    env = {**kept, "HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    found = run_alone(*launcher, "--num_processes", processes, "script.py", cwd=tmp_path, env=env)
    assert found.code == 1
    assert found.err.count(LINE) == processes
    assert "Traceback" not in found.err
    if processes == 1:
        assert found.err.endswith(LINE)
    else:
        root = found.err[found.err.index("Root Cause (first observed failure)") :]
        assert f"traceback : {LINE.removeprefix('ptm_accel: ')}" in root
