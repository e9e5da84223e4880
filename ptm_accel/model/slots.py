"""What the engine knows of each parameter: a side table keyed by parameter, nothing attached to the parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.errors import PagedModelError, PlaceholderError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.paged import PagedTensor, is_intact, placeholder
from ptm_accel.memory.pool import Pool


class ExtentTable:
    """Which slot's extent lies in which storage: the way from a saved tensor back to its parameter.

    Keyed by address, and addresses are reused: an entry counts only as long as the very storage it was made for lives.
    """

    kinds: tuple[type, ...] = (torch.Tensor, nn.Parameter)
    """The types of the tensors that lie in extents. Subclasses (quantised tensors, fake ones while something is being
    traced) have no storage to ask for."""

    @staticmethod
    def address(tensor: torch.Tensor) -> int:
        """What `tensor`'s storage is known by."""
        return tensor.untyped_storage().data_ptr()

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[ParamSlot | CastSource, StorageWeakRef]] = {}

    def add(self, tensor: torch.Tensor, source: ParamSlot | CastSource) -> int:
        """Notes that `tensor`'s storage holds the values of `source`; returns its address."""
        address = self.address(tensor)
        self._by_address[address] = (source, StorageWeakRef(tensor.untyped_storage()))
        return address

    def remove(self, tensor: torch.Tensor) -> None:
        """Forgets `tensor`'s storage."""
        self._by_address.pop(self.address(tensor), None)

    def find(self, tensor: torch.Tensor) -> ParamSlot | CastSource | None:
        """The source whose values lie in `tensor`'s storage, if any."""
        if tensor.layout is not torch.strided:
            # A sparse one has no storage.
            return None
        address = self.address(tensor)
        known = self._by_address.get(address)
        if known is None:
            return None
        if known[1].expired():
            del self._by_address[address]
            return None
        return known[0]

    def sweep(self, addresses: list[int]) -> list[int]:
        """Forgets those of `addresses` whose storage has died; returns the others."""
        living = []
        for address in addresses:
            known = self._by_address.get(address)
            if known is None:
                continue
            if known[1].expired():
                del self._by_address[address]
            else:
                living.append(address)
        return living

    def __len__(self) -> int:
        return len(self._by_address)


class CastSource:
    """A lower-precision copy that autocast would have made of a paged parameter, or of a view of one.

    Its bytes are never kept: `make` casts them anew from the parameter.
    """

    __slots__ = ("__weakref__", "dtype", "generation", "offset", "shape", "slot", "strides", "version")

    def __init__(self, slot: ParamSlot, view: torch.Tensor, dtype: torch.dtype) -> None:
        self.slot = slot
        self.dtype = dtype
        self.shape = view.shape
        self.strides = view.stride()
        self.offset = int(view.storage_offset())
        self.generation = slot.generation
        self.version = slot.param._version

    def make(self) -> torch.Tensor:
        """The copy, cast from the parameter's present values."""
        return self.slot.cast(self.shape, self.strides, self.offset, self.dtype)


_Layout = tuple[torch.Size, tuple[int, ...], int, torch.dtype]


def _layout(tensor: torch.Tensor) -> _Layout:
    """What of its storage a tensor shows."""
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.dtype


