"""A model whose parameters are on pages: how they come there and leave again, and what is set up for that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import nn

from ptm_accel.config import PTMConfig, ResolvedConfig
from ptm_accel.distributed.shards import Shards, sharding_of
from ptm_accel.distributed.together import on_each
from ptm_accel.distributed.wholes import most_wholes
from ptm_accel.hardware.profile import in_a_row, side_by_side
from ptm_accel.hardware.rates import device_rates, disk_rates
from ptm_accel.memory.activation_reserve import ActivationReserve
from ptm_accel.memory.arena import HostArena
from ptm_accel.memory.block import Place
from ptm_accel.memory.budget import Reservation, Tag, Tier
from ptm_accel.memory.calls import Call
from ptm_accel.memory.card_memory import CardMemory
from ptm_accel.memory.device import CudaTier, DeviceTier
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.malloc import give_back_freed, set_kept_blocks
from ptm_accel.memory.setup import Memory
from ptm_accel.metrics import Metrics
from ptm_accel.model.addresses import ExtentTable
from ptm_accel.model.attach import Paged, leave_meta, return_to_meta, small_bytes, take_parameters
from ptm_accel.model.grouping import group_sizes
from ptm_accel.model.residency import Residency
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.model.state_dicts import StateDictHooks
from ptm_accel.needs import Needs
from ptm_accel.optim.update_rate import cpu_update_rate
from ptm_accel.progress import progress
from ptm_accel.runtime.executor import Executor
from ptm_accel.schedule.watch import LinkUse
from ptm_accel.sizing import idle_fits_below

_RETURN_EVERY_BYTES = 64 << 20
"""How much of what a model's parameters leave behind as they come onto pages may wait to be given back."""


