"""Several processes that each have the whole model on pages of their own, as `DistributedDataParallel` has it.

It does what DDP does, to the bit with two processes: the first process's values go to all others once, its buffers
before every forward; gradients are multiplied by 1 / number of processes and summed over them at the end of every
backward that synchronises. What differs is when: DDP sends buckets while backward runs; here each gradient is sent when
all have arrived, page by page, since one that has arrived may be away.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from ptm_accel.distributed.ranks import broadcast
from ptm_accel.errors import UnsupportedError
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.gradients import Gradients
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor

_NONE, _NARROW, _WIDE = range(3)


class Replicas:
    """Keeps the replicas of a model alike.

    Args:
        executor: serves accesses.
        model: the model.
        group: the processes that have one; None for all.

    Attributes:
        processes: how many there are.
        due: whether gradients are to be shared after the next backward: its forward was not within `no_sync`.
    """

    def __init__(self, executor: Executor, model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
        self.processes = dist.get_world_size(group)
        self._group = group
        self._executor = executor
        self.due = True
        self._syncs = self._buffers_due = True
        self._hook = model.register_forward_pre_hook(self._before_forward())
        self._met: tuple[Gradients | None, int] = (None, 0)

    def share_values(self, slots: Iterable[ParamSlot], buffers: Iterable[torch.Tensor]) -> None:
        """Gives every process the first one's parameters and buffers.

        Raises:
            UnsupportedError: the processes have different models.
        """
        slots, buffers = list(slots), list(buffers)
        shapes = [(slot.name, tuple(slot.value.shape)) for slot in slots]
        others: list[object] = [None] * self.processes
        own = [*shapes, *(("", tuple(buffer.shape)) for buffer in buffers)]
        dist.all_gather_object(others, own, group=self._group)
        if any(other != others[0] for other in others):
            raise UnsupportedError(
                f"the {self.processes} processes have different models (the shapes or the order of their parameters "
                "and buffers differ). Build the same one in each."
            )
        for slot in slots:
            with self._executor.pin(slot.value, write=True) as values:
                broadcast(values, self._group, self._executor.pool.compute.device)
        for buffer in buffers:
            broadcast(buffer, self._group, self._executor.pool.compute.device)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around micro-batches whose gradients are only added up."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def _before_forward(self) -> Callable[[nn.Module, object], None]:
        known = weakref.ref(self)

        def share(module: nn.Module, args: object) -> None:
            self = known()
            # Training or evaluating is nothing to go by: many train in `eval()`, without dropout.
            if self is None or not torch.is_grad_enabled():
                return
            # As in DDP: not after a forward that did not synchronise.
            if self._buffers_due:
                self._share_buffers(module)
            self.due = self._buffers_due = self._syncs
            # A step comes: all take part in sharing before it, those in which no gradient arrives as well.
            self._met = (None, 0)

        return share

    def share_gradients(self, gradients: Gradients) -> None:
        """Makes every gradient the mean over all processes; all of them take part."""
        slots = gradients.slots()
        there = torch.tensor([_kind(grad) for grad in slots], dtype=torch.uint8).to(self._executor.pool.compute.device)
        dist.all_reduce(there, dist.ReduceOp.MAX, group=self._group)
        for grad, kind in zip(slots, there.tolist(), strict=True):
            if kind:
                self._share(grad, wide=kind == _WIDE)
        self._met = (gradients, gradients.arrivals)

    def have_shared(self, gradients: Gradients) -> bool:
        """Returns whether no gradient has arrived here since they were made the same."""
        return self._met == (gradients, gradients.arrivals)

    def _share(self, grad: GradSlot, *, wide: bool) -> None:
        if grad.value is None:
            # Used by others, not by this one; in DDP (find_unused_parameters) it adds nothing to the sum.
            value = grad.slot.value
            dtype = torch.float32 if wide else value.dtype
            grad.add(torch.zeros(value.shape, dtype=dtype, device=self._executor.pool.compute.device))
        elif wide:
            grad.widen()
        assert grad.value is not None
        with self._executor.pin(grad.value, write=True) as total:
            total.mul_(1.0 / self.processes)
            dist.all_reduce(total, group=self._group)
        grad.changed()

    def _share_buffers(self, module: nn.Module) -> None:
        """What a forward may change (running means), as the first process has it; the rest is computed alike by all."""
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if buffer is not None and name not in part._non_persistent_buffers_set:
                    broadcast(buffer, self._group, self._executor.pool.compute.device)

    def follow(self, model: nn.Module) -> None:
        """Another module wraps or replaces the model, and is what is called from now on."""
        self._hook.remove()
        self._hook = model.register_forward_pre_hook(self._before_forward())

    def remove(self) -> None:
        """Takes the hook off the model."""
        self._hook.remove()


def _kind(grad: GradSlot) -> int:
    """How a gradient is kept here; the greatest of all processes is how it is shared."""
    if grad.value is None:
        return _NONE
    return _WIDE if grad.value.dtype == torch.float32 else _NARROW
