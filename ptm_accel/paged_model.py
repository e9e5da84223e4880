"""A model whose parameters are on pages: how they come there, what is watched, and the least that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from torch import nn

from ptm_accel.config import PTMConfig, ResolvedConfig
from ptm_accel.errors import BudgetError
from ptm_accel.memory.arena import HostArena
from ptm_accel.memory.budget import Reservation, Tag, Tier
from ptm_accel.memory.card_memory import CardMemory
from ptm_accel.memory.device import CudaTier
from ptm_accel.memory.malloc import give_back_freed, set_kept_blocks
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.setup import Memory
from ptm_accel.memory.tenants import Need
from ptm_accel.memory.tide import Tide
from ptm_accel.memory.transfer import ALIGN_BYTES, round_up
from ptm_accel.metrics import Metrics
from ptm_accel.model.attach import leave_meta, small_bytes, take_parameters
from ptm_accel.model.changes import Outline, outline
from ptm_accel.model.compiled import Region, refuse_oversized_region, region_bytes
from ptm_accel.model.floor import ANY_ADAMW, FUSED_ADAMW, NO_OPTIMIZER, Appetite, Floor, least_budget
from ptm_accel.model.gradients import Gradients, Sums
from ptm_accel.model.norms import is_narrow
from ptm_accel.model.residency import Residency
from ptm_accel.model.slots import ExtentTable, ParamSlot, SlotTable
from ptm_accel.model.state_dicts import StateDictHooks
from ptm_accel.sizing import hint_about_masters, idle_fits_below, refuse_short
from ptm_accel.ways import know_way

_RETURN_EVERY_BYTES = 64 << 20
"""How much of what a model's parameters leave behind as they come onto pages may wait to be given back."""

_OF_BUDGET_FOR_NORMS = 16
_MOST_FOR_NORMS = 64 << 20
"""What is held to take norms of gradients in: at most this part of a budget, and at most so many bytes."""


