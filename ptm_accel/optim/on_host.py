"""Whether updates can be carried out on the CPU beside a device (`ptm_accel.optim.host_updates`), and by whom."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.own_threads import Worker
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.units import format_bytes

logger = logging.getLogger(__name__)

_MOST_OF_HOST = 4
"""Windows that are open hold pages of at most this part of the host's memory: others come from the disk, too."""


class OnHost:
    """State that the updates on the CPU of all steps share, and whether there can be any.

    Args:
        compute: carries out those of the device; says what there is to update, and how.
        chosen: tells whether the update of a parameter, by name, is to be done on the CPU.
        spent: is told the seconds of arithmetic that the updates of a step have taken.

    Attributes:
        compute, chosen, spent: see above.
        worker: carries them out.
    """

    def __init__(self, compute: ComputeUpdates, chosen: Callable[[str], bool], spent: Callable[[float], None]) -> None:
        self.compute = compute
        self.chosen = chosen
        self.spent = spent
        self.worker = Worker("ptm_accel updates")
        self._told = False

    def possible(self) -> bool:
        """Whether the optimizer, of which is known that it is element-wise, can run on the pages under a device.

        There must be room for a window of each tensor. And the CPU's kernel may round otherwise than the device's, and
        who updates what depends on times that were measured: whoever wants each run to have the bits of the last one
        has the device do it all.
        """
        backing = self.compute.pool.backing
        if not isinstance(backing, HostStore) or torch.are_deterministic_algorithms_enabled():
            return False
        held_bytes = (2 + self.compute.optimizer_memory.state_tensors) * backing.page_bytes
        if held_bytes > self.most_bytes:
            self._tell_of_room(held_bytes)
            return False
        device = self.compute.pool.compute.device.type
        for group in self.compute.inner.param_groups:
            tensors = [value for value in group.values() if isinstance(value, torch.Tensor)]
            if group.get("capturable") or any(tensor.device.type != "cpu" for tensor in tensors if device != "cpu"):
                return False
        return True

    def _tell_of_room(self, held_bytes: int) -> None:
        if not self._told:
            self._told = True
            logger.info(
                "no update is carried out on the CPU: one would hold up to %s of host_memory, and all may hold "
                "%s of it together; with host_memory=%s there would be room",
                format_bytes(held_bytes),
                format_bytes(self.most_bytes),
                format_bytes(held_bytes * _MOST_OF_HOST),
            )

    @property
    def most_bytes(self) -> int:
        """Most bytes of pages that are held for windows that are open."""
        backing = self.compute.pool.backing
        return backing.budget.capacity_bytes // _MOST_OF_HOST if isinstance(backing, HostStore) else 0

    def close(self) -> None:
        """Ends the thread, if there is one. Idempotent."""
        self.worker.close()
