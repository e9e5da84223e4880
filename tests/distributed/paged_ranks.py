"""Training on pages in several processes, and what is gathered of it for comparison."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn

import ptm_accel
from ptm_accel.config import PTMConfig
from ptm_accel.distributed import ranks
from ptm_accel.engine import Engine
from ptm_accel.memory.block import Part
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.units import parse_bytes
from tests.distributed.cases import PAGE, Case
from tests.distributed.costs import Costs
from tests.distributed.plain_ranks import Record, evaluate
from tests.plain_loop import same_bits
from tests.tiers import open_memory


def options(case: Case, folder: Path, **changes: Any) -> PTMConfig:
    """The configuration of a case, for this process."""
    given: dict[str, Any] = {"page_size": PAGE}
    if case.memory == "host+disk":
        given |= {"host_memory": case.budget_bytes(dist.get_rank()), "disk": str(folder)}
    if case.shard != "none":
        given["shard"] = case.shard
    if case.masters:
        given["master_weights"] = "fp32"
    return PTMConfig(**{**given, **changes})


def attach(case: Case, model: nn.Module, folder: Path, **changes: Any) -> Engine:
    """The model on pages, as one of several processes that train it."""
    asked, rank = options(case, folder, **changes), dist.get_rank()
    if case.memory == "host+disk":
        engine = Engine.attach(model, asked, device=torch.device("cpu"))
    else:
        page_bytes = parse_bytes(PAGE)
        host_bytes = None if case.memory == "mock+host" else 1 << 20
        memory = open_memory(
            case.memory, case.budget_bytes(rank), folder, seed=rank, host_bytes=host_bytes, page_bytes=page_bytes
        )
        engine = Engine.attach(model, asked, memory=memory)
    engine.training.replicate()
    return engine


class LateCollectives(ranks.Collectives):
    """Collectives whose results are seen late, as those on a stream of a device."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._until = time.monotonic() + random.random() * 2e-3

    def done(self) -> bool:
        return time.monotonic() >= self._until and super().done()

    def order(self) -> None:
        time.sleep(max(self._until - time.monotonic(), 0.0))
        super().order()


Begin = Callable[[Engine, PagedOptimizer], None]


def train_paged(case: Case, folder: Path, begin: Begin | None = None) -> Record:
    """Trains on pages; checks what it moved, and what is conserved.

    Args:
        case: which model, and how.
        folder: for pages.
        begin: loads a checkpoint, before the first step.
    """
    late = nullcontext() if case.memory == "host+disk" else patch.object(ranks, "Collectives", LateCollectives)
    with late:
        return _train(case, folder, begin)


def _train(case: Case, folder: Path, begin: Begin | None) -> Record:
    rank, record, model = dist.get_rank(), Record(), case.build()
    engine = attach(case, model, folder)
    optimizer = engine.bind_optimizer(case.make_optimizer(model))
    if begin is not None:
        begin(engine, optimizer)
    costs = Costs(engine, recomputes=case.checkpointing != "off") if case.shard == "full" else None
    torch.manual_seed(7 + rank)
    for step in range(case.steps):
        for micro in range(case.accumulation):
            adds_up = case.shard == "none" and micro < case.accumulation - 1
            with engine.training.no_sync() if adds_up else nullcontext():
                loss = model(**case.batch(step * case.accumulation + micro, rank)).loss / case.accumulation
                loss.backward()
            record.losses.append(loss.item())
            if costs is not None:
                costs.pass_ended()
        if case.clip is not None:
            record.norms.append(engine.clip_grad_norm_(case.clip).item())
        optimizer.step()
        optimizer.zero_grad()
    if costs is not None:
        costs.check()
    record.evaluated = evaluate(case, model)
    record.weights = weights_of(model)
    record.state = state_of(engine)
    # Of more ranks, or with more room, one may have so little that it fits.
    fits = dist.get_world_size() > 2 or case.uneven
    assert engine.pool.stats.stored_bytes or fits, "all stayed in memory, so this shows little"
    engine.check_integrity()
    engine.close()
    return record


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The whole of every parameter, one module at a time, on all ranks together."""
    names = {param: name for name, param in model.named_parameters()}
    weights = {}
    for module in model.modules():
        if module._parameters:
            with ptm_accel.gathered(module):
                weights |= {names[p]: p.detach().clone() for p in module._parameters.values() if p is not None}
    return {name: weights[name] for name in names.values()}


@dataclass
class Kept:
    """One entry of this rank's optimizer state.

    Attributes:
        value: this rank's range of it, in one dimension; or all of it.
        shape: of the whole.
        cut: whether it is a range.
    """

    value: Any
    shape: torch.Size
    cut: bool


def is_sharded(slot: ParamSlot) -> bool:
    """Whether this rank has only a range of the parameter."""
    return getattr(slot, "own", slot.value) is not slot.value


def state_of(engine: Engine) -> dict[str, dict[str, Any]]:
    """The whole state of the optimizer, on all ranks together: what is cut is joined, all else is the same on all."""
    engine.settle()
    assert engine.optimizer is not None
    slots = {slot.name: slot for slot in engine.slots}
    kept: dict[tuple[str, str], Kept] = {}
    for name, key, value in engine.optimizer.states.named_entries():
        slot, paged = slots[name], isinstance(value, Part)
        copy = engine.pages.executor.copied(value, torch.device("cpu")) if paged else value
        kept[name, key] = Kept(copy, slot.value.shape, paged and is_sharded(slot))
    everyone: list[dict[tuple[str, str], Kept]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, kept)
    whole: dict[str, dict[str, Any]] = {}
    for entry, mine in kept.items():
        assert all(entry in other for other in everyone), f"{entry} is on rank {dist.get_rank()} alone"
        values = [other[entry].value for other in everyone]
        if mine.cut:
            assert all(value.dim() == 1 for value in values), entry
            value = torch.cat(values).view(mine.shape)
        else:
            assert all(same_bits(value, mine.value) for value in values), f"{entry} differs between ranks"
            value = mine.value
        whole.setdefault(entry[0], {})[entry[1]] = value
    return whole
