"""Finds the parameter in whose values a tensor lies, by the address of its storage."""

from __future__ import annotations

from bisect import bisect_right, insort

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.memory.block import Block
from ptm_accel.memory.traffic import PoolStats
from ptm_accel.model.away import AwayParameter, bare
from ptm_accel.model.slots import ParamSlot


class ExtentTable:
    """Finds the parameter in whose buffer (or cast copy) a tensor lies, by the address of the tensor's storage.

    Addresses are reused: an entry is valid only while the storage it was made for lives.

    Args:
        stats: where the time of our own work is counted.
    """

    kinds: tuple[type, ...] = (torch.Tensor, nn.Parameter, AwayParameter)
    """The types of the tensors that are looked up. Other subclasses (quantised, fake) may have no storage."""

    @staticmethod
    def address(tensor: torch.Tensor) -> int:
        """Returns the key of `tensor`'s storage."""
        return tensor.untyped_storage().data_ptr()

    def __init__(self, stats: PoolStats) -> None:
        self.stats = stats
        self.addresses: dict[int, tuple[Members | CastSource, StorageWeakRef]] = {}

    def add(self, tensor: torch.Tensor, source: Members | CastSource) -> int:
        """Notes that `tensor`'s storage holds the values of `source`; returns its key."""
        address = self.address(tensor)
        self.addresses[address] = (source, StorageWeakRef(tensor.untyped_storage()))
        return address

    def occupy(self, block: Block) -> None:
        """Makes members of a block, which has none yet."""
        block.occupant = Members(self)

    def remove(self, tensor: torch.Tensor) -> None:
        """Forgets `tensor`'s storage."""
        self.addresses.pop(self.address(tensor), None)

    def find(self, tensor: torch.Tensor) -> ParamSlot | CastSource | None:
        """Returns the source whose values lie in `tensor`'s storage, if any."""
        if tensor.layout is not torch.strided:
            # A sparse one has no storage.
            return None
        address = self.address(tensor)
        known = self.addresses.get(address)
        if known is None:
            return None
        if known[1].expired():
            del self.addresses[address]
            return None
        source = known[0]
        return source.at(tensor) if isinstance(source, Members) else source

    def sweep(self, addresses: list[int]) -> list[int]:
        """Forgets those of `addresses` whose storage has been freed; returns the others."""
        living = []
        for address in addresses:
            known = self.addresses.get(address)
            if known is None:
                continue
            if known[1].expired():
                del self.addresses[address]
            else:
                living.append(address)
        return living

    def __len__(self) -> int:
        return len(self.addresses)


class CastSource:
    """A lower-precision copy of a paged parameter, or of a view of one; `make` casts it anew from the parameter."""

    __slots__ = ("__weakref__", "dtype", "generation", "offset", "shape", "slot", "strides", "version")

    def __init__(self, slot: ParamSlot, view: torch.Tensor, dtype: torch.dtype) -> None:
        self.slot = slot
        self.dtype = dtype
        self.shape = view.shape
        self.strides = view.stride()
        self.offset = slot.offset_of(view)
        self.generation = slot.generation
        self.version = slot.param._version

    def make(self) -> torch.Tensor:
        """Returns the copy, cast from the parameter's present values."""
        return self.slot.cast(self.shape, self.strides, self.offset, self.dtype)


class Members:
    """The parameters whose values lie in one block, in its order: they come and go together.

    Args:
        table: finds them by the address of the block.
    """

    __slots__ = ("_addresses", "_table", "_withheld", "slots")

    def __init__(self, table: ExtentTable) -> None:
        self.slots: list[ParamSlot] = []
        self._addresses: list[int] = []
        self._table = table
        self._withheld: dict[ParamSlot, torch.Tensor] | None = None
        """Views that the parameters get after a pending update of the block; None if none is pending."""

    def arrived(self, tensor: torch.Tensor) -> None:
        """Called by the pool after it has loaded the block."""
        self._table.add(tensor, self)
        withheld = self._withheld
        for slot in self.slots:
            values = slot.value.of(tensor)
            slot.arrived(values, given=withheld is None)
            if withheld is not None:
                withheld[slot] = values
        self._addresses = [slot.address for slot in self.slots]

    def leaving(self, tensor: torch.Tensor) -> None:
        """Called by the pool before it evicts the block."""
        self._table.remove(tensor)
        if self._withheld is not None:
            self._withheld.clear()
            return
        for slot in self.slots:
            slot.leaving(tensor.device)

    def withhold(self, block: Block, device: torch.device) -> None:
        """Parameters read as those that are away until `give_back`: what their block has is not what they are now.

        Code that goes around torch functions would read the values of the step before.

        Args:
            block: whose parameters they are.
            device: of the compute tier.
        """
        if self._withheld is not None:
            return
        self._withheld = {}
        if not block.place.resident:
            return
        with bare():
            for slot in self.slots:
                # They count as views of the block, as those that the parameters had.
                self._withheld[slot] = slot.param.data
                slot.param.data = slot.stand_in(device)

    def give_back(self) -> None:
        """Ends `withhold`: the block has been updated, or will not be."""
        withheld, self._withheld = self._withheld, None
        if withheld:
            with bare():
                for slot, values in withheld.items():
                    slot.param.data = values

    def lost(self, slot: ParamSlot) -> None:
        """A parameter is not to get its values any more."""
        if self._withheld is not None:
            self._withheld.pop(slot, None)

    def add(self, slot: ParamSlot, tensor: torch.Tensor | None) -> None:
        """A parameter has its part of the block.

        Args:
            slot: the parameter.
            tensor: the block in the compute tier; None if it is not there.
        """
        insort(self.slots, slot, key=lambda member: member.value.start)
        if tensor is not None:
            self._table.add(tensor, self)
            values = slot.value.of(tensor)
            slot.arrived(values, given=self._withheld is None)
            if self._withheld is not None:
                self._withheld[slot] = values
            self._addresses = [member.address for member in self.slots]

    @property
    def views(self) -> int:
        """Number of parameters: each has one view."""
        return len(self.slots)

    def was_written(self) -> bool:
        """Whether torch has counted an in-place change of one since the last call, or since they were loaded."""
        written = [slot.was_written() for slot in self.slots]
        return True in written

    def at(self, view: torch.Tensor) -> ParamSlot | None:
        """Returns the parameter in whose values a view of the block begins, if one has them still."""
        address = view.data_ptr()
        at = bisect_right(self._addresses, address) - 1
        if at < 0:
            return None
        found = self.slots[at]
        return found if address - found.address < found.value.nbytes else None

    def remove(self, slot: ParamSlot) -> None:
        """A parameter has left the block."""
        self.slots.remove(slot)
        self.lost(slot)
        self._addresses = [other.address for other in self.slots]
