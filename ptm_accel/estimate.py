"""Estimates the memory that a model will need, from shapes alone and from a pass over fake tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ptm_accel.config import DEFAULT_PAGE_SIZE
from ptm_accel.distributed.exchange import exchange_of
from ptm_accel.distributed.wholes import most_wholes
from ptm_accel.errors import ConfigError
from ptm_accel.memory.disk import bounce_bytes
from ptm_accel.memory.setup import Capacities, Memory, build_memory
from ptm_accel.memory.transfer import Transfer
from ptm_accel.model.addresses import ExtentTable
from ptm_accel.model.attach import check_model, small_bytes, take_parameters
from ptm_accel.model.floor import ANY_ADAMW, FUSED_ADAMW, Floor, OptimizerMemory, least_budget
from ptm_accel.model.forecast import ShapeSpec, forecast
from ptm_accel.model.grouping import Sharding, group_sizes
from ptm_accel.model.groups import ParamGroup
from ptm_accel.model.kept import Kept, kept_bytes
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.needs import groups_suit
from ptm_accel.runtime.executor import Executor
from ptm_accel.units import parse_bytes

_OPENED_PAGES = 4
"""The size of the memory that is opened to count; nothing is put into it."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """The memory to train a model, on the tier that computes (`device_memory`, or `host_memory` without a device).

    With several processes all bytes are those of the first, which has the largest ranges.

    Attributes:
        parameters: the number of parameters; tied ones count once.
        trainable: the number of those that train.
        states_bytes: parameters, gradients, optimizer state, masters and buffers.
        whole_bytes: the least budget under which nothing ever moves.
        least_bytes: the least budget that it can train under, with the bounce buffers of one disk folder; each further
            folder needs as much again, and with a device they are in host memory.
        reason: the tensor or phase that needs the least budget.
        below_bytes: bytes that the tiers below must hold under the least budget.
        pass_bytes: the peak of batch and activations, which the budget of a device counts and that of a CPU does not;
            None if no batch was given.
        processes: the number of processes that it is sharded over (`shard: full`).
        kept: the states in parts, without buffers.
        gathered_bytes: the part of `least_bytes` for whole blocks that are not in use at the moment, with gradients.
        network_bytes: the most bytes that a process receives in a micro-batch; gradient checkpointing and tied
            embeddings may add to it (`ptm_accel.distributed.exchange`).
    """

    parameters: int
    trainable: int
    states_bytes: int
    whole_bytes: int
    least_bytes: int
    reason: str
    below_bytes: int
    pass_bytes: int | None
    processes: int
    kept: Kept
    gathered_bytes: int
    network_bytes: int


@dataclass(frozen=True, slots=True)
class MovingGroup:
    """Parameters that move together.

    Attributes:
        name: as runs name it.
        names: of the parameters in it, all that a tied one has.
        numel: elements, of several processes those that one keeps; padding included.
        element_bytes: of one.
        trained: whether they are.
    """

    name: str
    names: tuple[str, ...]
    numel: int
    element_bytes: int
    trained: bool


@dataclass(frozen=True, slots=True)
class Grouped:
    """The parameters of a model as a run divides them under a budget.

    Attributes:
        groups: those that move, in the model's order.
        fixed_bytes: what stays in the compute tier beside them.
        whole_bytes: as of `Estimate`, with the padding of these groups.
        below_bytes: as of `Estimate`, with the padding of these groups.
    """

    groups: tuple[MovingGroup, ...]
    fixed_bytes: int
    whole_bytes: int
    below_bytes: int


def grouped(
    model: nn.Module,
    capacity_bytes: int,
    *,
    master_weights: bool = False,
    optimizer_memory: OptimizerMemory = FUSED_ADAMW,
    page_size: str | int = DEFAULT_PAGE_SIZE,
    processes: int = 1,
) -> Grouped:
    """Divides parameters into groups as a run with a tier below does.

    Args:
        model: as for `estimate`.
        capacity_bytes: the budget of the compute tier.
        master_weights: as for `estimate`.
        optimizer_memory: as for `estimate`.
        page_size: as for `estimate`.
        processes: as for `estimate`.
    """
    with _counting(model, page_size, processes, masters=master_weights) as counting:
        slots = counting.chosen(capacity_bytes)
        floor = counting.floor(slots, optimizer_memory)
        names: dict[ParamGroup, list[str]] = {}
        for name, slot in slots.by_name.items():
            names.setdefault(slot.group, []).append(name)
        groups = {slot.group: slot for slot in slots if slot.group.movable}
        return Grouped(
            tuple(
                MovingGroup(
                    group.name,
                    tuple(names[group]),
                    slot.own.block.numel,
                    slot.own.block.dtype.itemsize,
                    slot.param.requires_grad,
                )
                for group, slot in groups.items()
            ),
            floor.fixed_bytes,
            floor.whole_bytes,
            floor.away_bytes,
        )


def estimate(
    model: nn.Module,
    batch: Mapping[str, torch.Tensor | ShapeSpec | object] | None = None,
    *,
    master_weights: bool = False,
    autocast_dtype: torch.dtype | None = None,
    optimizer_memory: OptimizerMemory = FUSED_ADAMW,
    page_size: str | int = DEFAULT_PAGE_SIZE,
    processes: int = 1,
) -> Estimate:
    """Computes the memory that a model needs. The model may be on the meta device, and is not changed.

    Args:
        model: the model, in the mode, with the frozen parameters and the checkpointing that it will train with.
        batch: its keyword arguments, of which only shapes count; None to leave activations out. With several
            processes, the batch of one.
        master_weights: whether low-precision parameters get fp32 masters.
        autocast_dtype: the dtype of `torch.autocast`; None without it.
        optimizer_memory: the needs of the optimizer; AdamW's by default.
        page_size: as in the configuration.
        processes: the number of processes that it is sharded over (`shard: full`).

    Raises:
        ConfigError: fewer processes than 1.
        UnsupportedError: the model cannot be put on pages; or a pass over it depends on values (`forecast`).
    """
    with _counting(model, page_size, processes, masters=master_weights) as counting:
        slots = counting.slots(group_bytes=0)
        floor = counting.floor(slots, optimizer_memory)
        whole_bytes = counting.whole_bytes(floor, optimizer_memory)
        counted = [(slot.value.numel, slot.param.requires_grad) for slot in slots]
        kept = kept_bytes(slots, optimizer_memory, masters=master_weights)
        network_bytes = exchange_of(slots, processes).network_bytes
    pass_bytes = None if batch is None else forecast(model, batch, autocast_dtype=autocast_dtype)
    return Estimate(
        parameters=sum(count for count, _ in counted),
        trainable=sum(count for count, trained in counted if trained),
        states_bytes=floor.states_bytes,
        whole_bytes=whole_bytes,
        least_bytes=floor.total_bytes + bounce_bytes(1, parse_bytes(page_size)),
        reason=floor.reason,
        below_bytes=floor.away_bytes,
        pass_bytes=pass_bytes,
        processes=processes,
        kept=kept,
        gathered_bytes=floor.gathered_bytes,
        network_bytes=network_bytes,
    )


@contextmanager
def _counting(model: nn.Module, page_size: str | int, processes: int, *, masters: bool) -> Iterator[_Counting]:
    """Opens what a model is counted with, and closes it."""
    if processes < 1:
        raise ConfigError(f"processes: got {processes}; write how many train one model together, 1 or more.")
    page_bytes = parse_bytes(page_size)
    check_model(model)
    memory = build_memory(Capacities(page_bytes=page_bytes, host_bytes=_OPENED_PAGES * page_bytes), torch.device("cpu"))
    try:
        yield _Counting(model, memory, page_bytes, processes, masters=masters)
    finally:
        memory.close()


class _NoRanks:
    """A source of whole blocks that are only counted."""

    def load(self, handle: Any, offset: int, into: torch.Tensor, behind: Sequence[Transfer] = ()) -> Transfer:
        """See `Source`."""
        raise AssertionError("nothing is gathered for an estimate")


class _Counting:
    """Counts what a model needs, in groups of one size or another.

    Args:
        model: the model.
        memory: what is opened to count.
        page_bytes: of a page.
        processes: how many it is sharded over.
        masters: whether narrower parameters get fp32 masters.
    """

    def __init__(self, model: nn.Module, memory: Memory, page_bytes: int, processes: int, *, masters: bool) -> None:
        self._model = model
        self._executor = Executor(memory.pool)
        self._page_bytes = page_bytes
        self._sharding = None if processes == 1 else Sharding(0, processes)
        self._masters = masters

    def slots(self, group_bytes: int) -> SlotTable:
        """Gives every parameter a slot; groups of several take at most `group_bytes`."""
        slots = SlotTable()
        take_parameters(
            self._model,
            self._executor,
            slots,
            ExtentTable(self._executor.pool.stats),
            small=small_bytes(self._page_bytes),
            paged={},
            group_bytes=group_bytes,
            sharding=self._sharding,
            backing=_NoRanks(),
        )
        return slots

    def chosen(self, capacity: int) -> SlotTable:
        """Returns the groups that a run under a budget chooses (`ptm_accel.pages.Pages.size_up`)."""
        alone = self.slots(group_bytes=0)
        for group_bytes in group_sizes(capacity):
            together = self.slots(group_bytes)
            if self._sharding is not None:
                suits = self.floor(together, ANY_ADAMW).total_bytes <= capacity
            else:
                suits = groups_suit(lambda kind, slots: self.floor(slots, kind), together, alone, capacity, backed=True)
            if suits:
                return together
        return alone

    def floor(self, slots: SlotTable, optimizer_memory: OptimizerMemory) -> Floor:
        """Returns the least budget."""
        return least_budget(
            self._model,
            slots,
            optimizer_memory,
            masters=self._masters,
            window_bytes=self._page_bytes,
            wholes=0 if self._sharding is None else most_wholes(slots),
        )

    def whole_bytes(self, least: Floor, optimizer_memory: OptimizerMemory) -> int:
        """Returns the budget under which nothing moves; in that of several processes, groups are as large as it lets.

        Args:
            least: what is needed where each parameter is a group of its own.
            optimizer_memory: of the optimizer.
        """
        capacity = least.whole_bytes
        if self._sharding is not None:
            while (needed := self.floor(self.chosen(capacity), optimizer_memory).whole_bytes) > capacity:
                capacity = needed
        return capacity
