"""One of several processes: each loads its ranges of a checkpoint that one process has made, and they train on.

Started by torchrun with a folder, and a list of cases (`tests/distributed/cases.py`) as JSON. Each checkpoint is loaded
onto pages that have other values and state, and in ordinary memory; then both train, and every bit is compared.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from peft import PeftModel
from ptm_accel.integrations.transformers.weights import load_weights
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
from ptm_accel.checkpoint.plain_state import load_either_state
from ptm_accel.checkpoint.training_state import INDEX_NAME, SavedState, save_optimizer_state, saved_last
from ptm_accel.engine import Engine
from ptm_accel.errors import CheckpointError
from ptm_accel.memory.block import Part
from ptm_accel.optim.optimizer import PagedOptimizer
from tests.distributed.cases import DTYPES, SMALL_BYTES, Case
from tests.distributed.paged_ranks import options, train_paged
from tests.distributed.plain_ranks import Masters, assert_alike, train_plain
from tests.distributed.twin import is_cut, span
from tests.plain_loop import same_bits

PLAIN_STATE = "optimizer.pt"
OTHER = "other"
"""The folder of a checkpoint of another model, which the first case is given as well."""


def make(case: Case, source: str, folder: Path) -> None:
    """Trains in this process alone, and saves."""
    model = case.build()
    optimizer, engine = case.make_optimizer(model), None
    if source == "pages":
        engine = Engine.attach(model, options(replace(case, shard="none"), folder), device=torch.device("cpu"))
        optimizer = engine.bind_optimizer(optimizer)
    for step in range(2):
        model(**case.batch(100 + step, 0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    if engine is None:
        torch.save(optimizer.state_dict(), folder / PLAIN_STATE)
    else:
        save_optimizer_state(optimizer, folder)
        engine.close()


def state_in(folder: Path) -> dict[str, Any]:
    """The optimizer state of a checkpoint, as torch has it."""
    if (folder / INDEX_NAME).exists():
        with ExitStack() as files:
            return SavedState(folder, files).state_dict()
    return torch.load(folder / PLAIN_STATE, weights_only=True)


def whole_model(case: Case, folder: Path) -> nn.Module:
    """The model of a checkpoint, in ordinary memory."""
    model = case.build()
    if isinstance(model, PeftModel):
        model.load_adapter(str(folder), "default", is_trainable=True)
        return model
    return type(model).from_pretrained(folder, dtype=DTYPES[case.dtype])


def load_plain(case: Case, folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, masters: Masters) -> None:
    """Loads it in ordinary memory."""
    model.load_state_dict(whole_model(case, folder).state_dict())
    saved = state_in(folder)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    with torch.no_grad():
        for param, master in masters.items():
            master.copy_(param)
        for param, entries in zip(params, saved["state"].values(), strict=True):
            if "master" in entries:
                param.copy_(entries.pop("master"))
    optimizer.load_state_dict(saved)


def load_paged(case: Case, folder: Path, engine: Engine, optimizer: PagedOptimizer) -> None:
    """Loads it onto pages, which hold something else; whole blocks are there, and updates are pending."""
    model = engine.model
    model(**case.batch(50, dist.get_rank())).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        model(**case.batch(51, dist.get_rank()))
    before = engine.training.shards.stats.gathers
    if isinstance(model, PeftModel):
        model.load_adapter(str(folder), "default", is_trainable=True)
        # What was written to whole parameters is kept as they leave.
        engine.training.shards.wholes.drop_all()
    else:
        load_weights(model, folder)
        assert engine.training.shards.stats.gathers == before, "weights are read without collectives"
    saved = saved_last(folder, [folder / PLAIN_STATE])
    assert saved is not None
    load_either_state(optimizer, saved)
    check_ranges(case, folder, engine, optimizer)
    if (other := folder / OTHER).is_dir():
        refuse(other, engine, optimizer)
        check_ranges(case, folder, engine, optimizer)


def refuse(folder: Path, engine: Engine, optimizer: PagedOptimizer) -> None:
    """A checkpoint of another model is refused on each rank, with the same text."""
    with pytest.raises(CheckpointError, match="is of shape") as weights:
        load_weights(engine.model, folder)
    with pytest.raises(CheckpointError, match="of another") as plain:
        load_either_state(optimizer, folder / PLAIN_STATE)
    groups = optimizer.param_groups
    numbers = iter(range(10**6))
    saved = {"param_groups": [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]}
    saved["state"] = {0: {"step": torch.tensor(1.0), "master": torch.zeros(3)}}
    with pytest.raises(CheckpointError, match=r"has shape \(3,\)") as master:
        optimizer.load_state_dict(saved)
    texts = [str(caught.value) for caught in (weights, plain, master)]
    every: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(every, texts)
    assert all(other == texts for other in every), every


def check_ranges(case: Case, folder: Path, engine: Engine, optimizer: PagedOptimizer) -> None:
    """Each rank has its ranges of what was saved, whole tensors of what is small, and nothing else."""
    cpu, saved, names = torch.device("cpu"), state_in(folder)["state"], iter(range(10**6))
    wholes = dict(whole_model(case, folder).named_parameters())
    for slot in engine.slots:
        own = engine.pages.executor.copied(slot.own, cpu)
        assert same_bits(own, mine(wholes[slot.name], wholes[slot.name])), slot.name
    held = [slot.name for group in optimizer.states.groups() for slot in group]
    expected = {(name, key): value for name in held for key, value in saved[next(names)].items()}
    found = {(name, key): value for name, key, value in optimizer.states.named_entries()}
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    for (name, key), value in found.items():
        here = engine.pages.executor.copied(value, cpu) if isinstance(value, Part) else value
        there = expected[name, key]
        if isinstance(value, Part):
            there = mine(there, wholes[name]).to(torch.float32 if case.masters else there.dtype)
        assert same_bits(here, there), f"{key} of {name}: {here} and {there}"


def mine(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """What this rank has of a value of a parameter's shape."""
    ranks = dist.get_world_size()
    if not is_cut(param, ranks, SMALL_BYTES):
        return value.detach()
    size = span(param.numel(), ranks)
    return value.detach().reshape(-1)[dist.get_rank() * size :][:size]


def main(folder: Path, cases: list[tuple[str, Case]]) -> None:
    dist.init_process_group("gloo")
    for number, (source, case) in enumerate(cases):
        # It names the case of whatever fails.
        sys.stderr.write(f"case {case} from {source}\n")
        saved = folder / str(number)
        saved.mkdir(exist_ok=True)
        if dist.get_rank() == 0:
            make(case, source, saved)
            if number == 0:
                (saved / OTHER).mkdir()
                make(Case("llama-wide"), "plain", saved / OTHER)
        dist.barrier()
        theirs = train_plain(case, begin=partial(load_plain, case, saved))
        ours = train_paged(case, folder, begin=partial(load_paged, case, saved))
        assert_alike(case, ours, theirs)
        assert ours.weights
        assert ours.state
        sys.stdout.write(f"{case} from {source}: {len(ours.losses)} losses agree\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [(source, Case(**case)) for source, case in json.loads(sys.argv[2])])
