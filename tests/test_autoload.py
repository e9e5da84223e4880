"""What `import torch` calls."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from ptm_accel import autoload
from ptm_accel.engine import Engine


@pytest.mark.parametrize(
    ("argv", "program"),
    [
        (["python", "/usr/bin/accelerate", "launch", "x.py"], "accelerate"),
        (["python", "-u", "-m", "accelerate.commands.launch", "x.py"], "accelerate.commands.launch"),
        (["python", "-X", "dev", "-W", "error", "dir/accelerate_train.py"], "accelerate_train.py"),
        (["python", "-c", "pass"], "pass"),
        (["python"], ""),
        (["python", "-m"], ""),
        (["python", "/usr/bin/torchrun", "x.py"], "torchrun"),
    ],
)
def test_what_python_was_started_with(argv: list[str], program: str) -> None:
    assert autoload.what_runs(argv) == program


@pytest.mark.parametrize(
    ("argv", "environ", "waited_for"),
    [
        (["python", "accelerate"], {}, set(autoload.COMMANDS)),
        (["python", "ptm-accel"], {}, set(autoload.COMMANDS)),
        (["python", "-m", "accelerate.commands.launch"], {autoload.SWITCH: "1"}, set(autoload.COMMANDS)),
        (["python", "train.py"], {autoload.SWITCH: "true"}, set(autoload.HOSTS)),
        (["python", "accelerate_train.py"], {autoload.SWITCH: "true"}, set(autoload.HOSTS)),
        (["python", "train.py"], {autoload.SWITCH: "false"}, None),
        (["python", "train.py"], {}, None),
    ],
)
def test_who_is_waited_for(
    argv: list[str], environ: dict[str, str], waited_for: set[str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", argv)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(autoload.atexit, "register", lambda function: None)
    monkeypatch.delenv(autoload.SWITCH, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    autoload.install()
    autoload.install()
    watchers = [finder for finder in sys.meta_path if isinstance(finder, autoload.Watcher)]
    assert [set(watcher._wanted) for watcher in watchers] == ([] if waited_for is None else [waited_for])


@pytest.mark.parametrize(("program", "asks"), [("x.py", True), ("torchrun", False), ("torch.distributed.run", False)])
def test_launchers_of_torch_do_not_tell_of_unused_pages(
    program: str, asks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(autoload.atexit, "register", asked.append)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setenv(autoload.SWITCH, "1")
    monkeypatch.setattr(autoload, "what_runs", lambda argv: program)
    autoload.install()
    assert asked == ([autoload.tell_of_unused] if asks else [])


@pytest.mark.parametrize(("count", "error", "told"), [(0, False, True), (1, False, False), (0, True, False)])
def test_pages_that_no_model_came_onto_are_told_of_at_exit(
    count: int, error: bool, told: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Engine, "count", count)
    for name in ("last_type", "last_exc"):
        monkeypatch.delattr(sys, name, raising=False)
    if error:
        monkeypatch.setattr(sys, "last_type", ValueError, raising=False)
    autoload.tell_of_unused()
    assert ("no model was put on them" in capsys.readouterr().err) == told


def test_modules_that_are_there_already_are_met_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "met_at_home.py").write_text("met = []\ndef meet(module):\n    met.append(module.__name__)\n")
    names = ["met_first", "met_second"]
    for name in [*names, "met_other"]:
        (tmp_path / f"{name}.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    for name in names:
        importlib.import_module(name)
    autoload.watch(dict.fromkeys(names, ("met_at_home", "meet")))
    importlib.import_module("met_other")
    assert sorted(importlib.import_module("met_at_home").met) == names


def test_modules_are_met_once_whenever_they_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is imported later; one is under way, and imports the watcher's installation itself."""
    (tmp_path / "met_home.py").write_text(
        "met = []\ndef meet(module):\n    met.append((module.__name__, module.last))\n"
    )
    (tmp_path / "met_later.py").write_text("last = 1\n")
    (tmp_path / "met_under_way.py").write_text(
        "from ptm_accel import autoload\n"
        "autoload.watch({name: ('met_home', 'meet') for name in ('met_later', 'met_under_way')})\n"
        "import met_home\n"
        "last = 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    importlib.import_module("met_under_way")
    met = importlib.import_module("met_home").met
    assert met == []
    importlib.import_module("met_later")
    assert met == [("met_under_way", 2), ("met_later", 1)]
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("met_never")
    assert len(met) == 2


def test_it_needs_nothing_but_the_standard_library() -> None:
    code = (
        "import sys; before = set(sys.modules); import ptm_accel.autoload; ptm_accel.autoload.install(); "
        "new = {m.split('.')[0] for m in set(sys.modules) - before}; "
        "bad = new - set(sys.stdlib_module_names) - {'ptm_accel'}; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)
