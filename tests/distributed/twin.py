"""The oracle for sharded blocks: whole gradients, averaged in the order of summation that reduce-scatter has.

From three ranks on, the order in which gloo adds depends on an element's place in the buffer, so DDP's buckets round
otherwise. A gradient that is padded to equal ranges and averaged by itself has the bits of a reduce-scatter of it.
Every rank has the whole model, and an ordinary optimizer of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

_ALIGN = 64


def span(numel: int, ranks: int) -> int:
    """The elements of one rank's range of a parameter."""
    return math.ceil(math.ceil(numel / ranks) / _ALIGN) * _ALIGN


def is_cut(param: torch.Tensor, ranks: int, small_bytes: int) -> bool:
    """Whether every rank has a range: a parameter is replicated that is small, or leaves the last rank nothing.

    Args:
        param: it.
        ranks: how many there are.
        small_bytes: parameters below this never leave the compute tier.
    """
    numel: int = param.numel()
    return numel * param.dtype.itemsize >= small_bytes and (ranks - 1) * span(numel, ranks) < numel


class Twin:
    """Averages the gradients of every micro-batch, and adds the averages up.

    Args:
        model: the same on all ranks.
        small_bytes: parameters below this are replicated.
        wide: sums of several narrow gradients are made in fp32, as for fp32 masters.

    Attributes:
        called: what is called with a batch.
    """

    def __init__(self, model: nn.Module, small_bytes: int, *, wide: bool = False) -> None:
        self.called = model
        self._small_bytes = small_bytes
        self._wide = wide
        self._ranks = dist.get_world_size()
        self._sums: dict[nn.Parameter, torch.Tensor] = {}

    @contextmanager
    def micro_batch(self, *, last: bool) -> Iterator[None]:
        """Around a forward and its backward; `last` of a step or not, it is averaged by itself."""
        yield
        params = [p for p in self.called.parameters() if p.requires_grad]
        average(params, self._ranks, self._small_bytes)
        for param in params:
            grad, param.grad = param.grad, None
            if grad is None:
                continue
            total = self._sums.get(param)
            if total is None:
                self._sums[param] = grad
            else:
                self._sums[param] = (total.float() if self._wide else total).add_(grad)

    def take(self) -> dict[nn.Parameter, torch.Tensor]:
        """Gives the sums of a step, and begins anew."""
        sums, self._sums = self._sums, {}
        return sums


@torch.no_grad()
def average(params: Iterable[nn.Parameter], ranks: int, small_bytes: int) -> None:
    """Makes every gradient the mean over all ranks; where only others have one, this rank's counts as zeros."""
    params = list(params)
    there = torch.tensor([param.grad is not None for param in params], dtype=torch.uint8)
    dist.all_reduce(there, dist.ReduceOp.MAX)
    small: dict[torch.dtype, list[torch.Tensor]] = {}
    for param, has in zip(params, there.tolist(), strict=True):
        if not has:
            continue
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        if is_cut(param, ranks, small_bytes):
            _average(param.grad, ranks)
        else:
            small.setdefault(param.grad.dtype, []).append(param.grad)
    for grads in small.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads]).mul_(1.0 / ranks)
        dist.all_reduce(flat)
        for grad, values in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(values.view(grad.shape))


def _average(grad: torch.Tensor, ranks: int) -> None:
    padded = torch.zeros(ranks * span(grad.numel(), ranks), dtype=grad.dtype)
    padded[: grad.numel()] = grad.reshape(-1)
    dist.all_reduce(padded.mul_(1.0 / ranks))
    grad.copy_(padded[: grad.numel()].view(grad.shape))


def norm_by_ranges(param: nn.Parameter, grad: torch.Tensor, small_bytes: int, *, wide: bool) -> torch.Tensor:
    """The norm of a gradient, as ranks take it that have ranges: each of its own in fp32, their squares added in fp64.

    Args:
        param: whose gradient it is.
        grad: the whole of it.
        small_bytes: parameters below this are replicated, and have the norm of the whole.
        wide: the result has fp32, as for fp32 masters; else the gradient's dtype.
    """
    ranks, dtype = dist.get_world_size(), torch.float32 if wide else grad.dtype
    if not is_cut(param, ranks, small_bytes):
        return torch.linalg.vector_norm(grad, 2.0, dtype=dtype)
    ranges = grad.reshape(-1).split(span(grad.numel(), ranks))
    norms = [torch.linalg.vector_norm(each, 2.0, dtype=torch.float32).double() for each in ranges]
    return torch.stack(norms).square().sum().sqrt().to(dtype)
