"""The optimizer state of each parameter, on pages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

import torch

from ptm_accel.memory.block import Block, Part, Place
from ptm_accel.memory.budget import Tag
from ptm_accel.model.norms import is_narrow
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.others import Other, Others
from ptm_accel.optim.units import ParamState
from ptm_accel.runtime.executor import Executor

MASTER_KEY = "master"
"""Name of the fp32 master among the state of a parameter, in checkpoints."""


class States:
    """The state of every parameter of an optimizer.

    Args:
        inner: the user's optimizer; what is in its `state` for a parameter moves to the pages.
        slots: the model's parameters.
        executor: serves accesses to the state.
        masters: keep an fp32 master of every narrower parameter.

    Attributes:
        slots, executor, masters: see above.
        others: the optimizer's parameters that the model does not have.
    """

    def __init__(self, inner: torch.optim.Optimizer, slots: SlotTable, executor: Executor, *, masters: bool) -> None:
        self.executor = executor
        self.pool = executor.pool
        self.masters = masters
        self._inner = inner
        self.slots = slots
        self._met: dict[int, ParamState] = {}
        self.others = Others(inner, slots)
        try:
            for slot in self.held():
                self.of(slot)
        except BaseException:
            self.give_back(lambda slot: self.pool.compute.device)
            self.close()
            raise

    def __iter__(self) -> Iterator[ParamState]:
        """Iterates over the state of every parameter that the optimizer has met."""
        return iter(self._met.values())

    # ---- which parameter ---------------------------------------------------------------------------------------

    def held(self) -> Iterator[ParamSlot]:
        """Iterates over the model's parameters in all groups, in order."""
        params = (param for group in self._inner.param_groups for param in group["params"])
        return (slot for param in params if (slot := self.slots.of(param)) is not None)

    def groups(self) -> list[list[ParamSlot | Other]]:
        """Returns the parameters of each group, in its order."""
        others = {id(other.param): other for other in self.others}
        return [
            [self.slots.of(param) or others[id(param)] for param in group["params"]]
            for group in self._inner.param_groups
        ]

    def met(self, slot: ParamSlot) -> ParamState | None:
        """Returns the state of a parameter that the optimizer has met."""
        return self._met.get(id(slot))

    def of(self, slot: ParamSlot) -> ParamState:
        """Returns the state of a parameter; begun if there is none."""
        state = self._met.get(id(slot))
        if state is None:
            state = self._met[id(slot)] = ParamState(slot)
            if self.masters and is_narrow(slot.own.dtype):
                state.master = slot.group.part(slot.member, ".master", Tag.MASTER, torch.float32, self.pool)
            # What the optimizer has already: made in its constructor, or by earlier steps.
            there = self._inner.state.pop(slot.param, {})
            try:
                for key, value in there.items():
                    self.put(state, key, owned(slot, value))
            except BaseException:
                self._inner.state[slot.param] = there
                raise
        return state

    def are_of(self, slots: SlotTable) -> bool:
        """Whether what the optimizer holds of the model is still there, and of the shapes that its state is of."""
        shapes = ((part.shape, state.slot.own.shape) for state in self for part in state.paged.values())
        here = all(slots.of(state.slot.param) is not None for state in self)
        return here and all(kept == shape for kept, shape in shapes)

    # ---- what is kept ------------------------------------------------------------------------------------------

    def put(self, state: ParamState, key: str, value: Any, dtype: torch.dtype | None = None) -> None:
        """Sets one entry of a parameter's state.

        Args:
            state: what the optimizer keeps for the parameter.
            key: the optimizer's own key of it.
            value: it; of what is sharded what this rank owns.
            dtype: of the pages that are made for it; by default the value's.
        """
        slot = state.slot
        if key == MASTER_KEY and state.master is not None:
            self.executor.fault(state.master, write=True).copy_(value)
            state.mastered = slot.own.numel
            # What was written to the parameter between the last step and the save is in the parameter alone.
            state.doubt()
            return
        if not is_full(slot, value):
            state.small[key] = value
        elif key not in state.paged:
            state.paged[key] = self._page(slot, key, value, dtype)
        else:
            with torch.no_grad():
                self.executor.fault(state.paged[key], write=True).copy_(value)

    def _page(self, slot: ParamSlot, key: str, value: torch.Tensor, dtype: torch.dtype | None = None) -> Part:
        """Returns a copy of `value` on pages, cast to `dtype`; one that is the same everywhere takes no memory yet."""
        constant = value.numel() > 1 and all(s == 0 for s, n in zip(value.stride(), value.shape, strict=True) if n > 1)
        fill = float(value.detach().as_strided((), ())) if constant else 0.0
        part = slot.group.part(slot.member, f".{key}", Tag.STATE, dtype or value.dtype, self.pool, fill=fill)
        try:
            if not constant or part.block.place is not Place.BLANK:
                with torch.no_grad():
                    self.executor.fault(part, write=True).copy_(value)
        except BaseException:
            self.executor.forget(part)
            raise
        return part

    def replace(self, state: ParamState, values: Mapping[str, Any], dtype: torch.dtype | None) -> None:
        """Sets all of a parameter's state, keyed as `torch.optim.Optimizer.state_dict` has it.

        Args:
            state: what the optimizer keeps for the parameter.
            values: it; of what is sharded what this rank owns (`owned`).
            dtype: of what is full-size; None for the values' own.
        """
        for key in [key for key in state.paged if not is_full(state.slot, values.get(key))]:
            self.executor.forget(state.paged.pop(key))
        state.small.clear()
        if MASTER_KEY not in values:
            state.mastered = 0
        for key, value in values.items():
            before = state.paged.get(key)
            if before is not None and before.dtype != (dtype or value.dtype):
                # Before the old pages go: the value may be a view of them.
                state.paged[key] = self._page(state.slot, key, value, dtype)
                self.executor.forget(before)
                continue
            alone = value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value
            self.put(state, key, alone, dtype)

    def dtype_of(self, slot: ParamSlot | Other) -> torch.dtype | None:
        """Returns the dtype that torch gives loaded state: that of what is updated; None for the value's own."""
        param = (slot.own if isinstance(slot, Other) else self.of(slot).wide).dtype
        return param if param.is_floating_point else None

    def give_back(self, device_of: Callable[[ParamSlot], torch.device]) -> None:
        """Gives the wrapped optimizer the state in ordinary memory, as it was before it came onto pages.

        Args:
            device_of: says where that of a parameter is to be.
        """
        for state in self:
            given: dict[str, Any] = dict(state.small)
            for key, part in state.paged.items():
                if part.block.place is Place.BLANK:
                    # It is the same everywhere, and has come without memory of its own.
                    given[key] = self.executor.snapshot(part).to(device_of(state.slot))
                else:
                    given[key] = self.executor.copied(part, device_of(state.slot))
            if given:
                self._inner.state[state.slot.param] = {**given, **self._inner.state.get(state.slot.param, {})}

    def close(self) -> None:
        """Ends the life of all state on pages."""
        for state in self:
            for tensor in state.paged.values():
                self.executor.forget(tensor)
            if state.master is not None:
                self.executor.forget(state.master)
        self._met.clear()

    # ---- while the hooks are off (`ptm_accel.plain_mode`) ----------------------------------------------------------

    def kept(self) -> list[Block]:
        """Lists the blocks of full-size state."""
        return list(dict.fromkeys(part.block for state in self for part in state.paged.values()))

    def unmade_bytes(self) -> int:
        """The bytes of each full-size tensor that is still to be made, for parameters without a gradient yet."""
        return sum(s.wide.slot_bytes for s in self if s.fresh and s.slot.param.requires_grad)

    def lend(self) -> None:
        """Gives the wrapped optimizer the state, whose pages are pinned."""
        for state in self:
            kept = {key: self.executor.fault(tensor, write=True) for key, tensor in state.paged.items()}
            if state.small or kept:
                self._inner.state[state.slot.param] = {**state.small, **kept}

    def take_back(self) -> None:
        """Takes from the wrapped optimizer what it has made of its state."""
        for state in self:
            for key, value in self._inner.state.pop(state.slot.param, {}).items():
                page = state.paged.get(key)
                if page is None or value.data_ptr() != self.executor.fault(page, write=True).data_ptr():
                    self.put(state, key, value)

    # ---- how it is read ----------------------------------------------------------------------------------------

    def entries(self, state: ParamState) -> Iterator[tuple[str, Part | Any]]:
        """Yields the state of a parameter as (key, part of a block or other value), its master included."""
        yield from state.small.items()
        yield from state.paged.items()
        if state.master is not None and state.mastered:
            yield MASTER_KEY, state.master

    def values(self, state: ParamState) -> dict[str, Any]:
        """As `entries`, with the real values; what is away is mapped from its backing store."""
        return {
            key: self.executor.snapshot(value) if isinstance(value, Part) else value
            for key, value in self.entries(state)
        }

    def named_entries(self) -> Iterator[tuple[str, str, Part | Any]]:
        """Every entry of every parameter, in the optimizer's order, as (parameter name, key, tensor or value)."""
        for slot in chain.from_iterable(self.groups()):
            entries = self.others.entries(slot).items() if isinstance(slot, Other) else self.entries(self.of(slot))
            for key, value in entries:
                yield slot.name, key, value


def is_whole(slot: ParamSlot, value: object) -> bool:
    """Returns whether `value` has the shape of the whole parameter, of which a rank may own a range."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == slot.value.shape


def owned(slot: ParamSlot, value: Any) -> Any:
    """Returns what this rank owns of `value`, if that has the shape of the whole parameter; anything else as it is."""
    return slot.owned(value) if slot.sharded and is_whole(slot, value) else value


def is_full(slot: ParamSlot | Other, value: object) -> bool:
    """Returns whether `value` has an element for each that this rank has of the parameter, and so belongs on pages."""
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == slot.own.shape