class Pages:
    """The parameters of a model on pages, with the hooks and the planner that bring them in.

    Args:
        model: the model.
        asked: the options as given.
        config: the options as resolved for this machine.
        memory: the tiers and the pool.

    Attributes:
        model: see above; another module where that has come to wrap or replace it.
        slots: its parameters.
        table: finds the slot of a storage.
        residency: the hooks on its modules.
        run_ahead: what is known of its passes, and moves pages before they are needed.
        state_dicts: the hooks that fill state dictionaries.
        metrics: what was used and moved.
        needs: what it needs of the tiers.
        shards: the ranks that it is sharded over; None where it is not.
        group_bytes: the most that the values of a group of several parameters take.
    """

    grouped = True
    """Whether parameters of one repeated block are moved together. Otherwise each is moved alone: same numbers."""
    planned = True
    """Whether passes are planned from their traces. Without plans the pool pages on demand: slower, same numbers."""

    def __init__(self, model: nn.Module, asked: PTMConfig, config: ResolvedConfig, memory: Memory) -> None:
        self.model = model
        self.config = config
        self.memory = memory
        self.pool = memory.pool
        self.executor = Executor(self.pool)
        self.slots = SlotTable()
        self.table = ExtentTable(self.pool.stats)
        self.residency = Residency(self.executor, self.slots, self.table)
        self.run_ahead = self.residency.forwards.run_ahead
        self.state_dicts = StateDictHooks(self.executor, self.slots)
        self.residency.accesses.snapshots_of = self.state_dicts.modules
        self.metrics = Metrics(memory, self.run_ahead.tally)
        self.run_ahead.evaluation = self.metrics.leave_out
        sharding = sharding_of(asked)
        self.shards = None if sharding is None else Shards(self.executor, sharding)
        self.metrics.shards = None if self.shards is None else self.shards.stats
        self.needs = Needs(model, self.slots, memory, self.executor, config, self.shards)
        self.group_bytes = 0
        self._asked = asked
        self._buffers: Reservation | None = None
        # Where parameters were that have come from ordinary memory.
        self._origins: dict[ParamSlot, torch.device] = {}
        # Those that were on the meta device.
        self._blank: set[nn.Parameter] = set()

    def settle(self) -> None:
        """Takes over what was written to state dictionaries, and carries out what is left of the last optimizer step.

        Raises:
            DiskError: a transfer failed.
            PagedModelError: a parameter has changed since a state dictionary was given its value.
        """
        self.slots.given.take_over_all()
        if self.executor.pending_updates is not None:
            with self.pool.calls.during(Call.ACCESS, self.pool):
                self.executor.finish_updates()

    def size_up(self, values: Mapping[nn.Parameter, Paged]) -> None:
        """Gives every parameter a slot, and refuses a model that the tiers cannot train.

        Args:
            values: of parameters that are on pages already.

        Raises:
            BudgetError: less than the least budget the model can train under with any optimizer.
        """
        shards, capacity = self.shards, self.pool.share_bytes
        if shards is not None:
            # Ranks may have different budgets, and need the same groups.
            alike = {"page_size": self.config.page_bytes, "master_weights": self.config.master_weights}
            shards.check(self.model, alike)
            capacity = shards.ranks.least(capacity)
        alone = chosen = self._slots(values, 0)
        for group_bytes in group_sizes(capacity) if self.grouped else ():
            together = self._slots(values, group_bytes)
            if shards is None:
                suits = self.needs.suit(together, alone)
            else:
                suits = bool(shards.ranks.least(int(self.needs.hold(together))))
            if suits:
                chosen, self.group_bytes = together, group_bytes
                break
            self._forget(together, values)
        if chosen is not alone:
            self._forget(alone, values)
        self.slots.become(chosen)
        if shards is None:
            self.needs.expect_optimizer()
        else:
            shards.wholes.most = most_wholes(self.slots)
            on_each(shards.ranks, "has put a model on pages", self.needs.expect_optimizer)

    def _slots(self, values: Mapping[nn.Parameter, Paged], group_bytes: int) -> SlotTable:
        slots, small = SlotTable(), small_bytes(self.config.page_bytes)
        take_parameters(
            self.model,
            self.executor,
            slots,
            self.table,
            small=small,
            paged=values,
            group_bytes=group_bytes,
            sharding=None if self.shards is None else self.shards.sharding,
            backing=None if self.shards is None else self.shards.ranks,
        )
        return slots

    def _forget(self, slots: SlotTable, values: Mapping[nn.Parameter, Paged]) -> None:
        for slot in slots:
            if slot.param in values and slot.own is values[slot.param][1]:
                slot.give_up_part()
            else:
                slot.forget()

    def bring_in(self, slots: list[ParamSlot], values: Mapping[nn.Parameter, Paged]) -> None:
        """Puts the values of `slots` on pages, but for those of `values`, which are there, and hooks on the modules."""
        pool = self.pool
        blank = leave_meta(self.model, self.slots, pool.compute.device)
        self._blank |= blank
        buffers = sum(b.nbytes for b in self.model.buffers())
        if self._buffers is not None:
            self._buffers.release()
        self._buffers = pool.hold(buffers, Tag.BUFFER, "the model's buffers") if buffers else None
        self.set_malloc()
        self.decide_to_plan()
        left = 0
        for slot in slots:
            read = values.get(slot.param)
            if read is not None and read[1] is not slot.own:
                slot.take_over(read[1])
            elif read is None and slot.param not in blank:
                self._origins[slot] = slot.param.device
                if self.shards is not None:
                    self.shards.ranks.share(slot.param.data)
                slot.adopt()
                left += slot.value.nbytes
            slot.come_onto_pages(self.residency.accesses, pool.compute.device)
            if left > _RETURN_EVERY_BYTES:
                left = 0
                give_back_freed()
            if not slot.group.movable:
                self.executor.fault(slot.value)
        self.residency.install(self.model)
        self.state_dicts.install(self.model)
        if self.shards is not None:
            self.shards.mark(self.model)

    def remove_hooks(self) -> None:
        """Takes the hooks off the modules."""
        if self.shards is not None:
            self.shards.mark(self.model, ends=True)
        self.state_dicts.remove()
        self.residency.remove()

    def become(self, model: nn.Module) -> None:
        """Another module wraps or replaces the model now."""
        self.model = self.needs.model = model

    def set_malloc(self) -> None:
        """Has the C library keep freed blocks where all pages fit, and give large ones back where they do not."""
        if self.pool.budget.tier is Tier.HOST:
            short = self.needs.runs_short
            # The blocks of adopted tensors are freed one by one.
            self.pool.copies_in |= short
            set_kept_blocks(large=not short)

    def watch_activations(self, card: CardMemory) -> None:
        """Begins to measure what other memory of a device is used, which is none of the pages'."""
        if isinstance(self.pool.compute, CudaTier) and self._asked.device_memory is not None:
            # What is derived leaves the rest of the card for what is not torch's.
            self.pool.compute.limit(self.pool.admission.limit_bytes)
        if self.pool.admission.activation_reserve is None:
            total = self.pool.budget.capacity_bytes
            # What was at work on the card before, and is gone, is no part of what is beside these pages.
            card.trim()
            least = self.needs.least_beside_activations()
            self.pool.admission.activation_reserve = ActivationReserve(
                self.pool.budget, total, least, card, self.pool.admission.pinned_bytes
            )
            self.pool.admission.shrink()

    def decide_to_plan(self) -> None:
        """Passes are planned where pages have to leave."""
        self.run_ahead.enabled = self.planned and self.needs.runs_short
        if self.run_ahead.enabled and self.run_ahead.rates is None:
            self._learn_rates()

    def _learn_rates(self) -> None:
        """Gives the planner and the metrics the measured rates of transfers, and on a device those of updates."""
        run_ahead, metrics, device, disk = self.run_ahead, self.metrics, self.memory.device, self.memory.disk
        paths = self.config.disk_paths
        if device is None:
            if isinstance(backing := self.pool.backing, DiskTier):
                run_ahead.rates = metrics.rates = side_by_side(disk_rates(paths))
                run_ahead.link_use = lambda: LinkUse(backing.bytes_read, backing.bytes_written, backing.busy_s)
            return
        if disk is not None and self.pool.whole_bytes <= self.memory.budgets[Tier.HOST].capacity_bytes:
            disk = None
        run_ahead.link_use = partial(_use_of_link, device, disk)
        rates = device_rates(device.device)
        if rates is None:
            return
        run_ahead.rates = metrics.rates = rates
        if disk is not None:
            # As if all passed the disk; in fact what RAM lacks does. The planner corrects the rate by the use it sees.
            metrics.disk_rates = side_by_side(disk_rates(paths))
            run_ahead.rates = in_a_row([rates, metrics.disk_rates])
        trained = [slot.own for slot in self.slots if slot.param.requires_grad]
        params_a_byte = sum(value.numel for value in trained) / max(sum(value.nbytes for value in trained), 1)
        run_ahead.rated_update_s = params_a_byte / rates.update_params_s
        if disk is None:
            # With a disk below, updates on the host would wait for the disk as well.
            dtype = max(trained, key=lambda value: value.nbytes).dtype if trained else torch.float32
            rate = cpu_update_rate(dtype, masters=self.config.master_weights is not None)
            run_ahead.host_s = None if rate is None else params_a_byte / rate

    def leave_card(self) -> None:
        """Gives slabs back, so that the card has room for ordinary tensors: what is in them leaves, if it can."""
        if self.pool.card is not None and not self.memory.others:
            self.pool.card.confine(0)
            if idle_fits_below(self.memory):
                self.pool.admission.shrink()

    def origin_of(self, slot: ParamSlot) -> torch.device:
        """Returns the device where a parameter was before it came onto pages, or where it computes."""
        return self._origins.get(slot, self.pool.compute.device)

    def take_off_all(self, origin: Callable[[ParamSlot], torch.device] | None = None) -> None:
        """Gives all parameters ordinary memory, with their values.

        Args:
            origin: as they were before they came onto pages: says where each is to be, and those without values are on
                the meta device again.
        """
        with progress("taking the model off its pages", sum(slot.value.nbytes for slot in self.slots)) as moved:
            for slot in self.slots:
                nbytes = slot.value.nbytes
                self._take_off_or_return(slot, origin)
                moved(nbytes)

    def _take_off_or_return(self, slot: ParamSlot, origin: Callable[[ParamSlot], torch.device] | None) -> None:
        blank = origin is not None and slot.param in self._blank and slot.value.place is Place.BLANK
        if blank:
            return_to_meta(self.model, slot.param)
        if blank or not slot.on_pages:
            # It still has its own data if something was refused before it came onto pages.
            slot.give_up_part()
            slot.leave_pages()
        else:
            self.take_off(slot, None if origin is None else origin(slot))

    def take_off(self, slot: ParamSlot, device: torch.device | None = None) -> None:
        """Gives a parameter ordinary memory, with its values; by default where it computes."""
        slot.take_off(self.executor.copied(slot.value, self.pool.compute.device if device is None else device))
        slot.forget()
        if isinstance(compute := self.pool.compute, HostArena):
            # Nothing more comes onto pages: kept for that, they would lie beside the copies.
            self.pool.admission.released.collect()
            compute.reclaim(compute.kept_bytes)


def refuse_too_large(model: nn.Module, config: PTMConfig, resolved: ResolvedConfig, memory: Memory) -> None:
    """Refuses a model for its size as `Engine.attach` would, without changing it; it may be on the meta device.

    Raises:
        BudgetError: less than the least budget the model can train under with any optimizer.
    """
    pages = Pages(model, config, resolved, memory)
    try:
        pages.size_up({})
    finally:
        for slot in pages.slots:
            slot.forget()


def _use_of_link(device: DeviceTier, disk: DiskTier | None) -> LinkUse:
    """Bytes to and from a device, and the busy time of the slower of link and disk."""
    moved = device.moved()
    if disk is not None and disk.busy_s > moved.busy_s:
        return LinkUse(moved.in_bytes, moved.out_bytes, disk.busy_s)
    return LinkUse(moved.in_bytes, moved.out_bytes, moved.busy_s, moved.both_s)
