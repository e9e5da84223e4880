"""The parameters of a model and their paged values: side tables keyed by parameter."""

from __future__ import annotations

import weakref
from typing import Protocol, cast

import torch
from torch import nn

from ptm_accel.errors import PagedModelError
from ptm_accel.memory.block import Block, Part, Place, alone, placeholder
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.calls import Call
from ptm_accel.model import away
from ptm_accel.model.away import AwayParameter, Uses
from ptm_accel.model.groups import ParamGroup
from ptm_accel.runtime.executor import Executor


class Members(Protocol):
    """The parameters whose values lie in one block (`ptm_accel.model.addresses.Members`)."""

    def arrived(self, tensor: torch.Tensor) -> None:
        """The block is in the compute tier."""
        ...

    def add(self, slot: ParamSlot, tensor: torch.Tensor | None) -> None:
        """Adds a parameter; `tensor` is the block where it is resident."""
        ...

    def remove(self, slot: ParamSlot) -> None:
        """Takes a parameter off."""
        ...

    def lost(self, slot: ParamSlot) -> None:
        """Notes that the values of a parameter are lost."""
        ...


class Addresses(Protocol):
    """Finds parameters by address (`ptm_accel.model.addresses.ExtentTable`)."""

    def occupy(self, block: Block) -> None:
        """Makes members of a block, which has none yet."""
        ...


