"""Paged tensors, pins that keep them in the compute tier, and the interfaces of those who follow their moves."""

from __future__ import annotations

import enum
import math
import sys
from typing import Any, Protocol

import torch

from ptm_accel.memory.budget import Reservation, Tag
from ptm_accel.memory.transfer import ALIGN_BYTES, Buffer, Source, Transfer, round_up


class Place(enum.Enum):
    """Place of the authoritative bytes of a paged tensor.

    ```
    BLANK --fault (fill)--> DIRTY <--mark-- CLEAN <--fault (load)-------------- AWAY
                              |               |  ^                             |   ^
                              |               |  +--fault-- ARRIVING <-prefetch+   |
                              +--store--------+--drop the extent------------------+        any --drop--> BLANK
    ```
    """

    BLANK = "blank"
    """Nowhere: every element is the fill value."""
    AWAY = "away"
    """In the backing store only (what was never stored there is the fill value)."""
    ARRIVING = "arriving"
    """In the backing store, and on their way into an extent, which nobody has seen yet."""
    CLEAN = "clean"
    """In an extent of the compute tier, and the same bytes in the backing store."""
    DIRTY = "dirty"
    """In an extent only; what the backing store holds, if anything, is out of date."""

    resident: bool
    """Whether there is an extent that can be used now."""

    def __init__(self, value: str) -> None:
        # Kept, since it is asked for thousands of times a step.
        self.resident = value in ("clean", "dirty")


_NEXT = {
    Place.BLANK: (Place.DIRTY, Place.AWAY),
    Place.AWAY: (Place.ARRIVING, Place.DIRTY, Place.BLANK),
    Place.ARRIVING: (Place.CLEAN, Place.DIRTY, Place.AWAY, Place.BLANK),
    Place.CLEAN: (Place.DIRTY, Place.AWAY, Place.BLANK),
    Place.DIRTY: (Place.CLEAN, Place.AWAY, Place.BLANK),
}
"""Where the bytes may be next."""


class Occupant(Protocol):
    """Is told when the bytes of one paged tensor come and go."""

    def arrived(self, tensor: torch.Tensor) -> None:
        """The bytes are in the compute tier, as `tensor`."""
        ...

    def was_written(self) -> bool:
        """Returns whether the bytes have changed in place since they came, or since this was last called."""
        ...

    def leaving(self, tensor: torch.Tensor) -> None:
        """The bytes are about to leave the compute tier: views of them must end."""
        ...

    @property
    def views(self) -> int:
        """Number of its views of the bytes, which end by `leaving`."""
        ...


_OF_AN_EXTENT = 3
"""References to the storage of an extent: its two tensors and that of the caller; for a block also the base that
autograd keeps of its typed tensor, or `Parameter.data`."""


def _references(tensor: torch.Tensor) -> int:
    storage = tensor.untyped_storage()
    return sys.getrefcount(storage)


_OF_A_STORAGE = _references(torch.empty(0))
"""Python's references to a storage that only the caller has."""


class Extent:
    """A whole tensor in the compute tier: its typed view, its bytes, and the charge for them.

    Attributes:
        tensor: the tensor in its shape and dtype.
        octets: the same memory as 1-D uint8; padded to `ALIGN_BYTES` if it is a buffer of the tier's.
        buffer: the tier's buffer, or None where the memory is somebody else's (an adopted tensor).
        reservation: the charge.
    """

    __slots__ = ("buffer", "octets", "reservation", "tensor")

    def __init__(
        self, tensor: torch.Tensor, octets: torch.Tensor, buffer: Buffer | None, reservation: Reservation
    ) -> None:
        self.tensor = tensor
        self.octets = octets
        self.buffer = buffer
        self.reservation = reservation

    def viewed(self, known: int) -> bool:
        """Returns whether there are views of it beside `known` ones."""
        storage = self.octets.untyped_storage()
        users: int = torch._C._storage_Use_Count(storage._cdata)
        if users > _OF_AN_EXTENT + (self.buffer is not None) + known:
            return True
        # All that Python has of a storage counts as one.
        return sys.getrefcount(storage) > _OF_A_STORAGE


