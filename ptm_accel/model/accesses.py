"""Uses of parameters and gradients outside of the forwards of their own modules."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from ptm_accel.memory.calls import Call
from ptm_accel.model.assignments import assign, take_in
from ptm_accel.model.forwards import Forwards
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor

logger = logging.getLogger(__name__)


class Accesses:
    """Answers of the engine to an `AwayParameter`.

    Args:
        executor: serves accesses.
        slots: the model's slots.
        forwards: those that are under way.

    Attributes:
        outside: called before a parameter is used outside of its module's forward.
        gradient_of: returns `p.grad` of a parameter.
        set_gradient_of: called with what `p.grad` of a parameter was set to.
        snapshots_of: modules with a hook that puts the values into their state dictionaries.
    """

    def __init__(self, executor: Executor, slots: SlotTable, forwards: Forwards) -> None:
        self.outside: Callable[[], object] | None = None
        self.gradient_of: Callable[[ParamSlot], torch.Tensor | None] | None = None
        self.set_gradient_of: Callable[[ParamSlot, torch.Tensor | None], None] | None = None
        self.snapshots_of: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self._executor = executor
        self._pool = executor.pool
        self._slots = slots
        self._forwards = forwards
        self._told = False

    @contextmanager
    def values(self, slot: ParamSlot, *, changes: bool) -> Iterator[torch.Tensor]:
        """A context in which the values are resident, in an ordinary parameter; gives their storage's view.

        They stay afterwards while there is room (LRU).

        Args:
            slot: the parameter.
            changes: the values count as changed in any case.
        """
        stats, calls = self._pool.stats, self._pool.calls
        begin = time.perf_counter() - stats.elsewhere_s
        within = self._forwards.meet_autocast()
        if not within:
            # A forward is a call already.
            calls.begin(Call.ACCESS, self._pool)
        try:
            if self._slots.given.by_slot:
                self._slots.given.take_over(slot)
            if not within:
                self._tell_of_outside(slot)
            if self.outside is not None:
                self.outside()
            # Where no forward does that already.
            saved = None
            if torch.is_grad_enabled() and not within:
                saved = self._forwards.saved.cover(together=self._forwards.is_owned(slot))
            with self._executor.pin(slot.value) as tensor, saved or nullcontext():
                if changes:
                    slot.changed()
                slot.show()
                used = time.perf_counter() - stats.elsewhere_s
                try:
                    yield tensor
                finally:
                    # Not ours, but for what it has called of ours, which has been counted.
                    stats.elsewhere_s = time.perf_counter() - used
                    if slot.hide():
                        take_in([slot])
            self._pool.eviction.spare(slot.value.block)
            spent = time.perf_counter() - stats.elsewhere_s - begin
            stats.own_s += spent
            stats.elsewhere_s += spent
        finally:
            if not within:
                calls.end()

    def take_over(self, slot: ParamSlot) -> None:
        """Takes over what was written to values of the parameter in state dictionaries."""
        self._slots.given.take_over(slot)

    def alias_given(self, slot: ParamSlot) -> None:
        """A view of the values was given to user code; writes to it outside of forwards are not noticed otherwise."""
        if not self._forwards.under_way:
            slot.changed()

    def assign(self, slot: ParamSlot, data: torch.Tensor) -> None:
        """Makes `data` the values, as `p.data = data` does."""
        with self._pool.calls.during(Call.ACCESS, self._pool):
            before = slot.apart
            assign(slot, data, alone=True)
            if slot.apart and not before:
                self._forwards.apart.append(slot)

    def gradient(self, slot: ParamSlot) -> torch.Tensor | None:
        """Returns what `p.grad` of a parameter is."""
        if self.gradient_of is None:
            return None
        calls = self._pool.calls
        with calls.lock:
            if calls.owner is not None and calls.owner is not calls.thread.me:
                calls.meet(Call.ACCESS, self._pool)
            return self.gradient_of(slot)

    def set_gradient(self, slot: ParamSlot, gradient: torch.Tensor | None) -> None:
        """Takes what `p.grad` of a parameter was set to."""
        if self.set_gradient_of is not None:
            calls = self._pool.calls
            with calls.lock:
                if calls.owner is not None and calls.owner is not calls.thread.me:
                    calls.meet(Call.ACCESS, self._pool)
                self.set_gradient_of(slot, gradient)

    def let_go(self) -> None:
        """Releases what is only pinned until the next forward."""
        if self._forwards.between is not None:
            self._forwards.between()

    def snapshot_follows(self, module: nn.Module) -> bool:
        """Returns whether a hook puts the values into the state dictionary that `module` makes."""
        return module in self.snapshots_of

    def _tell_of_outside(self, slot: ParamSlot) -> None:
        """Warns once if a step uses all parameters outside of forwards."""
        self._forwards.outside_uses += 1
        if self._forwards.outside_uses == 2 * len(self._slots) and self._forwards.run_ahead.enabled and not self._told:
            self._told = True
            logger.warning(
                "all %d parameters are used outside of the forwards of their modules, the last one %s (an average of "
                "the weights, say, or the step of an optimizer that was not prepared). The numbers are right; each use "
                "brings one parameter in and waits for it, which is slow if it happens in every step.",
                len(self._slots),
                slot.name,
            )
