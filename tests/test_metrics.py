"""What is told of a run: figures per step, the bound, what was foretold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.distributed.ranks import ShardStats
from ptm_accel.engine import Engine
from ptm_accel.hardware.profile import DeviceRates, LinkRates
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.diskio import DiskTransfer
from ptm_accel.memory.setup import Capacities, build_memory
from ptm_accel.memory.timeline import Span
from ptm_accel.metrics import Metrics
from ptm_accel.model.forwards import Forwards
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.optim.batches import Batches
from ptm_accel.schedule.tally import Tally
from tests.queued import LateDevice
from tests.runtime.test_run_ahead import LAYERS, Net, batch, step
from tests.tiers import AMPLE, PAGE, needs, on_pages

SLOW = LinkRates(1e6, 2e6, 1.3e6)


def takes(monkeypatch: pytest.MonkeyPatch, clock: list[float], owner: Any, name: str, seconds: float) -> None:
    """Has a method take that long, on a clock that stands still otherwise."""
    method = getattr(owner, name)

    def slow(*args: Any, **kwargs: Any) -> Any:
        clock[0] += seconds
        return method(*args, **kwargs)

    monkeypatch.setattr(owner, name, slow)


@contextmanager
def trained(directory: Path, steps: int) -> Iterator[Engine]:
    """A model with room for half of its states beyond the least, on a disk that is known to be slow."""
    model = Net()
    floor, need = needs(Net(), directory, "host+disk")
    with on_pages(model, "host+disk", floor + (need - floor) // 2, directory) as engine:
        engine.metrics.rates = engine.run_ahead.rates = SLOW
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        for number in range(steps):
            step(model, optimizer, number)
        assert engine.metrics.steps == steps
        yield engine


def test_a_step_is_shown_beside_its_bound_and_what_was_foretold(tmp_path: Path) -> None:
    with trained(tmp_path, 7) as engine:
        stats = engine.pool.stats
        keys = engine.metrics.since_last()
        assert stats.loaded_bytes > 0 < stats.stored_bytes
        link_s = SLOW.seconds(stats.loaded_bytes / 7, stats.stored_bytes / 7)
        tally = engine.run_ahead.tally
        work_s = (tally.compute_s - tally.own_s + tally.update_s) / 7
        assert keys["ptm_bound_s"] == pytest.approx(max(link_s, work_s), abs=1e-4)
        summary = engine.metrics.summary()
        assert re.search(r"lower bound  .* s \(.*\); a step takes [\d.]+ times that", summary)
        assert re.search(r"plan  .* took [\d.]+ s, predicted [\d.]+ s", summary)
        assert "written in a day of this" in summary
        assert tally.passes == 7
        assert 0 < tally.foretold < 7
        assert tally.passes_s > tally.compute_s > tally.own_s > 0
        assert keys["ptm_own_s"] == pytest.approx(stats.own_s / 7, abs=1e-4)
        assert tally.update_s >= tally.beside_s > 0
        assert tally.foretold_s > 0
        assert tally.foretold_took_s <= tally.passes_s


def test_each_second_of_a_step_is_counted_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What our hooks take is no arithmetic, and what is computed or waited for in them is none of their work."""
    clock = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    takes(monkeypatch, clock, nn.Linear, "forward", 1.0)
    takes(monkeypatch, clock, Forwards, "call_begins", 0.25)
    takes(monkeypatch, clock, Forwards, "call_ends", 0.125)
    takes(monkeypatch, clock, GradSlot, "add", 0.0625)
    takes(monkeypatch, clock, Batches, "update", 0.5)
    # Within `Traffic.stalled`.
    takes(monkeypatch, clock, DiskTransfer, "order", 2.0)
    with trained(tmp_path, 9) as engine:
        assert engine.pool.stats.stall_s > 0
        made_of = engine.metrics._made_of
        assert made_of.steps == 6
        assert made_of.sums.compute_s == made_of.steps * LAYERS * 1.0
        # The end of the model's own forward is one more.
        assert made_of.sums.own_s == made_of.steps * (LAYERS * (0.25 + 0.125 + 2 * 0.0625) + 0.125)
        assert made_of.sums.update_s > 0 < made_of.sums.stall_s
        assert sum(made_of.sums) - made_of.sums.kernel_s == made_of.steps_s
        times = engine.metrics.times()
        assert times["compute"].startswith("8.000 s in forward and backward, ")
        assert times["own work"] == "4.125 s of ptm_accel on the thread that trains; 0.000 s for all else"
        assert f"{made_of.sums.stall_s / 6:.3f} s for pages" == times["waited"]
        assert times["lower bound"].startswith("16.000 s (compute); "), "with updates, and with nothing else"


