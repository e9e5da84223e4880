"""Protocols of a tier that the pool moves bytes through: buffers, backing stores and transfers.

The pool (`ptm_accel.memory.pool`) knows two places for a tensor's bytes. In the *compute tier* they lie in one
contiguous buffer that kernels read; in a *backing store* they wait between uses, cut into pages as the backing store
likes. On a CPU-only machine the compute tier is host memory and the backing store is the disk; with a device the
compute tier is the device's memory and the backing store is host frames that may overflow to the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from ptm_accel.memory.budget import Tag, Tier

ALIGN_BYTES = 4096
"""Buffers and slots are multiples of this, as `O_DIRECT` asks for."""


def round_up(nbytes: int, multiple: int = ALIGN_BYTES) -> int:
    """Returns the least multiple of `multiple` that is not less than `nbytes`."""
    return -(-nbytes // multiple) * multiple


class Transfer(Protocol):
    """A move of bytes that has been started."""

    def done(self) -> bool:
        """Returns whether it has ended, well or not; never blocks."""
        ...

    def wait(self) -> None:
        """Blocks the calling thread until the move has ended; raises its error, every time it is asked."""
        ...

    def order(self) -> None:
        """Makes all compute that is queued from now on come after the move.

        On a device this queues a wait on the compute stream and does not block the thread; on a CPU it is `wait`.
        """
        ...


class Buffer:
    """A contiguous run of compute-tier bytes, as a 1-D `uint8` tensor that others may take views of.

    The views own the bytes, not the buffer: `octets` is dropped first, and the tier takes the run back
    (`ComputeTier.recycle`) only when the last view of its storage has died.

    Attributes:
        octets: the bytes; None once dropped.
        nbytes: its length, a multiple of `ALIGN_BYTES`.
        region: what the tier needs to take the run back.
        behind: transfers that still use the memory: what is written to it comes after them.
    """

    __slots__ = ("behind", "nbytes", "octets", "region")

    def __init__(self, buffer: torch.Tensor, region: Any, behind: tuple[Transfer, ...] = ()) -> None:
        self.octets: torch.Tensor | None = buffer
        self.nbytes = buffer.numel()
        self.region = region
        self.behind = behind


class ComputeTier(Protocol):
    """Tier where kernels run: hands out contiguous buffers. The caller charges them."""

    tier: Tier
    device: torch.device

    def allocate(self, nbytes: int) -> Buffer:
        """Returns a buffer of `nbytes` (a multiple of `ALIGN_BYTES`), contents undefined.

        Raises:
            BudgetError: the machine itself has no more memory (not: the budget, which the caller holds).
        """
        ...

    def recycle(self, buffer: Buffer) -> None:
        """Takes back a buffer whose storage has died."""
        ...

    def close(self) -> None:
        """Gives all memory back. Idempotent."""
        ...

    def check_integrity(self) -> None:
        """Raises `AssertionError` with the numbers if live + kept bytes do not add up."""
        ...


class Source(Protocol):
    """Where the bytes of a tensor come from."""

    def load(self, handle: Any, offset: int, into: torch.Tensor, behind: Sequence[Transfer] = ()) -> Transfer:
        """Starts copying the handle's bytes from `offset` on into `into` (1-D uint8 in the compute tier).

        Args:
            handle: of a run that holds them.
            offset: the first byte.
            into: the target.
            behind: transfers that use `into`, which end, well or not, before anything is written there.
        """
        ...


class BackingStore(Source, Protocol):
    """Tier where bytes wait between uses. A handle (`new`) names a run of `nbytes` bytes, whatever lies under it.

    Offsets and lengths of `store` and `load` are multiples of `ALIGN_BYTES`; handles are rounded up to it.
    """

    def new(self, nbytes: int, tag: Tag, name: str) -> Any:
        """Charges and reserves room for `nbytes`; contents undefined.

        Raises:
            BudgetError: no room under the budget of the tier (or of the last tier it can overflow to).
        """
        ...

    def free(self, handle: Any) -> None:
        """Gives the room back, after any transfer still running on it."""
        ...

    def store(self, handle: Any, offset: int, source: torch.Tensor) -> Transfer:
        """Starts copying `source` (1-D uint8 in the compute tier) to the handle's bytes from `offset` on.

        The caller keeps `source` unchanged and alive until the transfer is done.
        """
        ...

    def snapshot(self, handle: Any) -> torch.Tensor:
        """The bytes as a 1-D uint8 CPU tensor that costs no charged memory (a private mapping of the backing store).

        As long as it lives, `held` of the handle is true, and nobody stores to the handle or frees it. All stores have
        ended before.
        """
        ...

    def copy(self, handle: Any, into: Any) -> None:
        """Copies all bytes of a handle to another, new one of the same length, in host memory or on the disk."""
        ...

    def close(self) -> None:
        """Gives everything back, after running transfers have ended. Idempotent."""
        ...

    def check_integrity(self) -> None:
        """Raises `AssertionError` with the numbers if free + used + in flight is not the capacity."""
        ...
