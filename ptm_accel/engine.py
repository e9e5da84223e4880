"""Puts models on pages and takes them off: an engine is a model on pages, from its beginning to its end."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar

import torch

# `_disable_current_modes` imports it when first called, which may be at the end of the process; importing there makes
# Python forget that it ends by Ctrl-C.
import torch._subclasses.schema_check_mode
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from ptm_accel.config import PTMConfig, ResolvedConfig, check_kind
from ptm_accel.distributed.exchange import tell_of_ranks
from ptm_accel.errors import ConfigError, UnsupportedError
from ptm_accel.memory.block import Block
from ptm_accel.memory.calls import Call
from ptm_accel.memory.device import CudaTier
from ptm_accel.memory.own_threads import do_elsewhere_if_own
from ptm_accel.memory.setup import Memory
from ptm_accel.model.attach import Paged, check_model, small_bytes
from ptm_accel.model.away import bare
from ptm_accel.model.changes import Changes, Outline, changes_of, outline, refuse_changes
from ptm_accel.model.gradients import Gradients
from ptm_accel.model.slots import ParamSlot, same_place
from ptm_accel.opening import open_memory
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.pages import Pages
from ptm_accel.plain_mode import LiveGraphs
from ptm_accel.sizing import hint_about_masters, refuse_oversized_model
from ptm_accel.training import Training

_engines: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Engine]] = weakref.WeakKeyDictionary()
"""Weak on both sides: an engine is kept alive by its model (through the hooks on its modules), and by nothing
here, so that a model that is no longer used takes its engine and all its pages with it."""


class Engine:
    """A model on pages. Made by `Engine.attach`, ended by `detach` or `close`.

    Attributes:
        asked: the options as given.
        config: the options as resolved for this machine.
        memory: the tiers.
        pool: where its tensors are.
        pages: its parameters on pages.
        training: its gradients, its optimizer and its replicas.
        slots, table, residency, run_ahead, state_dicts, metrics, needs: see `Pages`.
    """

    count: ClassVar[int] = 0
    """Number of models that this process has put on pages."""

    def __init__(self, model: nn.Module, asked: PTMConfig, config: ResolvedConfig, memory: Memory) -> None:
        self.asked = asked
        self.config = config
        self.memory = memory
        self.pool = memory.pool
        self.pages = Pages(model, asked, config, memory)
        self.training = Training(self.pages)
        self.slots = self.pages.slots
        self.table = self.pages.table
        self.residency = self.pages.residency
        self.residency.forwards.owner = self
        self.run_ahead = self.pages.run_ahead
        self.state_dicts = self.pages.state_dicts
        self.metrics = self.pages.metrics
        self.needs = self.pages.needs
        self._outline: Outline = ()
        self._finaliser = weakref.finalize(model, _close_unasked, memory, self.training.plain.graphs)

    @property
    def model(self) -> nn.Module:
        """The model, unchanged but for its hooks and, while they are away, the class of its parameters."""
        return self.pages.model

    @property
    def gradients(self) -> Gradients | None:
        """Its gradients."""
        return self.training.gradients

    @property
    def optimizer(self) -> PagedOptimizer | None:
        """The optimizer bound to it, if any."""
        return self.training.optimizer

    # ---- beginning and end -----------------------------------------------------------------------------------

    @classmethod
    def attach(
        cls,
        model: nn.Module,
        config: PTMConfig | None = None,
        *,
        memory: Memory | None = None,
        device: torch.device | None = None,
        evaluates: bool = False,
    ) -> Engine:
        """Puts a model's parameters on pages.

        Args:
            model: any module; parameters on the meta device become blank pages.
            config: the options.
            memory: tiers made by the caller, instead of those of this machine.
            device: where compute happens; by default the current CUDA device, or the CPU where there is none.
            evaluates: the model will not be trained, so other models on the same tiers get a larger share.

        Returns:
            the engine; a model that is already on pages keeps its engine, which follows the model's changes.

        Raises:
            ConfigError: contradictory options, or other options than this model, or another one on the device, was
                given.
            UnsupportedError: a parameter or module that cannot be paged, by name.
            BudgetError: less than the least budget that this model, together with the others, can train under with any
                optimizer.
        """
        check_kind(config)
        existing = engine_of(model) or engine_holding(model.parameters())
        if existing is not None:
            _refuse_other(existing, config, device)
            existing.follow(model)
            if evaluates and existing.optimizer is None:
                existing.needs.evaluates = True
                existing.needs.say()
            return existing
        check_model(model)
        asked = config or PTMConfig()
        engine = cls(model, asked, *open_memory(asked, memory, device))
        engine.needs.evaluates = evaluates
        try:
            engine._install({})
        except BaseException:
            engine.detach(check=False)
            raise
        return engine

    @classmethod
    def take_over(
        cls,
        model: nn.Module,
        config: PTMConfig,
        resolved: ResolvedConfig,
        memory: Memory,
        values: Mapping[nn.Parameter, Paged],
    ) -> Engine:
        """Attaches, as `attach` does, a model that was read or built on pages.

        Args:
            model: the model.
            config: the options.
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
        return engine

    def _install(self, values: Mapping[nn.Parameter, Paged]) -> None:
        self.pages.size_up(values)
        _adapt_others(self)
        # What stays for long among activations leaves holes there.
        self.pool.copies_in = self.pool.card is not None
        self._bring_in(list(self.slots), values)
        if self.pool.card is not None:
            self.pages.watch_activations(self.pool.card)
        hint_about_masters([s for s in self.slots if s.param.requires_grad], self.config)
        if (shards := self.pages.shards) is not None:
            tell_of_ranks(self.slots, shards.sharding, masters=self.config.master_weights is not None)
        Engine.count += 1
        _engines[self.model] = weakref.ref(self)

    def _bring_in(self, slots: list[ParamSlot], values: Mapping[nn.Parameter, Paged]) -> None:
        self.pages.bring_in(slots, values)
        self.training.begin()
        self.residency.regions.refresh(self.model)
        self._outline = outline(self.model)

    def follow(self, model: nn.Module | None = None) -> None:
        """Follows changes of the model: wrapped, given adapters or another head, resized, merged.

        New parameters are put on pages, and those that the model no longer has are taken off. The Trainer calls this
        before it trains; in a loop of your own, call it before the optimizer is made. Until then new parameters are in
        ordinary memory, and everything works. Regions compiled by `torch.compile` are found as well, which is only
        needed after `model.compile()` on the whole model.

        Args:
            model: the module that wraps or replaces it, if it is another module now.

        Raises:
            UnsupportedError: a new parameter cannot be paged, `model` is only a part of the model on pages, or a mode
                of `torch.compile` cannot work on pages.
            BudgetError: less than the least budget that it can train under now, or than a compiled region needs.
        """
        self.training.plain.make_way()
        given = self.model if model is None else model
        model = self.model if getattr(given, "_orig_mod", None) is self.model else given
        if model is self.model and outline(model) == self._outline and self.residency.covers(model):
            self.residency.regions.refresh(given)
            self.training.meet_trainable()
            return
        check_model(model, {slot.param for slot in self.slots})
        sizes = {"small": small_bytes(self.config.page_bytes), "group_bytes": self.pages.group_bytes}
        shards = self.pages.shards
        changes = changes_of(
            model,
            self.slots,
            self.pages.executor,
            self.table,
            **sizes,
            sharding=None if shards is None else shards.sharding,
            backing=None if shards is None else shards.ranks,
        )
        try:
            other = engine_holding(slot.param for slot in changes.new)
            refuse_changes(changes, model, self.model, None if other is None else other.model)
            if self.optimizer is not None and self.optimizer.states.are_of(changes.slots):
                floor = self.needs.estimate(self.optimizer.optimizer_memory, model, changes.slots)
                self.needs.check(floor, floor, floor)
            else:
                self.needs.expect_optimizer(model, changes.slots)
        except BaseException:
            for slot in changes.new:
                slot.forget()
            raise
        _adapt_others(self)
        self._change(model, changes)

    def _change(self, model: nn.Module, changes: Changes) -> None:
        self.settle()
        if self.optimizer is not None:
            self.optimizer.gradients.apply_scale()
        assert self.gradients is not None
        sums, replicas = self.gradients.lift(), self.training.replicas
        self.gradients.remove()
        self.pages.remove_hooks()
        self.run_ahead.forget()
        for slot in changes.gone:
            self.pages.take_off(slot)
        self.slots.become(changes.slots)
        if model is not self.model:
            _engines.pop(self.model, None)
            _engines[model] = weakref.ref(self)
            self._finaliser.detach()
            self._finaliser = weakref.finalize(model, _close_unasked, self.memory, self.training.plain.graphs)
            self.pages.become(model)
            if replicas is not None:
                replicas.follow(model)
        self._bring_in(changes.new, {})
        self.gradients.take_over(sums, self.slots)
        if replicas is not None:
            replicas.share_values(changes.new, ())
        self.training.follow()

    def bind_optimizer(self, optimizer: torch.optim.Optimizer) -> PagedOptimizer:
        """Puts an optimizer's state on pages; another one that was bound before loses its state.

        Raises:
            UnsupportedError: the optimizer cannot run on pages, or holds parameters of another model on pages as well.
            BudgetError: it updates whole tensors, and the budget is too small for them.
        """
        params = [param for group in optimizer.param_groups for param in group["params"]]
        other = engine_holding(param for param in params if self.slots.of(param) is None)
        if other is not None:
            raise UnsupportedError(
                f"the optimizer holds {len(params)} parameters, of {type(self.model).__name__} and of "
                f"{type(other.model).__name__}, which are both on pages. Make one optimizer for each."
            )
        bound = self.training.bind(optimizer)
        _adapt_others(self)
        return bound

    # ---- what a loop asks for ----------------------------------------------------------------------------------

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        self.training.zero_grad()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        parameters: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Clips as `torch.nn.utils.clip_grad_norm_` does over all parameters with gradients; bit-equal to it.

        Args:
            max_norm: the largest norm after clipping.
            norm_type: the p of the p-norm.
            error_if_nonfinite: True makes an infinite or NaN norm an error.
            parameters: the parameters to clip, in the order of the sum; by default all of the model, in its order.

        Returns:
            the norm before clipping, a scalar.

        Raises:
            RuntimeError: the norm is infinite or NaN, and `error_if_nonfinite` was asked for; nothing has been clipped.
        """
        return self.training.clip_grad_norm_(
            max_norm, norm_type, error_if_nonfinite=error_if_nonfinite, parameters=parameters
        )

    def settle(self) -> None:
        """Carries out the rest of the last optimizer step, which otherwise overlaps with the next forward.

        Nobody has to call this: a parameter or a state that is looked at is updated first.

        Raises:
            DiskError: a transfer failed.
        """
        self.pages.settle()

    def saving(self) -> AbstractContextManager[None]:
        """A context in which a save sees one state: other threads wait until its end before they use the model.

        Raises:
            PagedModelError: a forward, a backward or a step of another thread is under way.
        """
        return self.pool.calls.during(Call.SAVE, self.pool)

    def check_integrity(self) -> None:
        """Checks the conservation laws: free + used = capacity on every tier, and no pin while idle but for graphs.

        What is left of the last step of any model on these tiers is carried out first.
        """
        held: Counter[Block] = Counter()
        for engine in _on_tiers_of(self):
            engine.settle()
            engine.training.plain.make_way()
            held.update(engine.training.plain.graphs.blocks())
        self.memory.check_integrity()
        pinned = [(tensor, held[tensor]) for tensor in self.pool.tenants.pinned() if tensor.pins != held[tensor]]
        assert not pinned, f"pinned while idle, beside so many times for graphs: {pinned}"

    def detach(self, *, check: bool = True) -> nn.Module:
        """Takes the model off its pages: an ordinary model in ordinary memory, values and gradients included.

        Args:
            check: True refuses if the model does not fit the free memory. False undoes `attach` after a refusal: each
                parameter is on its old device, and a bound optimizer has its state again.

        Returns:
            the model.

        Raises:
            BudgetError: it does not fit; nothing has been changed then.
        """
        if not check:
            return self._take_back()
        self.training.plain.end(refuses=False)
        self.settle()
        refuse_oversized_model(self.memory, [*(s.value for s in self.slots), *self.training.sums()])
        self._lift_limit()
        self.pages.leave_card()
        sums = self.training.take_off_sums()
        self._leave()
        for slot, total in sums:
            slot.param.grad = total
        self.close()
        return self.model

    def _take_back(self) -> nn.Module:
        origin = self.pages.origin_of
        try:
            self._lift_limit()
            sums = {slot: total.to(origin(slot)) for slot, total in self.training.take_off_sums()}
            with bare():
                sums |= {slot: slot.param.grad for slot in self.slots if slot.param.grad is not None}
            if self.optimizer is not None:
                self.optimizer.states.give_back(origin)
            self._leave(origin)
            for slot, total in sums.items():
                slot.param.grad = total
        finally:
            # Also if a transfer failed, and what was on that disk is lost.
            self.close()
        return self.model

    def _lift_limit(self) -> None:
        """Whether a card has room is asked for itself; the budget need not have it."""
        if isinstance(self.pool.compute, CudaTier):
            self.pool.compute.limit(None)

    def _leave(self, origin: Callable[[ParamSlot], torch.device] | None = None) -> None:
        self.training.plain.close()
        self.abort()
        self.training.end()
        self.pages.remove_hooks()
        self.pages.take_off_all(origin)

    def close(self) -> None:
        """Gives all memory back. The model's parameters have no values afterwards, unless it was detached."""
        self.training.plain.close()
        self.residency.forwards.abort()
        _engines.pop(self.model, None)
        for slot in self.slots:
            slot.lose()
        if self.optimizer is not None:
            self.optimizer.updates.end_early()
        self._finaliser.detach()
        try:
            self.memory.close()
        finally:
            if self.optimizer is not None:
                self.optimizer.on_host.close()
        _adapt_others(self)

    def adapt(self) -> None:
        """Another model has come to the tiers or has left them, or needs something else: plans are made anew."""
        self.training.plain.make_way()
        self.run_ahead.resized()
        self.pages.set_malloc()
        self.pages.decide_to_plan()
        self.training.hold_norms()

    def abort(self) -> None:
        """Ends what is half done after an exception out of a step, so that saving and training on are possible."""
        self.training.plain.make_way()
        self.residency.forwards.abort()
        with bare():
            for slot in self.slots:
                # Autograd was broken off between leaving it there and telling us.
                slot.param.grad = None
        if self.optimizer is not None:
            self.optimizer.updates.abandon()