def test_nothing_is_said_of_what_is_not_known(tmp_path: Path) -> None:
    with trained(tmp_path, 2) as engine:
        # Too few steps for a median that means something.
        assert engine.metrics.times() == {}
        assert "lower bound" not in engine.metrics.summary()
        engine.metrics.rates = None
        step(engine.model, engine.optimizer, 2)  # type: ignore[arg-type]
        assert "ptm_bound_s" not in engine.metrics.since_last()


def test_what_is_between_two_trainings_is_no_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with trained(tmp_path, 0) as engine:
        clock = [0.0]
        monkeypatch.setattr("ptm_accel.metrics.time.perf_counter", lambda: clock[0])
        metrics = Metrics(engine.memory, Tally())
        for pause in (0.0, 1.0, 1.0, 2.0, 2.0):
            clock[0] += pause
            metrics.step_ended()
        clock[0] += 1000.0
        metrics.rest()
        metrics.step_ended()
        clock[0] += 2.0
        metrics.step_ended()
        assert metrics._steps_s == [2.0, 2.0, 2.0]


def test_tokens_count_where_the_time_of_their_step_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Not those of the first step, nor of one after a save, whose time nobody knows."""
    with trained(tmp_path, 0) as engine:
        clock = [0.0]
        monkeypatch.setattr("ptm_accel.metrics.time.perf_counter", lambda: clock[0])
        metrics = Metrics(engine.memory, Tally())
        for number in range(8):
            clock[0] += 2.0
            metrics.tokens.total += 100
            metrics.step_ended()
            if number in (1, 5):
                metrics.rest()
                clock[0] += 1000.0
        assert metrics.since_last()["ptm_tokens_s"] == 50
        assert metrics.summary().startswith("8 steps of 2.000 s (median 2.000 s), 50 tokens/s\n")


def test_steps_of_several_kinds_are_not_shown_below_their_bound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As of batches of several lengths, or of two trainings with another accumulation.
    with trained(tmp_path, 0) as engine:
        clock, tally = [0.0], Tally()
        monkeypatch.setattr("ptm_accel.metrics.time.perf_counter", lambda: clock[0])
        metrics = Metrics(engine.memory, tally)
        metrics.rates = SLOW
        for work_s in (1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 6.0, 6.0):
            clock[0] += work_s
            tally.passes += 1
            tally.compute_s += work_s
            metrics.step_ended()
        assert metrics.times()["lower bound"] == "3.000 s (compute); a step takes 1.00 times that"
        assert metrics.summary().startswith("8 steps of 3.000 s (median 1.000 s)\n")


@pytest.mark.parametrize(
    ("waited_s", "bound", "rate"),
    [(0.25, "0.750 s (compute", "16.00 MiB/s"), (0.75, "0.750 s (network)", "48.00 MiB/s"), (1.0, None, None)],
)
def test_ranks_that_are_waited_for_are_a_bound(
    waited_s: float, bound: str | None, rate: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the clock of a thread waiting is a part of its arithmetic; what is left could have hidden it."""
    with trained(tmp_path, 0) as engine:
        clock, tally, shards = [0.0], Tally(), ShardStats()
        monkeypatch.setattr("ptm_accel.metrics.time.perf_counter", lambda: clock[0])
        metrics = Metrics(engine.memory, tally)
        metrics.rates, metrics.shards = SLOW, shards
        for _ in range(6):
            clock[0] += 1.0
            tally.passes += 1
            tally.compute_s += 1.0
            shards.waited_s += waited_s
            shards.received_bytes += 12 << 20
            metrics.step_ended()
        if bound is not None:
            assert f"lower bound  {bound}" in metrics.summary()
        hidden = "" if rate is None else f" (hidden, at best, from {rate} on)"
        assert f"{waited_s:.3f} s waited for{hidden}\n" in metrics.summary()
        assert metrics.summary().startswith("6 steps of 1.000 s")


