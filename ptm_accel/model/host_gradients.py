"""Gradients of further micro-batches below a device: they go to host memory, where the CPU adds them to their sums.

Brought in for it, all sums would cross the link once more in each direction with each micro-batch: for 8B in bf16,
143 GiB a step of four instead of 73. The numbers are the same: both round each sum once. The last micro-batch of a step
has its sums brought in, since their norms are taken on the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.block import Block, Part, Place
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.host_store import HostStore
from ptm_accel.model.grad_slot import GradSlot, write_first
from ptm_accel.runtime.executor import Executor
from ptm_accel.schedule.updates import MORE_SUFFIX

_SPARE_BLOCKS = 2
"""Blocks that there must be room for beside what the model needs at the least."""


class HostGradients:
    """Collects the gradients of a backward that are added on the CPU.

    Args:
        executor: serves accesses.

    Attributes:
        expected: tells, before a forward and its backward, whether more gradients follow before the step.
        open: whether `take` may take some.
    """

    def __init__(self, executor: Executor) -> None:
        self.expected: Callable[[], bool] = lambda: False
        self._executor = executor
        self._pool = executor.pool
        backing = executor.pool.backing
        self._backing = backing if isinstance(backing, HostStore) else None
        self.open = False
        # What has arrived for the sums of a block, until all of it has.
        self._coming: dict[Block, dict[GradSlot, Part]] = {}

    @property
    def possible(self) -> bool:
        """Whether the sums are below a device, and more gradients follow before the step."""
        return self._backing is not None and self.expected()

    def begin(self) -> None:
        """A backward begins."""
        self.open = self.possible

    def end(self) -> None:
        """The backward has ended, or was broken off: adds what has arrived."""
        self.open = False
        for block in list(self._coming):
            self._send(block)

    def take(self, grad: GradSlot, gradient: torch.Tensor) -> bool:
        """Takes a gradient that is to be added to a sum in host memory.

        Args:
            grad: of which parameter.
            gradient: it; copied.

        Returns:
            whether it did; otherwise it is to be added on the device.
        """
        if grad.value is None:
            return False
        block = grad.value.block
        coming = self._coming.get(block)
        if coming is not None and grad in coming:
            # The second of one backward: the first has to be added before it.
            self._fold(block)
            return False
        if grad.widens or not self._is_away(block):
            return False
        part = grad.slot.group.part(grad.slot.member, MORE_SUFFIX, Tag.GRAD, gradient.dtype, self._pool)
        try:
            write_first(self._executor, part, gradient)
        except BaseException:
            self._executor.forget(part)
            raise
        grad.changed()
        coming = self._coming.setdefault(block, {})
        coming[grad] = part
        if len(coming) == len(grad.value.used):
            self._send(block)
        return True

    def _is_away(self, block: Block) -> bool:
        """Returns whether all of a block of sums is in host memory, and there is room to add to it there."""
        pool = self._pool
        if block.place is not Place.AWAY or not block.movable or block.stored_bytes < block.nbytes:
            return False
        spare = pool.share_bytes - pool.need.least_bytes
        assert self._backing is not None
        return spare >= _SPARE_BLOCKS * block.slot_bytes and self._backing.is_framed(block.handle)

    def _send(self, block: Block) -> None:
        """Sends what has arrived to host memory, to be added there; adds it here if it cannot be."""
        parts, pool = self._coming[block], self._pool
        assert self._backing is not None
        more = next(iter(parts.values())).block
        with pool.lock:
            try:
                if more.place.resident and block.place is Place.AWAY:
                    pool.admission.evict(more)
            except BudgetError:
                # The backing store is full.
                self._fold(block)
                return
            where = [(part.start, part.start + part.numel) for part in parts.values()]
            added = None
            if block.place is Place.AWAY and more.place is Place.AWAY:
                added = self._backing.add(block.handle, block.dtype, more.handle, more.dtype, where)
            if added is None:
                self._fold(block)
                return
            block.stores.append(added)
            for part in self._coming.pop(block).values():
                self._executor.forget(part)

    def _fold(self, block: Block) -> None:
        """Adds what has arrived on the device."""
        for grad, part in self._coming.pop(block).items():
            assert grad.value is not None
            with self._executor.pin(part) as more, self._executor.pin(grad.value, write=True) as total:
                total.add_(more)
            grad.changed()
            self._executor.forget(part)
