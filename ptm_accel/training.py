"""Training of a model on pages: its gradients, its optimizer, its replicas, and the steps that a loop asks for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from ptm_accel.config import EXACT
from ptm_accel.distributed.replicas import Replicas
from ptm_accel.distributed.together import on_each
from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.block import Part
from ptm_accel.memory.budget import Tier
from ptm_accel.memory.calls import Call
from ptm_accel.memory.transfer import ALIGN_BYTES, round_up
from ptm_accel.model.away import bare
from ptm_accel.model.compiled import Region, refuse_oversized_region, region_bytes
from ptm_accel.model.floor import Floor, OptimizerMemory
from ptm_accel.model.gradients import Gradients
from ptm_accel.model.norms import clip_coefficient, is_narrow, norm_of, total_norm
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.lock_free_needs import lock_free_bytes, refuse_lock_free, refuse_processes
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.optim.support import ELEMENTWISE, is_elementwise, measured_state, optimizer_memory_of
from ptm_accel.pages import Pages
from ptm_accel.plain_mode import PlainMode, weakly
from ptm_accel.schedule.updates import GradientSums

logger = logging.getLogger(__name__)

_LARGEST_BATCH_BYTES = 256 << 20
"""Most bytes that an optimizer step holds at a time."""

_OF_BUDGET_FOR_NORMS = 16
_MOST_FOR_NORMS = 64 << 20
"""Memory to take norms of gradients in: at most this part of a budget, and at most so many bytes."""


class Training:
    """Gradients, optimizer and replicas of a model on pages.

    Args:
        pages: the model.

    Attributes:
        plain: takes the hooks off while everything fits.
        gradients: of its trainable parameters; None before it is on pages and after it has left them.
        optimizer: the optimizer bound to it, if any.
        more_follow: tells whether more gradients are added to those of the next backward before the step; None where
            nobody knows.
        replicas: keeps it and those of other processes alike, where there are some.
        shards: the ranks that it is sharded over; None where it is not.
        norms: gathers every pipeline stage's norm; takes this stage's.
        updates_in_backward: tells whether `optimizer.step()` will come right after the next backward, on its gradients
            as they are; set by whoever owns the loop (`backward`).
    """

    def __init__(self, pages: Pages) -> None:
        self.gradients: Gradients | None = None
        self.optimizer: PagedOptimizer | None = None
        self.replicas: Replicas | None = None
        self.shards = pages.shards
        self.norms: Callable[[torch.Tensor], list[torch.Tensor]] | None = None
        self.updates_in_backward: Callable[[], bool] = lambda: False
        self.more_follow: Callable[[], bool] | None = None
        self.plain = PlainMode(pages)
        self._pages = pages
        self._pool = pages.pool
        self._slots = pages.slots
        self._needs = pages.needs
        self._masters = pages.config.master_weights is not None
        self._buffers: Replicas | None = None
        self._forbidden = 0
        # The gradients that were synchronised last, and how many had arrived.
        self._seen: tuple[Gradients | None, int] = (None, 0)
        self._told_of_lost: str | None = None
        # The pool, which outlives the model, holds some of these.
        pages.residency.forwards.beginning = weakly(self._meet_newcomers, None)
        pages.residency.accesses.outside = weakly(self._used_outside, None)
        pages.residency.forwards.ended = weakly(self._forward_ended, None)
        pages.residency.accesses.gradient_of = weakly(self._shown_gradient, None)
        pages.residency.accesses.set_gradient_of = weakly(self._set_gradient, None)
        pages.residency.regions.found = weakly(self._meet_region, None)
        pages.state_dicts.given = weakly(self._warn_of_lost_step, None)
        pages.run_ahead.step.more_follow = weakly(self._told_of_more, None)
        pages.run_ahead.sums = weakly(self._sums, GradientSums.NONE)
        pages.run_ahead.in_backward = weakly(self._may_update_in_backward, False)
        pages.run_ahead.on_host_possible = weakly(self._may_update_on_host, False)

    @property
    def has_stepped(self) -> bool:
        """Whether a step of the optimizer has been made, or begun."""
        return self._pages.metrics.steps > 0 or (self.optimizer is not None and self.optimizer.updates.lost is not None)

    # ---- gradients --------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Begins to take gradients of the parameters that are trained."""
        with bare():
            trainable = [s for s in self._slots if s.param.requires_grad]
        self.gradients = Gradients(trainable, self._pages.executor, wide=self._masters)
        self.gradients.on_host.expected = weakly(self._more_follow, False)
        if self.shards is not None:
            self.shards.reduce(self.gradients)
        self.gradients.hold_arrival()
        self.gradients.looking = weakly(self.look_at_gradients, None)
        self.hold_norms()
        self.gradients.take_waiting(self._slots)

    def end(self) -> None:
        """Ends it, and gives the state of the optimizer up."""
        self.plain.end()
        if self.optimizer is not None:
            self.optimizer.close()
            self.optimizer = None
        if self.gradients is not None:
            self.gradients.remove()
            self.gradients = None
        for replicas in (self.replicas, self._buffers):
            if replicas is not None:
                replicas.remove()

    def sums(self) -> list[Part]:
        """Lists the present gradients, as a step would use them."""
        if self.gradients is None:
            return []
        if self.optimizer is not None:
            self.optimizer.gradients.apply_scale()
        return [grad.value for grad in self.gradients.present() if grad.value is not None]

    def take_off_sums(self) -> list[tuple[ParamSlot, torch.Tensor]]:
        """Copies `sums` into ordinary memory, one after the other, and drops them here."""
        self.sums()
        sums = []
        for grad in [] if self.gradients is None else self.gradients.present():
            assert grad.value is not None
            if grad.slot.sharded:
                with grad.used_by() as whole:
                    sums.append((grad.slot, whole.clone()))
            else:
                total = self._pages.executor.copied(grad.value, self._pool.compute.device)
                sums.append((grad.slot, total.to(grad.slot.value.dtype)))
                del total
            grad.drop()
        return sums

    def _shown_gradient(self, slot: ParamSlot) -> torch.Tensor | None:
        return None if self.gradients is None else self.gradients.shown(slot)

    def _set_gradient(self, slot: ParamSlot, gradient: torch.Tensor | None) -> None:
        if self.gradients is not None:
            self.gradients.assign(slot, gradient, self._slots)

    def _sums(self) -> GradientSums:
        return GradientSums.NONE if self.gradients is None else self.gradients.sums()

    def look_at_gradients(self) -> None:
        """Makes all gradients what they are in plain torch, before code outside sees one.

        Raises:
            UnsupportedError: updates that have begun in backward have used some up.
        """
        if torch._C._current_graph_task_id() != -1:
            # In a hook during backward, where nothing is pending.
            return
        if self.optimizer is not None:
            self.optimizer.updates.refuse("a gradient was looked at or set")
        seen = (self.gradients, 0 if self.gradients is None else self.gradients.arrivals)
        if seen != self._seen:
            # Each gradient of a model may be looked at, one after the other.
            self._synchronise_replicas()
            self._seen = seen
        if self.optimizer is not None:
            self.optimizer.gradients.apply_scale()
        self._used_outside()

    def _used_outside(self) -> None:
        """Code outside of backward has the room in which gradients arrive."""
        if self.gradients is not None and torch._C._current_graph_task_id() == -1:
            self.gradients.release_arrival()

    def _forward_ended(self) -> None:
        """A backward may come, whose gradients need room."""
        if self.gradients is not None:
            self.gradients.hold_arrival()

    def meet_trainable(self) -> None:
        """Follows changes of `requires_grad` since the model was put on pages (layers frozen or unfrozen)."""
        assert self.gradients is not None
        self.plain.end()
        with bare():
            trainable = [s for s in self._slots if s.param.requires_grad]
        if self.gradients.covers(trainable):
            return
        if self.gradients.arrived():
            # They count as in torch, those of what was frozen since among them; it is left out once they are used up.
            self._meet_newcomers()
            return
        self.gradients.remove()
        self.begin()
        self._meet_regions()
        if self.optimizer is not None:
            self.optimizer.gradients.follow(self.gradients)

    def _meet_newcomers(self) -> None:
        """Takes over the gradients of parameters that have become trainable in the middle of training (unfreezing)."""
        if self.gradients is not None and self.gradients.admit(self._slots):
            self.hold_norms()
            self._meet_regions()

    def _meet_regions(self) -> None:
        for region in self._pages.residency.regions.running():
            self._meet_region(region)

    def _meet_region(self, region: Region) -> None:
        assert self.gradients is not None
        arriving = max((s.value.nbytes for s in self._slots if s.param.requires_grad), default=0)
        needed = region_bytes(region, self._needs.floor, arriving)
        self._needs.widen(needed)
        others = sum(other.pool.need.least_bytes for other in self._pages.memory.others)
        refuse_oversized_region(region, needed + others, self._pool.budget)
        self.gradients.expect_together(region.grad_bytes)

    def hold_norms(self) -> None:
        """Holds room to take norms in, where there are masters, on a CPU, and it is little of what is to spare."""
        assert self.gradients is not None
        narrow = [s.value for s in self._slots if s.param.requires_grad and is_narrow(s.value.dtype)]
        if not self._masters or self._pool.budget.tier is not Tier.HOST or not narrow:
            return
        capacity, floor = self._pool.share_bytes, self._needs.floor
        if self._needs.all_fits:
            spare = self._pool.budget.capacity_bytes - self._pool.whole_bytes
        else:
            spare = min(capacity // _OF_BUDGET_FOR_NORMS, floor.total_bytes // 4, capacity - 2 * floor.total_bytes)
        largest = max(value.numel for value in narrow) * 4
        self.gradients.norms.hold(min(round_up(largest), _MOST_FOR_NORMS, max(spare, 0) // ALIGN_BYTES * ALIGN_BYTES))

    # ---- the optimizer ----------------------------------------------------------------------------------------

    def bind(self, optimizer: torch.optim.Optimizer) -> PagedOptimizer:
        """Puts an optimizer's state on pages; another one that was bound before loses its state.

        Raises:
            UnsupportedError: the optimizer cannot run on pages.
            BudgetError: it updates whole tensors, and the budget is below what that needs.
        """
        if self.optimizer is not None and optimizer in (self.optimizer, self.optimizer.inner):
            return self.optimizer
        self.plain.end()
        if not is_elementwise(optimizer) and self.shards is not None:
            raise UnsupportedError(
                f"the optimizer {type(optimizer).__name__} updates whole tensors, and with shard: full each rank has a "
                f"range of each. Use one of {', '.join(sorted(kind.__name__ for kind in ELEMENTWISE))}, or set shard "
                "to none."
            )
        max_staleness = self._pages.config.max_staleness
        if max_staleness is not None:
            refuse_processes(several=self.shards is not None or self.replicas is not None)
            refuse_lock_free(optimizer, self._slots, self._pool)
        state_tensors = measured_state(optimizer, masters=self._masters, device=self._pool.compute.device)
        self.meet_trainable()
        before = self._needs.evaluates, self._needs.updates_bytes
        try:
            memory = optimizer_memory_of(optimizer, state_tensors=state_tensors)
            self._needs.evaluates = False
            self._check_needs(self._floor(optimizer, memory))
        except BaseException:
            self._needs.evaluates, self._needs.updates_bytes = before
            raise
        self._pages.set_malloc()
        self._pages.decide_to_plan()
        # What is to spare depends on the optimizer.
        self.hold_norms()
        if self.optimizer is not None:
            self.optimizer.close()
            self.optimizer = None
        assert self.gradients is not None
        self.optimizer = PagedOptimizer(
            optimizer,
            self._slots,
            self.gradients,
            self._pages.executor,
            master_weights=self._masters,
            window_bytes=self._pages.config.page_bytes,
            batch_bytes=weakly(self._batch_bytes, 0),
            run_ahead=self._pages.run_ahead,
            grown=weakly(self._meet_optimizer_memory, None),
            overlap=weakly(self._may_overlap, False),
            synchronise=weakly(self.synchronise, None),
            stepped=weakly(self._pages.metrics.step_ended, None),
            state_tensors=state_tensors,
            max_staleness=max_staleness,
        )
        self.optimizer.ended = weakly(self._step_ended, None)
        self._pages.metrics.staleness = self.optimizer.updates.staleness
        return self.optimizer

    def _floor(self, optimizer: torch.optim.Optimizer, memory: OptimizerMemory) -> Floor:
        """Returns the least budget with an optimizer, whose updates may have memory of their own."""
        if self._pages.config.max_staleness is not None:
            params = (param for group in optimizer.param_groups for param in group["params"] if param.requires_grad)
            trained = [slot for param in params if (slot := self._slots.of(param)) is not None]
            self._needs.updates_bytes = lock_free_bytes(trained, memory, masters=self._masters)
        return self._needs.estimate(memory)

    def _check_needs(self, floor: Floor) -> None:
        """Takes note of the least budget, if all ranks have that."""
        if self.shards is None:
            self._needs.check(floor, floor, floor)
        else:
            on_each(self.shards.ranks, "has been given an optimizer", lambda: self._needs.check(floor, floor, floor))

    def _step_ended(self) -> None:
        one = self.replicas is None and self.shards is None
        if one and self.optimizer is not None and self.gradients is not None:
            self.plain.step_ended(self.optimizer, self.gradients)

    def _meet_optimizer_memory(self, optimizer_memory: OptimizerMemory) -> None:
        """Updates need something else than before.

        Raises:
            BudgetError: the budgets are below what that takes; nothing has been changed.
        """
        assert self.optimizer is not None
        self._check_needs(self._floor(self.optimizer.inner, optimizer_memory))
        self.hold_norms()

    def follow(self) -> None:
        """The model's parameters are others now: an optimizer whose parameters have left gives up its state."""
        if self.optimizer is not None:
            assert self.gradients is not None
            if self.optimizer.states.are_of(self._slots):
                self.optimizer.gradients.follow(self.gradients)
            else:
                self.optimizer.close()
                self.optimizer = None

    def _batch_bytes(self) -> int:
        """How much an optimizer step holds at a time: enough to be fast, little enough that most stays where it is."""
        if self._needs.all_fits:
            return _LARGEST_BATCH_BYTES
        return min(_LARGEST_BATCH_BYTES, (self._pool.share_bytes - self._needs.floor.total_bytes) // 8)

    def _may_update_on_host(self) -> bool:
        """Returns whether updates may be carried out on the CPU beside a device.

        Replicas would not stay alike: each would choose by its own times, and kernels may round otherwise.
        """
        return self.replicas is None and self.optimizer is not None and self.optimizer.on_host.possible()

    def _may_overlap(self) -> bool:
        """Whether an update may run beside a pass: there is something to move, and room for the worst of both."""
        least = self._needs.floor.total_bytes + self._needs.floor.moving_bytes
        wanted = self._pages.run_ahead.enabled and self._pages.config.update == EXACT
        return wanted and not self._needs.all_fits and least <= self._pool.share_bytes

    def _may_update_in_backward(self) -> bool:
        return self._step_follows() and self.optimizer is not None and self.optimizer.expects_backward()

    def _more_follow(self) -> bool:
        return self.replicas is None and self.shards is None and bool(self._told_of_more())

    def _told_of_more(self) -> bool | None:
        return None if self.more_follow is None else self.more_follow()

    def _step_follows(self) -> bool:
        """Returns whether the update comes right after the next backward, and there is room for both at once."""
        one = self.optimizer is not None and self.replicas is None and self.shards is None
        return one and self._may_overlap() and self.updates_in_backward()

    def _may_begin_updates(self) -> bool:
        return not self._forbidden and self._step_follows()

    # ---- a step -----------------------------------------------------------------------------------------------

    @contextmanager
    def no_updates(self) -> Iterator[None]:
        """Keeps updates from beginning in a backward while it lasts."""
        self._forbidden += 1
        try:
            yield
        finally:
            self._forbidden -= 1

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around a backward: updates begin in it where `updates_in_backward` says that they may.

        Where `more_follow`, the CPU adds its gradients to sums that are in host memory below a device.
        """
        if self.plain.active or self.gradients is None:
            yield
            return
        with self._pool.calls.during(Call.BACKWARD, self._pool):
            updates: AbstractContextManager[object] = nullcontext()
            # Of micro-batches that run layer by layer this is of what is above the layers (`backward_by_layer`).
            by_layer = self._pages.run_ahead.step.goes_on
            if self.optimizer is not None and not by_layer and self._may_begin_updates():
                updates = self.optimizer.updates.in_backward()
            on_host = self.gradients.on_host
            on_host.begin()
            try:
                with updates:
                    yield
            finally:
                on_host.end()

    @contextmanager
    def backward_by_layer(self) -> Iterator[None]:
        """Around the backward of all layers for all micro-batches: updates begin with what the last one brings.

        What is above the layers has its gradients already.
        """
        optimizer = self.optimizer
        if self.plain.active or self.gradients is None or optimizer is None or not self._may_begin_updates():
            yield
            return
        updates = optimizer.updates
        with updates.in_backward():
            with self._pool.calls.during(Call.BACKWARD, self._pool):
                for grad in self.gradients.present():
                    updates.take(grad)
            yield

    @torch.no_grad()
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        *,
        error_if_nonfinite: bool = False,
        parameters: Sequence[torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See `Engine.clip_grad_norm_`."""
        # Those of size 0, which have no pages, have a norm as well: how many there are decides how torch adds them up.
        given = list(self._pages.model.parameters() if parameters is None else parameters)
        if self.norms is None and (self.plain.active or not self._has_all_of(given)):
            return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type, error_if_nonfinite=error_if_nonfinite)
        if self.plain.active or not self._has_all_of(given):
            gradients = [param.grad for param in given if param.grad is not None]
            norm = torch.nn.utils.get_total_norm(gradients, norm_type, error_if_nonfinite)
            norm = self._over_stages(norm, norm_type)
            torch.nn.utils.clip_grads_with_norm_(given, max_norm, norm)
            return norm
        with self._pages.executor.own_work(), self._pool.calls.during(Call.ACCESS, self._pool):
            return self._clip(given, max_norm, norm_type, error_if_nonfinite)

    def _clip(
        self, given: Sequence[torch.Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
    ) -> torch.Tensor:
        """Clips all gradients of the model, which are on pages, and others of `given`."""
        assert self.gradients is not None
        self.synchronise()
        if self.optimizer is not None:
            self.optimizer.gradients.apply_scale()
        norms, dtypes, others = list[torch.Tensor](), list[torch.dtype | None](), list[torch.Tensor]()
        slots: list[ParamSlot | None] = []
        for param in given:
            slot = self._slots.of(param)
            if slot is not None:
                found = [grad.norm(float(norm_type)) for grad in self.gradients.among([param])]
                dtype = slot.value.dtype
            elif param.grad is not None:
                others.append(param.grad)
                found = [norm_of(param.grad, float(norm_type))]
                dtype = param.grad.dtype
            else:
                continue
            norms += found
            slots += [slot] * len(found)
            dtypes += [dtype if dtype.is_complex else None] * len(found)
        if self.shards is not None:
            norms = self.shards.norms(norms, slots, float(norm_type), wide=self._masters)
        norm = self._over_stages(total_norm(norms, float(norm_type), dtypes), norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} of {len(norms)} gradients is {norm.item()}, so they cannot be "
                "clipped. Set error_if_nonfinite=False to multiply them by it anyway."
            )
        coefficient = clip_coefficient(norm, float(max_norm))
        here = coefficient.to(self._pool.compute.device)
        if self.optimizer is not None and len(norms) > len(others):
            # Those of the optimizer's parameters are multiplied when they are used.
            self.optimizer.gradients.multiply(here)
        else:
            self.gradients.multiply(here)
        for gradient in others:
            gradient.mul_(coefficient.to(gradient.device))
        return norm

    def _over_stages(self, norm: torch.Tensor, norm_type: float) -> torch.Tensor:
        """Returns the norm over all stages of a pipeline, where this is one of them."""
        return norm if self.norms is None else total_norm(self.norms(norm), float(norm_type)).to(norm)

    def _has_all_of(self, given: Sequence[torch.Tensor]) -> bool:
        """Returns whether all gradients of the model are on pages and of `given`, which names each parameter once."""
        assert self.gradients is not None
        known = {id(param) for param in given}
        return len(known) == len(given) and all(id(grad.slot.param) in known for grad in self.gradients.arrived())

    def replicate(self, group: dist.ProcessGroup | None = None) -> None:
        """From now on this model is one of several, each in a process of `torch.distributed`, that stay alike.

        Args:
            group: those processes; None for all.

        Raises:
            UnsupportedError: the processes have different models; or updates are lock-free.
        """
        if self._pages.config.max_staleness is not None:
            refuse_processes(several=True)
        self.plain.end()
        if self.shards is not None:
            # Values are shared as they come onto pages, and gradients as they arrive.
            if self._buffers is None:
                self._buffers = Replicas(self._pages.executor, self._pages.model, group)
                self._buffers.share_values((), self._pages.model.buffers())
            return
        if self.replicas is None:
            self.replicas = Replicas(self._pages.executor, self._pages.model, group)
            self.replicas.share_values(self._slots, self._pages.model.buffers())

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Around micro-batches whose gradients are only added up, and not made the same in all replicas."""
        with nullcontext() if self.replicas is None else self.replicas.no_sync():
            yield

    def synchronise(self) -> None:
        """Makes gradients that have arrived the mean over all replicas; nobody has to call this before a step."""
        if self.shards is not None and not self.plain.active:
            self.shards.before_step()
        self._synchronise_replicas()

    def _synchronise_replicas(self) -> None:
        if self.plain.active:
            return
        self._meet_newcomers()
        if self.replicas is None or self.gradients is None or self.replicas.have_shared(self.gradients):
            return
        if self.optimizer is not None:
            self.optimizer.gradients.apply_scale()
        self.replicas.share_gradients(self.gradients)

    def zero_grad(self) -> None:
        """Forgets all gradients."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        if self.plain.active and self.gradients is not None:
            self.gradients.forget_used()
            for slot in self._slots:
                slot.param.grad = None
        elif self.gradients is not None:
            self.gradients.drop()

    def _warn_of_lost_step(self) -> None:
        lost = None if self.optimizer is None else self.optimizer.updates.lost
        if lost is not None and lost != self._told_of_lost:
            logger.warning(
                "state_dict(), and saves that use it, give weights between two steps: the update %s (counted since "
                "this optimizer was prepared). Load the last checkpoint, weights and optimizer, and continue from "
                "there.",
                lost,
            )
        self._told_of_lost = lost