def _refuse_other(engine: Engine, config: PTMConfig | None, device: torch.device | None) -> None:
    """Refuses to put a model that is on pages on others: with other options, or on another device."""
    if config is not None and config != PTMConfig() and config != engine.asked:
        there, asked = engine.asked.unlike(config)
        raise ConfigError(
            f"this model is already on pages with {there}, and cannot be moved to {asked} while it is. Use the same "
            "ptm_config, or call `engine_of(model).detach()` first."
        )
    here = engine.pool.compute.device
    if device is not None and not same_place(device, here):
        raise ConfigError(
            f"this model is on pages of {here} already, and was to be put on {device}. Where several processes "
            "have a card each, begin with the Accelerator or with TrainingArguments, which choose it, and read or "
            "build the model after that."
        )


def _adapt_others(engine: Engine) -> None:
    """Has the other models on the same tiers make their plans anew."""
    for other in _on_tiers_of(engine):
        if other is not engine:
            other.adapt()


def _on_tiers_of(engine: Engine) -> list[Engine]:
    return [other for other in living_engines() if other.memory.users is engine.memory.users]


def _close_unasked(memory: Memory, graphs: LiveGraphs) -> None:
    """Closes the memory of a model that was collected, which may be while something is traced on fake tensors."""

    def close() -> None:
        # Python loses what is raised while something is collected.
        with _disable_current_modes():
            graphs.close()
            memory.close()

    do_elsewhere_if_own(close)


def engine_of(model: nn.Module) -> Engine | None:
    """Returns the engine of a model on pages, also for its `torch.compile` wrapper; None for a model that is not."""
    candidate: nn.Module | None = model
    while candidate is not None:
        known = _engines.get(candidate)
        engine = known() if known is not None else None
        if engine is not None:
            return engine
        candidate = getattr(candidate, "_orig_mod", None)
    return None


def living_engines() -> list[Engine]:
    """All engines of this process, those of models that nobody uses any more among them until they are collected."""
    return [engine for known in list(_engines.values()) if (engine := known()) is not None]


def engine_holding(parameters: Iterable[torch.Tensor]) -> Engine | None:
    """Returns the engine that has at least one of `parameters` on its pages, or None."""
    engines = living_engines()
    for param in parameters:
        for engine in engines:
            if engine.slots.of(param) is not None:
                return engine
    return None
