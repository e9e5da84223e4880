"""A step that torch's profiler records with stacks and memory, for which it looks into the optimizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn
from torch.profiler import profile

from tests.optim.loops import LEAST, Clip, assert_as_in_torch
from tests.stacks import backward


@pytest.mark.parametrize("roomy", [False, True])
def test_steps_that_are_profiled(roomy: bool, tmp_path: Path) -> None:
    def loop(model: nn.Sequential, optimizer: Any, clip: Clip) -> list[float]:
        said = []
        for number in range(4):
            said.append(float(backward(model, number)))
            said.append(float(clip(LEAST)))
            with profile(record_shapes=True, profile_memory=True, with_stack=True):
                optimizer.step()
            optimizer.zero_grad()
        return said

    assert_as_in_torch(loop, tmp_path, roomy=roomy)
