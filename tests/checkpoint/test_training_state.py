"""Optimizer state in safetensors: exact resume under any budget, refusals before any change, memory."""

from __future__ import annotations

import copy
import errno
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ptm_accel.checkpoint import training_state
from ptm_accel.checkpoint.directory import staged
from ptm_accel.checkpoint.training_state import (
    INDEX_NAME,
    Expected,
    check_optimizer_state,
    load_optimizer_state,
    save_optimizer_state,
    saved_last,
)
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.errors import CheckpointError, DiskError
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.optim.support import blank_state
from tests.plain_loop import same_bits
from tests.prepared import run_prepared
from tests.tiers import on_pages, open_memory

WIDTH = 48
AMPLE, SCANT = 8 << 20, 640 << 10


class Net(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.unused = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return nn.functional.cross_entropy(self.head(x).float() * self.scale, ids)


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=1e-2, fused=True, amsgrad=True)


MAKES: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "sgd": lambda m: torch.optim.SGD(groups(m), lr=1e-2, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(groups(m), lr=1e-2, initial_accumulator_value=0.5),
    "adafactor": lambda m: torch.optim.Adafactor(groups(m), lr=1e-2),
    "rprop": lambda m: torch.optim.Rprop(groups(m), lr=1e-2),
}


class Run:
    """A model on pages with its optimizer."""

    def __init__(
        self,
        directory: Path,
        make: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        *,
        kind: str = "host+disk",
        budget: int = AMPLE,
        dtype: torch.dtype = torch.float32,
        masters: str | None = None,
        model: nn.Module | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.model = (model or Net()).to(dtype)
        memory = open_memory(kind, budget, directory)
        self.engine = Engine.attach(self.model, PTMConfig(master_weights=masters, page_size=4096), memory=memory)
        with blank_state(self.engine.slots):
            inner = make(self.model)
        self.optimizer: PagedOptimizer = self.engine.bind_optimizer(inner)

    def train(self, first: int, last: int) -> list[float]:
        losses = []
        for number in range(first, last):
            ids = torch.randint(0, 64, (32,), generator=torch.Generator().manual_seed(number))
            loss = self.model(ids)
            loss.backward()
            losses.append(loss.item())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return losses

    def numbers(self) -> dict[str, Any]:
        weights = {k: v.clone() for k, v in self.model.state_dict().items()}
        return {"weights": weights, **copy.deepcopy(self.optimizer.state_dict())}

    def close(self) -> None:
        self.engine.check_integrity()
        self.engine.close()


def assert_equal(a: Any, b: Any, at: str = "") -> None:
    assert type(a) is type(b), at
    if isinstance(a, dict):
        assert a.keys() == b.keys(), at
        for key in a:
            assert_equal(a[key], b[key], f"{at}/{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), at
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_equal(x, y, f"{at}/{i}")
    else:
        assert same_bits(a, b) if isinstance(a, torch.Tensor) else a == b, at


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(("before", "after"), [("host+disk", "mock+host+disk"), ("mock+host", "host+disk")])
def test_resume_is_exact_under_other_budgets(tmp_path: Path, name: str, before: str, after: str) -> None:
    state = tmp_path / "state"
    state.mkdir()
    whole = Run(tmp_path, MAKES[name])
    losses = whole.train(0, 4)

    first = Run(tmp_path, MAKES[name], kind=before, budget=SCANT)
    assert first.train(0, 2) == losses[:2]
    first.optimizer.param_groups[1]["lr"] = 5e-3
    save_optimizer_state(first.optimizer, state)
    weights = first.numbers()["weights"]
    first.optimizer.param_groups[1]["lr"] = 1e-2
    kept = first.numbers()
    first.close()

    second = Run(tmp_path, MAKES[name], kind=after)
    second.train(7, 9)
    second.model.load_state_dict(weights)
    load_optimizer_state(second.optimizer, state)
    assert second.optimizer.param_groups[1]["lr"] == 5e-3
    second.optimizer.param_groups[1]["lr"] = 1e-2
    assert_equal(second.numbers(), kept)
    assert second.train(2, 4) == losses[2:]
    assert_equal(second.numbers(), whole.numbers())
    second.close()
    whole.close()


def test_masters_are_kept(tmp_path: Path) -> None:
    whole = Run(tmp_path, dtype=torch.bfloat16, masters="fp32")
    losses = whole.train(0, 4)
    first = Run(tmp_path, dtype=torch.bfloat16, masters="fp32", budget=SCANT)
    first.train(0, 2)
    state = tmp_path / "state"
    state.mkdir()
    save_optimizer_state(first.optimizer, state)
    second = Run(tmp_path, dtype=torch.bfloat16, masters="fp32")
    second.model.load_state_dict(first.numbers()["weights"])
    load_optimizer_state(second.optimizer, state)
    assert second.train(2, 4) == losses[2:]
    assert_equal(second.numbers(), whole.numbers())
    assert "embed.weight/master" in json.loads((state / "optimizer.json").read_text())["weight_map"]


def test_pages_without_values_come_back_as_their_fill(tmp_path: Path) -> None:
    first = Run(tmp_path, MAKES["adagrad"])
    save_optimizer_state(first.optimizer, tmp_path)
    second = Run(tmp_path, lambda m: torch.optim.Adagrad(groups(m), lr=1e-2, initial_accumulator_value=0.25))
    load_optimizer_state(second.optimizer, tmp_path)
    assert_equal(second.numbers(), first.numbers())
    sums = second.optimizer.state_dict()["state"][0]["sum"]
    assert torch.equal(sums, torch.full((64, WIDTH), 0.5))


def test_state_that_the_checkpoint_lacks_is_forgotten(tmp_path: Path) -> None:
    fresh = Run(tmp_path)
    save_optimizer_state(fresh.optimizer, tmp_path)
    used = Run(tmp_path)
    used.train(0, 2)
    load_optimizer_state(used.optimizer, tmp_path)
    assert used.optimizer.state_dict()["state"] == {}
    assert not list(used.optimizer.states.named_entries())


def test_the_layout_is_plain_safetensors_and_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_state, "SHARD_BYTES", 40_000)
    run = Run(tmp_path, budget=SCANT)
    run.train(0, 1)
    (tmp_path / "optimizer-00001-of-00099.safetensors").touch()
    assert saved_last(tmp_path, ()) is None
    save_optimizer_state(run.optimizer, tmp_path)
    assert saved_last(tmp_path, ()) == tmp_path / INDEX_NAME
    files = sorted(p.name for p in tmp_path.iterdir() if p.name.startswith("optimizer"))
    count = len(files) - 1
    assert count > 2
    assert files == sorted(
        [f"optimizer-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)] + ["optimizer.json"]
    )
    index = json.loads((tmp_path / "optimizer.json").read_text())
    assert (index["format"], index["version"], index["optimizer"]) == ("ptm_accel optimizer state", 1, "torch.AdamW")
    assert index["param_groups"][0]["params"][:2] == ["embed.weight", "layers.0.weight"]
    assert index["param_groups"][0]["values"]["betas"] == {"tuple": [0.9, 0.999]}
    assert index["parameters"]["embed.weight"] == {"shape": [64, WIDTH], "dtype": "float32"}
    seen: dict[str, str] = {}
    for file in files[:-1]:
        with safe_open(tmp_path / file, framework="pt") as shard:
            names = list(shard.keys())
            sizes = [shard.get_tensor(name).nbytes for name in names]
        assert sum(sizes) <= 40_000 or len(names) == 1
        seen.update(dict.fromkeys(names, file))
    assert seen == index["weight_map"]
    assert {"embed.weight/exp_avg", "embed.weight/step", "layers.3.bias/max_exp_avg_sq"} <= seen.keys()
    assert not any(name.startswith("head") for name in seen)


def test_hyperparameters_may_be_tensors(tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups(model), lr=torch.tensor(1e-2, dtype=torch.float64), fused=True)

    first = Run(tmp_path, make)
    first.train(0, 1)
    first.optimizer.param_groups[0]["lr"].mul_(0.3)
    first.optimizer.param_groups[1]["note"] = {"a": [1, None, "x"], "b": (True, float("inf"))}
    save_optimizer_state(first.optimizer, tmp_path)
    second = Run(tmp_path, make)
    load_optimizer_state(second.optimizer, tmp_path)
    assert_equal(second.optimizer.state_dict()["param_groups"], first.optimizer.state_dict()["param_groups"])


def test_keys_that_are_no_text_are_refused(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(0, 1)
    next(iter(run.optimizer.states)).small[0] = 3  # type: ignore[index]
    message = r"state of \S+ has the key 0, a int, which cannot be saved: it would come back as text\. Use an optimizer"
    with pytest.raises(CheckpointError, match=message):
        save_optimizer_state(run.optimizer, tmp_path)


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.optimizer.param_groups[0]["schedule"] = adamw
    message = (
        r"the optimizer's param_groups/0/schedule is a function, which cannot be saved: only numbers, text, tensors"
    )
    with pytest.raises(CheckpointError, match=message):
        save_optimizer_state(run.optimizer, tmp_path)


def test_a_full_disk_is_said_by_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    run.train(0, 1)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(training_state, "save_file", fail)
    message = r"cannot save checkpoint-1: No space left on device after 0 B, with .* free then"
    with pytest.raises(DiskError, match=message) as caught, staged(tmp_path / "checkpoint-1") as staging:
        save_optimizer_state(run.optimizer, staging)
    assert caught.value.errno == errno.ENOSPC


def test_an_index_that_cannot_be_written_is_said_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)

    def fail(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(Path, "write_text", fail)
    message = "cannot save checkpoint-1: Disk quota exceeded after 0 B"
    with pytest.raises(DiskError, match=message), staged(tmp_path / "checkpoint-1") as staging:
        save_optimizer_state(run.optimizer, staging)


# ---- what does not fit together is refused before anything is changed ------------------------------------------------


def other_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def other_order(model: nn.Module) -> torch.optim.Optimizer:
    made = groups(model)
    made[0]["params"][1:3] = made[0]["params"][2:0:-1]
    return torch.optim.AdamW(made, lr=1e-2, fused=True)


def fewer(model: nn.Module) -> torch.optim.Optimizer:
    made = groups(model)
    made[0]["params"] = [p for p in made[0]["params"] if p is not model.unused.weight]
    return torch.optim.AdamW(made, lr=1e-2, fused=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"make": MAKES["sgd"]},
            r"the optimizer differs: the checkpoint has torch.AdamW, this run has torch.SGD. The optimizer is",
        ),
        (
            {"make": other_groups},
            r"parameter 0 of group 0 differs: the checkpoint has embed.weight, this run has scale.",
        ),
        (
            {"make": other_order},
            r"parameter 1 of group 0 differs: the checkpoint has layers.0.weight, this run has layers.1",
        ),
        (
            {"make": fewer},
            r"of group 0 differs: the checkpoint has unused.weight, this run has ",
        ),
        (
            {"model": Net(64)},
            r"parameter embed.weight differs: the checkpoint has \(64, 48\) of float32, this run has \(64, 64",
        ),
        (
            {"dtype": torch.bfloat16, "masters": "fp32"},
            r"the state differs: the checkpoint has no masters, this run has fp32 masters. .* Set master_weights to no",
        ),
    ],
)
def test_another_optimizer_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    first = Run(tmp_path)
    first.train(0, 1)
    save_optimizer_state(first.optimizer, tmp_path)
    second = Run(tmp_path, **changes)
    second.train(0, 2)
    before = second.numbers()
    with pytest.raises(CheckpointError, match=message):
        load_optimizer_state(second.optimizer, tmp_path)
    assert_equal(second.numbers(), before)
    second.close()