class Block:
    """A named tensor, charged under a tag.

    Attributes:
        place: where its bytes are; only `become` changes it.
        fill: the value of every element as long as nothing was written.
        extent: the contiguous copy in the compute tier, if any.
        backing: where its bytes come from, if that is not the backing store of its pool.
        arrival: the transfer that fills the extent of an arriving tensor.
        handle: the backing store's handle, once it has been stored.
        stored_bytes: how many of the backing store's bytes, from the start, have been written; the rest is the fill
            value.
        pins: how many pins are held.
        movable: False for small tensors that stay in the compute tier.
        owner: the pool that has made it.
        stores: stores that may still be running.
        parts: how many parameters have a part of it.
    """

    # fmt: off
    __slots__ = (
        "arrival", "backing", "dtype", "extent", "fill", "handle", "movable", "name", "nbytes", "numel", "occupant",
        "owner", "parts", "pins", "place", "shape", "slot_bytes", "stored_bytes", "stores", "tag",
    )
    # fmt: on

    def __init__(self, name: str, tag: Tag, shape: torch.Size, dtype: torch.dtype, fill: float = 0.0) -> None:
        self.name = name
        self.tag = tag
        self.fill = fill
        self.place = Place.BLANK
        self.shape = shape
        self.dtype = dtype
        self.numel = math.prod(shape)
        self.nbytes = self.numel * dtype.itemsize
        self.slot_bytes = round_up(max(self.nbytes, 1), ALIGN_BYTES)
        self.extent: Extent | None = None
        self.arrival: Transfer | None = None
        self.backing: Source | None = None
        self.handle: Any = None
        self.stored_bytes = 0
        self.pins = 0
        self.movable = True
        self.occupant: Occupant | None = None
        self.owner: object = None
        self.stores: list[Transfer] = []
        self.parts = 1

    @property
    def viewed(self) -> bool:
        """Whether there is a view of its extent beside those of its occupant."""
        known = 0 if self.occupant is None else self.occupant.views
        return self.extent is not None and self.extent.viewed(known)

    def __repr__(self) -> str:
        return f"Block({self.name!r}, {self.tag.value}, {tuple(self.shape)}, {self.dtype}, {self.place.value})"

    def become(self, place: Place) -> None:
        """Notes where the bytes are from now on."""
        assert place is self.place or place in _NEXT[self.place], f"{self!r} cannot become {place.value}"
        self.place = place

    def note_changes(self) -> None:
        """Marks resident bytes that were changed in place as dirty."""
        if self.occupant is not None and self.occupant.was_written():
            self.become(Place.DIRTY)

    def check(self) -> None:
        """Raises `AssertionError` where the place and what is held disagree."""
        stored = self.handle is not None
        held = {
            Place.BLANK: self.extent is None and self.stored_bytes == 0,
            Place.AWAY: self.extent is None and stored,
            Place.ARRIVING: self.extent is not None and stored,
            Place.CLEAN: self.extent is not None and stored,
            Place.DIRTY: self.extent is not None,
        }[self.place]
        arriving = (self.arrival is not None) == (self.place is Place.ARRIVING)
        if not (held and arriving) or self.pins < 0 or (self.pins and self.extent is None):
            raise AssertionError(
                f"{self!r}: extent {self.extent}, handle {self.handle}, arrival {self.arrival}, pins {self.pins}"
            )


PART_ALIGN = 4096
"""Parts of a block begin at multiples of this many elements: aligned bytes for every dtype, and a multiple of 64."""


class Part:
    """One parameter's elements of a block: those from `start` on, in the parameter's shape.

    Attributes:
        block: the block.
        start: the first element.
        numel, nbytes, dtype: of the part alone.
        alone: whether the part is all of the block.
        used: the members that have a part of the block; it ends with the last.
    """

    __slots__ = ("alone", "block", "dtype", "member", "nbytes", "numel", "shape", "start", "used")

    def __init__(self, block: Block, start: int, shape: torch.Size, member: int, used: set[int]) -> None:
        self.block = block
        self.member = member
        self.used = used
        self.start = start
        self.shape = shape
        self.dtype = block.dtype
        self.numel = math.prod(shape)
        self.nbytes = self.numel * block.dtype.itemsize
        self.alone = self.numel == block.numel

    @property
    def place(self) -> Place:
        """Place of the block."""
        return self.block.place

    @property
    def slot_bytes(self) -> int:
        """Bytes of the block that the part takes, with padding."""
        return self.bytes_as(self.dtype.itemsize)

    def bytes_as(self, itemsize: int) -> int:
        """Returns the bytes that a like part takes of a block of elements of `itemsize` bytes, with padding."""
        if self.alone:
            return round_up(max(self.numel * itemsize, 1), ALIGN_BYTES)
        return round_up(self.numel, PART_ALIGN) * itemsize

    def of(self, elements: torch.Tensor) -> torch.Tensor:
        """Returns the part's view of all elements of the block."""
        if self.alone:
            return elements if elements.shape == self.shape else elements.view(self.shape)
        return elements[self.start : self.start + self.numel].view(self.shape)

    def __repr__(self) -> str:
        return f"Part({self.block!r}, {self.start}, {tuple(self.shape)})"


def alone(values: torch.Tensor) -> torch.Tensor:
    """The same bytes in a storage of just these: savers take parts of a storage for tied, or write all of it."""
    if values.untyped_storage().nbytes() == values.nbytes or not values.is_contiguous():
        return values
    separate: torch.Tensor = torch.utils.dlpack.from_dlpack(values)
    return separate


class Pins(Protocol):
    """A pool, as its pins see it."""

    def unpin(self, tensor: Block) -> None:
        """Ends a pin."""
        ...


class Pin:
    """Keeps a tensor in the compute tier until it is released."""

    __slots__ = ("_part", "_pool", "_tensor")

    def __init__(self, pool: Pins, tensor: Block, part: Part | None = None) -> None:
        self._pool: Pins | None = pool
        self._tensor = tensor
        self._part = part

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor in its shape; not to be kept beyond the pin."""
        assert self._pool is not None and self._tensor.extent is not None, "pin used after its end"
        whole = self._tensor.extent.tensor
        return whole if self._part is None else self._part.of(whole)

    def release(self) -> None:
        """Ends the pin. A second release does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.unpin(self._tensor)

    def __enter__(self) -> torch.Tensor:
        return self.tensor

    def __exit__(self, *exc: object) -> None:
        self.release()


def placeholder(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns a tensor of one element, expanded to `shape`, that stands in for one that is away.

    It keeps shape, dtype and device true. A kernel that reads it past all torch functions gets NaN (the least value for
    integers) rather than stale numbers.
    """
    poison: float | bool | int
    if dtype.is_floating_point or dtype.is_complex:
        poison = math.nan
    elif dtype is torch.bool:
        poison = False
    else:
        poison = torch.iinfo(dtype).min
    # Of a parameter that is away while it is only evaluated, and trained later.
    with torch.inference_mode(False):
        return torch.full((1,) * len(shape), poison, dtype=dtype, device=device).expand(shape)
