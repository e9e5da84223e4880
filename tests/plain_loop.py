"""Ordinary training loops: the same one for a plain model and for one on pages, and the oracle for fp32 masters."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ptm_accel.engine import Engine
from tests.zoo import Entry, use_checkpointing

STEPS = 5

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]


def decay_groups(model: nn.Module, weight_decay: float = 0.1) -> list[dict[str, Any]]:
    """Two parameter groups, as the Trainer makes them: matrices decay, all else does not."""
    params = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """What the Trainer's default `optim` makes."""
    return torch.optim.AdamW(decay_groups(model), lr=1e-2, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Keeps nothing and allocates nothing: no optimizer needs less room."""
    return torch.optim.SGD(model.parameters(), lr=1e-1, fused=True)


@dataclass(frozen=True)
class Recipe:
    """How to train.

    Attributes:
        accumulation: micro-batches per step.
        clip: `max_norm`; None for no call to clipping.
        checkpointing: `off`, `non-reentrant` or `reentrant`.
        autocast: the lower precision of `bf16=True`; None for none.
        optimizer: makes the optimizer.
        scheduler: makes the learning-rate scheduler, if any.
        steps: optimizer steps.
    """

    accumulation: int = 1
    clip: float | None = 1.0
    checkpointing: str = "off"
    autocast: torch.dtype | None = None
    optimizer: MakeOptimizer = adamw
    scheduler: MakeScheduler | None = None
    steps: int = STEPS


@dataclass
class Record:
    """What a run must have in common with another: every number, bit for bit."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[int, dict[str, Any]] = field(default_factory=dict)


def micro_batch_loss(model: nn.Module, entry: Entry, number: int, autocast: torch.dtype | None) -> torch.Tensor:
    """The loss of one micro-batch."""
    with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
        loss: torch.Tensor = model(**entry.batch_at(number)).loss
    return loss


def train(model: nn.Module, entry: Entry, recipe: Recipe, engine: Engine | None = None) -> Record:
    """Trains `model`, which is on pages if `engine` is given, and records every number."""
    record = Record()
    use_checkpointing(model, recipe.checkpointing)
    optimizer: torch.optim.Optimizer = recipe.optimizer(model)
    if engine is not None:
        optimizer = engine.bind_optimizer(optimizer)
    scheduler = recipe.scheduler(optimizer) if recipe.scheduler else None
    torch.manual_seed(7)
    for step in range(recipe.steps):
        for micro in range(recipe.accumulation):
            loss = micro_batch_loss(model, entry, step * recipe.accumulation + micro, recipe.autocast)
            record.losses.append(loss.item())
            (loss / recipe.accumulation).backward()
            del loss
        if recipe.clip is not None:
            clip = engine.clip_grad_norm_ if engine else _clip_of(model)
            record.norms.append(clip(recipe.clip).item())
        optimizer.step()
        if scheduler is not None:
            record.rates.append(scheduler.get_last_lr()[0])
            scheduler.step()
        optimizer.zero_grad()
    record.weights = {name: value.clone() for name, value in model.state_dict().items()}
    record.state = copy.deepcopy(optimizer.state_dict()["state"])
    return record


def _clip_of(model: nn.Module) -> Callable[[float], torch.Tensor]:
    return lambda max_norm: torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def train_with_masters(model: nn.Module, entry: Entry, recipe: Recipe) -> Record:
    """The plain loop that `master_weights: fp32` must equal, for a model with bf16 parameters.

    * The gradient of the first micro-batch is kept in its own dtype; sums of several are made in fp32.
    * Norms are computed in fp32 from what is kept, and the norm over all of them from theirs.
    * The clip coefficient multiplies the fp32 gradient.
    * The optimizer runs on the fp32 masters, and each parameter is then its master rounded once.
    """
    record = Record()
    use_checkpointing(model, recipe.checkpointing)
    optimizer = recipe.optimizer(model)
    owners = [p for group in optimizer.param_groups for p in group["params"]]
    masters = {p: nn.Parameter(p.detach().float()) for p in owners}
    for group in optimizer.param_groups:
        group["params"] = [masters[p] for p in group["params"]]
    named = [p for p in model.parameters() if p.requires_grad]
    torch.manual_seed(7)
    for step in range(recipe.steps):
        sums: dict[nn.Parameter, torch.Tensor] = {}
        for micro in range(recipe.accumulation):
            loss = micro_batch_loss(model, entry, step * recipe.accumulation + micro, recipe.autocast)
            record.losses.append(loss.item())
            (loss / recipe.accumulation).backward()
            for p in named:
                if p.grad is not None:
                    sums[p] = p.grad if p not in sums else sums[p].float().add_(p.grad)
                    p.grad = None
        scale = None
        if recipe.clip is not None:
            norms = [torch.linalg.vector_norm(sums[p], 2.0, dtype=torch.float32) for p in named if p in sums]
            norm = torch.linalg.vector_norm(torch.stack(norms), 2.0)
            record.norms.append(norm.item())
            scale = torch.clamp(recipe.clip / (norm + 1e-6), max=1.0)
        for p, grad in sums.items():
            masters[p].grad = grad.float() if scale is None else grad.float() * scale
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, master in masters.items():
                p.copy_(master)
    record.weights = {name: value.clone() for name, value in model.state_dict().items()}
    record.state = copy.deepcopy(optimizer.state_dict()["state"])
    for number, p in enumerate(owners):
        record.state.setdefault(number, {})["master"] = masters[p].detach()
    return record


def assert_same(ours: Record, theirs: Record) -> None:
    """Every number of two runs is the same, NaN equal to NaN; the first difference is named."""
    for what in ("losses", "norms", "rates"):
        mine, other = getattr(ours, what), getattr(theirs, what)
        assert len(mine) == len(other), f"{what}: {len(mine)} and {len(other)} of them"
        for at, (a, b) in enumerate(zip(mine, other, strict=True)):
            assert a == b or (math.isnan(a) and math.isnan(b)), f"{what}[{at}]: {a!r} and {b!r}"
    _same_tensors("weight", ours.weights, theirs.weights)
    assert ours.state.keys() == theirs.state.keys(), "other parameters have optimizer state"
    for number, entry in theirs.state.items():
        _same_tensors(f"state {number}", ours.state[number], entry)


def _same_tensors(what: str, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys(), f"{what}: keys {sorted(ours)} and {sorted(theirs)}"
    for key, other in theirs.items():
        assert same_bits(ours[key], other), f"{what} {key} differs: {ours[key]} and {other}"


def same_bits(a: Any, b: Any) -> bool:
    """Whether two values are equal, tensors by dtype, shape and every bit, also those in dictionaries and lists."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(same_bits(a[key], b[key]) for key in b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(same_bits, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape:
            return False
        raw = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return torch.equal(*raw)
    return type(a) is type(b) and bool(a == b or (a != a and b != b))
