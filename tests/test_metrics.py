"""What is told of a run: figures per step, the bound, what was foretold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from ptm_accel.engine import Engine
from ptm_accel.hardware.profile import LinkRates
from ptm_accel.metrics import Metrics
from ptm_accel.schedule.tally import Tally
from tests.model.test_run_ahead import Net, step
from tests.tiers import needs, on_pages

SLOW = LinkRates(1e6, 2e6, 1.3e6)


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
            engine.metrics.step_ended()
        yield engine


def test_a_step_is_shown_beside_its_bound_and_what_was_foretold(tmp_path: Path) -> None:
    with trained(tmp_path, 7) as engine:
        stats = engine.pool.stats
        keys = engine.metrics.since_last()
        assert stats.loaded_bytes > 0 < stats.stored_bytes
        link_s = SLOW.seconds(stats.loaded_bytes / 7, stats.stored_bytes / 7)
        tally = engine.run_ahead.tally
        work_s = (tally.compute_s + tally.update_s) / 7
        assert keys["ptm_bound_s"] == pytest.approx(max(link_s, work_s), abs=1e-4)
        summary = engine.metrics.summary()
        assert "times its lower bound of" in summary
        assert ", foretold " in summary
        assert "written to disk in a day of this" in summary
        assert tally.passes == 7
        assert 0 < tally.foretold < 7
        assert tally.passes_s > tally.compute_s > 0
        assert tally.update_s >= tally.beside_s > 0
        assert tally.foretold_s > 0
        assert tally.foretold_took_s <= tally.passes_s


def test_nothing_is_said_of_what_is_not_known(tmp_path: Path) -> None:
    with trained(tmp_path, 2) as engine:
        # Too few steps for a median that means something.
        assert engine.metrics.times() is None
        assert "lower bound" not in engine.metrics.summary()
        engine.metrics.rates = None
        step(engine.model, engine.optimizer, 2)  # type: ignore[arg-type]
        engine.metrics.step_ended()
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
