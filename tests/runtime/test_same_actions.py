"""Two runs carry out the same actions in the same order, however long their transfers and their updates take."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
import torch

from ptm_accel.hardware.profile import LinkRates
from ptm_accel.memory.admission import Admission
from ptm_accel.memory.block import Block
from ptm_accel.memory.scratch import ScratchFile
from ptm_accel.memory.timeline import Mark, Moment
from ptm_accel.memory.traffic import Traffic
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.optim.host_updates import HostUpdates
from ptm_accel.optim.units import Unit
from ptm_accel.pages import Pages
from ptm_accel.runtime.executor import Executor
from ptm_accel.units import MIB
from tests.card import Card, CardTier
from tests.faults import VOCABULARY, llama
from tests.mock_device import MockDevice
from tests.tiers import needs, on_pages

STEPS, HIDDEN, LAYERS = 10, 32, 6
SCALE = 1024
LONGEST_S = 2e-3
ACCESS_S = 1e-4


class GivenClock:
    """Every access takes the same time, and updates take none: plans are made from times, and runs differ in theirs."""

    def __init__(self) -> None:
        self._at_s = 0.0

    def mark(self) -> Mark:
        self._at_s += ACCESS_S
        return Mark(Moment(self._at_s, self._at_s))

    begin = end = mark

    def give_up(self) -> None:
        pass

    begin_update = give_up

    def exclude(self, seconds: float, *, beside: bool) -> None:
        pass

    def read(self, marks: Sequence[Mark]) -> list[Moment]:
        return [mark.moment for mark in marks if mark.moment is not None]


@contextmanager
def delayed(seed: int) -> Iterator[None]:
    """Meanwhile moves of bytes and updates on the CPU take random times longer."""
    rng = random.Random(seed)

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if rng.random() < 0.3:
                time.sleep(rng.random() * LONGEST_S)
            return function(*args)

        return called

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((ScratchFile, "move"), (MockDevice, "_move"), (HostUpdates, "_update")):
            patch.setattr(owner, name, late(getattr(owner, name)))
        yield


@contextmanager
def written_down() -> Iterator[list[str]]:
    """The actions of the training thread within: the number of accesses before each, what it does, and which block."""
    log: list[str] = []
    accesses = 0

    def noted(owner: type, name: str, text: Callable[..., str]) -> None:
        function = getattr(owner, name)

        def called(*args: Any, **options: Any) -> Any:
            log.append(f"{accesses} {text(*args)}")
            return function(*args, **options)

        patch.setattr(owner, name, called)

    def counted(self: Executor, block: Block, write: bool) -> Any:
        nonlocal accesses
        accesses += 1
        return before(self, block, write)

    def elements(unit: Unit) -> str:
        return f"{unit.state.block_name} {unit.start}:{unit.stop}"

    before = Executor._before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Executor, "_before", counted)
        noted(Traffic, "start_load", lambda _, block, offset, into, *more: f"load {block.name} {offset}+{len(into)}")
        noted(Traffic, "start_store", lambda _, block, offset, octets: f"store {block.name} {offset}+{len(octets)}")
        noted(Traffic, "start_store_whole", lambda _, block: f"store {block.name}")
        noted(Admission, "take_back", lambda _, block, *more: f"free {block.name}")
        noted(ComputeUpdates, "carry_out", lambda _, batch, *more: f"update {', '.join(map(elements, batch))}")
        noted(HostUpdates, "_hold", lambda _, unit: f"update on the CPU {elements(unit)}")
        yield log


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        kind: of memory (`tests.tiers.MEMORIES`).
        share: of the states there is room for, beyond the least that training needs.
        lengths: of the batches, one of which is drawn for each.
        micro: how many micro-batches a step has.
        evaluates: whether every third step is followed by an evaluation.
        early: whether updates may begin in backward.
    """

    kind: str = "host+disk"
    share: float = 0.25
    lengths: tuple[int, ...] = (16,)
    micro: int = 1
    evaluates: bool = False
    early: bool = False


def actions(case: Case, seed: int, directory: Path) -> list[list[str]]:
    """The actions of each step of a run whose delays are those of `seed`."""
    floor, need = needs(llama(HIDDEN, LAYERS), directory, case.kind)
    steps: list[list[str]] = []
    model, lengths = llama(HIDDEN, LAYERS), random.Random(0)
    budget = floor + int((need - floor) * case.share)
    with pytest.MonkeyPatch.context() as patch, delayed(seed):
        patch.setattr("ptm_accel.runtime.run_ahead.clock_of", lambda pool, tally: GivenClock())
        patch.setattr(Pages, "_learn_rates", lambda pages: None)
        # Of its memory parts are used again behind copies, as on a card.
        patch.setattr("tests.tiers.MockDevice", lambda delay: CardTier(Card(64 * MIB, SCALE), SCALE))
        with on_pages(model, case.kind, budget, directory) as engine:
            engine.run_ahead.rates = LinkRates(1e9, 1e9, 1e9)
            engine.training.updates_in_backward = lambda: case.early
            optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
            for number in range(STEPS):
                with written_down() as log:
                    for _ in range(case.micro):
                        ids = torch.arange(2 * lengths.choice(case.lengths)).view(2, -1) % VOCABULARY
                        loss = model(input_ids=ids, labels=ids).loss
                        with engine.training.backward() if case.early else nullcontext():
                            loss.backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    if case.evaluates and number % 3 == 2:
                        model.eval()
                        with torch.no_grad():
                            model(input_ids=ids)
                        model.train()
                steps.append(log)
            assert engine.pool.stats.evictions
            assert any(route.has_plan for route in engine.run_ahead.routes.values())
            engine.settle()
    return steps


CASES = {
    "one batch a step": Case(),
    "little room": Case(share=0.05, evaluates=True),
    "random lengths": Case(lengths=(8, 12, 16), micro=2, evaluates=True),
    "four micro-batches": Case(micro=4),
    "updates in backward": Case(early=True),
    "a device": Case("mock+host"),
    "a device, random lengths": Case("mock+host", lengths=(8, 12, 16), micro=2, evaluates=True),
    "a device over a disk": Case("mock+host+disk"),
    "a device over a disk, in backward": Case("mock+host+disk", early=True),
}


@pytest.mark.thinned(4)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_delays_change_no_action(case: Case, tmp_path: Path) -> None:
    first, second = (actions(case, seed, tmp_path) for seed in (1, 2))
    for number, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        differ = list(unified_diff(ours, theirs, lineterm="", n=1))
        assert not differ, f"step {number}:\n" + "\n".join(differ[:20])