@pytest.mark.parametrize("kind", MAKES)
def test_state_of_parameters_in_another_dtype_is_cast_as_by_torch(kind: str, tmp_path: Path) -> None:
    first = Run(tmp_path, MAKES[kind])
    first.train(0, 2)
    save_optimizer_state(first.optimizer, tmp_path)
    plain = MAKES[kind](Net().to(torch.bfloat16))
    plain.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
    first.close()
    second = Run(tmp_path, MAKES[kind], dtype=torch.bfloat16)
    second.train(0, 1)
    load_optimizer_state(second.optimizer, tmp_path)
    ours, theirs = second.optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for number, entries in theirs.items():
        for key, value in entries.items():
            assert same_bits(ours[number][key].clone(), value), (number, key)
    second.close()


def edit(directory: Path, change: Callable[[dict[str, Any]], object]) -> None:
    path = directory / "optimizer.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


def truncate(directory: Path) -> None:
    path = directory / "optimizer-00002-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def swap_shards(directory: Path) -> None:
    shutil.copy(directory / "optimizer-00001-of-00002.safetensors", directory / "optimizer-00002-of-00002.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"optimizer-00002-of-00002.safetensors is damaged: .* Resume from another checkpoint"),
        (
            lambda d: (d / "optimizer-00002-of-00002.safetensors").unlink(),
            r"-00002-of-00002.safetensors, which holds .* is mi",
        ),
        (swap_shards, r"optimizer-00002-of-00002.safetensors is damaged: it does not hold"),
        (lambda d: (d / "optimizer.json").unlink(), r"has no optimizer state: optimizer.json is missing. Resume from"),
        (lambda d: (d / "optimizer.json").write_text("{"), r"optimizer.json is damaged: Expecting property name"),
        (
            lambda d: (d / "optimizer.json").write_text("[]"),
            r"optimizer.json is damaged: it is not of the format 'ptm_accel",
        ),
        (
            lambda d: edit(d, lambda i: i.update(version=2)),
            r"has version 2 of its format, and this ptm_accel reads version 1\. A later ptm_accel wrote",
        ),
        (lambda d: edit(d, lambda i: i.pop("state")), r"optimizer.json is damaged: it lacks 'state'"),
        (lambda d: edit(d, lambda i: i["weight_map"].pop("scale/step")), r"it does not say where scale/step is"),
        (
            lambda d: edit(
                d, lambda i: i["state"]["embed.weight"].update(exp_avg={"paged": "layers.0.weight/exp_avg"})
            ),
            r"the state exp_avg of embed.weight differs: the checkpoint has \(48, 48\), this run has shape \(64, 48\)",
        ),
    ],
)
def test_a_damaged_state_is_refused(
    tmp_path: Path, damage: Callable[[Path], object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_state, "SHARD_BYTES", 100_000)
    run = Run(tmp_path)
    run.train(0, 1)
    save_optimizer_state(run.optimizer, tmp_path)
    damage(tmp_path)
    run.train(1, 2)
    before = run.numbers()
    with pytest.raises(CheckpointError, match=message):
        load_optimizer_state(run.optimizer, tmp_path)
    assert_equal(run.numbers(), before)
    run.close()


def entry(index: dict[str, Any]) -> dict[str, Any]:
    state: dict[str, Any] = index["state"]["embed.weight"]
    return state


def values(index: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = index["param_groups"][0]["values"]
    return found


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "text as step": (lambda i: entry(i).update(step="three"), "state/embed.weight/step is no number"),
    "a list in a dictionary's place": (lambda i: values(i).update(lr={"dict": []}), "param_groups/0/lr is no value"),
    "nesting": (lambda i: values(i).update(lr=nested(100)), "param_groups/0/lr is no value"),
    "an unknown container": (lambda i: entry(i).update(note={"set": [1]}), "state/embed.weight/note is no value"),
    "a number as tensor": (lambda i: entry(i).update(exp_avg=3.0), "state/embed.weight/exp_avg is no tensor"),
    "a tensor's name": (lambda i: entry(i).update(exp_avg={"paged": 3}), "state/embed.weight/exp_avg is no value"),
    "text as rate": (lambda i: values(i).update(lr="fast"), r"param_groups/0/lr is 'fast', and 0.01 in this run"),
    "text as betas": (lambda i: values(i).update(betas={"tuple": ["a", 1]}), "param_groups/0/betas is .* in this run"),
    "no groups": (lambda i: i.update(param_groups={}), "param_groups is a dict, and no list"),
    "an optimizer's name": (lambda i: i.update(optimizer=[]), "optimizer is a list, and no str"),
    "a group's names": (lambda i: i["param_groups"][0].update(params=[1]), "param_groups/0 is no group of parameters"),
    "a group": (lambda i: i["param_groups"].insert(0, []), "param_groups/0 is no group of parameters"),
    "a shape": (lambda i: i["parameters"].update({"scale": {"shape": "x"}}), "parameters/scale is no shape and dtype"),
    "no shape": (lambda i: i["parameters"].pop("scale"), "it lacks shape and dtype of scale"),
    "a state": (lambda i: i["state"].update(scale=[]), "state/scale is of no parameter in a group"),
    "another's state": (lambda i: i["state"].update(other={}), "state/other is of no parameter in a group"),
    "a file's name": (
        lambda i: i["weight_map"].update({"scale/step": 1}),
        "weight_map/scale/step is no name of a file",
    ),
    "elsewhere": (
        lambda i: i["weight_map"].update({"scale/step": "../optimizer-00001-of-00002.safetensors"}),
        "weight_map/scale/step is no name of a file in this folder",
    ),
    "a long name": (
        lambda i: i["weight_map"].update({"scale/step": "x" * 300}),
        "x{300} is damaged: File name too long",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_types_in_an_index_are_named(kind: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(0, 1)
    save_optimizer_state(run.optimizer, tmp_path)
    change, text = WRONG[kind]
    edit(tmp_path, change)
    before = run.numbers()
    with pytest.raises(CheckpointError, match=rf"{text}.*\. Resume from another checkpoint\."):
        load_optimizer_state(run.optimizer, tmp_path)
    assert_equal(run.numbers(), before)
    run.close()


@pytest.mark.parametrize("name", ["optimizer.json", "optimizer-00001-of-00001.safetensors"])
def test_a_pipe_in_a_files_place_is_named(name: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(0, 1)
    save_optimizer_state(run.optimizer, tmp_path)
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with pytest.raises(CheckpointError, match=f"{name} is damaged: it is no regular file"):
        load_optimizer_state(run.optimizer, tmp_path)
    run.close()


@pytest.mark.parametrize("content", ["[" * 100_000, "1" * 5000, "NUL\0"])
def test_an_index_that_is_no_json_is_named(content: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    (tmp_path / "optimizer.json").write_text(content)
    with pytest.raises(CheckpointError, match="optimizer.json is damaged: "):
        load_optimizer_state(run.optimizer, tmp_path)
    run.close()


@pytest.mark.parametrize("moment", ["before", "on pages"])
def test_a_state_is_compared_before_its_optimizer_is_on_pages(moment: str, tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(0, 1)
    save_optimizer_state(run.optimizer, tmp_path)

    def expected(make: Callable[[nn.Module], torch.optim.Optimizer], *, masters: bool = False) -> Expected:
        if moment == "on pages" and make is adamw and not masters:
            return Expected.of(run.optimizer)
        return Expected.before(make(run.model), run.engine.slots, masters=masters)

    check_optimizer_state(tmp_path, expected(adamw))
    check_optimizer_state(tmp_path)
    for others, text in (
        (expected(MAKES["sgd"]), r"the optimizer differs: the checkpoint has torch\.AdamW, this run has torch\.SGD"),
        (expected(other_order), r"parameter 1 of group 0 differs"),
        (expected(adamw, masters=True), r"the checkpoint has no masters, this run has fp32 masters"),
    ):
        with pytest.raises(CheckpointError, match=text):
            check_optimizer_state(tmp_path, others)
    run.close()


ROOT = Path(__file__).resolve().parents[2]
MEASURED = """
import json, sys
from pathlib import Path
from types import FrameType
import torch
from ptm_accel.checkpoint import training_state
from ptm_accel.checkpoint.training_state import load_optimizer_state, save_optimizer_state
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from tests.anonymous_memory import Peak, anonymous_bytes

BUDGET, SHARD, MIB = 24 << 20, 8 << 20, 1 << 20

def build():
    with torch.device("meta"):
        model = torch.nn.Sequential(*[torch.nn.Linear(512, 512, bias=False) for _ in range(96)])
    engine = Engine.attach(model, PTMConfig(host_memory=BUDGET, disk=sys.argv[1], page_size=65536))
    return engine, engine.bind_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))

engine, optimizer = build()
start = anonymous_bytes()
for number, slot in enumerate(engine.slots):
    state = optimizer.states.of(slot)
    for key in ("exp_avg", "exp_avg_sq"):
        optimizer.states.put(state, key, torch.full((512, 512), float(number)))
    optimizer.states.put(state, "step", torch.tensor(3.0))
out = Path(sys.argv[1]) / "state"
out.mkdir()
with Peak() as saving:
    training_state.SHARD_BYTES = SHARD
    save_optimizer_state(optimizer, out)
engine.close()
del engine, optimizer, state, slot
engine, optimizer = build()
with Peak() as loading:
    load_optimizer_state(optimizer, out)
values = [float(engine.pages.executor.snapshot(optimizer.states.of(s).paged["exp_avg"])[0, 0]) for s in engine.slots]
assert values == [float(i) for i in range(96)], values
print(json.dumps({"state": 2 * 96 * MIB, "saving": saving.bytes - start, "loading": loading.grown}))
"""


def test_saving_and_loading_stay_within_the_budget_and_a_shard(tmp_path: Path) -> None:
    done = run_prepared("-c", MEASURED, tmp_path, cwd=ROOT)
    assert done.code == 0, done.err
    measured = json.loads(done.out)
    budget, shard, slack = 24 << 20, 8 << 20, 4 << 20
    assert measured["state"] > 7 * budget
    assert measured["saving"] < budget + shard + slack
    assert measured["loading"] < budget + shard + slack


def test_saving_and_loading_take_calls_by_the_number_of_parameters(tmp_path: Path) -> None:
    """And not by its square, while what was read before is kept."""
    calls = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    taken = []
    for number in (100, 400):
        model = nn.ParameterList([nn.Parameter(torch.ones(32, 32)) for _ in range(number)])
        # A third of the state may be kept as it is, the rest is mapped.
        with on_pages(model, "host+disk", number * 3 * 4096, tmp_path) as engine:
            optimizer = engine.bind_optimizer(torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9))
            for slot in engine.slots:
                optimizer.states.put(optimizer.states.of(slot), "momentum_buffer", torch.ones(32, 32))
            folder = tmp_path / str(number)
            folder.mkdir()
            calls = 0
            sys.setprofile(count)
            try:
                kept = optimizer.state_dict()
                save_optimizer_state(optimizer, folder)
                load_optimizer_state(optimizer, folder)
            finally:
                sys.setprofile(None)
            del kept
            taken.append(calls)
    assert 0 < taken[1] < 6 * taken[0], taken
