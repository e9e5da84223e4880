"""fp32 masters follow what is written to their parameters from outside, and keep their precision elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ptm_accel.integrations.transformers.weights import load_weights
from safetensors.torch import save_file
from torch import nn

from ptm_accel.checkpoint.training_state import load_optimizer_state, save_optimizer_state
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.outside import gathered


def prepared(tmp_path: Path) -> tuple[nn.Linear, Engine, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(96, 96, bias=False).to(torch.bfloat16)
    config = PTMConfig(host_memory="4MiB", disk=str(tmp_path), page_size=4096, master_weights="fp32")
    engine = Engine.attach(model, config)
    optimizer = engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=1e-3))
    step(model, optimizer)
    return model, engine, optimizer


def step(model: nn.Linear, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    """One step with a gradient of ones, which is what the loss below has; returns the masters after it."""
    model(torch.ones(1, 96, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()["state"][0]
    return state["master"].clone()


@pytest.mark.parametrize("way", ["gathered", "load_state_dict", "in place", "exchanged", "exchanged unread"])
def test_a_write_from_outside_reaches_the_master(way: str, tmp_path: Path) -> None:
    model, engine, optimizer = prepared(tmp_path)
    before = optimizer.state_dict()["state"][0]["master"].clone()
    values = model.state_dict()["weight"].clone()
    values[0] = 2.0
    if way == "gathered":
        with gathered(model, write=True), torch.no_grad():
            model.weight[0] = 2.0
    elif way == "in place":
        with torch.no_grad():
            model.weight[0] = 2.0
    elif way == "exchanged":
        model.weight.data = values
    elif way == "load_state_dict":
        model.load_state_dict({"weight": values})
    else:
        next(model.parameters()).data = values
    after = step(model, optimizer)
    expected = before.clone()
    expected[0] = 2.0
    expected.sub_(torch.full_like(expected, 1e-3))
    assert torch.equal(after, expected), "rows that nobody wrote keep what their bf16 values round away"
    assert torch.equal(model.state_dict()["weight"], expected.to(torch.bfloat16))
    engine.check_integrity()


def test_a_write_to_a_value_of_a_state_dictionary_reaches_the_master(tmp_path: Path) -> None:
    """Also where the value is a copy, since its parameter is away."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(96, 96, bias=False) for _ in range(8))).to(torch.bfloat16)
    config = PTMConfig(host_memory="384KiB", disk=str(tmp_path), page_size=4096, master_weights="fp32")
    engine = Engine.attach(model, config)
    optimizer = engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=0.0))
    for written in (None, 0.5):
        state = model.state_dict()
        assert written is None or not all(slot.value.place.resident for slot in engine.slots)
        for value in state.values():
            value.fill_(value[0, 0] if written is None else written)
        model(torch.ones(1, 96, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for number, kept in optimizer.state_dict()["state"].items():
        assert kept["master"].eq(0.5).all(), number
    assert all(param.eq(0.5).all() for param in model.parameters())
    engine.check_integrity()


def test_a_write_before_a_save_is_not_lost_on_resuming(tmp_path: Path) -> None:
    """The master that is saved does not have it yet: the next update would have given it to it."""
    found = []
    for resumes in (False, True):
        model, engine, optimizer = prepared(tmp_path)
        with torch.no_grad():
            model.weight[0] = 2.0
        if resumes:
            save_file(model.state_dict(), tmp_path / "model.safetensors")
            save_optimizer_state(optimizer, tmp_path)
            model, engine, optimizer = prepared(tmp_path)
            load_weights(model, tmp_path)
            load_optimizer_state(optimizer, tmp_path)
        found.append(step(model, optimizer))
        engine.check_integrity()
    assert torch.equal(*found)
    assert found[0][0].eq(2.0 - 1e-3).all()


def test_reading_changes_no_master(tmp_path: Path) -> None:
    model, _, optimizer = prepared(tmp_path)
    before = optimizer.state_dict()["state"][0]["master"].clone()
    with gathered(model):
        assert model.weight.shape == (96, 96)
    assert torch.equal(step(model, optimizer), before.sub(1e-3))


def test_a_parameter_that_is_given_another_shape_goes_on_with_its_master(tmp_path: Path) -> None:
    model, engine, optimizer = prepared(tmp_path)
    before = optimizer.state_dict()["state"][0]["master"].clone()
    model.weight.data = model.state_dict()["weight"].clone().reshape(48, 192)
    model(torch.ones(1, 192, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    expected = before.reshape(-1) - 1e-3
    assert torch.equal(optimizer.state_dict()["state"][0]["master"].reshape(-1), expected)
    assert torch.equal(model.state_dict()["weight"], expected.reshape(48, 192).to(torch.bfloat16))
    engine.check_integrity()
