"""What torch's profiler shows of copies and updates."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tests.tiers import needs, on_pages


def test_a_profiler_shows_which_block_a_copy_and_an_update_is_for(tmp_path: Path) -> None:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    floor, need = needs(build(), tmp_path, "host+disk")
    model = build()
    with on_pages(model, "host+disk", floor + (need - floor) // 4, tmp_path) as engine:
        optimizer = engine.bind_optimizer(torch.optim.AdamW(model.parameters()))
        for number in range(3):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                model(torch.full((2, 64), float(number))).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                engine.settle()
    names = {event.name for event in profiler.events()}
    for what in ("load", "store", "update"):
        assert any(name.startswith(f"ptm_accel: {what} 0.weight") for name in names), (what, sorted(names))
