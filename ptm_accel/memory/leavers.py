"""Memory that has left the compute tier and that a view or a transfer still uses."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.memory.budget import Reservation
from ptm_accel.memory.transfer import Block, Transfer


@dataclass(slots=True, eq=False)
class Leaver:
    """Memory that was let go of; it is charged until neither a view nor a transfer uses it.

    Attributes:
        storage: dies with the last view.
        block: what the tier takes back then; None for memory of torch's.
        reservation: the charge.
        transfer: reads or writes the memory; None once it was seen to have ended.
        kept: memory of torch's that only the transfer still needs.
    """

    storage: StorageWeakRef
    block: Block | None
    reservation: Reservation
    transfer: Transfer | None
    kept: torch.Tensor | None = None

    def is_unused(self) -> bool:
        """Whether the memory can be taken back; takes note of a transfer that has ended."""
        if self.transfer is not None and self.transfer.done():
            self.transfer = self.kept = None
        return self.transfer is None and self.storage.expired()
