"""Sharded blocks: each process has its range of every parameter, and the numbers are those of whole models.

With two processes and a gradient from one micro-batch the oracle is DDP, else the twin (`tests/distributed/twin.py`).
Cases that are trained by as many processes are trained one after another by the same ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from tests.distributed.cases import Case
from tests.distributed.runs import printed

CHILD = Path(__file__).with_name("sharded_child.py")

REPLICAS = [
    Case(shard="none"),
    Case("llama-tied", accumulation=3, clip=0.5, checkpointing="reentrant", shard="none"),
    Case("mixtral", optimizer="adam", foreach=False, checkpointing="non-reentrant", shard="none"),
    Case("lora", checkpointing="reentrant", uneven=True, shard="none"),
    Case("t5", optimizer="sgd", clip=0.5, shard="none"),
    Case("gpt2", optimizer="adagrad", dtype="bf16", clip=0.5, shard="none"),
    Case("llama", dtype="bf16", masters=True, clip=0.5, shard="none"),
    Case("branches", optimizer="sgd", foreach=False, shard="none"),
]
"""These show that the harness compares what it says."""

TWO = [
    Case(),
    Case("llama-tied", accumulation=3, checkpointing="reentrant"),
    Case("llama", checkpointing="reentrant", roomy=True),
    Case("mixtral", dtype="bf16", clip=0.5, checkpointing="non-reentrant", roomy=True),
    Case("lora", optimizer="adam", checkpointing="reentrant"),
    Case("t5", clip=0.5),
    Case("llama", clip=0.5, optimizer="sgd", whole_norms=True),
    Case("gpt2", dtype="bf16", masters=True, accumulation=3),
    Case("branches", optimizer="sgd", foreach=False),
    Case("llama-wide", optimizer="adagrad"),
    Case(accumulation=3, memory="mock+host"),
    Case("llama-tied", dtype="bf16", clip=0.5, checkpointing="non-reentrant", memory="mock+host+disk"),
    Case("llama", optimizer="adagrad", foreach=False),
]
THREE = [
    Case("llama-tied", accumulation=3, checkpointing="non-reentrant", uneven=True),
    Case("branches", dtype="bf16", clip=0.5, optimizer="adam"),
]

MODELS = ("llama", "llama-tied", "t5", "mixtral", "gpt2", "lora", "branches")
FORMS = [
    Case(),
    Case(dtype="bf16", clip=0.5),
    Case(dtype="bf16", masters=True, accumulation=3, clip=0.5),
    Case(checkpointing="reentrant", accumulation=3, optimizer="sgd"),
    Case(checkpointing="non-reentrant", optimizer="adagrad", foreach=False, uneven=True),
    Case(checkpointing="reentrant", dtype="bf16", optimizer="adam", clip=0.5, accumulation=3),
    Case(checkpointing="non-reentrant", clip=0.5, foreach=False),
    Case(clip=0.5, optimizer="sgd", whole_norms=True),
]
"""Each value of each column, for each model and number of processes."""


def of_model(model: str) -> list[Case]:
    """The forms that the model can have."""
    forms = [replace(form, model=model) for form in FORMS]
    return [form for form in forms if model != "branches" or form.checkpointing == "off"]


def check(cases: Sequence[Case], ranks: int, folder: Path) -> None:
    """Trains each case in so many processes."""
    expected = [f"{case}: {case.steps * case.accumulation} losses agree" for case in cases]
    for lines in printed(CHILD, [asdict(case) for case in cases], ranks, folder):
        assert lines == expected


@pytest.mark.process
def test_replicas_train_as_ddp_does(tmp_path: Path) -> None:
    check(REPLICAS, 2, tmp_path)


def test_two_ranks_train_as_whole_models_do(tmp_path: Path) -> None:
    check(TWO, 2, tmp_path)


def test_three_ranks_train_as_the_twin_does(tmp_path: Path) -> None:
    check(THREE, 3, tmp_path)


@pytest.mark.matrix
@pytest.mark.parametrize(("model", "ranks", "half"), list(itertools.product(MODELS, (2, 3, 4), (0, 1))))
def test_ranks_train_as_whole_models_do_everywhere(model: str, ranks: int, half: int, tmp_path: Path) -> None:
    check(of_model(model)[half::2], ranks, tmp_path)
