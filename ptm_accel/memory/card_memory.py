"""A card's memory as pages see it: large buffers out of slabs, small ones from the card's allocator itself.

Pages hold what their slabs and small buffers take, used or not. All else that the allocator has reserved is beside
them: activations, workspaces, and the pieces between those.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any, ClassVar, Protocol

import torch

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.slabs import GRANULE_BYTES, Run, Slabs
from ptm_accel.memory.transfer import ALIGN_BYTES, Buffer
from ptm_accel.units import format_bytes

SMALL_BYTES = 1 << 20
"""Up to this size torch's allocator has segments of their own, where they leave no holes between large ones."""


def check_block_size(nbytes: int) -> None:
    """Asserts that `nbytes` is what `ComputeTier.allocate` takes."""
    assert nbytes > 0 and nbytes % ALIGN_BYTES == 0, f"block of {nbytes} B, not a positive multiple of {ALIGN_BYTES}"


def device_refusal(device: str, asked: int, allocated: int, reserved: int, total: int) -> DeviceBudgetError:
    """Returns the error for a device that has less memory than the budget promised. All counts are bytes."""
    return DeviceBudgetError(
        f"ptm_accel: the device is out of memory. {device}: cannot allocate a block of {format_bytes(asked)}: "
        f"{format_bytes(allocated)} are allocated and {format_bytes(reserved)} reserved by torch, "
        f"of {format_bytes(total)} on the card; set device_memory lower, or use a smaller batch."
    )


class Allocator(Protocol):
    """The allocator of a card, which pages share with everything else.

    Attributes:
        card: identifies the card.
        small_bytes: requests up to this size have segments of their own.
        granule_bytes: segments of large requests are multiples of this.
    """

    card: Hashable
    small_bytes: int
    granule_bytes: int

    def empty(self, nbytes: int) -> Any | None:
        """Allocates `nbytes`, contents undefined; None if there is not as much."""
        ...

    def view(self, memory: Any, offset: int, nbytes: int) -> torch.Tensor:
        """Returns a part of memory from `empty`, as uint8 in a storage of its own, which keeps the memory alive."""
        ...

    def give_up(self, memory: Any) -> None:
        """The caller drops memory from `empty` next."""
        ...

    def trim(self) -> None:
        """Has segments of which nothing is used given back to the card."""
        ...

    def reserved(self) -> int:
        """Bytes that it has taken from the card."""
        ...

    def free(self) -> int:
        """Bytes that it can still hand out: what nobody has taken from the card, and what it keeps for itself."""
        ...

    def refusal(self, nbytes: int) -> DeviceBudgetError:
        """Returns the error for so many bytes that it does not have."""
        ...


