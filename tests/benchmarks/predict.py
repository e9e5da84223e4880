"""Predicted beside measured: a step's time and peak under budgets that nothing was calibrated on.

    OMP_WAIT_POLICY=passive python tests/benchmarks/predict.py DIRECTORY_ON_AN_SSD [--rounds 2] [--fp32]

One training, whose budget is changed on the way. A few steps under 1 GiB, clipped, are the calibration: from what is
seen there (the trace of a pass, the rate of its updates, that of the disk) it is foretold what a step takes under
others. Then come a few steps under one of those, and a few under 1 GiB again; and so on. Shared machines are faster at
one time than at another, so what was measured stands beside the mean of what was foretold just before and just after
it, and the ratio is the median of the rounds'. Llama, 222M parameters, bf16 with fp32 masters or all in fp32, batch
4 x 128. Prints the result as Markdown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from machine_facts import facts
from ptm_accel.integrations.transformers import Trainer
from random_tokens import Tokens
from small_llama import VOCABULARY, numerics, small_llama
from transformers import TrainerCallback, TrainingArguments

import ptm_accel
from ptm_accel.engine import Engine
from ptm_accel.memory.budget import Tier
from ptm_accel.schedule.choice import choose_plan
from ptm_accel.schedule.tally import Tally
from ptm_accel.schedule.trace import Trace
from ptm_accel.schedule.updates import UpdateTiming
from ptm_accel.schedule.watch import LinkUse, rates_as_seen
from ptm_accel.units import parse_bytes

MIB = 1 << 20


@dataclass(frozen=True)
class Configuration:
    """What a step is foretold for.

    Attributes:
        host_memory: the budget.
        clip: the greatest norm; 0 for no clipping.
    """

    host_memory: str
    clip: float = 1.0


CALIBRATION = Configuration("1024MiB")
OTHERS = (
    Configuration("640MiB"),
    Configuration("768MiB"),
    Configuration("896MiB"),
    Configuration("1280MiB"),
    Configuration("1536MiB"),
    Configuration("896MiB", clip=0.0),
)
WARM_UP = 7
"""Steps after which memory has been touched, the second plan has been made, and holes in the heap are known."""
SETTLE = 2
"""Steps left out after each change of the budget."""
MEASURED = 5


@dataclass(frozen=True)
class Foretold:
    """What a step comes to: seconds, and MiB of pages at its peak; holes in the heap come on top, within the budget."""

    step_s: float
    peak_mib: float


@dataclass
class Turn:
    """Steps under one configuration.

    Attributes:
        configuration: which one.
        settle: steps that are left out.
        times: of the others, in seconds.
        passes: of those, the seconds of each pass; one makes a step.
        computes: of those, the seconds of each pass in which something was computed.
        peak_mib: the most that pages took in them.
        foretold: what steps under each configuration should take by these, where this is the calibration.
    """

    configuration: Configuration
    settle: int
    times: list[float] = field(default_factory=list)
    passes: list[float] = field(default_factory=list)
    computes: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    foretold: dict[Configuration, Foretold] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """The median of its steps."""
        return statistics.median(self.times)


class Turns(TrainerCallback):
    """Times steps, from the end of one to the end of the next, and changes the budget between them.

    Args:
        turns: in order; filled in.
    """

    def __init__(self, turns: list[Turn]) -> None:
        self._left = turns[::-1]
        self._turn = self._left.pop()
        self._steps = 0
        self._ended_s = 0.0
        self._before: tuple[Tally, LinkUse] | None = None
        self._last = Tally()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        engine = ptm_accel.engine_of(kwargs["model"])
        assert engine is not None
        turn, budget = self._turn, engine.memory.budgets[Tier.HOST]
        self._steps += 1
        tally, last = engine.run_ahead.tally, self._last
        if self._steps > turn.settle:
            assert tally.passes == last.passes + 1
            turn.times.append(now - self._ended_s)
            turn.passes.append(tally.passes_s - last.passes_s)
            turn.computes.append(tally.compute_s - last.compute_s)
        elif self._steps == turn.settle:
            budget.peak_bytes = budget.used_bytes
            self._before = replace(engine.run_ahead.tally), link_use(engine)
        self._ended_s, self._last = now, replace(tally)
        if len(turn.times) == MEASURED:
            turn.peak_mib = budget.peak_bytes / MIB
            if turn.configuration == CALIBRATION:
                assert self._before is not None
                turn.foretold = foretell(engine, turn, *self._before)
            if self._left:
                self._change(engine, args)

    def _change(self, engine: Engine, args: Any) -> None:
        self._turn, self._steps = self._left.pop(), 0
        args.max_grad_norm = self._turn.configuration.clip
        engine.settle()
        engine.pool.budget.capacity_bytes = parse_bytes(self._turn.configuration.host_memory)
        engine.pool.admission.shrink()
        engine.adapt()


def link_use(engine: Engine) -> LinkUse:
    """What the disk has moved so far."""
    assert engine.run_ahead.link_use is not None
    return engine.run_ahead.link_use()


def foretell(engine: Engine, seen: Turn, warm: Tally, moved: LinkUse) -> dict[Configuration, Foretold]:
    """What a step takes under each budget, this one included, by what was seen under this one.

    Args:
        engine: it was seen in.
        seen: the steps under this one.
        warm: what passes had taken before the steps that are gone by.
        moved: what the disk had moved then.
    """
    run_ahead, pool = engine.run_ahead, engine.pool
    (route,) = (route for route in run_ahead.routes.values() if route.updates is UpdateTiming.FORWARD)
    assert run_ahead.rates is not None
    # What lies between two passes, and in holes of the heap, is the same under each budget. Medians throughout, as of
    # what is measured: one step beside a busy neighbour says nothing of the others.
    outside_s = statistics.median(step - a_pass for step, a_pass in zip(seen.times, seen.passes, strict=True))
    holes_bytes = pool.admission.limit_bytes - pool.budget.capacity_bytes
    # The pass that was recorded is one of many; its arithmetic is what others took. The difference is not taken off
    # what is simulated with more of it: what is moved would be hidden behind arithmetic that there is not.
    recorded = at_pace(route.recorded, statistics.median(seen.computes))
    rates = rates_as_seen(run_ahead.rates, moved, link_use(engine))
    foretold = {}
    for other in sorted((CALIBRATION, *OTHERS), key=lambda other: parse_bytes(other.host_memory)):
        choice = choose_plan(
            recorded,
            capacity_bytes=parse_bytes(other.host_memory) - holes_bytes,
            updates=run_ahead.updates,
            overwritten=run_ahead.overwritten,
            in_backward=not other.clip,
            repeats=True,
            rates=rates,
            update_s=run_ahead.tally.update_s_per_byte(warm),
        )
        assert choice.simulated is not None, f"no plan for {other}"
        foretold[other] = Foretold(choice.simulated.seconds + outside_s, choice.simulated.peak_bytes / MIB)
    return foretold


def at_pace(trace: Trace, compute_s: float) -> Trace:
    """A trace whose arithmetic takes so many seconds in all."""
    factor = compute_s / trace.compute_s
    accesses = tuple(replace(access, compute_s=access.compute_s * factor) for access in trace.accesses)
    return replace(trace, accesses=accesses, lead_s=trace.lead_s * factor)


def train(directory: Path, turns: list[Turn], *, fp32: bool) -> None:
    """One training, through all the turns."""
    model, options = small_llama(CALIBRATION.host_memory, directory, fp32=fp32)
    arguments = TrainingArguments(
        output_dir=str(directory / "run"),
        max_steps=sum(turn.settle + MEASURED for turn in turns),
        per_device_train_batch_size=4,
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        learning_rate=1e-4,
        max_grad_norm=CALIBRATION.clip,
    )
    tokens = Tokens(256, 128, VOCABULARY)
    Trainer(model=model, args=arguments, train_dataset=tokens, callbacks=[Turns(turns)], ptm_config=options).train()


def order(rounds: int) -> list[Turn]:
    """Each configuration once a round, between two calibrations; each round begins with another."""
    turns = [Turn(CALIBRATION, WARM_UP)]
    for number in range(rounds):
        first = number % len(OTHERS)
        for other in OTHERS[first:] + OTHERS[:first]:
            turns += [Turn(other, SETTLE), Turn(CALIBRATION, SETTLE)]
    return turns


def report(options: argparse.Namespace, turns: list[Turn]) -> None:
    """Prints the result."""
    print("# Predicted and measured steps\n")
    command = f"predict.py DIRECTORY --rounds {options.rounds}{' --fp32' if options.fp32 else ''}"
    print(facts(f"OMP_WAIT_POLICY=passive python tests/benchmarks/{command}"))
    print(
        f"* model: Llama, 222M parameters, {numerics(fp32=options.fp32)}, batch 4 x 128; calibrated under "
        f"{CALIBRATION.host_memory}, clipped, before and after each turn of {MEASURED} steps, {SETTLE} left out\n"
    )
    titles = ("calibration", "predicted step", "measured", "ratio", "rounds' ratios", "predicted peak", "measured")
    print(f"| host_memory | clipping | {' | '.join(titles)} |\n{'| --- ' * 9}|")
    for other in OTHERS:
        places = [place for place, turn in enumerate(turns) if turn.configuration == other]
        seen = [turns[place] for place in places]
        around = [(turns[place - 1], turns[place + 1]) for place in places]
        foretold = [statistics.mean(turn.foretold[other].step_s for turn in pair) for pair in around]
        ratios = [said / turn.step_s for said, turn in zip(foretold, seen, strict=True)]
        peak = max(turn.foretold[other].peak_mib for pair in around for turn in pair)
        print(
            f"| {other.host_memory} | {other.clip or 'none'} "
            f"| {statistics.median(turn.step_s for pair in around for turn in pair):.2f} s "
            f"| {statistics.median(foretold):.2f} s | {statistics.median(turn.step_s for turn in seen):.2f} s "
            f"| {statistics.median(ratios):.2f} | {', '.join(f'{ratio:.2f}' for ratio in ratios)} "
            f"| {peak:.0f} MiB | {max(turn.peak_mib for turn in seen):.0f} MiB |"
        )
    own = [turn.foretold[CALIBRATION].step_s / turn.step_s for turn in turns if turn.configuration == CALIBRATION]
    print(
        f"\nOf themselves the calibrations foretell {statistics.median(own):.2f} of what they took "
        f"({', '.join(f'{ratio:.2f}' for ratio in own)}): so far off is the simulation, whatever the budget."
    )


def main() -> None:
    """Trains, and prints the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--fp32", action="store_true", help="in fp32, where the cores are too slow at bf16")
    options = parser.parse_args()
    turns = order(options.rounds)
    train(options.directory, turns, fp32=options.fp32)
    report(options, turns)


if __name__ == "__main__":
    main()
