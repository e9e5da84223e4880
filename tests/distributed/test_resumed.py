"""Checkpoints of one process, plain or on pages, are loaded by several that each have ranges of the model."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.distributed.cases import Case
from tests.distributed.runs import printed

CHILD = Path(__file__).with_name("resumed_child.py")
SOURCES = ("plain", "pages")

FORMS = [
    Case(),
    Case("llama-tied", optimizer="adam"),
    Case("llama", dtype="bf16", masters=True),
    Case("mixtral", dtype="bf16", clip=0.5, roomy=True),
    Case("lora"),
    Case("gpt2", optimizer="sgd", accumulation=3),
    Case("t5", optimizer="adagrad", checkpointing="reentrant"),
]
TWO = [
    ("plain", FORMS[0]),
    ("pages", FORMS[1]),
    ("pages", FORMS[2]),
    ("plain", FORMS[3]),
    ("pages", FORMS[4]),
]
THREE = [("pages", replace(FORMS[3], uneven=True)), ("plain", FORMS[2])]


def check(cases: Sequence[tuple[str, Case]], ranks: int, folder: Path) -> None:
    """Each case is loaded, and trained on, in so many processes."""
    expected = [f"{case} from {source}: {case.steps * case.accumulation} losses agree" for source, case in cases]
    for lines in printed(CHILD, [(source, asdict(case)) for source, case in cases], ranks, folder):
        assert lines == expected


def test_two_ranks_go_on_from_one_process(tmp_path: Path) -> None:
    check(TWO, 2, tmp_path)


def test_three_ranks_go_on_from_one_process(tmp_path: Path) -> None:
    check(THREE, 3, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(("ranks", "source"), list(itertools.product((2, 3, 4), SOURCES)))
def test_ranks_go_on_from_one_process_everywhere(ranks: int, source: str, tmp_path: Path) -> None:
    check([(source, form) for form in FORMS], ranks, tmp_path)
