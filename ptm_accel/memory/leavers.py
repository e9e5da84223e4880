"""Memory on its way out of the compute tier, and the bytes in it that are nowhere else yet.

A store that nobody waits for can fail long after its memory was let go of. Until it has ended well that memory is the
only place of its bytes, so it is kept, and charged, as long as the tensor wants them (`Unsaved`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.errors import DiskError
from ptm_accel.memory.budget import Reservation
from ptm_accel.memory.copies import settle
from ptm_accel.memory.transfer import Block, Transfer

if TYPE_CHECKING:
    from ptm_accel.memory.paged import Extent, PagedTensor


@dataclass(slots=True, eq=False)
class Unsaved:
    """Bytes of a tensor that its home does not have before their store has ended well.

    Attributes:
        tensor: whose bytes; it has this in its list for as long as it wants them.
        offset: of the first of them, in the tensor.
        octets: the bytes.
        extent: what is given back to the tensor if the store fails; None for a part of it, which is stored again.
    """

    tensor: PagedTensor
    offset: int
    octets: torch.Tensor
    extent: Extent | None

    @property
    def wanted(self) -> bool:
        """Whether the tensor has no newer bytes, and has not been dropped."""
        return self in self.tensor.unsaved

    def end(self) -> None:
        """The home has the bytes."""
        if self.wanted:
            self.tensor.unsaved.remove(self)


@dataclass(slots=True, eq=False)
class Leaver:
    """Memory that we let go of and that somebody may still use: a view, or a transfer.

    Attributes:
        storage: dies with the last view.
        block: what the tier takes back then; None for memory of torch's.
        reservation: the charge.
        transfer: reads or writes the memory; None once it was seen to have ended.
        kept: memory of torch's that only the transfer still needs.
        unsaved: what the transfer is to save; still there after it has ended if it has failed.
    """

    storage: StorageWeakRef
    block: Block | None
    reservation: Reservation
    transfer: Transfer | None
    kept: torch.Tensor | None = None
    unsaved: Unsaved | None = None

    def look(self) -> DiskError | None:
        """Takes note of a transfer that has ended; returns the error if bytes that are wanted were not saved."""
        failure: DiskError | None = None
        if self.transfer is not None and self.transfer.done():
            if self.unsaved is not None and self.unsaved.wanted:
                error = settle([self.transfer])
                failure = error if isinstance(error, DiskError) else None
            # Some that will not be waited for any more hold what they would have filled.
            self.transfer = None
            if self.unsaved is not None and failure is None:
                self.unsaved.end()
                self.unsaved = None
        if self.transfer is None:
            self.kept = None
            if self.unsaved is not None and not self.unsaved.wanted:
                self.unsaved = None
        return failure

    @property
    def failed_part(self) -> bool:
        """Whether it has a part of a tensor that could not be stored."""
        return self.transfer is None and self.unsaved is not None and self.unsaved.extent is None

    @property
    def comes_back(self) -> bool:
        """Whether a whole tensor could not be stored that can have its memory again; what arrives is given up first."""
        unsaved = self.unsaved
        if self.transfer is not None or unsaved is None:
            return False
        return unsaved.extent is not None and unsaved.tensor.extent is None

    def is_of(self, tensor: PagedTensor) -> bool:
        """Whether it has bytes of the tensor that are not known to be saved."""
        return self.unsaved is not None and self.unsaved.tensor is tensor

    @property
    def unused(self) -> bool:
        """Whether nobody needs the memory any more."""
        return self.transfer is None and self.unsaved is None and self.storage.expired()
