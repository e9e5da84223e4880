"""What training on pages in several processes has to equal: an ordinary loop, with DDP or with the twin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.distributed.cases import SMALL_BYTES, Case
from tests.distributed.twin import Twin, norm_by_ranges
from tests.plain_loop import same_bits

_NORM_OFF, _LOSS_OFF = 1e-6, 1e-5


class Sharing(Protocol):
    """Makes gradients the mean over all processes."""

    called: nn.Module

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around a forward and its backward."""
        ...

    def take(self) -> dict[nn.Parameter, torch.Tensor]:
        """Gives the gradients of a step, and begins anew."""
        ...


class Ddp:
    """DDP, which averages the sums of a step."""

    def __init__(self, model: nn.Module, *, unused: bool) -> None:
        self.called: nn.Module = DistributedDataParallel(model, find_unused_parameters=unused)

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        with nullcontext() if last else self.called.no_sync():
            yield

    def take(self) -> dict[nn.Parameter, torch.Tensor]:
        sums = {p: p.grad for p in self.called.parameters() if p.grad is not None}
        for param in sums:
            param.grad = None
        return sums


@dataclass
class Record:
    """What two trainings have in common, this process's losses among it."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    evaluated: float = 0.0
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    state: dict[str, dict[str, Any]] = field(default_factory=dict)


def sharing_of(case: Case, model: nn.Module) -> Sharing:
    """DDP where it adds up in the same order, else the twin."""
    if dist.get_world_size() == 2 and (case.accumulation == 1 or case.shard == "none"):
        return ddp(case, model)
    return twin(case, model)


def ddp(case: Case, model: nn.Module) -> Sharing:
    """DDP over the model of a case."""
    return Ddp(model, unused=case.model == "branches")


def twin(case: Case, model: nn.Module) -> Sharing:
    """The twin of the model of a case."""
    return Twin(model, SMALL_BYTES, wide=case.masters)


Masters = dict[nn.Parameter, nn.Parameter]
"""What is updated in the place of parameters, if that is something else."""


def train_plain(
    case: Case,
    made: Callable[[Case, nn.Module], Sharing] = sharing_of,
    begin: Callable[[nn.Module, torch.optim.Optimizer, Masters], None] | None = None,
) -> Record:
    """Trains in ordinary memory.

    Args:
        case: which model, and how.
        made: gives what shares gradients.
        begin: loads a checkpoint, before the first step.
    """
    rank, record, model = dist.get_rank(), Record(), case.build()
    sharing = made(case, model)
    optimizer = case.make_optimizer(model)
    masters = _masters(optimizer) if case.masters else {}
    if begin is not None:
        begin(model, optimizer, masters)
    torch.manual_seed(7 + rank)
    for step in range(case.steps):
        for micro in range(case.accumulation):
            with sharing.micro_batch(last=micro == case.accumulation - 1):
                batch = case.batch(step * case.accumulation + micro, rank)
                loss = sharing.called(**batch).loss / case.accumulation
                loss.backward()
            record.losses.append(loss.item())
        sums = sharing.take()
        norm = None if case.clip is None else _total_norm(case, model, sums)
        if norm is not None:
            record.norms.append(norm.item())
        _give(case, sums, masters, norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, master in masters.items():
                param.copy_(master)
    record.evaluated = evaluate(case, model)
    for name, param in model.named_parameters():
        record.weights[name] = param.detach()
        kept = dict(optimizer.state.get(masters.get(param, param), {}))
        if param in masters and kept:
            kept["master"] = masters[param].detach()
        if kept:
            record.state[name] = kept
    return record


def _masters(optimizer: torch.optim.Optimizer) -> Masters:
    """Gives the optimizer fp32 copies to update; by parameter."""
    masters = {p: nn.Parameter(p.detach().float()) for group in optimizer.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        group["params"] = [masters[p] for p in group["params"]]
    return masters


def _total_norm(case: Case, model: nn.Module, sums: dict[nn.Parameter, torch.Tensor]) -> torch.Tensor:
    """The norm over all gradients, in torch's order."""
    present = [(param, sums[param]) for param in model.parameters() if param in sums]
    if case.by_ranges:
        norms = [norm_by_ranges(param, total, SMALL_BYTES, wide=case.masters) for param, total in present]
    elif case.masters:
        norms = [torch.linalg.vector_norm(total, 2.0, dtype=torch.float32) for _, total in present]
    else:
        return nn.utils.get_total_norm([total for _, total in present])
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(norms), 2.0)
    return norm


def _give(
    case: Case,
    sums: dict[nn.Parameter, torch.Tensor],
    masters: Masters,
    norm: torch.Tensor | None,
) -> None:
    """Gives what is updated its gradients, clipped; masters by the rules of `tests.plain_loop.train_with_masters`."""
    for param, total in sums.items():
        masters.get(param, param).grad = total.float() if param in masters else total
    if case.clip is not None and norm is not None:
        updated = [masters.get(param, param) for param in sums]
        nn.utils.clip_grads_with_norm_(updated, case.clip, norm)


@torch.no_grad()
def evaluate(case: Case, model: nn.Module) -> float:
    """A loss without gradients, on a batch that training has not seen."""
    model.eval()
    loss: float = model(**case.batch(999, dist.get_rank())).loss.item()
    model.train()
    return loss


def assert_alike(case: Case, ours: Record, theirs: Record) -> None:
    """Every number is the same, or within the bounds of rounding where norms are; the first other is named."""
    if case.whole_norms:
        assert len(ours.norms) == len(theirs.norms) == case.steps, (len(ours.norms), len(theirs.norms))
        _near("norm", ours.norms, theirs.norms, _NORM_OFF)
        _near("loss", ours.losses, theirs.losses, _LOSS_OFF)
        _near("loss without gradients", [ours.evaluated], [theirs.evaluated], _LOSS_OFF)
        return
    assert ours.norms == theirs.norms, f"norms: {ours.norms} and {theirs.norms}"
    assert ours.losses == theirs.losses, f"losses: {ours.losses} and {theirs.losses}"
    assert ours.evaluated == theirs.evaluated, f"without gradients: {ours.evaluated} and {theirs.evaluated}"
    assert ours.weights.keys() == theirs.weights.keys()
    for name, weight in theirs.weights.items():
        assert same_bits(ours.weights[name], weight), f"weight {name}: {ours.weights[name]} and {weight}"
    assert ours.state.keys() == theirs.state.keys(), ours.state.keys() ^ theirs.state.keys()
    for name, kept in theirs.state.items():
        assert ours.state[name].keys() == kept.keys(), f"state of {name}: {ours.state[name].keys() ^ kept.keys()}"
        for key, value in kept.items():
            assert same_bits(ours.state[name][key], value), f"{key} of {name}: {ours.state[name][key]} and {value}"


def _near(what: str, ours: list[float], theirs: list[float], bound: float) -> None:
    assert len(ours) == len(theirs), f"{what}: {len(ours)} and {len(theirs)} of them"
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert abs(a - b) <= bound * abs(b), f"{what}[{at}]: {a!r} and {b!r}, off by {abs(a - b) / abs(b):.1e}"
