"""What becomes of bytes whose store, which nobody waited for, has failed.

They are still in memory. A whole tensor is given its extent back, and is as if it had never been sent away; somebody
who must have its room stores it again then, and is told if that fails. A part of a tensor is stored again, before the
tensor is used next or when its room is needed, whichever comes first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ptm_accel.memory.leavers import Unsaved
from ptm_accel.memory.paged import PagedTensor, Place

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool


class Salvage:
    """Sees to such bytes.

    Args:
        pool: whose tensors.
    """

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    def mend(self, tensor: PagedTensor) -> bool:
        """Sees to stores of a tensor that have failed; those that run go on.

        Returns:
            whether there was one. The tensor is resident then, or its home has all of its bytes.

        Raises:
            DiskError: a part of it could not be stored again; it is kept all the same.
        """
        if not tensor.unsaved:
            return False
        with self._pool.lock:
            self._pool.room.collect()
            again = self._pool.room.store_again(tensor)
            return again or tensor.place.resident

    def settle(self, tensor: PagedTensor) -> None:
        """Waits for stores of a tensor that nobody has waited for, and sees to those that have failed.

        Raises:
            DiskError: as `mend`.
        """
        if tensor.unsaved:
            with self._pool.lock:
                self._pool.room.wait_for(tensor)
                self.mend(tensor)

    def give_back(self, unsaved: Unsaved) -> None:
        """Gives a tensor the extent back that it was to leave: AWAY -> DIRTY."""
        tensor, extent = unsaved.tensor, unsaved.extent
        assert tensor.place is Place.AWAY and extent is not None, tensor
        if extent.block is not None:
            extent.block.buffer = extent.octets
        tensor.extent, tensor.place = extent, Place.DIRTY
        tensor.unsaved.clear()
        self._pool.traffic.leave_home(tensor)
        self._pool.extents.settle_in(tensor, Place.DIRTY)
