"""Budgets are hard: the whole process stays within what the options promise, under a cap of the kernel's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests import capping

CHILD = Path(__file__).with_name("budget_child.py")
HOST_MEMORY = 112 << 20


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}


def report(text: str) -> dict[str, Any]:
    lines = [line for line in text.splitlines() if line.startswith('{"before_bytes"')]
    assert lines, text
    return dict(json.loads(lines[-1]))


@cache
def plain(directory: Path) -> dict[str, Any]:
    command = [sys.executable, str(CHILD), "plain", str(directory)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return report(done.stdout)


def promise_bytes(base: dict[str, Any]) -> int:
    """What the documentation promises: the script before its model, the budget, the activations, and 5%."""
    return int((base["before_bytes"] + HOST_MEMORY + base["activations_bytes"]) * 1.05)


def cap_bytes(base: dict[str, Any]) -> int:
    """That promise, without pages of libraries, which the kernel takes back when it must: 0.3 GB of some of torch's."""
    return promise_bytes({**base, "before_bytes": base["before_bytes"] - base["mapped_bytes"]})


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("budget")


def test_states_four_times_the_budget_stay_under_a_kernel_cap(directory: Path) -> None:
    reason = capping.available()
    if reason is not None:
        pytest.skip(f"cannot cap memory: {reason}")
    base = plain(directory)
    assert base["states_bytes"] >= 4 * HOST_MEMORY
    command = [sys.executable, str(CHILD), "paged", str(directory), str(HOST_MEMORY)]
    capped = capping.run_capped(cap_bytes(base), command, env=environment(), timeout_s=250)
    assert capped.returncode == 0, f"{capped}"
    assert capped.kills == 0
    paged = report(capped.stdout)
    assert paged["evictions"] > 0
    assert paged["host_peak_bytes"] <= HOST_MEMORY
    assert paged["peak_bytes"] <= promise_bytes(base), (paged, base)


@pytest.mark.process
def test_the_plain_script_does_not_fit_under_that_cap(directory: Path) -> None:
    """The cap is real: without pages the same script is killed by it."""
    reason = capping.available()
    if reason is not None:
        pytest.skip(f"cannot cap memory: {reason}")
    command = [sys.executable, str(CHILD), "plain", str(directory)]
    capped = capping.run_capped(cap_bytes(plain(directory)), command, env=environment(), timeout_s=250)
    assert capped.returncode != 0
    assert capped.kills > 0
