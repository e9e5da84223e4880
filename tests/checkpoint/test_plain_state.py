"""Optimizer state as plain torch saves it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ptm_accel.checkpoint.plain_state import load_plain_state, write_plain_state
from ptm_accel.checkpoint.training_state import save_optimizer_state
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import CheckpointError, DiskError
from ptm_accel.optim.optimizer import PagedOptimizer

WIDTH = 32
Make = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: torch.optim.AdamW(_groups(m), lr=1e-2),
    "fused": lambda m: torch.optim.AdamW(_groups(m), lr=1e-2, fused=True),
    "amsgrad": lambda m: torch.optim.Adam(_groups(m), lr=1e-2, amsgrad=True),
    "momentum": lambda m: torch.optim.SGD(_groups(m), lr=1e-2, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(_groups(m), lr=1e-2),
}


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def net(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(width, width), nn.Tanh())))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        torch.manual_seed(number)
        model(torch.randn(4, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def paged(model: nn.Module, folder: Path, make: Make, **dials: Any) -> tuple[Engine, PagedOptimizer]:
    config = PTMConfig(host_memory=120 << 10, page_size=4096, disk=str(folder), **dials)
    engine = Engine.attach(model, config, device=torch.device("cpu"))
    return engine, engine.bind_optimizer(make(model))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_plain_run_goes_on_on_pages_and_back(kind: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[kind]
    whole = net()
    optimizer = make(whole)
    train(whole, optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    model = copy.deepcopy(whole)
    train(whole, optimizer, range(2, 4))

    engine, ours = paged(model, tmp_path, make)
    load_plain_state(ours, tmp_path / "optimizer.pt")
    train(model, ours, range(2, 4))
    expected = {name: value.clone() for name, value in whole.state_dict().items()}
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())

    saved = tmp_path / "saved"
    saved.mkdir()
    save_optimizer_state(ours, saved)
    back = net()
    back.load_state_dict(model.state_dict())
    engine.close()
    write_plain_state(saved, tmp_path / "back.pt")
    plain = make(back)
    plain.load_state_dict(torch.load(tmp_path / "back.pt", weights_only=True))
    train(whole, optimizer, range(4, 6))
    train(back, plain, range(4, 6))
    assert all(map(torch.equal, back.parameters(), whole.parameters()))
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    model = net()
    engine, ours = paged(model, tmp_path, OPTIMIZERS["adamw"])
    train(model, ours, range(1))
    before = engine.optimizer.state_dict()["state"][0]["exp_avg"].clone() if engine.optimizer else None
    for content in (b"", b"text", torch.zeros(2).numpy().tobytes()):
        (tmp_path / "bad.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match="is no optimizer state that can be read without running code"):
            load_plain_state(ours, tmp_path / "bad.pt")
    torch.save({"state": {}}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="is no optimizer state that can be read"):
        load_plain_state(ours, tmp_path / "bad.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="is no optimizer state that can be read without running code"):
        load_plain_state(ours, tmp_path / "bad.pt")
    assert before is not None
    assert torch.equal(ours.state_dict()["state"][0]["exp_avg"], before)
    engine.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: torch.optim.AdamW(net().parameters()), r"groups of \[10\] parameters, this optimizer has \[5, 5\]"),
        (lambda: OPTIMIZERS["momentum"](net()), "has no 'amsgrad' in parameter group 0, and AdamW has one"),
        (lambda: OPTIMIZERS["adamw"](net(48)), r"'exp_avg' of shape \(48, 48\) for 0.weight, which has \(32, 32\)"),
    ],
)
def test_the_state_of_something_else_is_refused(
    other: Callable[[], torch.optim.Optimizer], message: str, tmp_path: Path
) -> None:
    optimizer = other()
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    model = net()
    engine, ours = paged(model, tmp_path, OPTIMIZERS["adamw"])
    with pytest.raises(CheckpointError, match=message):
        load_plain_state(ours, tmp_path / "optimizer.pt")
    engine.close()


def test_masters_have_no_place_in_a_plain_run(tmp_path: Path) -> None:
    model = net().to(torch.bfloat16)
    engine, ours = paged(model, tmp_path, OPTIMIZERS["adamw"], master_weights="fp32")
    model(torch.randn(4, WIDTH, dtype=torch.bfloat16)).sum().backward()
    ours.step()
    save_optimizer_state(ours, tmp_path)
    with pytest.raises(CheckpointError, match="has fp32 masters .* which a plain run has no place for"):
        write_plain_state(tmp_path, tmp_path / "optimizer.pt")
    assert not (tmp_path / "optimizer.pt").exists()
    engine.close()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    engine, ours = paged(model, tmp_path, OPTIMIZERS["adamw"])
    train(model, ours, range(1))
    save_optimizer_state(ours, tmp_path)
    engine.close()

    def full(value: object, file: Path) -> None:
        file.write_bytes(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DiskError, match=r"cannot write optimizer.pt: No space left on device"):
        write_plain_state(tmp_path, tmp_path / "optimizer.pt")
    assert not list(tmp_path.glob("*optimizer.pt*"))
