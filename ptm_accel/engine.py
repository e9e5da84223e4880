"""Joins a model, its memory and its optimizer. Thin: the work is done in the layers below."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TypeVar

import torch

# `_disable_current_modes` imports it when first called, which may be at the end of the process; importing there makes
# Python forget that it ends by Ctrl-C.
import torch._subclasses.schema_check_mode
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ptm_accel.config import BLOCKING, PTMConfig, ResolvedConfig
from ptm_accel.distributed.replicas import Replicas
from ptm_accel.errors import ConfigError
from ptm_accel.memory.device import CudaTier
from ptm_accel.memory.interrupts import INTERRUPTS
from ptm_accel.memory.paged import PagedTensor, Place
from ptm_accel.memory.setup import Memory
from ptm_accel.model.attach import check_model, small_bytes
from ptm_accel.model.changes import Changes, changes_of, is_covered, outline, refuse_changes
from ptm_accel.model.floor import FUSED_ADAMW, NO_OPTIMIZER
from ptm_accel.model.gradients import Gradients, Sums, clip_coefficient, total_norm
from ptm_accel.opening import open_memory
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.optim.support import appetite_of
from ptm_accel.paged_model import PagedModel
from ptm_accel.sizing import refuse_below, refuse_homeless, refuse_oversized_model

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")

_LARGEST_BATCH_BYTES = 256 << 20
"""The most that an optimizer step holds at a time."""

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
"""Weak on both sides: an engine is kept alive by its model (through the model's parameter dictionaries), and by nothing
here, so that a model that is no longer used takes its engine and all its pages with it."""


class Engine(PagedModel):
    """A model on pages, and what trains it. Made by `Engine.attach`, ended by `detach` or `close`.

    Attributes:
        optimizer: the optimizer bound to it, if any.
        replicas: keeps it and those of other processes alike, where there are some.
        updates_in_backward: tells whether `optimizer.step()` will come right after the next backward, on its gradients
            as they are; set by whoever owns the loop (`Engine.backward`).
    """

    def __init__(self, model: nn.Module, asked: PTMConfig, config: ResolvedConfig, memory: Memory) -> None:
        super().__init__(model, asked, config, memory)
        self.updates_in_backward: Callable[[], bool] = _no
        self._forbidden = 0
        self.run_ahead.sums = _asking(self, Engine._sums, Sums.NONE)
        self.run_ahead.in_backward = _asking(self, Engine._may_update_in_backward, False)
        self.optimizer: PagedOptimizer | None = None
        self.replicas: Replicas | None = None
        self._finaliser = weakref.finalize(model, _close_unasked, memory)

    # ---- beginning and end -----------------------------------------------------------------------------------

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        config: PTMConfig | None = None,
        *,
        memory: Memory | None = None,
        device: torch.device | None = None,
    ) -> Engine:
        """Puts a model's parameters on pages.

        Args:
            model: any module; parameters on the meta device become blank pages.
            config: the dials.
            memory: tiers made by the caller, instead of those of this machine.
            device: where compute happens; by default the current CUDA device, or the CPU where there is none.

        Returns:
            the engine; a model that is already on pages keeps the one it has, which follows what has become of it.

        Raises:
            ConfigError: contradictory dials, or other dials than a model on pages was given.
            UnsupportedError: a parameter or module that cannot be paged, by name.
            BudgetError: less than the least budget the model can train under.
        """
        existing = engine_of(model) or engine_holding(model.parameters())
        if existing is not None:
            existing._check_same(config)
            existing.follow(model)
            return existing
        check_model(model)
        asked = config or PTMConfig()
        resolved, memory = open_memory(asked, memory, device)
        engine = cls(model, asked, resolved, memory)
        try:
            engine._install({})
        except BaseException:
            engine.detach(check=False)
            raise
        _engines[model] = weakref.ref(engine)
        return engine

    @classmethod
    def take_over(
        cls,
        model: nn.Module,
        config: PTMConfig,
        resolved: ResolvedConfig,
        memory: Memory,
        values: Mapping[nn.Parameter, PagedTensor],
    ) -> Engine:
        """As `attach`, for a model that was read or built on pages.

        Args:
            model: the model.
            config: the dials.
            resolved: what `open_memory` made of them.
            memory: the tiers it opened. They are closed if this fails.
            values: parameters whose values are on pages of `memory` already; the others are taken as they are.
        """
        try:
            check_model(model, values)
            engine = cls(model, config, resolved, memory)
            engine._install(values)
        except BaseException:
            # The values are nowhere else, and may be more than the memory holds: this model is of no use any more.
            memory.close()
            raise
        _engines[model] = weakref.ref(engine)
        return engine

    @classmethod
    def rehearse(cls, model: nn.Module, config: PTMConfig, resolved: ResolvedConfig, memory: Memory) -> None:
        """Refuses a model that `attach` would refuse for its size, without changing it; it may be on the meta device.

        Raises:
            BudgetError: less than the least budget the model can train under.
        """
        engine = cls(model, config, resolved, memory)
        engine._finaliser.detach()
        try:
            engine._size_up({})
        finally:
            for slot in engine.slots:
                memory.pool.forget(slot.value)

    def follow(self, model: nn.Module | None = None) -> None:
        """Follows what has become of the model: wrapped, given adapters or another head, resized, merged.

        What it has now that is not on pages comes onto pages, and what it no longer has comes off them. Whoever trains
        it calls this (the Trainer does); until then what is new is ordinary memory, and everything works.

        Args:
            model: what wraps or replaces it, if it is another module now.

        Raises:
            UnsupportedError: what is new cannot be paged, or `model` is only a part of what is on pages.
            BudgetError: less than the least budget that it can train under now.
        """
        model = self.model if model is None else model
        for slot in self.slots:
            slot.meet()
        if model is self.model and outline(model) == self._outline and is_covered(model):
            self._meet_trainable()
            return
        check_model(model, {slot.param for slot in self.slots})
        small = small_bytes(self.config.page_bytes)
        changes = changes_of(model, self.slots, self.pool, self.table, small=small)
        try:
            other = engine_holding(slot.param for slot in changes.new)
            refuse_changes(changes, model, self.model, None if other is None else other.model)
            floor = self._floor(FUSED_ADAMW, model, changes.slots)
            refuse_below(self.memory, floor)
            refuse_homeless(self.memory, self._floor(NO_OPTIMIZER, model, changes.slots))
        except BaseException:
            for slot in changes.new:
                self.pool.forget(slot.value)
            raise
        self.floor = floor
        self._change(model, changes)

    def _change(self, model: nn.Module, changes: Changes) -> None:
        self.settle()
        if self.gradients is not None:
            self.gradients.remove()
        self.state_dicts.remove()
        self.residency.remove()
        self.run_ahead.forget()
        for slot in changes.gone:
            self._take_off(slot)
        self.slots.become(changes.slots)
        if model is not self.model:
            _engines.pop(self.model, None)
            _engines[model] = weakref.ref(self)
            self._finaliser.detach()
            self._finaliser = weakref.finalize(model, _close_unasked, self.memory)
            self.model = model
        self._bring_in(changes.new, {})
        if self.replicas is not None:
            self.replicas.share_values(changes.new, ())
        if self.pool.room.tide is not None:
            self.pool.room.tide.need(self.floor.total_bytes * 5 // 4)
        if self.optimizer is not None:
            assert self.gradients is not None
            if self.optimizer.states.are_of_the_model():
                self.optimizer.follow(self.gradients)
            else:
                self.optimizer.close()
                self.optimizer = None

    def _meet_trainable(self) -> None:
        """Follows changes of `requires_grad` since the model was put on pages (layers frozen or unfrozen)."""
        assert self.gradients is not None
        trainable = [s for s in self.slots if s.param.requires_grad]
        if self.gradients.covers(trainable):
            return
        self.gradients.remove()
        self.gradients = Gradients(trainable, self.pool, wide=self.config.master_weights is not None)
        self.gradients.hold_landing()
        for region in self.residency.regions.running():
            self._meet_region(region)
        if self.optimizer is not None:
            self.optimizer.follow(self.gradients)

    def detach(self, *, check: bool = True) -> nn.Module:
        """Takes the model off its pages: an ordinary model in ordinary memory, values included.

        Args:
            check: refuse if the model does not fit the memory that is free.

        Returns:
            the model.

        Raises:
            BudgetError: it does not fit; nothing has been changed then.
        """
        if check:
            self.settle()
            refuse_oversized_model(self.memory, self.slots)
        if isinstance(self.pool.compute, CudaTier):
            # Whether the card has room was asked above; the budget need not.
            self.pool.compute.limit(None)
        self.abort()
        if self.optimizer is not None:
            self.optimizer.close()
            self.optimizer = None
        if self.gradients is not None:
            self.gradients.remove()
            self.gradients = None
        self.state_dicts.remove()
        self.residency.remove()
        if self.replicas is not None:
            self.replicas.remove()
        for slot in self.slots:
            if check:
                slot.meet()
            if slot.value.place is Place.BLANK and not (check and slot.shown):
                # Never put on pages (it still has its own data), or without values in a model that is given up.
                slot.value.occupant = None
                continue
            self._take_off(slot)
        self.close()
        return self.model

    def close(self) -> None:
        """Gives all memory back. The model's parameters are placeholders afterwards, unless it was detached."""
        _engines.pop(self.model, None)
        if self.optimizer is not None:
            self.optimizer.in_backward.end()
        self._finaliser.detach()
        self.memory.close()

    def abort(self) -> None:
        """After an exception out of a step: ends what is half done, so that saving and training on are possible."""
        self.residency.abort()
        self.state_dicts.abort()
        if self.optimizer is not None:
            self.optimizer.in_backward.abandon()

    def _check_same(self, config: PTMConfig | None) -> None:
        if config is not None and config != PTMConfig() and config != self.asked:
            raise ConfigError(
                f"this model is already on pages with {self.asked}, and cannot be moved to {config} while it "
                "is. Use the same ptm_config, or call `engine_of(model).detach()` first."
            )

    # ---- budgets ---------------------------------------------------------------------------------------------

    def _may_overlap(self) -> bool:
        """Whether an update may run beside a pass: there is something to move, and room for the worst of both."""
        least = self.floor.total_bytes + self.floor.moving_bytes
        wanted = self.run_ahead.enabled and self.config.update != BLOCKING
        return wanted and not self._all_fits() and least <= self.pool.budget.capacity_bytes

    def _may_update_in_backward(self) -> bool:
        optimizer = self.optimizer
        return (
            optimizer is not None
            and self.replicas is None
            and self._may_overlap()
            and self.updates_in_backward()
            and optimizer.expects_backward()
        )

    # ---- training --------------------------------------------------------------------------------------------

    def bind_optimizer(self, optimizer: torch.optim.Optimizer) -> PagedOptimizer:
        """Puts an optimizer's state on pages; another one that was bound before loses its state.

        Raises:
            UnsupportedError: the optimizer cannot run on pages.
            BudgetError: it updates whole tensors, and the budget is below what that needs.
        """
        if self.optimizer is not None and optimizer in (self.optimizer, self.optimizer.inner):
            return self.optimizer
        self._meet_trainable()
        floor = self._floor(appetite_of(optimizer))
        refuse_below(self.memory, floor)
        refuse_homeless(self.memory, floor)
        self.floor = floor
        if self.pool.room.tide is not None:
            self.pool.room.tide.need(floor.total_bytes * 5 // 4)
        self._decide_to_plan()
        if self.optimizer is not None:
            self.optimizer.close()
            self.optimizer = None
        assert self.gradients is not None
        self.optimizer = PagedOptimizer(
            optimizer,
            self.slots,
            self.gradients,
            self.pool,
            master_weights=self.config.master_weights is not None,
            window_bytes=self.window_bytes,
            batch_bytes=_asking(self, lambda engine: engine._batch_bytes(), 0),
            run_ahead=self.run_ahead,
            overlap=_asking(self, lambda engine: engine._may_overlap(), False),
            synchronise=_asking(self, Engine.synchronise, None),
        )
        return self.optimizer

    def _batch_bytes(self) -> int:
        """How much an optimizer step holds at a time: enough to be fast, little enough that most stays where it is."""
        if self._all_fits():
            return _LARGEST_BATCH_BYTES
        return min(_LARGEST_BATCH_BYTES, (self.pool.budget.capacity_bytes - self.floor.total_bytes) // 8)

    @contextmanager
    def no_updates(self) -> Iterator[None]:
        """While it lasts, updates begin in no backward."""
        self._forbidden += 1
        try:
            yield
        finally:
            self._forbidden -= 1

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward: updates begin in it where `updates_in_backward` says that they may."""
        possible = not self._forbidden and self.replicas is None and self._may_overlap()
        if self.optimizer is not None and possible and self.updates_in_backward():
            with self.optimizer.in_backward.permitted():
                yield
        else:
            yield

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """As `torch.nn.utils.clip_grad_norm_` over all parameters with gradients; bit-equal to it.

        Returns:
            the norm before clipping, a scalar.
        """
        with INTERRUPTS:
            return self._clip_grad_norm(float(max_norm), float(norm_type))

    def _clip_grad_norm(self, max_norm: float, norm_type: float) -> torch.Tensor:
        assert self.gradients is not None
        self.synchronise()
        if self.optimizer is not None:
            self.optimizer.apply_scale()
        present = self.gradients.arrived()
        norm = total_norm(present, norm_type, self.pool.compute.device)
        if present:
            coefficient = clip_coefficient(norm, max_norm)
            if self.optimizer is not None:
                self.optimizer.scale_gradients(coefficient)
            else:
                self.gradients.multiply(coefficient)
        return norm

    def replicate(self) -> None:
        """From now on this model is one of several, each in a process of `torch.distributed`, that stay alike.

        Raises:
            UnsupportedError: the processes have different models.
        """
        if self.replicas is None:
            self.replicas = Replicas(self.pool, self.model)
            self.replicas.share_values(self.slots, self.model.buffers())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around micro-batches whose gradients are only added up, and not made the same in all replicas."""
        with nullcontext() if self.replicas is None else self.replicas.no_sync():
            yield

    def synchronise(self) -> None:
        """Makes gradients that have arrived the mean over all replicas; nobody has to call this before a step."""
        if self.replicas is None or self.gradients is None or self.replicas.have_shared(self.gradients):
            return
        if self.optimizer is not None:
            self.optimizer.apply_scale()
        with INTERRUPTS:
            self.replicas.share_gradients(self.gradients)

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if self.gradients is not None:
            self.gradients.drop()

    @contextmanager
    def gathered(
        self, *, grads: bool = False, write: bool = False, part: nn.Module | None = None
    ) -> Iterator[nn.Module]:
        """See `ptm_accel.gathered`; of the whole model, or of a part of it."""
        # Pins leave little room to work in.
        self.settle()
        slots = [self.slots.of(param) for param in (self.model if part is None else part).parameters()]
        with ExitStack() as stack:
            for slot in slots:
                if slot is None:
                    continue
                slot.meet()
                stack.callback(self.pool.pin(slot.value, write=write).release)
            if grads:
                assert self.gradients is not None
                self.synchronise()
                if self.optimizer is not None:
                    self.optimizer.in_backward.refuse("gradients were looked at")
                    self.optimizer.apply_scale()
                stack.enter_context(self.gradients.shown(write=write))
            yield self.model
        if write:
            self._weights_touched()

    def _weights_touched(self) -> None:
        if self.optimizer is not None:
            self.optimizer.weights_touched()

    def check_integrity(self) -> None:
        """Checks the conservation laws: free + used = capacity on every tier, and no pin while idle."""
        self.settle()
        self.memory.check_integrity()
        pinned = self.pool.pinned()
        assert not pinned, f"pinned while idle: {pinned}"


def _asking(engine: Engine, ask: Callable[[Engine], _Answer], otherwise: _Answer) -> Callable[[], _Answer]:
    """A question to the engine that does not keep it alive: the memory may hold this, and outlives the model."""
    known = weakref.ref(engine)

    def answer() -> _Answer:
        alive = known()
        return otherwise if alive is None else ask(alive)

    return answer


def _no() -> bool:
    return False


def _close_unasked(memory: Memory) -> None:
    """Closes the memory of a model that was collected, which may be while something is traced on fake tensors."""
    with _disable_current_modes():
        memory.close()


def engine_of(model: nn.Module) -> Engine | None:
    """The engine whose model is `model`, or wraps it, or None if it is not on pages."""
    candidate: nn.Module | None = model
    while candidate is not None:
        known = _engines.get(candidate)
        engine = known() if known is not None else None
        if engine is not None:
            return engine
        candidate = getattr(candidate, "_orig_mod", None)
    return None


def engine_holding(parameters: Iterable[torch.Tensor]) -> Engine | None:
    """The engine that has at least one of `parameters` on its pages, or None."""
    engines = [engine for known in list(_engines.values()) if (engine := known()) is not None]
    for param in parameters:
        for engine in engines:
            if engine.slots.of(param) is not None:
                return engine
    return None