class CardMemory:
    """Allocates buffers of a card's memory.

    Args:
        allocator: where it comes from.

    Attributes:
        slabs: what large buffers are cut from.
    """

    _open: ClassVar[weakref.WeakSet[CardMemory]] = weakref.WeakSet()

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self.slabs = Slabs(allocator.empty, allocator.give_up, allocator.trim, allocator.granule_bytes)
        self._small_bytes = 0
        self._lock = threading.RLock()
        CardMemory._open.add(self)

    @property
    def live_bytes(self) -> int:
        """Bytes in buffers handed out and not yet recycled."""
        with self._lock:
            return self.slabs.used_bytes + self._small_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes that the card has less for others: slabs and small buffers."""
        return self.slabs.held_bytes + self._small_bytes

    def allocate(self, nbytes: int, *, anywhere: bool = False) -> Buffer:
        """A buffer of `nbytes`, contents undefined; `anywhere` also beyond what slabs may take together (`confine`).

        Raises:
            DeviceBudgetError: there is no piece of that size.
        """
        check_block_size(nbytes)
        with self._lock:
            if nbytes <= self._allocator.small_bytes:
                memory = self._allocator.empty(nbytes)
                if memory is None:
                    raise self._allocator.refusal(nbytes)
                self._small_bytes += nbytes
                # The buffer has the memory: a copy may still run when the last view of it has died.
                return Buffer(self._allocator.view(memory, 0, nbytes), memory)
            run = self.slabs.stretch(nbytes) if anywhere else self.slabs.take(nbytes)
            if run is None:
                raise self._allocator.refusal(nbytes)
            return Buffer(self._allocator.view(run.slab.memory, run.offset, run.nbytes), run, run.users())

    def cuts(self, nbytes: int) -> bool:
        """Returns whether buffers of that size are cut from slabs."""
        return nbytes > self._allocator.small_bytes

    def recycle(self, buffer: Buffer) -> None:
        """Takes back a buffer whose storage has died; what `Buffer.behind` names may still use one out of a slab."""
        with self._lock:
            if isinstance(buffer.region, Run):
                self.slabs.give(buffer.region, buffer.behind)
            else:
                assert buffer.region is not _GONE, f"a block of {buffer.nbytes} B was recycled twice"
                self._small_bytes -= buffer.nbytes
                self._allocator.give_up(buffer.region)
            buffer.region = _GONE

    def confine(self, nbytes: int) -> None:
        """Limits what slabs take together; excess slabs give no more buffers."""
        with self._lock:
            self.slabs.confine(nbytes)

    def beside_bytes(self) -> int:
        """Bytes that are reserved on the card and that no pages hold, those of other models included."""
        card = self._allocator.card
        held = sum(memory.held_bytes for memory in list(CardMemory._open) if memory._allocator.card == card)
        return max(self._allocator.reserved() - held, 0)

    def free_bytes(self) -> int:
        """Bytes that the card has for anybody, slabs left out."""
        return self._allocator.free()

    def trim(self) -> None:
        """Gives unused segments back to the card."""
        self._allocator.trim()

    def close(self) -> None:
        """Gives memory back as buffers come back."""
        with self._lock:
            self.slabs.close()

    def check_integrity(self) -> None:
        """Raises `AssertionError` if slabs do not add up, or if more is held than is reserved."""
        with self._lock:
            self.slabs.check_integrity()
            reserved = self._allocator.reserved()
            if not 0 <= self._small_bytes <= self.held_bytes <= reserved:
                raise AssertionError(f"{self._allocator.card}: {self.held_bytes} B are held, {reserved} B are reserved")


_GONE = object()


class _DeviceSlice:
    """A part of a tensor on a card by the CUDA array interface (version 2), to make another tensor of it."""

    def __init__(self, memory: torch.Tensor, offset: int, nbytes: int) -> None:
        self._memory = memory
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.data_ptr() + offset, False),
            "version": 2,
        }


class TorchAllocator:
    """torch's caching allocator on a CUDA device.

    Args:
        device: with an index.
    """

    small_bytes = SMALL_BYTES
    granule_bytes = GRANULE_BYTES

    def __init__(self, device: torch.device) -> None:
        self.card: Hashable = device
        self._device = device
        self._streams: set[torch.cuda.Stream] = set()

    def empty(self, nbytes: int) -> torch.Tensor | None:
        """See `Allocator.empty`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError:
            return None

    def view(self, memory: torch.Tensor, offset: int, nbytes: int) -> torch.Tensor:
        """See `Allocator.view`. Compute that runs on several streams is put in order."""
        current = torch.cuda.current_stream(self._device)
        # A part that comes back here may still be read by what was queued on another stream.
        for other in self._streams - {current}:
            current.wait_stream(other)
        self._streams.add(current)
        return torch.as_tensor(_DeviceSlice(memory, offset, nbytes), device=self._device)

    def give_up(self, memory: torch.Tensor) -> None:
        """See `Allocator.give_up`. torch reuses it when all streams that were seen are done with what is queued now."""
        for stream in self._streams:
            memory.record_stream(stream)

    def trim(self) -> None:
        """See `Allocator.trim`."""
        torch.cuda.empty_cache()

    def reserved(self) -> int:
        """See `Allocator.reserved`."""
        # The same figure as `memory_reserved`, which sorts all the others for it as well.
        return int(torch.cuda.memory_stats_as_nested_dict(self._device)["reserved_bytes"]["all"]["current"])

    def free(self) -> int:
        """See `Allocator.free`."""
        kept = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return int(torch.cuda.mem_get_info(self._device)[0]) + kept

    def refusal(self, nbytes: int) -> DeviceBudgetError:
        """See `Allocator.refusal`."""
        return device_refusal(
            str(self._device),
            nbytes,
            torch.cuda.memory_allocated(self._device),
            torch.cuda.memory_reserved(self._device),
            torch.cuda.get_device_properties(self._device).total_memory,
        )
