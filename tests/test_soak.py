"""Ten thousand steps of a tiny model at a tiny budget: nothing grows."""

from __future__ import annotations

import gc
import os
import threading
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from tests.tiers import needs, on_pages

STEPS, WARM_UP = 10_000, 2_000

LEARNT = 2
"""In the first backward it is seen which gradients can be computed on pages, and the second one does so: they come into
being earlier there than the first one's trace has them. From the third on all passes are as they were traced."""

GROWTH_BYTES = 4 << 20
"""What the process may have grown by: less than 500 bytes a step."""


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_steps_leave_no_trace(tmp_path: Path) -> None:
    floor, need = needs(net(), tmp_path, "host+disk")
    model = net()
    process = psutil.Process()
    with on_pages(model, "host+disk", floor + (need - floor) // 4, tmp_path) as engine:
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True))
        x = torch.randn(4, 64)
        before, departures = (0, 0, 0), 0
        for number in range(STEPS):
            if number == LEARNT:
                departures = engine.run_ahead.departures
            if number == WARM_UP:
                gc.collect()
                before = process.memory_info().rss, threading.active_count(), len(os.listdir("/proc/self/fd"))
            model(x).square().mean().backward()
            engine.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        gc.collect()
        assert process.memory_info().rss - before[0] < GROWTH_BYTES
        assert threading.active_count() == before[1]
        assert len(os.listdir("/proc/self/fd")) == before[2]
        assert engine.run_ahead.departures == departures
        assert engine.pool.stats.hits > STEPS
