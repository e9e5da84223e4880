"""Works out what a model needs of the tiers, checks it against the budgets, and tells the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from ptm_accel.config import ResolvedConfig
from ptm_accel.distributed.shards import Shards
from ptm_accel.distributed.wholes import most_wholes
from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.setup import Memory
from ptm_accel.memory.tenants import Need
from ptm_accel.model.floor import (
    ANY_ADAMW,
    ANY_OPTIMIZER,
    FUSED_ADAMW,
    NO_OPTIMIZER,
    Floor,
    OptimizerMemory,
    least_budget,
)
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.runtime.executor import Executor
from ptm_accel.sizing import refuse_short


def groups_suit(
    floor: Callable[[OptimizerMemory, SlotTable], Floor],
    grouped: SlotTable,
    alone: SlotTable,
    room_bytes: int,
    *,
    backed: bool,
) -> bool:
    """Whether groups leave as much room again beside what they need; see `Needs.suit`.

    Args:
        floor: works out the least budget with an optimizer, of parameters in groups.
        grouped: the parameters in groups.
        alone: each in a group of its own.
        room_bytes: the budget.
        backed: whether there is a tier below.
    """
    most = floor(ANY_OPTIMIZER, grouped)
    if most.whole_bytes <= room_bytes or not backed:
        return most.whole_bytes <= room_bytes
    adamw, without = (floor(FUSED_ADAMW, slots) for slots in (grouped, alone))
    if 2 * adamw.total_bytes > room_bytes or without.whole_bytes <= room_bytes < adamw.whole_bytes:
        return False
    return most.total_bytes <= max(room_bytes, floor(ANY_OPTIMIZER, alone).total_bytes)


class Needs:
    """Needs of one model of the tiers.

    Args:
        model: the model.
        slots: its parameters.
        memory: the tiers.
        config: the options as resolved for this machine.
        shards: the ranks that it is sharded over, if it is.

    Attributes:
        model: see above; another module where that has come to wrap or replace it.
        floor: the least budget it can train under.
        updates_bytes: memory of updates that run beside training (`update: lock_free`).
        evaluates: whether it is not meant to be trained: its share of the tiers is less.
    """

    floor: Floor
    _states: Floor

    def __init__(
        self,
        model: nn.Module,
        slots: SlotTable,
        memory: Memory,
        executor: Executor,
        config: ResolvedConfig,
        shards: Shards | None = None,
    ) -> None:
        self.model = model
        self.evaluates = False
        self._slots = slots
        self._memory = memory
        self._pool = memory.pool
        self._executor = executor
        self._config = config
        self._shards = shards
        self.updates_bytes = self._together_bytes = 0

    def estimate(
        self, optimizer_memory: OptimizerMemory, model: nn.Module | None = None, slots: SlotTable | None = None
    ) -> Floor:
        """Returns the least budget with an optimizer.

        Args:
            optimizer_memory: what the optimizer needs.
            model: what the model is to become, if that is another one.
            slots: its parameters then.
        """
        # What updates and transfers hold for a moment is no part of what the tiers hold themselves.
        self._executor.finish_updates()
        self._pool.admission.released.settle()
        slots = self._slots if slots is None else slots
        return least_budget(
            self.model if model is None else model,
            slots,
            optimizer_memory,
            masters=self._config.master_weights is not None,
            window_bytes=self._config.page_bytes,
            held_bytes=self._pool.budget.used_by_tag().get(Tag.STAGING, 0) + self.updates_bytes,
            wholes=0 if self._shards is None else most_wholes(slots),
        )

    def suit(self, grouped: SlotTable, alone: SlotTable) -> bool:
        """Whether groups leave as much room again beside what they need, and all fits where it does without them.

        What updates need with an optimizer that is not known yet may be most of the room, in groups or not: it is no
        reason against groups unless they need more.

        Args:
            grouped: the parameters in groups.
            alone: each in a group of its own.
        """

        def floor(kind: OptimizerMemory, slots: SlotTable) -> Floor:
            return self.estimate(kind, None, slots)

        return groups_suit(floor, grouped, alone, self._pool.share_bytes, backed=self._pool.backing is not None)

    def hold(self, grouped: SlotTable) -> bool:
        """Whether a model in groups can be trained at all: gathered one by one, parameters cross the network oftener.

        Args:
            grouped: the parameters in groups.
        """
        return self.estimate(ANY_ADAMW, None, grouped).total_bytes <= self._pool.share_bytes

    def expect_optimizer(self, model: nn.Module | None = None, slots: SlotTable | None = None) -> None:
        """Estimates before there is an optimizer: for AdamW, or where that is too much, for the least that any needs.

        The arguments are those of `estimate`.

        Raises:
            BudgetError: no optimizer could do with the budgets; nothing has been changed then.
        """
        adamw, least, expected = (self.estimate(kind, model, slots) for kind in (FUSED_ADAMW, NO_OPTIMIZER, ANY_ADAMW))
        try:
            self.check(adamw, least, expected)
            return
        except BudgetError:
            if adamw.total_bytes == least.total_bytes:
                raise
        self.check(least, least, expected)

    def check(self, floor: Floor, states: Floor, expected: Floor) -> None:
        """Takes note of the least budget, if the tiers have that.

        Args:
            floor: the least budget.
            states: with the optimizer that there is, or none.
            expected: with the optimizer that there is, or that is expected, to be named in errors.

        Raises:
            BudgetError: the budgets are less than that and what other models need; nothing has been changed then.
        """
        refuse_short(self._memory, floor, self._counted(states), self._counted(expected), self._config.page_bytes)
        self.floor, self._states = floor, states
        self.say()

    def widen(self, nbytes: int) -> None:
        """A compiled region needs so much at once."""
        if nbytes > self._together_bytes:
            self._together_bytes = nbytes
            self.say()

    def say(self) -> None:
        """Makes known to the pool what the model needs, by what is known of it now."""
        floor, states = self._counted(self.floor), self._counted(self._states)
        least = max(floor.total_bytes, self._together_bytes)
        self._pool.need = Need(
            type(self.model).__name__,
            least_bytes=least,
            whole_bytes=max(floor.whole_bytes, least),
            known_bytes=states.whole_bytes,
            away_bytes=states.away_bytes,
        )
        if self._pool.admission.activation_reserve is not None:
            self._pool.admission.activation_reserve.need(self.least_beside_activations())

    def _counted(self, floor: Floor) -> Floor:
        """Returns what counts of a floor: a model that is only evaluated has no gradients."""
        if not self.evaluates:
            return floor
        values = floor.fixed_bytes + sum(slot.own.slot_bytes for slot in self._slots)
        return replace(
            floor,
            states_bytes=min(floor.states_bytes, values),
            away_bytes=min(floor.away_bytes, values),
            whole_bytes=min(floor.whole_bytes, values + floor.moving_bytes),
        )

    def least_beside_activations(self) -> int:
        """What pages keep until it is known what activations leave: what they work with, or what has no other place."""
        # Where all is together in memory that is shared, what is below is the rest of the same memory.
        tiers = self._memory.budgets.items()
        below = sum(budget.capacity_bytes for tier, budget in tiers if tier is not self._pool.budget.tier)
        return max(self._pool.least_bytes * 5 // 4, self._pool.whole_bytes - below)

    @property
    def all_fits(self) -> bool:
        """Whether nothing ever has to leave the compute tier."""
        return self._pool.whole_bytes <= self._pool.budget.capacity_bytes

    @property
    def runs_short(self) -> bool:
        """Whether pages have to leave."""
        return self._pool.backing is not None and not self.all_fits
