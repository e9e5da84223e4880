"""What is shipped is what is there, and imports run downward only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent


def _project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def _packages(folder: str, name: str) -> set[str]:
    inits = (ROOT / folder).rglob("__init__.py")
    return {".".join((name, *init.parent.relative_to(ROOT / folder).parts)) for init in inits}


def _imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def test_every_package_is_shipped() -> None:
    """A folder that is missing from `packages` in pyproject.toml works in a checkout and not from a wheel."""
    there = _packages("ptm_accel", "ptm_accel") | _packages("integrations", "ptm_accel.integrations")
    assert set(_project()["tool"]["setuptools"]["packages"]) == there


def test_every_folder_with_code_is_a_package() -> None:
    files = [file for folder in ("ptm_accel", "integrations") for file in (ROOT / folder).rglob("*.py")]
    assert len(files) > 10
    assert [file for file in files if not (file.parent / "__init__.py").exists()] == []


def test_the_core_imports_no_adapter() -> None:
    """In a checkout the import linter cannot see `ptm_accel.integrations`, so this is checked here.

    Only `ptm_accel/__init__.py` may name it: it re-exports lazily.
    """
    core = [file for file in (ROOT / "ptm_accel").rglob("*.py") if file != ROOT / "ptm_accel" / "__init__.py"]
    offending = [
        (str(file.relative_to(ROOT)), name)
        for file in core
        for name in _imports(file)
        if name.startswith(("ptm_accel.integrations", "integrations"))
    ]
    assert offending == []
