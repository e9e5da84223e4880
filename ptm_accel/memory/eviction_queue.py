"""The idle tensors of the compute tier in order of eviction: least recently used first, then the spared ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from ptm_accel.memory.block import Block, Place


class EvictionQueue:
    """The idle tensors of a pool: resident, not pinned, and able to go elsewhere.

    Args:
        has_backing: whether there is a tier below; without one only what is clean could leave.

    Attributes:
        nbytes: what they hold.
    """

    def __init__(self, has_backing: bool) -> None:
        self.nbytes = 0
        self._has_backing = has_backing
        self._idle: OrderedDict[Block, None] = OrderedDict()
        self._spared: OrderedDict[Block, None] = OrderedDict()

    def __contains__(self, tensor: Block) -> bool:
        return tensor in self._idle

    def touch(self, tensor: Block) -> None:
        """Makes `tensor` the most recently used, if it may leave at all."""
        if tensor in self._idle:
            self._idle.move_to_end(tensor)
        elif tensor.movable and (self._has_backing or tensor.place is Place.CLEAN):
            assert tensor.extent is not None
            self._idle[tensor] = None
            self.nbytes += tensor.extent.reservation.nbytes

    def take(self, tensor: Block) -> None:
        """Takes `tensor` off, if it is there: it must not be evicted now."""
        if tensor in self._idle:
            assert tensor.extent is not None
            del self._idle[tensor]
            self._spared.pop(tensor, None)
            self.nbytes -= tensor.extent.reservation.nbytes

    def spare(self, tensor: Block) -> None:
        """Evicts `tensor` after all others, the newest last: code outside of forwards may hold a view of it."""
        if tensor in self._idle:
            self._spared[tensor] = None
            self._spared.move_to_end(tensor)

    def is_spared(self, tensor: Block) -> bool:
        """Returns whether `tensor` is spared."""
        return tensor in self._spared

    def end_sparing(self) -> None:
        """Spared tensors are evicted as all others."""
        self._spared.clear()

    def free(self) -> list[Block]:
        """Returns the tensors that are not spared, least recently used first."""
        return [tensor for tensor in self._idle if tensor not in self._spared]

    def in_order(self) -> Iterable[Block]:
        """Iterates over `free`, without a copy where nothing is spared."""
        return self.free() if self._spared else self._idle

    def last_resort(self) -> Block | None:
        """Returns the first of the spared tensors."""
        return next(iter(self._spared), None)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless each may leave, and sizes add up."""
        held = 0
        for tensor in self._idle:
            assert tensor.extent is not None and not tensor.pins and tensor.movable, tensor
            held += tensor.extent.reservation.nbytes
        if held != self.nbytes:
            raise AssertionError(f"idle extents hold {held} bytes, counted {self.nbytes}")
