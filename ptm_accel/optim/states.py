"""What an optimizer keeps for each parameter, on pages: taken over, set, forgotten, shown."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ptm_accel.errors import CheckpointError, UnsupportedError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.paged import PagedTensor, placeholder
from ptm_accel.memory.pool import Pool
from ptm_accel.model.slots import ParamSlot, SlotTable
from ptm_accel.optim.units import ParamState

MASTER_KEY = "master"
"""Name of the fp32 master among the state of a parameter, in checkpoints."""


class States:
    """The state of every parameter of an optimizer.

    Args:
        inner: the user's optimizer; its `state` shows placeholders for what is on pages.
        slots: the model's parameters.
        pool: where the state lives.
        masters: keep an fp32 master of every narrower parameter.

    Attributes:
        pool: see above.
        masters: see above.

    Raises:
        UnsupportedError: the optimizer holds a parameter that the model does not have.
    """

    def __init__(self, inner: torch.optim.Optimizer, slots: SlotTable, pool: Pool, *, masters: bool) -> None:
        self.pool = pool
        self.masters = masters
        self._inner = inner
        self._slots = slots
        self._met: dict[int, ParamState] = {}
        for param in self.params():
            self._adopt(param)

    def __iter__(self) -> Iterator[ParamState]:
        """The state of every parameter that the optimizer has met."""
        return iter(self._met.values())

    # ---- which parameter ---------------------------------------------------------------------------------------

    def params(self) -> Iterator[nn.Parameter]:
        """The parameters of all groups, in order."""
        for group in self._inner.param_groups:
            yield from group["params"]

    def groups(self) -> list[list[ParamSlot]]:
        """The parameters of each group, in its order."""
        return [[self.slot(param) for param in group["params"]] for group in self._inner.param_groups]

    def slot(self, param: nn.Parameter) -> ParamSlot:
        """See `slot_of`."""
        return slot_of(self._slots, param)

    def met(self, slot: ParamSlot) -> ParamState | None:
        """The state of a parameter that the optimizer has met."""
        return self._met.get(id(slot))

    def of(self, slot: ParamSlot) -> ParamState:
        """The state of a parameter; begun if there is none."""
        state = self._met.get(id(slot))
        if state is None:
            state = self._met[id(slot)] = ParamState(slot)
            if self.masters and slot.value.dtype != torch.float32 and slot.value.dtype.is_floating_point:
                state.master = self.pool.create(
                    f"{slot.name}.master", Tag.MASTER, slot.value.shape, torch.float32, movable=slot.value.movable
                )
        return state

    def named(self, name: str) -> ParamState:
        """The state of the parameter called `name`.

        Raises:
            CheckpointError: the model has no such parameter, or the optimizer does not hold it.
        """
        slot = self._slots.by_name.get(name)
        if slot is None or all(param is not slot.param for param in self.params()):
            raise CheckpointError(f"the checkpoint has optimizer state for {name}, which this optimizer does not hold")
        return self.of(slot)

    def are_of_the_model(self) -> bool:
        """Whether the optimizer's parameters are the model's, and of the shapes that its state is of."""
        shapes = ((tensor.shape, state.slot.value.shape) for state in self for tensor in state.paged.values())
        here = all(self._slots.of(param) is not None for param in self.params())
        return here and all(kept == shape for kept, shape in shapes)

    # ---- what is kept ------------------------------------------------------------------------------------------

    def _adopt(self, param: nn.Parameter) -> None:
        """Takes over state that the optimizer already has: made in its constructor, or by earlier steps."""
        state = self.of(self.slot(param))
        for key, value in list(self._inner.state.get(param, {}).items()):
            self.put(state, key, value)
        self.show(state)

    def put(self, state: ParamState, key: str, value: Any) -> None:
        """Sets one entry of a parameter's state.

        Raises:
            CheckpointError: the master has another shape than the parameter.
        """
        slot = state.slot
        if key == MASTER_KEY and state.master is not None:
            if value.shape != slot.value.shape:
                raise CheckpointError(
                    f"the fp32 master of {slot.name} in the checkpoint has shape {tuple(value.shape)}, the parameter "
                    f"has {tuple(slot.value.shape)}: this checkpoint is of another model."
                )
            self.pool.fault(state.master, write=True).copy_(value)
            state.mastered = slot.value.numel
            return
        full = isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape == slot.value.shape
        if not full:
            state.small[key] = value
            return
        tensor = state.paged.get(key)
        if tensor is None:
            constant = value.numel() > 1 and all(
                s == 0 for s, n in zip(value.stride(), value.shape, strict=True) if n > 1
            )
            fill = float(value.as_strided((), ())) if constant else 0.0
            tensor = state.paged[key] = self.pool.create(
                f"{slot.name}.{key}", Tag.STATE, value.shape, value.dtype, fill=fill, movable=slot.value.movable
            )
            if constant:
                return
        with torch.no_grad():
            self.pool.fault(tensor, write=True).copy_(value)

    def replace(self, state: ParamState, values: Mapping[str, Any]) -> None:
        """Sets all of a parameter's state, keyed as `torch.optim.Optimizer.state_dict` has it."""
        self._forget_all_but(state, values.keys())
        for key, value in values.items():
            self.put(state, key, value.clone() if isinstance(value, torch.Tensor) and not value.dim() else value)
        self.show(state)

    def _forget_all_but(self, state: ParamState, keys: Collection[str]) -> None:
        for key in state.paged.keys() - keys:
            self.pool.forget(state.paged.pop(key))
        for key in state.small.keys() - keys:
            del state.small[key]
        if MASTER_KEY not in keys:
            state.mastered = 0

    def reset(self, state: ParamState, keep: Mapping[str, torch.dtype]) -> None:
        """Forgets a parameter's state, so that another can be put in its place.

        Args:
            state: what the optimizer keeps for the parameter.
            keep: full-size entries that will be put, with their dtypes; such pages are kept, to be written over.
        """
        for key, tensor in list(state.paged.items()):
            if keep.get(key) != tensor.dtype:
                self.pool.forget(state.paged.pop(key))
        state.small.clear()
        state.mastered = 0
        self._inner.state.pop(state.slot.param, None)

    def close(self) -> None:
        """Ends the life of all state on pages."""
        for state in self:
            for tensor in state.paged.values():
                self.pool.forget(tensor)
            if state.master is not None:
                self.pool.forget(state.master)
            # What it shows for this parameter are placeholders of state that is no more.
            self._inner.state.pop(state.slot.param, None)
        self._met.clear()

    # ---- how it is seen ----------------------------------------------------------------------------------------

    def show(self, state: ParamState) -> None:
        """Shows a parameter's state in `optimizer.state`, with placeholders for what is on pages."""
        if state.empty:
            return
        device = self.pool.compute.device
        stand_ins = {k: placeholder(t.shape, t.dtype, device) for k, t in state.paged.items()}
        self._inner.state[state.slot.param] = {**state.small, **stand_ins}

    def entries(self, state: ParamState) -> Iterator[tuple[str, PagedTensor | Any]]:
        """What is kept for a parameter as (key, paged tensor or other value), its master included."""
        yield from state.small.items()
        yield from state.paged.items()
        if state.master is not None and state.mastered:
            yield MASTER_KEY, state.master

    def values(self, state: ParamState) -> dict[str, Any]:
        """As `entries`, with the real values; what is away is mapped from its home."""
        return {
            key: self.pool.snapshot(value) if isinstance(value, PagedTensor) else value
            for key, value in self.entries(state)
        }

    def named_entries(self) -> Iterator[tuple[str, str, PagedTensor | Any]]:
        """Every entry of every parameter, in the optimizer's order, as (parameter name, key, tensor or value)."""
        for param in self.params():
            state = self.of(self.slot(param))
            for key, value in self.entries(state):
                yield state.slot.name, key, value


def slot_of(slots: SlotTable, param: nn.Parameter) -> ParamSlot:
    """Where a parameter of an optimizer lives.

    Raises:
        UnsupportedError: it is not the model's.
    """
    slot = slots.of(param)
    if slot is None:
        raise UnsupportedError(
            f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not one of the model's. "
            "Make the optimizer from model.parameters() after the model is complete."
        )
    return slot
