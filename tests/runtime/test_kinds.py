"""Plans hold for kinds of passes: whatever the lengths of batches, and whatever kind of pass comes in between."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from statistics import mean

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from ptm_accel.runtime.kinds import Kind, Place, StepSoFar
from tests import faults
from tests.faults import Batches, Experts, Loop, counted, llama, paged
from tests.tiers import PAGE

LOOPS: dict[str, Loop] = {
    "one batch": faults.one_batch,
    "packed rows": faults.packed,
    "two micro-batches": faults.accumulated(2),
    "four micro-batches": faults.accumulated(4),
    "evaluation in between": faults.evaluated,
    "two forwards before a backward": faults.two_forwards,
    "a reference forward": faults.with_reference,
    "adapters off": faults.with_adapter_off,
}

MOST = 4
"""Faults of a pass, on average, from the third of its kind on; without plans there are 15 to 110."""


def model_and_bytes(situation: str) -> tuple[nn.Module, int]:
    """A model, and a budget that is about a quarter of its states."""
    model: nn.Module = llama(64, layers=8)
    if situation != "adapters off":
        return model, 2 << 20
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"])), 3 << 18


def faults_by_kind(
    model: nn.Module, nbytes: int, loop: Loop, directory: Path, *, device: bool, equal: bool, absent: bool = True
) -> dict[Hashable, float]:
    """The mean of the faults of the passes of each kind, from its third on.

    Args:
        model: it is put on pages.
        nbytes: of the tier that computes.
        loop: trains it.
        directory: for the disk.
        device: whether a device computes, above host memory; else host memory above a disk.
        equal: whether all batches have one length.
        absent: whether what the plans know nothing of counts.
    """
    with paged(model, nbytes, PAGE, directory, device=device) as (engine, optimizer), counted(engine) as passes:
        loop(model, optimizer, Batches(equal=equal))
        engine.settle()
    found: dict[Hashable, list[int]] = {}
    for each in passes:
        found.setdefault(each.kind, []).append(len(each.faults) - (0 if absent else each.absent))
    return {kind: mean(counts[2:]) for kind, counts in found.items() if len(counts) > 3}


@pytest.mark.parametrize("device", [False, True], ids=["disk", "device"])
@pytest.mark.parametrize("situation", LOOPS)
def test_passes_whose_lengths_differ_find_their_parameters_there(situation: str, device: bool, tmp_path: Path) -> None:
    model, nbytes = model_and_bytes(situation)
    found = faults_by_kind(model, nbytes, LOOPS[situation], tmp_path, device=device, equal=False)
    assert found
    assert max(found.values()) <= MOST, found


@pytest.mark.parametrize("situation", ["one batch", "two micro-batches"])
def test_lengths_make_no_kinds(situation: str, tmp_path: Path) -> None:
    found = []
    for equal in (True, False):
        model, nbytes = model_and_bytes(situation)
        found.append(faults_by_kind(model, nbytes, LOOPS[situation], tmp_path, device=True, equal=equal))
    equal, differing = found
    assert equal.keys() == differing.keys()
    assert max(equal.values()) <= MOST
    assert all(count <= 1.2 * equal[kind] + 1 for kind, count in differing.items()), found


@pytest.mark.parametrize("device", [False, True], ids=["disk", "device"])
def test_experts_that_are_the_same_each_time_are_there(device: bool, tmp_path: Path) -> None:
    found = faults_by_kind(Experts(), 256 << 10, faults.routed(equal=True), tmp_path, device=device, equal=True)
    assert max(found.values()) <= MOST, found


def test_a_pass_whose_experts_are_others_goes_on_by_its_plan(tmp_path: Path) -> None:
    """Of 16 experts of a pass 12 are others than in the planned one; of what both have half is there in time."""
    loop = faults.routed(equal=False)
    found = faults_by_kind(Experts(), 400 << 10, loop, tmp_path, device=False, equal=True, absent=False)
    assert max(found.values()) < 20, found


def places(step: StepSoFar, count: int) -> list[Place | None]:
    found = [step.next(True, True, b"\1").place for _ in range(count)]
    step.end()
    return found


def test_the_place_of_a_micro_batch_is_told_or_counted() -> None:
    step = StepSoFar()
    assert places(step, 3) == [Place.FIRST, Place.LATER, Place.LATER]
    assert step.next(True, False, b"\1") == Kind(True, False, b"\1"), "without gradients it has none"
    for follow, expected in (
        ([False], [Place.ONLY]),
        ([True, True, False], [Place.FIRST, Place.MIDDLE, Place.LAST]),
        ([False, False], [Place.ONLY, Place.LAST]),
    ):
        step.more_follow = iter(follow).__next__
        assert places(step, len(follow)) == expected
    # What is not known to follow is not counted on.
    kinds = [Kind(True, True, b"\1", place) for place in Place]
    assert [kind.place for kind in kinds if kind.more_follow] == [Place.FIRST, Place.MIDDLE]


def test_graphs_whose_backward_has_not_begun_make_a_kind() -> None:
    step, trained = StepSoFar(), b"\1"
    opened = [step.next(True, True, trained).open_graphs for _ in range(4)]
    assert opened == [0, 1, 2, 2]
    assert step.next(True, False, trained).open_graphs == 2
    step.backward = True
    assert step.next(True, True, trained).open_graphs == 0


def test_micro_batches_by_layer_are_one_pass() -> None:
    step, trained = StepSoFar(), b"\1"
    with step.together(3):
        # A reference without gradients may come first.
        assert not step.goes_on
        assert step.next(True, False, trained) == Kind(True, True, trained, Place.ONLY, 0, 3)
        assert step.goes_on
    assert not step.goes_on
    step.end()
    assert step.next(True, True, trained).together == 0
    step.end()
    # A step in chunks, whose gradients are added up.
    kinds = []
    for count, more in ((3, True), (2, True), (2, False)):
        with step.together(count, more=more):
            kinds.append(step.next(True, True, trained))
    assert [kind.place for kind in kinds] == [Place.FIRST, Place.MIDDLE, Place.LAST]
    assert [kind.together for kind in kinds] == [3, 2, 2]


@pytest.mark.parametrize("rows", [[4, 8, 6], [8, 4, 6]])
def test_a_plan_is_for_the_largest_batch_so_far(rows: list[int], tmp_path: Path) -> None:
    model = llama(64, layers=8)
    with paged(model, 2 << 20, PAGE, tmp_path) as (engine, _), torch.no_grad():
        for number, count in enumerate([4, 4, *rows]):
            ids = torch.randint(0, faults.VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(number))
            model(input_ids=ids)
        engine.run_ahead.end()
        (route,) = engine.run_ahead.routes.values()
        assert route.elements == 64
        assert route.has_plan