def test_the_time_of_an_evaluation_is_no_part_of_a_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with trained(tmp_path, 0) as engine:
        clock = [0.0]
        monkeypatch.setattr("ptm_accel.metrics.time.perf_counter", lambda: clock[0])
        metrics = Metrics(engine.memory, Tally())
        for evaluated_s in (0.0, 0.0, 0.0, 0.0, 100.0, 0.0):
            clock[0] += 1.0
            if evaluated_s:
                metrics.leave_out(True)
                clock[0] += evaluated_s
                metrics.leave_out(True)
                metrics.leave_out(False)
            clock[0] += 1.0
            metrics.step_ended()
        assert metrics._steps_s == [2.0, 2.0, 2.0]


def evaluate(engine: Engine, passes: int) -> None:
    """As often as that, and each leaves its parameters to be loaded by the next."""
    engine.model.eval()
    with torch.no_grad():
        for number in range(passes):
            engine.model(batch(number))
            for slot in engine.slots:
                if slot.value.block in engine.pool.eviction:
                    engine.pool.admission.evict(slot.value.block)
    engine.model.train()


def train(engine: Engine, steps: range) -> None:
    assert engine.optimizer is not None
    for number in steps:
        step(engine.model, engine.optimizer, number)  # type: ignore[arg-type]


def test_an_evaluation_is_no_part_of_training(tmp_path: Path) -> None:
    with trained(tmp_path, 5) as engine:
        stats, tally = engine.pool.stats, engine.run_ahead.tally
        engine.settle()
        engine.run_ahead.end()
        engine.metrics.since_last()
        before, loaded, faults = engine.metrics.read(), stats.loaded_bytes, stats.faults + stats.hits
        evaluate(engine, 20)
        evaluated = stats.loaded_bytes
        assert evaluated > loaded
        assert stats.faults + stats.hits > faults
        assert engine.metrics.read() == before, "while it may go on, too"
        train(engine, range(5, 7))
        engine.settle()
        engine.run_ahead.end()
        assert tally.passes == 7
        assert tally.foretold_took_s <= tally.passes_s
        after = engine.metrics.read()
        seen = engine.metrics.since_last()
        assert after.loaded_bytes - before.loaded_bytes == stats.loaded_bytes - evaluated
        stored_bytes = after.stored_bytes - before.stored_bytes
        link_s = SLOW.seconds((stats.loaded_bytes - evaluated) / 2, stored_bytes / 2)
        last, first = after.tally, before.tally
        work_s = (last.compute_s - last.own_s + last.update_s - first.compute_s + first.own_s - first.update_s) / 2
        assert seen["ptm_bound_s"] == pytest.approx(max(link_s, work_s), abs=1e-4)
        evaluate(engine, 3)
        assert engine.metrics.read() == after


def test_updates_that_are_carried_out_beside_an_evaluation_are_those_of_training(tmp_path: Path) -> None:
    with trained(tmp_path, 5) as engine:
        assert engine.run_ahead.beside is not None
        before = engine.metrics.read()
        evaluate(engine, 1)
        engine.settle()
        engine.run_ahead.end()
        between = engine.metrics.read()
        assert between.tally.update_s > before.tally.update_s
        assert between.tally.passes == 5
        assert between.tally.updated_bytes > before.tally.updated_bytes
        assert between.stored_bytes >= before.stored_bytes
        evaluate(engine, 1)
        assert engine.metrics.read() == between


CARD = DeviceRates(3e6, 3e6, 3e6, 5e8)


