"""Optimizer state as plain torch saves it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn

from ptm_accel.checkpoint.plain_state import load_either_state, load_plain_state, write_plain_state
from ptm_accel.checkpoint.training_state import INDEX_NAME, save_optimizer_state
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
        model(torch.randn(4, WIDTH).to(next(model.parameters()).dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def paged(model: nn.Module, folder: Path, make: Make, **options: Any) -> tuple[Engine, PagedOptimizer]:
    config = PTMConfig(host_memory=120 << 10, page_size=4096, disk=str(folder), **options)
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


class Wide(torch.optim.Optimizer):
    """Keeps state that is wider than a bf16 parameter, full-size and small."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if not state:
                        state["sum"], state["scale"] = torch.zeros_like(p, dtype=torch.float32), torch.ones(1)
                        state["step"] = torch.zeros(())
                    state["step"] += 1
                    state["sum"].add_(p.grad.float(), alpha=1.01)
                    state["scale"] *= 0.99
                    p.sub_((state["sum"] * state["scale"] * group["lr"]).to(p.dtype))


WIDTHS: dict[str, Make] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "wide": lambda m: Wide(m.parameters()),
}


def of_dtype(state: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """A state as a run of another dtype has saved it."""
    made = {
        number: {k: v.to(dtype) if isinstance(v, torch.Tensor) and k != "step" else v for k, v in entries.items()}
        for number, entries in state["state"].items()
    }
    return {**state, "state": made}


def described(state: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {
        number: {
            key: (value.dtype, value.tolist()) if isinstance(value, torch.Tensor) else value
            for key, value in entries.items()
        }
        for number, entries in state["state"].items()
    }


@pytest.mark.parametrize("kind", WIDTHS)
@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("saved", [torch.float32, torch.float64, torch.bfloat16])
def test_state_is_as_wide_as_torch_makes_it(kind: str, begun: bool, saved: torch.dtype, tmp_path: Path) -> None:
    """Also where there is state already, of another width."""
    make = WIDTHS[kind]
    model, plain = (net().to(torch.bfloat16) for _ in range(2))
    source = make(net().to(torch.bfloat16))
    _some_steps(source)
    given = of_dtype(source.state_dict(), saved)
    theirs = make(plain)
    engine, ours = paged(model, tmp_path, make)
    if begun:
        train(plain, theirs, range(2))
        train(model, ours, range(2))
        assert described(ours.state_dict()) == described(theirs.state_dict()) != described(given)
    torch.save(given, tmp_path / "optimizer.pt")
    theirs.load_state_dict(copy.deepcopy(given))
    load_plain_state(ours, tmp_path / "optimizer.pt")
    assert described(ours.state_dict()) == described(theirs.state_dict())
    ours.load_state_dict(ours.state_dict())
    assert described(ours.state_dict()) == described(theirs.state_dict())
    engine.check_integrity()
    engine.close()


def test_state_of_ours_comes_back_as_wide_as_it_was(tmp_path: Path) -> None:
    model = net().to(torch.bfloat16)
    engine, ours = paged(model, tmp_path, WIDTHS["wide"])
    train(model, ours, range(2))
    before = described(ours.state_dict())
    save_optimizer_state(ours, tmp_path)
    train(model, ours, range(2, 4))
    load_either_state(ours, tmp_path / INDEX_NAME)
    assert described(ours.state_dict()) == before
    assert before[0]["sum"][0] == torch.float32
    engine.close()


def _some_steps(optimizer: torch.optim.Optimizer) -> None:
    for number in range(2):
        torch.manual_seed(number)
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.randn(param.shape).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()


def test_with_masters_state_is_as_wide_as_they_are(tmp_path: Path) -> None:
    model, plain = net().to(torch.bfloat16), net()
    source = torch.optim.AdamW(net().to(torch.bfloat16).parameters(), lr=1e-2)
    _some_steps(source)
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    engine, ours = paged(model, tmp_path, WIDTHS["adamw"], master_weights="fp32")
    for each in (ours, theirs):
        each.load_state_dict(copy.deepcopy(source.state_dict()))
    assert described(ours.state_dict()) == described(theirs.state_dict())
    engine.close()


def older(state: dict[str, Any]) -> dict[str, Any]:
    """As a version of torch has saved it that did not know some of the keys, and counted steps by a number."""
    new = ("decoupled_weight_decay", "fused", "capturable", "differentiable", "foreach", "maximize")
    groups = [{k: v for k, v in group.items() if k not in new} for group in state["param_groups"]]
    made = {
        number: {k: int(v) if k == "step" else v for k, v in entries.items()}
        for number, entries in state["state"].items()
    }
    return {"state": made, "param_groups": groups}


@pytest.mark.parametrize("kind", ["adamw", "amsgrad", "momentum", "adagrad"])
def test_what_older_versions_lack_is_filled_in_as_by_torch(kind: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[kind]
    source = make(net())
    _some_steps(source)
    given = older(source.state_dict())
    # Numbers as the file has them, which need not count from zero.
    for group in given["param_groups"]:
        group["params"] = [number + 7 for number in group["params"]]
    given["state"] = {number + 7: entries for number, entries in given["state"].items()}
    model, plain = net(), net()
    theirs = make(plain)
    engine, ours = paged(model, tmp_path, make)
    # What torch forgets of the group that there was.
    for each in (theirs, ours):
        each.param_groups[0]["initial_lr"] = 1.0
        each.param_groups[0]["maximize"] = True
    torch.save(given, tmp_path / "optimizer.pt")
    theirs.load_state_dict(copy.deepcopy(given))
    load_plain_state(ours, tmp_path / "optimizer.pt")
    for here, there in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert {k: v for k, v in here.items() if k != "params"} == {k: v for k, v in there.items() if k != "params"}
    assert described(ours.state_dict()) == described(theirs.state_dict())
    train(model, ours, range(2))
    train(plain, theirs, range(2))
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
    engine.close()


def test_a_dictionary_that_is_loaded_twice_is_not_shared(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=torch.tensor(0.5), momentum=0.9)

    model, plain = net(), net()
    theirs = make(plain)
    engine, ours = paged(model, tmp_path, make)
    found = []
    for each in (ours, theirs):
        given = make(net()).state_dict()
        given["param_groups"][0]["noted"] = [1]
        each.load_state_dict(given)
        each.param_groups[0]["lr"].mul_(0.1)
        each.param_groups[0]["noted"].append(2)
        found.append((given["param_groups"][0]["lr"].item(), given["param_groups"][0]["noted"]))
        each.load_state_dict(given)
        found[-1] += (each.param_groups[0]["lr"].item(), each.param_groups[0]["noted"])
    assert found[0] == found[1] == (0.5, [1], 0.5, [1])
    engine.close()


def test_what_is_no_state_is_refused(tmp_path: Path) -> None:
    model = net()
    engine, ours = paged(model, tmp_path, OPTIMIZERS["adamw"])
    train(model, ours, range(1))
    before = engine.optimizer.state_dict()["state"][0]["exp_avg"].clone() if engine.optimizer else None
    for content in (b"", b"text", torch.zeros(2).numpy().tobytes()):
        (tmp_path / "bad.pt").write_bytes(content)
        with pytest.raises(CheckpointError, match="is not an optimizer state that can be read without running code"):
            load_plain_state(ours, tmp_path / "bad.pt")
    torch.save({"state": {}}, tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="is not an optimizer state that can be read"):
        load_plain_state(ours, tmp_path / "bad.pt")
    torch.save(nn.Linear(2, 2), tmp_path / "bad.pt")
    with pytest.raises(CheckpointError, match="is not an optimizer state that can be read without running code"):
        load_plain_state(ours, tmp_path / "bad.pt")
    assert before is not None
    assert torch.equal(ours.state_dict()["state"][0]["exp_avg"], before)
    engine.close()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: torch.optim.AdamW(net().parameters()), r"groups of \[10\] parameters, this optimizer has \[5, 5\]"),
        (lambda: OPTIMIZERS["momentum"](net()), "has no 'betas' in parameter group 0, and AdamW has one"),
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


def test_an_export_follows_no_link(tmp_path: Path) -> None:
    model = net()
    engine, ours = paged(model, tmp_path, OPTIMIZERS["adamw"])
    train(model, ours, range(1))
    save_optimizer_state(ours, tmp_path)
    engine.close()
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    for name in ("optimizer.pt", ".optimizer.pt.incomplete"):
        (tmp_path / name).symlink_to(victim)
    write_plain_state(tmp_path, tmp_path / "optimizer.pt", replace_newer=True)
    assert victim.read_bytes() == b"mine"
    assert not (tmp_path / "optimizer.pt").is_symlink()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net()
    engine, ours = paged(model, tmp_path, OPTIMIZERS["adamw"])
    train(model, ours, range(1))
    save_optimizer_state(ours, tmp_path)
    engine.close()

    def full(value: object, file: BinaryIO) -> None:
        file.write(b"part")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(DiskError, match=r"cannot write optimizer.pt: No space left on device"):
        write_plain_state(tmp_path, tmp_path / "optimizer.pt")
    assert not list(tmp_path.glob("*optimizer.pt*"))
