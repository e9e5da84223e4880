"""Training on pages in several processes, and what is gathered of it for comparison."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import ptm_accel
from ptm_accel.config import PTMConfig
from ptm_accel.engine import Engine
from ptm_accel.memory.block import Part
from ptm_accel.model.slots import ParamSlot
from tests.distributed.cases import PAGE, Case
from tests.distributed.costs import Costs
from tests.distributed.plain_ranks import Record, evaluate
from tests.plain_loop import same_bits


def options(case: Case, folder: Path, **changes: Any) -> PTMConfig:
    """The configuration of a case, for this process."""
    budget = case.host_memory(dist.get_rank())
    given: dict[str, Any] = {"host_memory": budget, "page_size": PAGE, "disk": str(folder)}
    if case.shard != "none":
        given["shard"] = case.shard
    if case.masters:
        given["master_weights"] = "fp32"
    return PTMConfig(**{**given, **changes})


def attach(case: Case, model: nn.Module, folder: Path, **changes: Any) -> Engine:
    """The model on pages, as one of several processes that train it."""
    engine = Engine.attach(model, options(case, folder, **changes), device=torch.device("cpu"))
    engine.training.replicate()
    return engine


def train_paged(case: Case, folder: Path) -> Record:
    """Trains on pages; checks what it moved, and what is conserved."""
    rank, record, model = dist.get_rank(), Record(), case.build()
    engine = attach(case, model, folder)
    optimizer = engine.bind_optimizer(case.make_optimizer(model))
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
    assert engine.memory.disk is not None
    # Of more ranks, or with more room, one may have so little that it fits.
    fits = dist.get_world_size() > 2 or case.uneven
    assert engine.memory.disk.bytes_written or fits, "all stayed in memory, so this shows little"
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