class PagedModel:
    """What an engine is made of before there is an optimizer.

    Args:
        model: the model.
        asked: the dials as given.
        config: the dials as resolved for this machine.
        memory: the tiers and the pool.

    Attributes:
        model: unchanged but for its parameter dictionaries and hooks.
        asked: see above.
        config: see above.
        memory: see above.
        slots: its parameters.
        gradients: their gradients.
        floor: the least budget it can train under.
        run_ahead: what is known of its passes, and moves pages before they are needed.
        evaluates: whether it is not meant to be trained: its share of the tiers is less.
    """

    count: ClassVar[int] = 0
    """How many models this process has put on pages."""

    planned = True
    """Whether passes are planned from their traces. Without plans the pool pages on demand: slower, same numbers."""

    floor: Floor

    def __init__(self, model: nn.Module, asked: PTMConfig, config: ResolvedConfig, memory: Memory) -> None:
        self.model = model
        self.asked = asked
        self.config = config
        self.memory = memory
        self.pool = memory.pool
        self.slots = SlotTable()
        self.table = ExtentTable()
        self.residency = Residency(self.pool, self.slots, self.table)
        self.residency.owner = self
        self.run_ahead = self.residency.run_ahead
        self.state_dicts = StateDictHooks(self.pool, self.slots)
        self.residency.snapshots_of = self.state_dicts.modules
        self.gradients: Gradients | None = None
        self.metrics = Metrics(memory, self.run_ahead.tally)
        self.run_ahead.evaluation = self.metrics.leave_out
        self.evaluates = False
        self._together_bytes = 0
        self._buffers: Reservation | None = None
        self._outline: Outline = ()

    def settle(self) -> None:
        """Carries out what is left of the last optimizer step, which runs beside the next forward otherwise.

        Nobody has to call this: whoever looks at a parameter or at its state waits for its update.

        Raises:
            DiskError: a transfer failed.
        """
        if self.pool.owed is not None:
            self.pool.owed.finish()

    def _gradients_made(self, gradients: Gradients) -> None:
        """The model's gradients are these from now on."""

    def _warn_of_lost_step(self) -> None:
        """The values of parameters have been given: those that are of no step are named such."""

    # ---- onto pages --------------------------------------------------------------------------------------------

    def _size_up(self, values: Mapping[nn.Parameter, PagedTensor]) -> None:
        small = small_bytes(self.config.page_bytes)
        take_parameters(self.model, self.pool, self.slots, self.table, small=small, paged=values)
        self._expect_optimizer()

    def _expect_optimizer(self, model: nn.Module | None = None, slots: SlotTable | None = None) -> None:
        """Before there is an optimizer: reckons with AdamW, or where that is too much, with what any needs.

        What the optimizer really needs is asked when there is one.

        Args:
            model: see `_floor`.
            slots: see `_floor`.

        Raises:
            BudgetError: no optimizer could do with the budgets; nothing has been changed then.
        """
        adamw, least = self._floor(FUSED_ADAMW, model, slots), self._floor(NO_OPTIMIZER, model, slots)
        expected = self._floor(ANY_ADAMW, model, slots)
        try:
            self._needs(adamw, least, expected)
            return
        except BudgetError:
            if adamw.total_bytes == least.total_bytes:
                raise
        self._needs(least, least, expected)

    def _needs(self, floor: Floor, states: Floor, expected: Floor) -> None:
        """The least budget is known, or another one than before.

        Args:
            floor: the least budget.
            states: with the optimizer that there is, or none.
            expected: with the optimizer that there is, or that is expected, to be named in errors.

        Raises:
            BudgetError: the budgets are less than that and what other models need; nothing has been changed then.
        """
        refuse_short(self.memory, floor, self._counted(states), self._counted(expected), self.config.page_bytes)
        self.floor, self._states = floor, states
        self.say_need()

    def say_need(self) -> None:
        """Makes known to the pool what the model needs, by what is known of it now."""
        floor, states = self._counted(self.floor), self._counted(self._states)
        least = max(floor.total_bytes, self._together_bytes)
        self.pool.need = Need(
            type(self.model).__name__,
            least_bytes=least,
            whole_bytes=max(floor.whole_bytes, least),
            known_bytes=states.whole_bytes,
            away_bytes=states.away_bytes,
        )
        if self.pool.room.tide is not None:
            self.pool.room.tide.need(self._least_beside_activations())

    def _counted(self, floor: Floor) -> Floor:
        """What counts of a floor: a model that is only evaluated has no gradients."""
        if not self.evaluates:
            return floor
        values = floor.fixed_bytes + sum(slot.value.slot_bytes for slot in self.slots)
        whole = values + floor.moving_bytes
        return replace(
            floor,
            states_bytes=min(floor.states_bytes, values),
            away_bytes=min(floor.away_bytes, values),
            whole_bytes=min(floor.whole_bytes, whole),
        )

    def adapt(self) -> None:
        """Another model has come to the tiers or has left them, or needs something else: plans are made anew."""
        self.run_ahead.resized()
        self._set_malloc()
        self._decide_to_plan()
        self._hold_norms()

    def _install(self, values: Mapping[nn.Parameter, PagedTensor]) -> None:
        self._size_up(values)
        # What stays for long among activations leaves holes there.
        self.pool.copies_in = self.pool.card is not None
        self._bring_in(list(self.slots), values)
        if self.pool.card is not None:
            self._watch_tide(self.pool.card)
        hint_about_masters([s for s in self.slots if s.param.requires_grad], self.config)
        PagedModel.count += 1

    def _bring_in(self, slots: list[ParamSlot], values: Mapping[nn.Parameter, PagedTensor]) -> None:
        """Puts the values of `slots` on pages, and the model's modules on faults."""
        pool = self.pool
        blank = leave_meta(self.model, self.slots, pool.compute.device)
        buffers = sum(b.nbytes for b in self.model.buffers())
        if self._buffers is not None:
            self._buffers.release()
        self._buffers = pool.hold(buffers, Tag.BUFFER, "the model's buffers") if buffers else None
        self._set_malloc()
        self._decide_to_plan()
        left = 0
        for slot in slots:
            if slot.param not in blank and slot.param not in values:
                # No name here may hold the data: what moves away at once must also be freed at once.
                pool.adopt(slot.value, slot.param.data)
                left += slot.value.nbytes
            slot.come_onto_pages(self.residency, pool.compute.device)
            if left > _RETURN_EVERY_BYTES:
                left = 0
                give_back_freed()
            if not slot.value.movable:
                pool.fault(slot.value)
        trainable = [s for s in self.slots if s.param.requires_grad]
        self.gradients = Gradients(trainable, pool, wide=self.config.master_weights is not None)
        self.residency.install(self.model)
        self.state_dicts.install(self.model)
        self.state_dicts.given = self._warn_of_lost_step
        self.gradients.hold_arrival()
        self._gradients_made(self.gradients)
        self._hold_norms()
        self.residency.regions.found = self._meet_region
        self.refresh_compiled()
        self._outline = outline(self.model)

    def _set_malloc(self) -> None:
        """Has the C library keep freed blocks where all pages fit, and give large ones back where they do not."""
        if self.pool.budget.tier is Tier.HOST:
            short = self._runs_short()
            # The blocks of adopted tensors are freed one by one.
            self.pool.copies_in |= short
            set_kept_blocks(large=not short)

    def _runs_short(self) -> bool:
        """Whether pages have to leave."""
        return self.pool.home is not None and not self._all_fits()

    def _least_beside_activations(self) -> int:
        """What pages keep until it is known what activations leave: what they work with, or what has no other place."""
        # Where all is together in memory that is shared, what is below is the rest of the same memory.
        tiers = self.memory.budgets.items()
        below = sum(budget.capacity_bytes for tier, budget in tiers if tier is not self.pool.budget.tier)
        return max(self.pool.least_bytes * 5 // 4, self.pool.whole_bytes - below)

    def _watch_tide(self, card: CardMemory) -> None:
        if isinstance(self.pool.compute, CudaTier) and self.asked.device_memory is not None:
            # What is derived leaves the rest of the card for what is not torch's.
            self.pool.compute.limit(self.pool.room.limit_bytes)
        if self.pool.room.tide is None:
            total = self.pool.budget.capacity_bytes
            # What was at work on the card before, and is gone, is no part of what is beside these pages.
            card.trim()
            self.pool.room.tide = Tide(self.pool.budget, total, self._least_beside_activations(), card)
            self.pool.room.shrink()

    def refresh_compiled(self, model: nn.Module | None = None) -> None:
        """Looks for what `torch.compile` has compiled since the model was put on pages.

        Needed only after `model.compile()` on the whole model; everything else is found by itself.

        Args:
            model: what wraps or replaces the model now, if it is another module.

        Raises:
            UnsupportedError: a compile mode that cannot work on pages, by name.
            BudgetError: a compiled region whose parameters and gradients do not fit at once.
        """
        self.residency.regions.refresh(self.model if model is None else model)

    def _meet_region(self, region: Region) -> None:
        assert self.gradients is not None
        landing = max((s.value.nbytes for s in self.slots if s.param.requires_grad), default=0)
        needed = region_bytes(region, self.floor, landing)
        if needed > self._together_bytes:
            self._together_bytes = needed
            self.say_need()
        others = sum(other.pool.need.least_bytes for other in self.memory.others)
        refuse_oversized_region(region, needed + others, self.pool.budget)
        self.gradients.expect_together(region.grad_bytes)

    def _leave_card(self) -> None:
        """Gives slabs back, so that the card has room for ordinary tensors: what is in them leaves, if it can."""
        if self.pool.card is not None and not self.memory.others:
            self.pool.card.confine(0)
            if idle_fits_below(self.memory):
                self.pool.room.shrink()

    def _take_off(self, slot: ParamSlot) -> None:
        if slot.value.place.resident:
            values = self.pool.fault(slot.value).detach().clone()
        else:
            values = self.pool.snapshot(slot.value).to(self.pool.compute.device, copy=True)
        slot.take_off(values)
        self.pool.forget(slot.value)
        if isinstance(compute := self.pool.compute, HostArena):
            # Nothing more comes onto pages: kept for that, they would lie beside the copies.
            self.pool.room.collect()
            compute.reclaim(compute.kept_bytes)

    @property
    def window_bytes(self) -> int:
        """Size of an optimizer window."""
        return self.config.page_bytes

    def _floor(self, appetite: Appetite, model: nn.Module | None = None, slots: SlotTable | None = None) -> Floor:
        # What updates and transfers hold for a moment is no part of what the tiers hold themselves.
        self.settle()
        self.pool.room.settle()
        return least_budget(
            self.model if model is None else model,
            self.slots if slots is None else slots,
            appetite,
            masters=self.config.master_weights is not None,
            window_bytes=self.window_bytes,
            held_bytes=self.pool.budget.used_by_tag().get(Tag.STAGING, 0),
        )

    def _hold_norms(self) -> None:
        """Holds room to take norms in, where there are masters, on a CPU, and it is little of what is to spare."""
        assert self.gradients is not None
        narrow = [s.value for s in self.slots if s.param.requires_grad and is_narrow(s.value.dtype)]
        if self.config.master_weights is None or self.pool.budget.tier is not Tier.HOST or not narrow:
            return
        capacity, floor = self.pool.share_bytes, self.floor
        if self._all_fits():
            spare = self.pool.budget.capacity_bytes - self.pool.whole_bytes
        else:
            spare = min(capacity // _OF_BUDGET_FOR_NORMS, floor.total_bytes // 4, capacity - 2 * floor.total_bytes)
        largest = max(value.numel for value in narrow) * 4
        self.gradients.norms.hold(min(round_up(largest), _MOST_FOR_NORMS, max(spare, 0) // ALIGN_BYTES * ALIGN_BYTES))

    def _decide_to_plan(self) -> None:
        self.run_ahead.enabled = self.planned and self._runs_short()
        if self.run_ahead.enabled and self.run_ahead.rates is None:
            trained = [slot.value for slot in self.slots if slot.param.requires_grad]
            paths = self.config.disk_paths
            know_way(self.run_ahead, self.metrics, self.memory, paths, trained, self.pool.whole_bytes)

    def _sums(self) -> Sums:
        return Sums.NONE if self.gradients is None else self.gradients.sums()

    def _all_fits(self) -> bool:
        return self.pool.whole_bytes <= self.pool.budget.capacity_bytes