class ParamSlot:
    """One parameter of the model and its paged values.

    Attributes:
        name: the first of its names in the model.
        param: the model's own `nn.Parameter`; its `.data` is the extent or a placeholder.
        value: its values on pages.
        generation: counts updates, so that a backward through an older forward is noticed.
        veiled: whether the parameter shows its placeholder although its values are there: an update is owed to them.
        unpacked: called with each view of the values that backward is about to compute with.
    """

    __slots__ = (
        "_address",
        "_layout",
        "_placeholder",
        "_pool",
        "_spare",
        "_table",
        "_version",
        "_writes",
        "generation",
        "name",
        "param",
        "unpacked",
        "value",
        "veiled",
    )

    def __init__(self, name: str, param: nn.Parameter, value: PagedTensor, pool: Pool, table: ExtentTable) -> None:
        self.name = name
        self.param = param
        self.value = value
        self.generation = 0
        self.veiled = False
        self.unpacked: Callable[[torch.Tensor], None] | None = None
        self._writes = 0
        self._version = param._version
        self._pool = pool
        self._table = table
        # What was found intact is shown again: to make another takes longer than to bring in a small parameter.
        self._placeholder: torch.Tensor | None = None
        self._spare: torch.Tensor | None = None
        self._address: int | None = None
        self._layout: _Layout | None = None
        value.occupant = self

    def _give(self, data: torch.Tensor, address: int) -> None:
        """Gives the parameter its extent or a placeholder, which nobody else has exchanged.

        Args:
            data: what it is given.
            address: what the storage of that is known by.
        """
        self.param.data = data
        self._address, self._layout = address, _layout(data)

    @property
    def exchanged(self) -> bool:
        """Whether somebody has given the parameter other data than its extent or its placeholder, or a view of that."""
        return self._address is not None and not (self._has_its_storage and _layout(self.param) == self._layout)

    @property
    def _has_its_storage(self) -> bool:
        return self._table.address(self.param) == self._address

    def meet(self) -> None:
        """Takes what somebody has given the parameter as its data (`param.data = ...`) onto its pages.

        Called before its values are used, since nothing tells when it happens.

        Raises:
            PagedModelError: a forward uses the values, and what was given is of another shape or type, or somebody has
                kept a view of what there was.
            PlaceholderError: it was given a view of what stands in for its values.
            BudgetError: no room for it.
        """
        if not self.exchanged:
            return
        view = self._has_its_storage
        if view and self._placeholder is not None:
            raise PlaceholderError(
                f"parameter {self.name} of shape {tuple(self.value.shape)} was given a view of itself (shape "
                f"{tuple(self.param.shape)}) while its values were on pages. Read it by its name when you do that "
                "(`module.weight.data = module.weight.data[:n]`), or do it inside `with ptm_accel.gathered(model, "
                "write=True):`."
            )
        given = self.param.data.contiguous()
        if self.value.pins and (given.shape != self.value.shape or given.dtype != self.value.dtype):
            raise PagedModelError(
                f"parameter {self.name} of shape {tuple(self.value.shape)} and {self.value.dtype} was given data of "
                f"shape {tuple(given.shape)} and {given.dtype} while it was in use. Change it between two forwards."
            )
        if self.value.pins and self.value.extent is not None and self.value.extent.viewed(shown=view):
            # What is given is copied there, as long as it is in use.
            raise PagedModelError(
                f"parameter {self.name} of shape {tuple(self.value.shape)} was given other data while it was in use, "
                "and what it had before is kept by somebody (such as `kept = module.weight.data`), who would see it "
                "change. Keep a copy (`module.weight.data.clone()`), or write in place (`module.weight.data.copy_()`)."
            )
        if view:
            # Not as a part of what is about to be dropped.
            given = given.clone() if self._table.address(given) == self._address else given
            self.param.data = given
        self._pool.renew(self.value, given)
        assert self.value.extent is not None
        self._address = self._layout = self._placeholder = None
        self.generation += 1
        self._writes += 1
        self.arrived(self.value.extent.tensor)

    def arrived(self, tensor: torch.Tensor) -> None:
        """The pool has brought the values in."""
        if self.veiled:
            return
        stand_in, self._placeholder = self._placeholder, None
        self._version = self.param._version
        address = self._table.add(tensor, self)
        if not self.exchanged:
            self._give(tensor, address)
        if stand_in is None or stand_in.device.type != "cpu":
            return
        if not is_intact(stand_in):
            raise PlaceholderError(
                f"parameter {self.name} was written to while it was on pages, by zero_() or fill_() on its placeholder "
                f"(shape {tuple(self.param.shape)}); that write is lost. Write to parameters inside "
                "`with ptm_accel.gathered(model, write=True):`."
            )
        self._spare = stand_in

    def was_written(self) -> bool:
        """Whether somebody has changed the values in place since they came, or since this was last asked.

        Torch counts that, whoever does it: a forward that clamps its weight, a hook of a backward.
        """
        version = self.param._version
        if self.veiled or version == self._version:
            return False
        self._version = version
        self._writes += 1
        return True

    @property
    def writes(self) -> int:
        """How often somebody outside may have written to the values."""
        if self.value.place.resident:
            self.value.note_changes()
        return self._writes

    def leaving(self, tensor: torch.Tensor) -> None:
        """The pool is about to take the values away."""
        if self.veiled:
            return
        self._table.remove(tensor)
        if not self.exchanged:
            self._show_placeholder(tensor.device)

    def veil(self) -> None:
        """An update is owed to the values: until it is done nobody is to see them."""
        if self.value.place.resident:
            assert self.value.extent is not None
            self.value.note_changes()
            self.leaving(self.value.extent.tensor)
        self.veiled = True

    def unveil(self) -> None:
        """The update is done.

        Raises:
            PlaceholderError: somebody has written to the placeholder meanwhile.
        """
        if self.veiled:
            self.veiled = False
            if self.value.place.resident:
                assert self.value.extent is not None
                self.arrived(self.value.extent.tensor)

    def stand_in(self, device: torch.device) -> None:
        """Gives the parameter its first placeholder, before any values exist."""
        self._show_placeholder(device, given=not self.exchanged)

    def _show_placeholder(self, device: torch.device, *, given: bool = True) -> None:
        spare, self._spare = self._spare, None
        # Its values may have been exchanged for some of another shape.
        if spare is None or (spare.shape, spare.dtype, spare.device) != (self.value.shape, self.value.dtype, device):
            spare = placeholder(self.value.shape, self.value.dtype, device)
        self._placeholder = spare
        if given:
            self._give(spare, self._table.address(spare))

    def show(self, device: torch.device) -> None:
        """Gives a parameter whose values are on pages already its extent, or a placeholder if it is away."""
        if self.value.extent is not None:
            self.arrived(self.value.extent.tensor)
        else:
            self.stand_in(device)

    @property
    def shown(self) -> bool:
        """Whether the parameter's data is ours: its extent or a placeholder, not what it had before it was paged."""
        return self._placeholder is not None or self.value.place.resident

    def take_off(self, values: torch.Tensor) -> None:
        """Gives the parameter `values` for good: it is on pages no more."""
        self.value.occupant = None
        self._table.remove(self.param.data)
        self._address = self._layout = self._placeholder = None
        self.param.data = values

    def cast(self, shape: torch.Size, strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> torch.Tensor:
        """A copy in `dtype` of a view of the values, charged as long as it lives."""
        with self._pool.pin(self.value) as values:
            view = values.detach().as_strided(shape, strides, offset)
            with self._pool.room.charged(view.numel() * dtype.itemsize, Tag.CAST, self.name) as keep:
                copy = view.to(dtype)
                keep(copy)
            return copy

    def lend(self) -> None:
        """Brings the values in for somebody outside, who may write to them."""
        self._pool.lend(self.value)
        self._writes += 1

    def written(self) -> None:
        """Somebody's code has changed the values where they were read in a forward, and torch has not counted that."""
        with self._pool.unadvised():
            self._pool.fault(self.value, write=True)
        self._writes += 1

    def write(self, values: torch.Tensor) -> None:
        """Gives the parameter other values, between two steps."""
        self.meet()
        with self._pool.pin(self.value, write=True) as pages:
            pages.copy_(values)
        self.generation += 1

    def fetch(self, *, write: bool = False) -> torch.Tensor:
        """The values in the compute tier."""
        return self._pool.fault(self.value, write=write)


class SlotTable:
    """All slots of one model, by parameter identity and by name (every name a tied parameter has)."""

    def __init__(self) -> None:
        self._by_id: dict[int, ParamSlot] = {}
        self.by_name: dict[str, ParamSlot] = {}

    def add(self, slot: ParamSlot) -> None:
        """Adds a slot under its parameter and its first name."""
        self.put(slot.name, slot)

    def put(self, name: str, slot: ParamSlot) -> None:
        """Adds a slot under its parameter and one of its names."""
        self._by_id[id(slot.param)] = slot
        self.by_name[name] = slot

    def become(self, other: SlotTable) -> None:
        """Takes over the slots of another table, their order and their names."""
        self._by_id = dict(other._by_id)
        self.by_name = dict(other.by_name)
        for name, slot in reversed(self.by_name.items()):
            slot.name = slot.value.name = name

    def remove(self, slot: ParamSlot) -> None:
        """Forgets a slot whose parameter has left the model."""
        self._by_id.pop(id(slot.param), None)
        for name in [n for n, s in self.by_name.items() if s is slot]:
            del self.by_name[name]

    def replace(self, params: dict[nn.Parameter, nn.Parameter]) -> None:
        """Gives slots another parameter object each; their order stays."""
        for slot in self._by_id.values():
            slot.param = params.get(slot.param, slot.param)
        self._by_id = {id(slot.param): slot for slot in self._by_id.values()}

    def of(self, param: torch.Tensor | None) -> ParamSlot | None:
        """The slot of a parameter, or None if it is not on pages."""
        slot = self._by_id.get(id(param))
        return slot if slot is not None and slot.param is param else None

    def __iter__(self) -> Iterator[ParamSlot]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)
