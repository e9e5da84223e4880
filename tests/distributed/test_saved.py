"""What several processes save together is what one process saves, byte for byte."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.distributed.cases import Case
from tests.distributed.runs import printed
from tests.distributed.test_resumed import FORMS
from tests.prepared import run_ranks

CHILD = Path(__file__).with_name("saved_child.py")


def check(cases: Sequence[Case], ranks: int, folder: Path) -> None:
    """Each case is saved by so many processes."""
    expected = [f"{case}: every byte is the same" for case in cases]
    for lines in printed(CHILD, [asdict(case) for case in cases], ranks, folder):
        assert lines == expected


def test_two_ranks_save_what_one_process_saves(tmp_path: Path) -> None:
    check([FORMS[1], FORMS[2], FORMS[3], FORMS[4]], 2, tmp_path)


def test_three_ranks_save_what_one_process_saves(tmp_path: Path) -> None:
    check([replace(FORMS[3], uneven=True), FORMS[2]], 3, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_save_what_one_process_saves_everywhere(ranks: int, tmp_path: Path) -> None:
    check(FORMS, ranks, tmp_path)


@pytest.mark.process
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_save_takes_no_more_than_two_groups(ranks: int, tmp_path: Path) -> None:
    child = CHILD.with_name("saving_memory_child.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    for run in run_ranks(child, tmp_path, count=ranks, cwd=tmp_path, env=environment):
        assert run.code == 0, run.err[-3000:]
        assert run.out.splitlines()[-1] == "in little memory"