class ParamSlot:
    """One parameter of the model and its paged values.

    Attributes:
        name: the first of its names in the model.
        param: the model's own `nn.Parameter`; its `.data` is the buffer or a placeholder.
        group: what it is moved with.
        member: its number there.
        group_part: its part of the block of the group's values.
        value: the part that has its values: that, or a block of its own (`ptm_accel.model.assignments`). Of a sharded
            parameter it is gathered while it is used.
        own: what is updated and kept: the same part, or the range of a sharded parameter that this rank owns.
        sharded: whether other ranks own the rest.
        executor: serves accesses.
        pool: where they are.
        generation: counts updates, so that a backward through an older forward is an error.
        shown: how many uses of the values are under way in which it is an ordinary parameter (`show`).
    """

    __slots__ = (
        "__weakref__",
        "_accesses",
        "_placeholder",
        "_table",
        "_version",
        "_writes",
        "address",
        "executor",
        "generation",
        "group",
        "group_part",
        "member",
        "name",
        "own",
        "param",
        "pool",
        "sharded",
        "shown",
        "value",
    )

    def __init__(
        self,
        name: str,
        param: nn.Parameter,
        group: ParamGroup,
        member: int,
        value: Part,
        executor: Executor,
        table: Addresses,
        own: Part | None = None,
    ) -> None:
        self.name = name
        self.param = param
        self.group = group
        self.member = member
        self.value = value
        self.own = own or value
        self.sharded = own is not None
        self.group_part = own or value
        self.generation = 0
        # Weak: the pool, which outlives the model, holds this object.
        self._accesses: weakref.ref[Uses] | None = None
        self._writes = 0
        self._version = param._version
        self.executor = executor
        self.pool = executor.pool
        self._table = table
        self.shown = 0
        # Cached: making one takes longer than loading a small parameter.
        self._placeholder: torch.Tensor | None = None
        self.address = 0
        self._take_part()

    def owned(self, whole: torch.Tensor) -> torch.Tensor:
        """Returns the range of a whole tensor of the parameter's shape that this rank owns, 1-D."""
        cut = self.group.pieces[self.member].cut
        if all(stride == 0 for stride in whole.stride()):
            # The same everywhere, and as little memory.
            return whole.as_strided((cut.length,), (0,))
        return whole.reshape(-1)[cut.start : cut.stop]

    # ---- what its parameter is -------------------------------------------------------------------------------------

    def come_onto_pages(self, accesses: Uses, device: torch.device) -> None:
        """Makes the parameter an `AwayParameter`, with its buffer or a placeholder as its data.

        Args:
            accesses: serves uses of the parameter from now on.
            device: of the compute tier.
        """
        self._accesses = weakref.ref(accesses)
        away.register(self)
        if self.value.block.extent is not None:
            self._members().arrived(self.value.block.extent.tensor)
        else:
            self._give(self.stand_in(device))
        if not self.shown:
            self.param.__class__ = AwayParameter

    def adopt(self) -> None:
        """Moves the parameter's present data onto the pages.

        Raises:
            BudgetError: no room for it.
        """
        value, executor = self.own, self.executor
        # No name here may hold the data: what moves away at once must also be freed at once.
        if self.sharded:
            into = value.of(executor.make(value.block)) if value.place is Place.BLANK else None
            into = executor.fault(value, write=True) if into is None else into
            into.copy_(self.owned(self.param.data))
        elif value.alone:
            executor.adopt(value.block, self.param.data)
        elif value.block.place is Place.BLANK:
            value.of(executor.make(value.block)).copy_(self.param.data)
        else:
            executor.fault(value, write=True).copy_(self.param.data)

    def take_over(self, read: Part) -> None:
        """Moves values that are on pages elsewhere to the parameter's own part.

        Raises:
            BudgetError: no room for them.
        """
        value, executor = self.own, self.executor
        with executor.pin(read) as values:
            # What was read for this rank is no more than its range.
            values = self.owned(values) if self.sharded and read.shape != value.shape else values
            into = (
                value.of(executor.make(value.block))
                if value.place is Place.BLANK
                else executor.fault(value, write=True)
            )
            into.copy_(values)
        executor.forget(read)

    @property
    def accesses(self) -> Uses:
        """Serves uses of the parameter while it is an `AwayParameter`."""
        accesses = None if self._accesses is None else self._accesses()
        if accesses is None:
            raise PagedModelError(
                f"the values of parameter {self.name} are gone: its model is no longer in use, or was closed. Keep the "
                "model as long as the parameter, or take a copy (`param.detach().clone()`)."
            )
        return accesses

    @property
    def on_pages(self) -> bool:
        """Whether the parameter's data is the buffer or a placeholder."""
        return self._accesses is not None

    def show(self) -> None:
        """Makes it an ordinary parameter until `hide`; the caller has pinned the values."""
        self.shown += 1
        if self._accesses is not None:
            self.param.__class__ = nn.Parameter

    def hide(self) -> bool:
        """Ends `show`.

        Returns:
            whether the parameter was given other memory meanwhile (`p.data = x`, `p.set_(x)`), or has a placeholder
            until an update of it: `assignments.take_in` makes what it was given its values.
        """
        self.shown -= 1
        if self.shown or self._accesses is None:
            return False
        moved = self.param.data_ptr() != self.address
        self.param.__class__ = AwayParameter
        return moved and not self.pool.closed

    def arrived(self, tensor: torch.Tensor, *, given: bool = True) -> None:
        """The values are in the compute tier, as `tensor`, and `given` to the parameter."""
        self.address = tensor.data_ptr()
        with away.bare():
            if given and self._accesses is not None:
                self.param.data = tensor
            self._version = self.param._version

    def leaving(self, device: torch.device) -> None:
        """The values are about to leave the compute tier."""
        if self._accesses is not None:
            self._give(self.stand_in(device))

    @property
    def data(self) -> torch.Tensor:
        """The parameter's `data` as it is, whatever class the parameter has."""
        with away.bare():
            return self.param.data

    def offset_of(self, view: torch.Tensor) -> int:
        """Returns where a view of the values begins, in elements of its own dtype behind the first."""
        return (view.data_ptr() - self.address) // view.dtype.itemsize

    def _give(self, data: torch.Tensor) -> None:
        with away.bare():
            self.param.data = data

    def stand_in(self, device: torch.device) -> torch.Tensor:
        """Returns the tensor that the parameter has while its values are away."""
        kept, value = self._placeholder, self.value
        if kept is None or (kept.shape, kept.dtype, kept.device) != (value.shape, value.dtype, device):
            kept = self._placeholder = placeholder(value.shape, value.dtype, device)
        return kept

    def take_off(self, values: torch.Tensor) -> None:
        """Takes the parameter off pages, with `values` as its data."""
        self.give_up_part()
        self.leave_pages()
        self.param.data = values

    def _take_part(self) -> None:
        block = self.value.block
        if block.occupant is None:
            self._table.occupy(block)
        self._members().add(self, block.extent.tensor if block.place.resident and block.extent is not None else None)

    def give_up_part(self) -> None:
        """The part of the block is this parameter's no more; the caller forgets the part that has the values."""
        self._members().remove(self)
        if self.sharded:
            self.executor.forget(self.value)
        if self.apart:
            self.executor.forget(self.group_part)
            self.group_part = self.value

    @property
    def apart(self) -> bool:
        """Whether the values are not in the group's block."""
        return not self.sharded and self.value is not self.group_part

    def forget(self) -> None:
        """Ends the life of its pages."""
        self.executor.forget(self.value)
        if self.sharded:
            self.executor.forget(self.own)

    def move_to(self, part: Part) -> None:
        """The values are in another part from now on."""
        self.was_written()
        self._members().remove(self)
        self.value = self.own = part
        self._take_part()
        if not part.place.resident:
            self.leaving(self.pool.compute.device)

    def become_member(self, group: ParamGroup, shape: torch.Size, dtype: torch.dtype) -> None:
        """Takes a part of the block of another group, as its first member, of which `shape` is the whole."""
        self.group, self.member = group, 0
        backing = self.value.block.backing
        self.value = self.own = self.group_part = group.part(0, "", Tag.PARAM, dtype, self.pool)
        if group.pieces:
            assert backing is not None
            self.value = group.whole_part(0, shape, self.own.block, self.pool, backing)
        self._take_part()

    def _members(self) -> Members:
        return cast("Members", self.value.block.occupant)

    def leave_pages(self) -> None:
        """Makes the parameter an ordinary one again, with the data that it has."""
        self._accesses, self._placeholder, self.shown = None, None, 0
        self.param.__class__ = nn.Parameter
        away.forget(self)

    def lose(self) -> None:
        """Makes any use of the parameter an error, since the values are lost, if it is still on pages."""
        if self.on_pages:
            self._accesses = None
            away.forget(self)
            self._members().lost(self)
            self._give(self.stand_in(self.pool.compute.device))
            self.param.__class__ = AwayParameter

    # ---- writes ----------------------------------------------------------------------------------------------------

    def was_written(self) -> bool:
        """Whether torch has counted an in-place change of the values since the last call, or since they were loaded."""
        with away.bare():
            version = self.param._version
        if version == self._version:
            return False
        self._version = version
        self._writes += 1
        return True

    def outdate(self) -> None:
        """Has torch count a change of the values that it has not seen: an older graph is an error then."""
        with away.bare():
            torch.autograd.graph.increment_version(self.param)
            self._version = self.param._version

    @property
    def writes(self) -> int:
        """Number of times that user code may have written to the values."""
        block = self.value.block
        if block.place.resident and self.was_written():
            block.become(Place.DIRTY)
        return self._writes

    def changed(self) -> None:
        """The values may have been changed in a way that torch does not count."""
        self._writes += 1
        if self.value.place.resident:
            self.value.block.become(Place.DIRTY)

    def can_have(self, data: torch.Tensor) -> bool:
        """Returns whether the parameter can be given `data`."""
        return data.dtype == self.value.dtype and same_place(data.device, self.pool.compute.device)

    def resident(self) -> torch.Tensor:
        """Returns the values; they are in the compute tier."""
        extent = self.value.block.extent
        assert extent is not None, self.name
        return self.value.of(extent.tensor)

    def separate(self) -> None:
        """Gives the parameter its values in a storage of their own, for savers that look at storages."""
        if not self.value.alone:
            self._give(alone(self.resident()))

    def rejoin(self) -> None:
        """Ends `separate`."""
        if not self.value.alone and self.value.place.resident:
            self._give(self.resident())

    def bring_back(self) -> None:
        """Gives the parameter the data on its pages again, which must be in the compute tier."""
        self._give(self.resident())

    def check_data(self, data: torch.Tensor) -> None:
        """Refuses data that the parameter cannot have.

        Raises:
            PagedModelError: it is of another dtype or on another device.
        """
        value, device = self.value, self.pool.compute.device
        if not self.can_have(data):
            raise PagedModelError(
                f"parameter {self.name} ({value.dtype} on {device}) cannot be given data of {data.dtype} on "
                f"{data.device}: it is on pages. Load or build the model in the wanted dtype, or call "
                "`ptm_accel.engine_of(model).detach()` first."
            )

    def copied(self) -> torch.Tensor:
        """Returns a copy of the values in ordinary memory of the compute tier's device; loads and evicts nothing."""
        with self.pool.calls.during(Call.ACCESS, self.pool):
            return self.executor.copied(self.value, self.pool.compute.device)

    def cast(self, shape: torch.Size, strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a view of the values in `dtype`, charged as long as it lives."""
        with self.executor.pin(self.value) as values:
            view = values.detach().as_strided(shape, strides, values.storage_offset() + offset)
            with self.pool.admission.charged(view.numel() * dtype.itemsize, Tag.CAST, self.name) as keep:
                copy = view.to(dtype)
                keep(copy)
            return copy

    def write(self, values: torch.Tensor) -> None:
        """Gives the parameter other values, between two steps.

        Of a sharded one this rank keeps its range. Unless it is in use, that is no collective; all ranks do so in the
        same order.

        Args:
            values: of the shape of the whole; no more of them is read than this rank keeps.
        """
        if self.sharded and self._drops_whole():
            with self.executor.pin(self.own, write=True) as pages:
                pages.copy_(self.owned(values))
        else:
            with self.executor.pin(self.value, write=True) as pages:
                pages.copy_(values)
        self.generation += 1

    def _drops_whole(self) -> bool:
        """Drops the whole block of a sharded parameter, so that its next use gathers it; False where it is in use."""
        assert self.executor.gathers is not None, self.name
        with self.pool.lock:
            return self.executor.gathers.give_up(self.value.block)

    def fetch(self, *, write: bool = False) -> torch.Tensor:
        """The values in the compute tier."""
        return self.executor.fault(self.value, write=write)


def same_place(one: torch.device, other: torch.device) -> bool:
    """Returns whether both are the same; one without an index is any of its type."""
    return one.type == other.type and (one.index == other.index or None in (one.index, other.index))
