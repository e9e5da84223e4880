"""Norms of gradients, and what clipping makes of them, to the bit as `torch.nn.utils.clip_grad_norm_` has them."""

from __future__ import annotations

import threading
import time

import torch

from ptm_accel.memory.block import Block
from ptm_accel.memory.budget import Tag
from ptm_accel.runtime.executor import Executor

NORM_TYPE = 2.0


def is_narrow(dtype: torch.dtype) -> bool:
    """Returns whether it has less than fp32, so that a master would be wider."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


class Norms:
    """Takes norms of whole gradients.

    The kernel that is to sum bf16 in fp32 makes a copy in fp32, in fresh memory, which the system clears first: that
    was seen to take ten times as long as a copy into room that is held and the kernel that reads that; both give the
    same bits. So there may be room for such a copy.

    Args:
        executor: serves accesses.
        wide: norms of narrower gradients are computed in fp32 (they belong to fp32 masters).
    """

    def __init__(self, executor: Executor, wide: bool) -> None:
        self.wide = wide
        self._executor = executor
        self._pool = executor.pool
        self._room: Block | None = None
        # Gradients leave, and have their norms taken then, in whichever thread makes room.
        self._lock = threading.Lock()

    def hold(self, nbytes: int) -> None:
        """Holds so much room for copies; larger gradients do without one.

        Raises:
            BudgetError: no room can be made.
        """
        self.release()
        if nbytes:
            # A tensor like any other, so that it ends with the pool.
            room = self._pool.create("norms of gradients", Tag.GRAD, torch.Size([nbytes]), torch.uint8, movable=False)
            self._executor.make(room)
            self._room = room

    def release(self) -> None:
        """Gives the room back."""
        with self._lock:
            room, self._room = self._room, None
        if room is not None:
            self._executor.forget(room)

    def of(self, gradient: torch.Tensor, norm_type: float, *, part: bool = False) -> torch.Tensor:
        """Returns the norm of one gradient.

        Args:
            gradient: the whole of it.
            norm_type: the p of the p-norm.
            part: it is a range of one, whose norm is put together from those of all ranks: in fp32.
        """
        begin = time.perf_counter()
        if not ((self.wide or part) and is_narrow(gradient.dtype)):
            norm = norm_of(gradient, norm_type)
        else:
            with self._lock:
                extent = None if self._room is None else self._room.extent
                nbytes = gradient.numel() * 4
                if extent is not None and nbytes <= extent.tensor.numel():
                    copied = extent.tensor[:nbytes].view(torch.float32).view(gradient.shape)
                    gradient = copied.copy_(gradient)
                norm = norm_of(gradient, norm_type, torch.float32)
        # It is computed without pages as well.
        self._pool.stats.elsewhere_s += time.perf_counter() - begin
        return norm


def norm_of(gradient: torch.Tensor, norm_type: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The norm of one tensor, by the kernel of torch's clipping: `torch.linalg.vector_norm` sums otherwise on a GPU."""
    norms: list[torch.Tensor] = list(torch._foreach_norm([gradient], norm_type, dtype=dtype))
    return norms[0]


def clip_coefficient(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Returns the factor by which `torch.nn.utils.clip_grad_norm_` multiplies gradients (1 at most)."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)


def total_norm(
    norms: list[torch.Tensor], norm_type: float, dtypes: list[torch.dtype | None] | None = None
) -> torch.Tensor:
    """Returns the norm over all gradients, in the order of reduction that torch uses.

    Args:
        norms: of each gradient, where that is, in the order of the parameters.
        norm_type: the p of the p-norm.
        dtypes: of each gradient that has another than its norm, as a complex one has.
    """
    if not norms:
        return torch.tensor(0.0)
    first_device = norms[0].device
    # (A norm has its gradient's dtype, or fp32 for the gradient of an fp32 master.)
    kinds = [kind or norm.dtype for kind, norm in zip(dtypes or [None] * len(norms), norms, strict=True)]
    if len({(kind, norm.device) for kind, norm in zip(kinds, norms, strict=True)}) > 1:
        # torch groups gradients by device and dtype before it norms them, in an order of its own: it is asked for the
        # order, with empty tensors.
        stand_ins: list[torch.Tensor | None] = [
            torch.empty(0, dtype=kind, device=norm.device) for kind, norm in zip(kinds, norms, strict=True)
        ]
        grouped = torch.utils._foreach_utils._group_tensors_by_device_and_dtype([stand_ins], with_indices=True)
        norms = [norms[i] for (_, indices) in grouped.values() for i in indices]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first_device) for norm in norms]), norm_type)
    return norm
