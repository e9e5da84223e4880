"""Every command of the README and the documentation is one that its program takes, flag by flag; none is carried out.

What a page trains, it trains in tests/test_docs.py, tests/test_first_model.py and tests/test_examples.py.
"""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.run
import typer.main
import yaml
from accelerate.commands import launch
from ptm_accel.integrations.accelerate.launching import add_flags

from ptm_accel import cli
from ptm_accel.config import PTMConfig
from ptm_accel.environment import CONFIG_FILE, SWITCH, SWITCH_FLAG, TEXT_OPTIONS, variable_of

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "examples/README.md")), *(ROOT / "docs").glob("*.md")]
)
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
OPTIONS = {*TEXT_OPTIONS, CONFIG_FILE}
COMMANDS = typer.main.get_command(cli.app)

SHELL = {"cd", "cmp", "export", "pre-commit", "python3", "source", ".ci/run"}
"""Programs of which only the name is looked at."""
_BLOCK = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(
    r"`((?:ptm-accel|accelerate launch|torchrun|python -m ptm_accel|python examples/)[^`\n]* [^`\n]+)`"
)
_SETTING = re.compile(r"([A-Z_]+)=(.*)")


class _ParsedError(Exception):
    """Ends a script where it has read its command line, with what it did not know of it."""


def _commands(page: Path) -> list[str]:
    """The commands of a page, in blocks and within sentences; a program's name alone in a sentence is no command."""
    text = re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = []
    for block in _BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            parts = " ".join(shlex.quote(word) for word in shlex.split(line, comments=True)).split(" '&&' ")
            found += filter(None, parts)
    return found + [command for command in _INLINE.findall(text) if "..." not in command]


FOUND = [(page, command) for page in PAGES for command in _commands(page)]


def _installs(words: list[str]) -> None:
    # From any other installation, Python that is started in the checkout imports a package without its integrations.
    assert "-e" in words or not words[-1].startswith("."), "in the checkout, only `pip install -e` works"
    for extra in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        for name in extra.split(","):
            assert re.search(rf"^{name} = \[", PROJECT, re.MULTILINE), f"there is no extra {name}"


def _markers_exist(words: list[str]) -> None:
    if "-m" in words:
        assert f'"{words[words.index("-m") + 1]}:' in PROJECT


def _ours(words: list[str]) -> None:
    name, *arguments = words
    if name == "launch":
        _accelerate([name, *arguments])
        return
    command = COMMANDS.get_command(typer.Context(COMMANDS), name)
    assert command is not None, f"there is no command {name}"
    if arguments:
        # A name in capitals stands for a number, too.
        command.make_context(name, [{"N": "2", "K": "2"}.get(word, word) for word in arguments])


def _accelerate(words: list[str]) -> None:
    assert words.pop(0) == "launch"
    if words in ([f"--{SWITCH_FLAG}"], []):
        return
    parser = launch.launch_command_parser()
    add_flags(parser)
    given = parser.parse_args(words)
    assert given.training_script.endswith((".py", "ptm_accel"))


def _torchrun(words: list[str]) -> None:
    if words[-1].endswith(".py"):
        torch.distributed.run.get_args_parser().parse_args(words)


def _python(words: list[str]) -> None:
    if words[:2] == ["-m", "ptm_accel"]:
        assert not [word for word in words[2:] if word.startswith("--") and word[6:] not in OPTIONS]
        return
    script = ROOT / words[0]
    if words[0].startswith("examples/"):
        assert script.is_file()
        _script_knows(script, words[1:])


def _script_knows(script: Path, words: list[str]) -> None:
    """Lets a script read its command line, and stops it there."""
    known = argparse.ArgumentParser.parse_known_args

    def parsed(self: argparse.ArgumentParser, *given: object, **named: object) -> None:
        raise _ParsedError(known(self, *given, **named)[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", parsed)
        patch.setattr(sys, "argv", [str(script), *words])
        with pytest.raises(_ParsedError) as ended:
            runpy.run_path(str(script), run_name="__main__")
    assert ended.value.args == ([],), f"{script.name} does not know {ended.value.args[0]}"


CHECKS: dict[str, Callable[[list[str]], None]] = {
    "ptm-accel": _ours,
    "accelerate": _accelerate,
    "torchrun": _torchrun,
    "python": _python,
    "pip": _installs,
    "pytest": _markers_exist,
}


@pytest.mark.parametrize(("page", "command"), FOUND, ids=[f"{page.stem}: {command}" for page, command in FOUND])
def test_a_command_is_one_that_its_program_takes(page: Path, command: str) -> None:
    words = shlex.split(command)
    variables = {name for word in words if (name := word.partition("=")[0]).startswith(("PTM_", "ACCELERATE_USE_P"))}
    assert variables <= {SWITCH, *map(variable_of, OPTIONS)}
    flags = {word.partition("=")[0] for word in words if word.startswith("--ptm_")}
    assert flags <= {f"--ptm_{option}" for option in OPTIONS}
    while words and _SETTING.fullmatch(words[0]):
        words.pop(0)
    if words and words[0] not in SHELL:
        CHECKS[words[0]](words[1:])


def test_commands_are_found() -> None:
    pages = {page.name for page, _ in FOUND}
    assert {"README.md", "first-model.md", "launch.md", "several-gpus.md", "budget.md"} <= pages
    assert len(FOUND) > 60


@pytest.mark.parametrize(
    ("check", "words"),
    [
        (_ours, ["estimate", "gpt2", "--no_such_flag"]),
        (_ours, ["no_such_command"]),
        (_accelerate, ["launch", "--use_ptm", "--ptm_no_such_flag", "1", "train.py"]),
        (_torchrun, ["--no_such_flag", "train.py"]),
        (_python, ["examples/accelerate_loop.py", "--no_such_flag", "1"]),
        (_installs, ["install", "-e", ".[no_such_extra]"]),
        (_installs, ["install", ".[peft]"]),
        (_markers_exist, ["-m", "no_such_marker"]),
    ],
)
def test_what_a_program_does_not_know_is_noticed(check: Callable[[list[str]], None], words: list[str]) -> None:
    # argparse ends the process with status 2.
    with pytest.raises(BaseException, match=r"no_such|^2$|only `pip install -e`"):
        check(words)


def test_options_in_yaml_are_options() -> None:
    """The YAML of the pages is a configuration of ours, or one of accelerate with a section of ours."""
    blocks = [
        (page, yaml.safe_load(block))
        for page in PAGES
        for block in re.findall(r"^```yaml\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    ]
    assert len(blocks) >= 2
    for page, values in blocks:
        assert PTMConfig.load(values.get("ptm_config", values)) != PTMConfig(), page.name


def test_every_python_block_compiles() -> None:
    pages = [*PAGES, *(ROOT / "docs" / "benchmarks").glob("*.md")]
    fence = re.compile(r"^```python[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
    blocks = [(page, block) for page in pages for block in fence.findall(page.read_text(encoding="utf-8"))]
    assert len(blocks) > 30
    for page, block in blocks:
        compile(block, page.name, "exec")
