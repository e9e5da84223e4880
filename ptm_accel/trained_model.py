"""A model on pages with its optimizer and its replicas: what a training loop asks of it."""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import TypeVar

import torch
from torch import nn

from ptm_accel.config import BLOCKING, PTMConfig, ResolvedConfig
from ptm_accel.distributed.replicas import Replicas
from ptm_accel.memory.setup import Memory
from ptm_accel.model.away import bare
from ptm_accel.model.floor import Appetite
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.gradients import Gradients, Sums
from ptm_accel.model.norms import clip_coefficient, norm_of, total_norm
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.optimizer import PagedOptimizer
from ptm_accel.optim.support import appetite_of, grain_of, measured_state
from ptm_accel.paged_model import PagedModel
from ptm_accel.sizing import refuse_gathering

logger = logging.getLogger(__name__)

_Answer = TypeVar("_Answer")
_News = TypeVar("_News")

_LARGEST_BATCH_BYTES = 256 << 20
"""The most that an optimizer step holds at a time."""


class TrainedModel(PagedModel):
    """A model on pages, and what trains it.

    Attributes:
        optimizer: the optimizer bound to it, if any.
        replicas: keeps it and those of other processes alike, where there are some.
        updates_in_backward: tells whether `optimizer.step()` will come right after the next backward, on its gradients
            as they are; set by whoever owns the loop (`TrainedModel.backward`).
    """

    def __init__(self, model: nn.Module, asked: PTMConfig, config: ResolvedConfig, memory: Memory) -> None:
        super().__init__(model, asked, config, memory)
        self.optimizer: PagedOptimizer | None = None
        self.replicas: Replicas | None = None
        self.updates_in_backward: Callable[[], bool] = _no
        self._forbidden = 0
        self._told_of_lost: str | None = None
        self.residency.beginning = _asking(self, TrainedModel._meet_newcomers, None)
        self.residency.outside = _asking(self, TrainedModel._used_outside, None)
        self.residency.ended = _asking(self, TrainedModel._forward_ended, None)
        self.residency.gradient_of = _gradient_of(self)
        self.residency.set_gradient_of = _set_gradient_of(self)
        self.run_ahead.sums = _asking(self, TrainedModel._sums, Sums.NONE)
        self.run_ahead.in_backward = _asking(self, TrainedModel._may_update_in_backward, False)
        self.run_ahead.on_host_possible = _asking(self, TrainedModel._may_update_on_host, False)

    def _may_update_on_host(self) -> bool:
        """Whether updates may be carried out on the CPU beside a device.

        Replicas would not stay alike: each would choose by its own times, and kernels may round otherwise.
        """
        return self.replicas is None and self.optimizer is not None and self.optimizer.on_host.possible()

    # ---- its optimizer ----------------------------------------------------------------------------------------

    def bind_optimizer(self, optimizer: torch.optim.Optimizer) -> PagedOptimizer:
        """Puts an optimizer's state on pages; another one that was bound before loses its state.

        Raises:
            UnsupportedError: the optimizer cannot run on pages.
            BudgetError: it updates whole tensors, and the budget is below what that needs.
        """
        if self.optimizer is not None and optimizer in (self.optimizer, self.optimizer.inner):
            return self.optimizer
        grain_of(optimizer)
        masters = self.config.master_weights is not None
        state_tensors = measured_state(optimizer, masters=masters, device=self.pool.compute.device)
        self._meet_trainable()
        floor = self._floor(appetite_of(optimizer, state_tensors=state_tensors))
        evaluated, self.evaluates = self.evaluates, False
        try:
            self._needs(floor, floor, floor)
        except BaseException:
            self.evaluates = evaluated
            raise
        self._set_malloc()
        self._decide_to_plan()
        # What is to spare depends on the optimizer.
        self._hold_norms()
        if self.optimizer is not None:
            self.optimizer.close()
            self.optimizer = None
        assert self.gradients is not None
        self.optimizer = PagedOptimizer(
            optimizer,
            self.slots,
            self.gradients,
            self.pool,
            master_weights=masters,
            window_bytes=self.window_bytes,
            batch_bytes=_asking(self, lambda model: model._batch_bytes(), 0),
            run_ahead=self.run_ahead,
            grown=_telling(self, TrainedModel._meet_appetite),
            overlap=_asking(self, lambda model: model._may_overlap(), False),
            synchronise=_asking(self, TrainedModel.synchronise, None),
            stepped=_asking(self, lambda model: model.metrics.step_ended(), None),
            state_tensors=state_tensors,
        )
        return self.optimizer

    def _meet_appetite(self, appetite: Appetite) -> None:
        """Updates need something else than before.

        Raises:
            BudgetError: the budgets are below what that takes; nothing has been changed.
        """
        floor = self._floor(appetite)
        self._needs(floor, floor, floor)
        self._hold_norms()

    def _batch_bytes(self) -> int:
        """How much an optimizer step holds at a time: enough to be fast, little enough that most stays where it is."""
        if self._all_fits():
            return _LARGEST_BATCH_BYTES
        return min(_LARGEST_BATCH_BYTES, (self.pool.share_bytes - self.floor.total_bytes) // 8)

    def _meet_trainable(self) -> None:
        """Follows changes of `requires_grad` since the model was put on pages (layers frozen or unfrozen)."""
        assert self.gradients is not None
        with bare():
            trainable = [s for s in self.slots if s.param.requires_grad]
        if self.gradients.covers(trainable):
            return
        if self.gradients.arrived():
            # They count as in torch, those of what was frozen since among them; it is left out once they are used up.
            self._meet_newcomers()
            return
        self.gradients.remove()
        self.gradients = Gradients(trainable, self.pool, wide=self.config.master_weights is not None)
        self.gradients.hold_arrival()
        self._gradients_made(self.gradients)
        self._hold_norms()
        for region in self.residency.regions.running():
            self._meet_region(region)
        if self.optimizer is not None:
            self.optimizer.follow(self.gradients)

    def _gradients_made(self, gradients: Gradients) -> None:
        """See `PagedModel`."""
        gradients.looking = _asking(self, TrainedModel._gradients_seen, None)

    def _gradients_seen(self) -> None:
        """Before code outside sees a gradient: makes all of them what they are in plain torch then.

        Raises:
            UnsupportedError: updates that have begun in backward have used some up.
        """
        if torch._C._current_graph_task_id() != -1:
            # In a hook during backward, where nothing is pending.
            return
        if self.optimizer is not None:
            self.optimizer.in_backward.refuse("a gradient was looked at or set")
        self.synchronise()
        if self.optimizer is not None:
            self.optimizer.apply_scale()

    def _used_outside(self) -> None:
        """Code outside of backward has the room in which gradients arrive."""
        if self.gradients is not None and torch._C._current_graph_task_id() == -1:
            self.gradients.release_arrival()

    def _forward_ended(self) -> None:
        """A backward may come, whose gradients need room."""
        if self.gradients is not None:
            self.gradients.hold_arrival()

    def _meet_newcomers(self) -> None:
        """Takes over the gradients of parameters that have become trainable in the middle of training (unfreezing)."""
        if self.gradients is not None and self.gradients.admit(self.slots):
            self._hold_norms()
            for region in self.residency.regions.running():
                self._meet_region(region)

    # ---- a step -----------------------------------------------------------------------------------------------

    def _may_overlap(self) -> bool:
        """Whether an update may run beside a pass: there is something to move, and room for the worst of both."""
        least = self.floor.total_bytes + self.floor.moving_bytes
        wanted = self.run_ahead.enabled and self.config.update != BLOCKING
        return wanted and not self._all_fits() and least <= self.pool.share_bytes

    def _may_update_in_backward(self) -> bool:
        optimizer = self.optimizer
        return (
            optimizer is not None
            and self.replicas is None
            and self._may_overlap()
            and self.updates_in_backward()
            and optimizer.expects_backward()
        )

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
            self.optimizer.look_at_groups()
            with self.optimizer.in_backward.permitted():
                yield
        else:
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
        """As `torch.nn.utils.clip_grad_norm_` over all parameters with gradients; bit-equal to it.

        Args:
            max_norm: the most that their norm may be.
            norm_type: the p of the p-norm.
            error_if_nonfinite: a norm that is infinite or NaN is an error.
            parameters: all that have gradients, in the order in which to sum; by default that of the model.

        Returns:
            the norm before clipping, a scalar.

        Raises:
            RuntimeError: the norm is infinite or NaN, and `error_if_nonfinite` was asked for; nothing has been clipped.
        """
        others = [] if parameters is None else self.other_gradients(parameters)
        norm, present = self._grad_norm(float(norm_type), error_if_nonfinite, parameters)
        coefficient = clip_coefficient(norm, float(max_norm))
        if present:
            self.scale_gradients(coefficient.to(self.pool.compute.device), present)
        for gradient in others:
            gradient.mul_(coefficient.to(gradient.device))
        return norm

    def other_gradients(self, parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The gradients of those parameters that are not the model's, in order."""
        return [param.grad for param in parameters if self.slots.of(param) is None and param.grad is not None]

    def _grad_norm(
        self, norm_type: float, error_if_nonfinite: bool, parameters: Sequence[torch.Tensor] | None
    ) -> tuple[torch.Tensor, list[GradSlot]]:
        assert self.gradients is not None
        self.synchronise()
        if self.optimizer is not None:
            self.optimizer.apply_scale()
        present = self.gradients.arrived() if parameters is None else self.gradients.among(parameters)
        if parameters is None:
            norms = [grad.norm(norm_type) for grad in present]
        else:
            norms = []
            for param in parameters:
                norms += [grad.norm(norm_type) for grad in self.gradients.among([param])]
                norms += [norm_of(gradient, norm_type) for gradient in self.other_gradients([param])]
        norm = total_norm(norms, norm_type)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"The total norm of order {norm_type} of {len(present)} gradients is {norm.item()}, so they cannot be "
                "clipped. Set error_if_nonfinite=False to multiply them by it anyway."
            )
        return norm, present

    def holds_gradients_of(self, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all gradients that there are on pages belong to `parameters`."""
        assert self.gradients is not None
        given = {id(param) for param in parameters}
        return all(id(grad.slot.param) in given for grad in self.gradients.arrived())

    def scale_gradients(self, coefficient: torch.Tensor, given: Sequence[GradSlot]) -> None:
        """Multiplies all gradients by `coefficient`, as torch's clipping does.

        Args:
            coefficient: a scalar.
            given: all that there are; one that is there twice is multiplied twice, as in torch.

        Raises:
            UnsupportedError: updates that have begun in backward have used some up.
        """
        assert self.gradients is not None
        for grad, times in Counter(given).items():
            if times > 1 and self.optimizer is not None:
                self.optimizer.in_backward.refuse("gradients were multiplied twice")
            self.gradients.multiply(coefficient, [grad] * (times - 1))
        if self.optimizer is not None:
            self.optimizer.scale_gradients(coefficient)
        else:
            self.gradients.multiply(coefficient)

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
        self._meet_newcomers()
        if self.replicas is None or self.gradients is None or self.replicas.have_shared(self.gradients):
            return
        if self.optimizer is not None:
            self.optimizer.apply_scale()
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
        """See `ptm_accel.gathered`; of the whole model, or of a part of it.

        Raises:
            BudgetError: all of it does not fit the compute tier at once.
        """
        with ExitStack() as stack:
            self._gather(stack, grads, write, part)
            yield self.model

    def _gather(self, stack: ExitStack, grads: bool, write: bool, part: nn.Module | None) -> None:
        # Pins leave little room to work in.
        self.settle()
        if grads:
            self._gradients_seen()
        params = (self.model if part is None else part).parameters()
        slots = [slot for slot in map(self.slots.of, params) if slot is not None]
        refuse_gathering(self.memory, [slot.value for slot in slots])
        saved = self.residency.saved.cover()
        if saved is not None:
            # What is computed with parameters meanwhile may have its backward after it.
            stack.enter_context(saved)
        for slot in slots:
            stack.callback(self.pool.pin(slot.value, write=write).release)
            if not grads:
                slot.show()
                stack.callback(slot.hide)
            if write:
                # What was written before an exception is written, as without pages.
                stack.callback(slot.take_in)

    def _warn_of_lost_step(self) -> None:
        lost = None if self.optimizer is None else self.optimizer.lost
        if lost is not None and lost != self._told_of_lost:
            logger.warning(
                "state_dict() and what saves by it give weights that are between two steps: the update %s (counted "
                "since this optimizer was prepared). Load the last checkpoint, weights and optimizer, and go on from "
                "there.",
                lost,
            )
        self._told_of_lost = lost

    def check_integrity(self) -> None:
        """Checks the conservation laws: free + used = capacity on every tier, and no pin while idle."""
        self.settle()
        self.memory.check_integrity()
        pinned = self.pool.pinned()
        assert not pinned, f"pinned while idle: {pinned}"


def _asking(model: TrainedModel, ask: Callable[[TrainedModel], _Answer], otherwise: _Answer) -> Callable[[], _Answer]:
    """A question to the model that does not keep it alive: the memory may hold this, and outlives the model."""
    known = weakref.ref(model)

    def answer() -> _Answer:
        alive = known()
        return otherwise if alive is None else ask(alive)

    return answer


def _gradient_of(model: TrainedModel) -> Callable[[ParamSlot], torch.Tensor | None]:
    known = weakref.ref(model)

    def gradient(slot: ParamSlot) -> torch.Tensor | None:
        alive = known()
        return None if alive is None or alive.gradients is None else alive.gradients.shown(slot)

    return gradient


def _set_gradient_of(model: TrainedModel) -> Callable[[ParamSlot, torch.Tensor | None], None]:
    known = weakref.ref(model)

    def assign(slot: ParamSlot, gradient: torch.Tensor | None) -> None:
        alive = known()
        if alive is not None and alive.gradients is not None:
            alive.gradients.assign(slot, gradient, alive.slots)

    return assign


def _telling(model: TrainedModel, tell: Callable[[TrainedModel, _News], None]) -> Callable[[_News], None]:
    """As `_asking`: something to tell the model."""
    known = weakref.ref(model)

    def told(news: _News) -> None:
        alive = known()
        if alive is not None:
            tell(alive, news)

    return told


def _no() -> bool:
    return False
