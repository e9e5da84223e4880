"""A pin: the value whose holder keeps the bytes of a paged tensor where they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ptm_accel.memory.paged import PagedTensor

if TYPE_CHECKING:
    from ptm_accel.memory.pool import Pool


class Pin:
    """Bytes that stay in the compute tier while this value is held; the only way to them."""

    __slots__ = ("_pool", "_tensor")

    def __init__(self, pool: Pool, tensor: PagedTensor) -> None:
        self._pool: Pool | None = pool
        self._tensor = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor in its shape; not to be kept beyond the pin."""
        assert self._pool is not None and self._tensor.extent is not None, "pin used after its end"
        return self._tensor.extent.tensor

    def release(self) -> None:
        """Ends the pin. A second release does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.unpin(self._tensor)

    def __enter__(self) -> torch.Tensor:
        return self.tensor

    def __exit__(self, *exc: object) -> None:
        self.release()