def test_on_a_device_the_link_is_the_bound(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[torch.device] = []

    def rates_of(device: torch.device) -> DeviceRates:
        asked.append(device)
        return CARD

    floor, need = needs(Net(), tmp_path, "mock+host")
    monkeypatch.setattr("ptm_accel.pages.device_rates", rates_of)
    monkeypatch.setattr("ptm_accel.pages.cpu_update_rate", lambda dtype, masters: 1e9)
    model = Net()
    with on_pages(model, "mock+host", floor + (need - floor) // 2, tmp_path) as engine:
        assert asked == [torch.device("cpu")]
        assert engine.metrics.rates == engine.run_ahead.rates == CARD
        assert engine.run_ahead.rated_update_s == 1 / (4 * 5e8)
        assert engine.run_ahead.host_s == 1 / (4 * 1e9)
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        for number in range(7):
            step(model, optimizer, number)
        stats = engine.pool.stats
        assert engine.metrics.rates is not None
        link_s = engine.metrics.rates.seconds(stats.loaded_bytes / 7, stats.stored_bytes / 7)
        work_s = (engine.run_ahead.tally.compute_s + engine.run_ahead.tally.update_s) / 7
        assert engine.metrics.since_last()["ptm_bound_s"] == pytest.approx(max(link_s, work_s), abs=1e-4)
        engine.settle()
        engine.pool.admission.released.settle()
        assert engine.run_ahead.link_use is not None
        use = engine.run_ahead.link_use()
        # What was sent for and not received, and fills of what was never stored, make a difference.
        assert use.read_bytes == pytest.approx(stats.loaded_bytes, rel=0.1)
        assert use.written_bytes == pytest.approx(stats.stored_bytes, rel=0.1)
        assert use.busy_s > 0
        summary = engine.metrics.summary()
        assert "lower bound" in summary
        assert ", predicted " in summary
        assert engine.run_ahead.tally.foretold > 0


def test_below_a_device_the_disk_counts_where_host_memory_overflows(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # So slow that its time is the bound, however long compute takes on a busy machine.
    disk = LinkRates(1e4, 4e6, 2e4)
    floor, need = needs(Net(), tmp_path, "mock+host+disk")
    monkeypatch.setattr("ptm_accel.pages.device_rates", lambda device: CARD)
    monkeypatch.setattr("ptm_accel.pages.disk_rates", lambda paths: [disk])
    with on_pages(Net(), "mock+host+disk", floor, tmp_path, host_bytes=AMPLE) as engine:
        assert engine.run_ahead.rates == engine.metrics.rates == CARD
        assert engine.metrics.disk_rates is None
    model = Net()
    with on_pages(model, "mock+host+disk", floor + (need - floor) // 4, tmp_path) as engine:
        assert engine.metrics.rates == CARD
        assert engine.run_ahead.rates == LinkRates(1e4, 3e6, 2e4)
        assert engine.run_ahead.host_s is None
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), fused=True))
        for number in range(4):
            step(model, optimizer, number)
        tier = engine.memory.disk
        assert tier is not None
        assert tier.bytes_read > 0
        engine.settle()
        engine.pool.admission.released.settle()
        seconds = max(
            disk.seconds(tier.bytes_read / 4, tier.bytes_written / 4),
            CARD.seconds(engine.pool.stats.loaded_bytes / 4, engine.pool.stats.stored_bytes / 4),
        )
        assert engine.metrics.since_last()["ptm_bound_s"] == pytest.approx(seconds, abs=1e-4)
        assert engine.run_ahead.link_use is not None
        assert engine.run_ahead.link_use().busy_s >= tier.busy_s > 0


def test_on_a_device_that_tells_times_it_is_its_own_waiting_that_is_shown() -> None:
    device = LateDevice(latency_s=0.2)
    memory = build_memory(Capacities(page_bytes=PAGE, host_bytes=AMPLE, device_bytes=AMPLE), device)
    timeline = memory.pool.timeline
    assert timeline is not None
    metrics = Metrics(memory)
    tensor = memory.pool.create("w", Tag.PARAM, torch.Size([PAGE]), torch.float32)
    memory.pool.fault(tensor)
    memory.pool.admission.evict(tensor)
    memory.pool.stats.stall_s = 1000.0
    timeline.switch(Span.PASS)
    memory.pool.fault(tensor)
    timeline.switch(Span.OTHER)
    timeline.look()
    assert 0.1 < metrics.read().stall_s < 100.0
    memory.close()
