"""Gradients leave at once: each is taken as autograd accumulates it, and the parameter's own `.grad` is empty again.

What is kept is the running sum over micro-batches, on pages (`ptm_accel.model.grad_slot`). `p.grad` shows it
(`ptm_accel.model.away.AwayGradient`).
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Protocol

import torch
from torch.utils.hooks import RemovableHandle

from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.budget import Reservation, Tag
from ptm_accel.model.away import AwayGradient, bare
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.host_gradients import HostGradients
from ptm_accel.model.norms import Norms
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor
from ptm_accel.schedule.updates import GradientSums

logger = logging.getLogger(__name__)

_OF_A_GRADIENT = 2
"""Use count of the storage of a gradient without other users: the gradient and the storage object that is asked."""


class Sharing(Protocol):
    """Gradients of several ranks, which are summed before they are kept."""

    def take(self, grad: GradSlot, gradient: torch.Tensor) -> None:
        """A gradient has arrived in a backward."""
        ...


class Gradients:
    """Gradients of a model, and the hooks that take them.

    Memory for the largest gradient is reserved at all times: autograd allocates a gradient before its hook runs.

    Args:
        slots: the trainable parameters.
        executor: serves accesses.
        wide: norms and sums of gradients are in fp32 (fp32 master weights).

    Attributes:
        norms: takes their norms.
        on_host: has those of micro-batches added on the CPU, below a device.
        arrivals: number of gradients taken.
        arriving: called before a gradient is added to a sum, or is the first of one.
        taken: called with each sum that a gradient was added to.
        looking: called before user code reads or sets a gradient.
        sharing: takes those that arrive, where parameters are sharded over ranks; None where they are not.
    """

    def __init__(self, slots: list[ParamSlot], executor: Executor, wide: bool) -> None:
        self._executor = executor
        self._pool = executor.pool
        self.norms = Norms(executor, wide)
        self.on_host = HostGradients(executor)
        self._by_param = {id(s.param): GradSlot(s, executor, self.norms) for s in slots}
        self._arrival_bytes = max((s.value.nbytes for s in slots), default=0)
        self._arrival: Reservation | None = None
        self._hooks: list[RemovableHandle] = []
        self._known = weakref.ref(self)
        self._hook = partial(self._take, self._known)
        self._watch(slots)
        self._told_of_used = False
        self.used_up: list[GradSlot] = []
        self.arrivals = 0
        self.arriving: Callable[[], object] | None = None
        self.taken: Callable[[GradSlot], None] | None = None
        self.looking: Callable[[], None] = lambda: None
        self.sharing: Sharing | None = None

    def hold_arrival(self) -> None:
        """Reserves memory for the next gradient, so that its arrival cannot exceed the budget."""
        if self._arrival is None and self._arrival_bytes:
            self._arrival = self._pool.hold(self._arrival_bytes, Tag.GRAD, "the next gradient to arrive")

    def expect_together(self, nbytes: int) -> None:
        """Enlarges the reservation: one node (a compiled region) returns several gradients at once."""
        if nbytes > self._arrival_bytes:
            self._arrival_bytes = nbytes
            self.release_arrival()
            self.hold_arrival()

    def of(self, slot: ParamSlot) -> GradSlot:
        """Returns the gradient of a trainable parameter."""
        return self._by_param[id(slot.param)]

    def known(self, slot: ParamSlot) -> GradSlot | None:
        """The gradient of a parameter, also one that was frozen after its backward; None if it was never trainable."""
        return self._by_param.get(id(slot.param))

    def admit(self, slots: Iterable[ParamSlot]) -> bool:
        """Adds parameters that have become trainable, with gradients that have arrived for them.

        Args:
            slots: all parameters of the model, in its order.

        Returns:
            whether there were any.
        """
        every = list(slots)
        with bare():
            new = [s for s in every if id(s.param) not in self._by_param and s.param.requires_grad]
        if not new:
            return False
        self._admit(new, every)
        for slot in new:
            self.take(slot.param)
        return True

    def take_waiting(self, slots: Iterable[ParamSlot]) -> None:
        """Takes gradients that parameters have as they come onto pages, frozen ones among them.

        Args:
            slots: all parameters of the model, in its order.
        """
        every = list(slots)
        with bare():
            waiting = [slot for slot in every if slot.param.grad is not None]
        if frozen := [slot for slot in waiting if self.known(slot) is None]:
            self._admit(frozen, every)
        for slot in waiting:
            self.take(slot.param)

    def _admit(self, new: list[ParamSlot], every: list[ParamSlot]) -> None:
        # A parameter that is frozen again keeps its gradient, which counts in norms. Torch takes hooks for trainable
        # parameters only.
        frozen = [slot.param for slot in new if not slot.param.requires_grad]
        for param in frozen:
            param.requires_grad_(True)
        try:
            self._by_param |= {id(slot.param): GradSlot(slot, self._executor, self.norms) for slot in new}
            self._watch(new)
        finally:
            for param in frozen:
                param.requires_grad_(False)
        # Norms are put together in the order of the model's parameters.
        place = {id(slot.param): number for number, slot in enumerate(every)}
        self._by_param = dict(sorted(self._by_param.items(), key=lambda known: place[known[0]]))
        self.expect_together(max(slot.value.nbytes for slot in new))

    def lift(self) -> list[GradSlot]:
        """Removes and returns the sums, for another `Gradients` to continue with (`take_over`)."""
        lifted = []
        for grad in self._by_param.values():
            if grad.value is not None or grad.used:
                used = grad.used
                lifted.append(grad.hand_over())
                lifted[-1].used = used
        return lifted

    def take_over(self, lifted: list[GradSlot], slots: Iterable[ParamSlot]) -> None:
        """Continues with sums of another `Gradients`, and drops those of parameters that have left the model.

        Args:
            lifted: what `lift` has given.
            slots: all parameters of the model, in its order.
        """
        every = list(slots)
        present = {id(slot.param) for slot in every}
        staying = [grad for grad in lifted if id(grad.slot.param) in present]
        if frozen := [grad.slot for grad in staying if self.known(grad.slot) is None]:
            self._admit(frozen, every)
        for grad in staying:
            self.of(grad.slot).go_on_with(grad)
        for grad in lifted:
            grad.drop()

    def tell_of_used(self, grad: GradSlot) -> None:
        """Warns once that `zero_grad` was not called after a step; torch would reuse the gradients."""
        if not self._told_of_used:
            self._told_of_used = True
            logger.warning(
                "the gradient of %s was used up by the last step, and zero_grad() has not been called since: torch "
                "would use it once more, on pages it is as if zero_grad() had been called. Call optimizer.zero_grad() "
                "after each step.",
                grad.slot.name,
            )

    # ---- uses by user code ----------------------------------------------------------------------------------------

    def shown(self, slot: ParamSlot) -> AwayGradient | None:
        """Returns what `p.grad` of a parameter is.

        Raises:
            UnsupportedError: updates of this backward have used gradients up already.
        """
        grad = self.known(slot)
        if grad is None:
            return None
        # A hook of the user's may run before ours.
        self._take(self._known, slot.param)
        if grad.value is not None or grad.spent:
            self.looking()
        grad.used = False
        return grad.view()

    @torch.no_grad()
    def assign(self, slot: ParamSlot, gradient: torch.Tensor | None, slots: Iterable[ParamSlot]) -> None:
        """Takes what `p.grad` of a parameter was set to.

        Args:
            slot: of the parameter.
            gradient: it; None drops the gradient.
            slots: all parameters of the model, in its order.

        Raises:
            UnsupportedError: as by `shown`; or the gradient is sparse.
            RuntimeError: it has another shape, dtype or device than the parameter, as torch says it.
        """
        grad = self.known(slot)
        if grad is None:
            if gradient is None:
                return
            self._admit([slot], list(slots))
            grad = self.of(slot)
        if gradient is not None and gradient is grad.view():
            return
        if grad.value is not None or grad.spent:
            self.looking()
        if gradient is None:
            grad.forget()
            return
        copied = gradient.clone()
        with bare():
            # Torch refuses what does not suit the parameter.
            slot.param.grad = copied
            slot.param.grad = None
        refuse_sparse(slot.name, copied)
        if self.arriving is not None:
            self.arriving()
        grad.forget()
        grad.add(slot.owned(copied) if slot.sharded else copied)

    def covers(self, slots: list[ParamSlot]) -> bool:
        """Returns whether `slots` are exactly the parameters whose gradients are taken."""
        return self._by_param.keys() == {id(slot.param) for slot in slots}

    def slots(self) -> list[GradSlot]:
        """Lists the slots of all trainable parameters, in the model's order, with a gradient or without."""
        return list(self._by_param.values())

    def present(self) -> list[GradSlot]:
        """Lists the gradients that exist, in the order of the model's parameters."""
        return [g for g in self._by_param.values() if g.value is not None]

    def arrived(self) -> list[GradSlot]:
        """Lists `present` and those that updates have used up during this backward."""
        return [g for g in self._by_param.values() if g.value is not None or g.spent]

    def among(self, parameters: Iterable[torch.Tensor]) -> list[GradSlot]:
        """Returns the gradients of `arrived` that belong to `parameters`, in that order, with repetitions."""
        known = [self._by_param.get(id(param)) for param in parameters]
        return [g for g in known if g is not None and (g.value is not None or g.spent)]

    def sums(self) -> GradientSums:
        """Returns what happens when the next gradients arrive."""
        present = self.present()
        if not present:
            return GradientSums.NONE
        if any(g.widens for g in present):
            return GradientSums.WIDENED
        return GradientSums.ON_HOST if self.on_host.possible else GradientSums.ADDED_TO

    @torch.no_grad()
    def multiply(self, coefficient: torch.Tensor, gradients: Iterable[GradSlot] | None = None) -> None:
        """Multiplies `gradients` (by default all), one at a time."""
        for grad in self.present() if gradients is None else gradients:
            # In the dtype of the update, so that no number depends on when gradients are read.
            grad.widen()
            assert grad.value is not None
            with self._executor.pin(grad.value, write=True) as total:
                begin = time.perf_counter()
                total.mul_(coefficient)
                self._pool.stats.elsewhere_s += time.perf_counter() - begin
            grad.changed()

    def drop(self) -> None:
        """Forgets all gradients (`zero_grad`)."""
        for grad in self._by_param.values():
            grad.forget()

    def remove(self) -> None:
        """Removes the hooks and frees all memory."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.drop()
        self.norms.release()
        self.release_arrival()

    def leave_alone(self) -> None:
        """Leaves gradients in `p.grad` from now on; the caller holds room for all of them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self.release_arrival()
        self.used_up = [grad for grad in self._by_param.values() if grad.used]

    def forget_used(self, *, zeros: bool = False) -> None:
        """Ends what `zero_grad` needs to know of the step before, while gradients are left alone.

        Args:
            zeros: whether those that the step has used up become zeros.
        """
        for grad in self.used_up:
            grad.used = False
            if zeros and grad.slot.param.grad is None:
                grad.slot.param.grad = torch.zeros_like(grad.slot.param)
        self.used_up = []

    def take_again(self, slots: Iterable[ParamSlot]) -> None:
        """Ends `leave_alone`: takes the gradients that there are.

        Args:
            slots: all parameters of the model, in its order.
        """
        # Whether `zero_grad` has been called in between is not known of a module's own.
        self._told_of_used |= bool(self.used_up)
        self.used_up = []
        known, self._by_param = self._by_param, {}
        every = list(slots)
        with bare():
            trained = [slot for slot in every if id(slot.param) in known or slot.param.requires_grad]
        if trained:
            self._admit(trained, every)
        self._by_param |= known
        self.hold_arrival()
        self.take_waiting(every)

    def _watch(self, slots: list[ParamSlot]) -> None:
        for slot in slots:
            with bare():
                self._hooks.append(slot.param.register_post_accumulate_grad_hook(self._hook))

    def _has_room(self, nbytes: int) -> bool:
        """Returns whether there is room beside the reservation for the next gradient."""
        return self._pool.budget.free_bytes >= nbytes or self._pool.admission.available_bytes() >= nbytes

    def release_arrival(self) -> None:
        """Releases the reservation for the next gradient, until `hold_arrival`."""
        if self._arrival is not None:
            self._arrival.release()
            self._arrival = None

    def take(self, param: torch.Tensor) -> None:
        """Moves the gradient that autograd has accumulated, if any, from `param.grad` into its sum on pages.

        Raises:
            UnsupportedError: the gradient is sparse, or an update has used up what should have been the whole sum.
        """
        self._take(self._known, param)

    @staticmethod
    def _take(known: weakref.ref[Gradients], param: torch.Tensor) -> None:
        """See `take`. With a weak reference, since a hook on a parameter is this.

        Python's collector does not see what such a hook holds: it would never find that a model is no longer used.
        """
        self = known()
        if self is None:
            return
        task, calls, stats = torch._C._current_graph_task_id(), self._pool.calls, self._pool.stats
        begin = time.perf_counter() - stats.elsewhere_s
        if task != -1 and task not in calls.tasks:
            calls.begin_backward(self._pool)
        with bare():
            arrived, param.grad = param.grad, None
        if arrived is None:
            return
        grad = self._by_param[id(param)]
        refuse_sparse(grad.slot.name, arrived)
        if grad.spent:
            raise _second(grad)
        if grad.used and grad.value is None:
            self.tell_of_used(grad)
        if self.arriving is not None:
            self.arriving()
        self.arrivals += 1
        gradient = arrived.data
        del arrived
        if self.sharing is not None and task != -1:
            self.sharing.take(grad, gradient)
        else:
            # A gradient whose memory a hook of the user's keeps too is copied.
            held = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata) > _OF_A_GRADIENT
            if (
                grad.value is None
                and grad.slot.group_part.alone
                and not ((held or self._pool.copies_in) and self._has_room(gradient.nbytes))
            ):
                # The reservation for arrivals becomes the charge of the gradient, unless a copy of it has room beside.
                self.release_arrival()
            with torch.no_grad():
                if not (self.on_host.open and self.on_host.take(grad, gradient)):
                    grad.add(grad.slot.owned(gradient) if grad.slot.sharded else gradient, held=held)
            del gradient
            self.hold_arrival()
            if self.taken is not None:
                self.taken(grad)
        spent = time.perf_counter() - stats.elsewhere_s - begin
        stats.own_s += spent
        stats.elsewhere_s += spent


def _second(grad: GradSlot) -> UnsupportedError:
    return UnsupportedError(
        f"a second gradient of {grad.slot.name} has arrived in one backward, after its update: this pass was not like "
        "those before it. Set update='blocking', and resume from the last checkpoint."
    )


def refuse_sparse(name: str, gradient: torch.Tensor) -> None:
    """Refuses a gradient of parameter `name` that cannot be kept.

    Raises:
        UnsupportedError: it is sparse.
    """
    if gradient.layout is not torch.strided:
        raise UnsupportedError(
            f"the gradient of {name} is {gradient.layout}; only dense gradients can be kept on pages. "
            "Build the module with sparse=False."
        )
