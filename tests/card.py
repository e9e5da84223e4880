"""A card whose memory is handed out as torch's caching allocator does it, for tests without a card.

Blocks, and what operations allocate, come out of segments that are never given back while a part of them is used. So
free memory lies in pieces here as it does there, and a limit on what is reserved is met long before all of it is used.
The rules are those of torch's `CUDACachingAllocator` without options: sizes are rounded, small and large requests have
segments of their own, the smallest free block that is large enough is split, and where a limit is met all free
segments are given back before the request fails.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.card_memory import CardMemory, device_refusal
from ptm_accel.memory.slabs import Run
from ptm_accel.memory.transfer import Buffer
from ptm_accel.model.forecast import storage_key
from ptm_accel.units import MIB
from tests.mock_device import POISON, MockDevice


@dataclass(eq=False)
class Piece:
    """A part of a segment, used or free.

    Attributes:
        nbytes: its length.
        small: whether it is of a segment for small requests.
        before: the part in front of it.
        after: the part behind it.
        used: whether it is handed out.
    """

    nbytes: int
    small: bool
    before: Piece | None = None
    after: Piece | None = None
    used: bool = False


class Card:
    """The memory of a card.

    Args:
        limit_bytes: the most that may be reserved.
        scale: all sizes of torch's rules are divided by this, for models that are smaller by it.

    Attributes:
        allocated: bytes that are handed out.
        reserved: bytes in segments.
        peak_allocated: the most of the former since `reset_peaks`.
        peak_reserved: the most of the latter.
        flushes: how often a limit was met and free segments were given back for it.
    """

    def __init__(self, limit_bytes: int, scale: int = 1) -> None:
        self.limit_bytes = limit_bytes
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self.flushes = 0
        self._round = max(512 // scale, 1)
        self._small = MIB // scale
        self._free: dict[bool, list[tuple[int, int, Piece]]] = {True: [], False: []}
        self._number = 0

    def malloc(self, nbytes: int) -> Piece:
        """Hands out memory.

        Raises:
            torch.OutOfMemoryError: no free block is large enough, and the limit leaves no room for another segment.
        """
        size = -(-max(nbytes, 1) // self._round) * self._round
        small = size <= self._small
        piece = self._taken(size, small) or self._segment(size, small)
        if piece is None:
            self.flushes += 1
            self.empty_cache()
            piece = self._segment(size, small)
        if piece is None:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {nbytes} B: {self.allocated} B of {self.reserved} B that are "
                f"reserved are allocated, of {self.limit_bytes} B"
            )
        if piece.nbytes - size >= self._round if small else piece.nbytes - size > self._small:
            rest = Piece(piece.nbytes - size, small, piece, piece.after)
            if piece.after is not None:
                piece.after.before = rest
            piece.after, piece.nbytes = rest, size
            self._put(rest)
        piece.used = True
        self.allocated += piece.nbytes
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return piece

    def free(self, piece: Piece) -> None:
        """Takes memory back."""
        assert piece.used
        piece.used = False
        self.allocated -= piece.nbytes
        if (before := piece.before) is not None and not before.used:
            self._remove(before)
            piece.nbytes += before.nbytes
            piece.before = before.before
            if piece.before is not None:
                piece.before.after = piece
        if (after := piece.after) is not None and not after.used:
            self._remove(after)
            piece.nbytes += after.nbytes
            piece.after = after.after
            if piece.after is not None:
                piece.after.before = piece
        self._put(piece)

    def empty_cache(self) -> None:
        """Gives back the segments of which nothing is used."""
        for free in self._free.values():
            whole = [entry for entry in free if entry[2].before is None and entry[2].after is None]
            for entry in whole:
                free.remove(entry)
                self.reserved -= entry[2].nbytes

    def reset_peaks(self) -> None:
        """Peaks are what is there now."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def _taken(self, size: int, small: bool) -> Piece | None:
        entry = next((entry for entry in self._free[small] if entry[0] >= size), None)
        if entry is None:
            return None
        self._free[small].remove(entry)
        return entry[2]

    def _segment(self, size: int, small: bool) -> Piece | None:
        large = 20 * self._small if size < 10 * self._small else -(-size // (2 * self._small)) * 2 * self._small
        nbytes = 2 * self._small if small else large
        if self.reserved + nbytes > self.limit_bytes:
            return None
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return Piece(nbytes, small)

    def _put(self, piece: Piece) -> None:
        self._number += 1
        insort(self._free[piece.small], (piece.nbytes, self._number, piece))

    def _remove(self, piece: Piece) -> None:
        free = self._free[piece.small]
        free.pop(next(at for at, entry in enumerate(free) if entry[2] is piece))


class OnCard(TorchDispatchMode):
    """What operations allocate is counted on a card, until its last tensor dies.

    Args:
        card: the card.
        workspace: bytes that an operation takes beside its results while it runs, by its name.

    Attributes:
        card: see above.
    """

    def __init__(self, card: Card, workspace: dict[str, int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.card = card
        self._workspace = workspace or {}
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {storage_key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        workspace = self._workspace.get(func._schema.name.removeprefix("aten::"))
        piece = None if workspace is None else self.card.malloc(workspace)
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor) and storage_key(value) not in before:
                self._follow(value)
        if piece is not None:
            self.card.free(piece)
        return result

    def _follow(self, tensor: torch.Tensor) -> None:
        key, nbytes = storage_key(tensor), tensor.untyped_storage().nbytes()
        if not nbytes or key in self._known:
            return
        piece = self.card.malloc(nbytes)

        def died(ref: weakref.ref[Any]) -> None:
            self.card.free(piece)
            if self._known.get(key) is ref:
                del self._known[key]

        self._known[key] = weakref.ref(tensor.untyped_storage(), died)


class CardAllocator:
    """The allocator of a card, as pages see it (`ptm_accel.memory.card_memory.Allocator`)."""

    def __init__(self, card: Card, scale: int = 1) -> None:
        self.card: Hashable = card
        self.small_bytes = MIB // scale
        self.granule_bytes = 2 * MIB // scale
        self.given_up: list[int] = []
        self._card = card
        self._kept: dict[int, list[ctypes.Array[ctypes.c_ubyte]]] = {}

    def empty(self, nbytes: int) -> torch.Tensor | None:
        try:
            piece = self._card.malloc(nbytes)
        except torch.OutOfMemoryError:
            return None
        kept = self._kept.get(nbytes)
        octets = kept.pop() if kept else (ctypes.c_ubyte * nbytes)()
        # It is counted here, and not as what an operation has allocated.
        with _disable_current_modes():
            memory = torch.frombuffer(octets, dtype=torch.uint8).fill_(POISON)
        weakref.finalize(memory.untyped_storage(), self._died, piece, octets)
        return memory

    def _died(self, piece: Piece, octets: ctypes.Array[ctypes.c_ubyte]) -> None:
        self._card.free(piece)
        # Like a card's it stays mapped, for a copy that still runs, and for the next request.
        ctypes.memset(octets, POISON, len(octets))
        if len(octets) <= self.small_bytes:
            self._kept.setdefault(len(octets), []).append(octets)

    def view(self, memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        part = (ctypes.c_ubyte * nbytes).from_address(memory.data_ptr() + offset)
        part.memory = memory  # type: ignore[attr-defined]
        with _disable_current_modes():
            return torch.frombuffer(part, dtype=torch.uint8)

    def give_up(self, memory: torch.Tensor) -> None:
        self.given_up.append(memory.numel())

    def trim(self) -> None:
        self._card.empty_cache()

    def reserved(self) -> int:
        return self._card.reserved

    def free(self) -> int:
        return self._card.limit_bytes - self._card.allocated

    def refusal(self, nbytes: int) -> DeviceBudgetError:
        card = self._card
        return device_refusal("card", nbytes, card.allocated, card.reserved, card.limit_bytes)


class CardTier(MockDevice):
    """A mock device whose blocks come out of a card. Bytes are NaN before they are written, and after `recycle`.

    Args:
        card: the card.
        scale: of the card.
    """

    def __init__(self, card: Card, scale: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self.memory = CardMemory(CardAllocator(card, scale))

    def allocate(self, nbytes: int) -> Buffer:
        assert self.memory is not None
        buffer = self.memory.allocate(nbytes)
        if not buffer.behind:
            assert buffer.octets is not None
            with _disable_current_modes():
                buffer.octets.fill_(POISON)
        return buffer

    def recycle(self, buffer: Buffer) -> None:
        assert self.memory is not None
        if isinstance(buffer.region, Run) and not buffer.behind:
            # No name here may hold the slab: it may be given back now.
            buffer.region.slab.memory[buffer.region.offset :][: buffer.nbytes].fill_(POISON)
        self.memory.recycle(buffer)

    def check_integrity(self) -> None:
        assert self.memory is not None
        self.memory.check_integrity()
