"""Gradients leave at once: each is taken as autograd accumulates it, and `p.grad` is empty again.

What is kept is the running sum over micro-batches, on pages (`ptm_accel.model.grad_slot`).
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

import torch
from torch.utils.hooks import RemovableHandle

from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.budget import Reservation, Tag
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.pool import Pool
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.landing import Landings
from ptm_accel.model.looks import Look, is_held, lend_to_hooks, refuse_hooks_of_others, refuse_sparse
from ptm_accel.model.norms import Norms
from ptm_accel.model.slots import ParamSlot

logger = logging.getLogger(__name__)


class Sums(enum.Enum):
    """What is done with the gradients that are there when more of them arrive."""

    NONE = "none"
    """There are none: the next are kept as they come."""
    WIDENED = "widened"
    """They are put into fp32 first, which takes other memory."""
    ADDED_TO = "added to"


class Gradients:
    """All gradients of a model, and the hooks that take them.

    Room for the largest gradient is held at all times, because autograd allocates a gradient before we hear of it.

    Args:
        slots: the trainable parameters.
        pool: where gradients live.
        wide: norms and sums of gradients are in fp32 (fp32 master weights).

    Attributes:
        norms: takes their norms.
        landings: has some of them computed on pages.
        arrivals: how many have been taken.
        arriving: called before a gradient is added to a sum, or is the first of one.
        taken: called with each sum that a gradient was added to.
    """

    def __init__(self, slots: list[ParamSlot], pool: Pool, wide: bool) -> None:
        self._pool = pool
        self.norms = Norms(pool, wide)
        self.landings = Landings(pool, self._make_way, self._end_backward)
        self._by_param = {id(s.param): GradSlot(s, pool, self.norms) for s in slots}
        self._landing_bytes = max((s.value.nbytes for s in slots), default=0)
        self._landing: Reservation | None = None
        self._hooks: list[RemovableHandle] = []
        self._watch(slots)
        self._told_of_used = self._told_of_held = False
        self.arrivals = 0
        self.arriving: Callable[[], object] | None = None
        self.taken: Callable[[GradSlot], None] | None = None

    def hold_landing(self) -> None:
        """Holds room for the next gradient, so that its arrival cannot exceed the budget."""
        # One that is being computed on pages may have the room that was held for it.
        if self._landing is None and self._landing_bytes and not self.landings.under_way:
            self._landing = self._pool.hold(self._landing_bytes, Tag.GRAD, "the next gradient to arrive")

    def expect_together(self, nbytes: int) -> None:
        """Widens the room held for arrivals: several gradients come out of one node (a compiled region) at once."""
        if nbytes > self._landing_bytes:
            self._landing_bytes = nbytes
            if self._landing is not None:
                self._landing.release()
                self._landing = None
            self.hold_landing()

    def of(self, slot: ParamSlot) -> GradSlot:
        """The gradient of a trainable parameter."""
        return self._by_param[id(slot.param)]

    def known(self, slot: ParamSlot) -> GradSlot | None:
        """The gradient of a parameter; None if it has not been trainable.

        One that was frozen after its backward has still a gradient, which is used up or forgotten as in torch.
        """
        return self._by_param.get(id(slot.param))

    def admit(self, slots: Iterable[ParamSlot]) -> bool:
        """Takes the gradients of those too that have become trainable; what has arrived for them is taken over.

        Args:
            slots: all parameters of the model, in its order.

        Returns:
            whether there were any.
        """
        every = list(slots)
        unknown = [slot for slot in every if id(slot.param) not in self._by_param]
        new = [slot for slot in unknown if slot.param.requires_grad or slot.param.grad is not None]
        if not new:
            return False
        self._admit(new, every)
        for slot in new:
            self.take(slot.param)
        return True

    def _admit(self, new: list[ParamSlot], every: list[ParamSlot]) -> None:
        # Of one that has been frozen again since, what has arrived counts in norms as ever. Hooks can be put on none
        # that is frozen, and must be there for when it is trained once more.
        frozen = [slot.param for slot in new if not slot.param.requires_grad]
        for param in frozen:
            param.requires_grad_(True)
        try:
            self._by_param |= {id(slot.param): GradSlot(slot, self._pool, self.norms) for slot in new}
            self._watch(new)
        finally:
            for param in frozen:
                param.requires_grad_(False)
        # Norms are put together in the order of the model's parameters.
        place = {id(slot.param): number for number, slot in enumerate(every)}
        self._by_param = dict(sorted(self._by_param.items(), key=lambda known: place[known[0]]))
        self.expect_together(max(slot.value.nbytes for slot in new))

    def lift(self) -> list[GradSlot]:
        """The sums that there are, for other gradients that go on with them (`take_over`); here there are none then."""
        self.meet_given()
        lifted = []
        for grad in self._by_param.values():
            if grad.value is not None or grad.used:
                used = grad.used
                lifted.append(grad.hand_over())
                lifted[-1].used = used
        return lifted

    def take_over(self, lifted: list[GradSlot], slots: Iterable[ParamSlot]) -> None:
        """Goes on with sums that others had; those of parameters that have left the model are forgotten.

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
        """Says, once, that nobody has called `zero_grad` since a step, where torch would go on with its gradients."""
        if not self._told_of_used:
            self._told_of_used = True
            logger.warning(
                "the gradient of %s was used up by the last step, and zero_grad() has not been called since: torch "
                "would use it once more, on pages it is as if zero_grad() had been called. Call optimizer.zero_grad() "
                "after each step (without an Accelerator, model.zero_grad() is not seen).",
                grad.slot.name,
            )

    def _tell_of_held(self, grad: GradSlot) -> None:
        if not self._told_of_held:
            self._told_of_held = True
            logger.warning(
                "the gradient of %s has arrived in a tensor that is used elsewhere too, as where p.grad was set before "
                "backward: on pages there is a copy of it now. What is written to that tensor before the step changes "
                "nothing, and later gradients are not added to it. Set p.grad after backward, or change gradients "
                "within ptm_accel.gathered(model, grads=True, write=True).",
                grad.slot.name,
            )

    @torch.no_grad()
    def meet_given(self) -> None:
        """Takes over what somebody has put in `p.grad`, which is the gradient now, in the place of what there was.

        Raises:
            UnsupportedError: an update of this backward has used the gradient up already; or what was given is sparse.
        """
        for grad in self._by_param.values():
            given = grad.slot.param.grad
            if given is None or grad.look is not Look.NONE:
                continue
            if grad.spent:
                raise UnsupportedError(
                    f"p.grad of {grad.slot.name} was set after an update had used its gradient up, during backward. "
                    "Set update='blocking', and resume from the last checkpoint."
                )
            refuse_sparse(grad, given)
            if self.arriving is not None:
                # What is pending of clipping is for those that were there when it was asked for.
                self.arriving()
            grad.forget()
            given = given.data
            grad.add(given, held=is_held(given))

    def covers(self, slots: list[ParamSlot]) -> bool:
        """Whether these are exactly the parameters whose gradients are taken."""
        return self._by_param.keys() == {id(slot.param) for slot in slots}

    def slots(self) -> list[GradSlot]:
        """One for each trainable parameter, in the order of the model's parameters, with a gradient or without."""
        return list(self._by_param.values())

    def present(self) -> list[GradSlot]:
        """The gradients that there are, in the order of the model's parameters."""
        return [g for g in self._by_param.values() if g.value is not None]

    def arrived(self) -> list[GradSlot]:
        """As `present`, with those that updates have used up during this backward."""
        return [g for g in self._by_param.values() if g.value is not None or g.spent]

    def among(self, parameters: Iterable[torch.Tensor]) -> list[GradSlot]:
        """Those of `arrived` that are of `parameters`, in their order; of one that is there twice, twice."""
        known = [self._by_param.get(id(param)) for param in parameters]
        return [g for g in known if g is not None and (g.value is not None or g.spent)]

    def sums_of(self, slots: Iterable[ParamSlot]) -> list[PagedTensor]:
        """The sums that there are of the gradients of these."""
        known = [self.known(slot) for slot in slots]
        return [grad.value for grad in known if grad is not None and grad.value is not None]

    @contextmanager
    def shown(self, slots: Iterable[ParamSlot], *, write: bool) -> Iterator[None]:
        """Within it gradients that there are lie in their parameters' `.grad`; at the end `.grad` is empty again.

        Args:
            slots: of which parameters; those that are not trained have none.
            write: take over what it is then.
        """
        known = [self.known(slot) for slot in slots]
        with ExitStack() as shown:
            for grad in [grad for grad in known if grad is not None]:
                pin = None if grad.value is None else self._pool.pin(grad.value, write=write)
                if pin is not None:
                    grad.slot.param.grad = pin.tensor.to(grad.slot.value.dtype)
                if write or pin is not None:
                    grad.look = Look.WRITE if write else Look.READ
                shown.callback(grad.take_back, pin)
            yield

    def sums(self) -> Sums:
        """What the next gradients will meet."""
        present = self.present()
        if not present:
            return Sums.NONE
        return Sums.WIDENED if any(g.widens for g in present) else Sums.ADDED_TO

    @torch.no_grad()
    def multiply(self, coefficient: torch.Tensor, gradients: Iterable[GradSlot] | None = None) -> None:
        """Multiplies `gradients` (by default all), one at a time."""
        for grad in self.present() if gradients is None else gradients:
            # As the update would multiply it, so that no number depends on who has looked at gradients before.
            grad.widen()
            assert grad.value is not None
            with self._pool.pin(grad.value, write=True) as total:
                total.mul_(coefficient)
            grad.changed()

    def drop(self) -> None:
        """Forgets all gradients (`zero_grad`)."""
        self.landings.give_up()
        for grad in self._by_param.values():
            grad.forget()

    def remove(self) -> None:
        """Takes the hooks off and gives all room back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        for grad in self._by_param.values():
            grad.slot.unpacked = None
        self.drop()
        self.norms.release()
        self._let_go_of_landing()

    def _watch(self, slots: list[ParamSlot]) -> None:
        self._hooks += lend_to_hooks(slots)
        for slot in slots:
            # The latter is called when what has arrived has been added to `p.grad`, the former before that.
            grad = self.of(slot)
            slot.unpacked = partial(self.landings.expect, grad)
            self._hooks.append(slot.param.register_hook(self._replacer(grad)))
            self._hooks.append(slot.param.register_post_accumulate_grad_hook(self._taker()))

    def _make_way(self, grad: GradSlot) -> None:
        """One is about to be computed on pages, while its parameter is in use."""
        # To have that leave gives nothing now.
        if not self._has_room(2 * grad.slot.value.slot_bytes):
            self._let_go_of_landing()

    def _end_backward(self) -> None:
        self.landings.give_up()
        self.hold_landing()

    def _has_room(self, nbytes: int) -> bool:
        """Whether there is room beside what is held for the next gradient to arrive."""
        return self._pool.budget.free_bytes >= nbytes or self._pool.room.available_bytes() >= nbytes

    def _let_go_of_landing(self) -> None:
        if self._landing is not None:
            self._landing.release()
            self._landing = None

    def _replacer(self, grad: GradSlot) -> Callable[[torch.Tensor], None]:
        def meet(arriving: torch.Tensor) -> None:
            if grad.value is not None and grad.slot.param.grad is not None and grad.look is Look.NONE:
                # Somebody has put it there in the place of the sum.
                if self.arriving is not None:
                    self.arriving()
                grad.drop()

        return meet

    def _taker(self) -> Callable[[torch.Tensor], None]:
        def take(param: torch.Tensor) -> None:
            hooks = param._post_accumulate_grad_hooks
            if len(hooks) > 1:
                refuse_hooks_of_others(self._by_param[id(param)], last=next(reversed(hooks.values())) is take)
            self.take(param)

        return take

    def take(self, param: torch.Tensor) -> None:
        """Takes `param.grad` and leaves it empty.

        Raises:
            UnsupportedError: the gradient is sparse, or an update has used up what should have been the whole sum.
        """
        gradient, param.grad = param.grad, None
        grad = self._by_param[id(param)]
        if gradient is None:
            return
        if grad.look is Look.WRITE:
            # It was added to what is shown, and is taken with that.
            param.grad = gradient
            self.arrivals += 1
            return
        if grad.look is Look.READ:
            raise UnsupportedError(
                f"a gradient of {grad.slot.name} has arrived within ptm_accel.gathered(model, grads=True), and was "
                "added to the one that is shown. Call backward outside of it, or gather with write=True; and call "
                "zero_grad() before the next one."
            )
        refuse_sparse(grad, gradient)
        if grad.spent:
            raise UnsupportedError(
                f"a second gradient of {grad.slot.name} has arrived in one backward, after its update: this pass was "
                "not like those before it. Set update='blocking', and resume from the last checkpoint."
            )
        if grad.used and grad.value is None:
            self.tell_of_used(grad)
        if self.arriving is not None:
            self.arriving()
        self.arrivals += 1
        # Without what autograd has left in the parameter, which is somebody's if it was there before.
        gradient = gradient.data
        landed = self.landings.claim(grad, gradient)
        held = is_held(gradient) if landed is None else landed.viewed_besides
        if held:
            self._tell_of_held(grad)
        if landed is not None and not held:
            grad.land(landed)
            self.landings.end()
        else:
            if grad.value is None and not ((held or self._pool.copies_in) and self._has_room(gradient.nbytes)):
                # What was held for it becomes the charge of the gradient itself, unless that is a copy and has room.
                self._let_go_of_landing()
            with torch.no_grad():
                grad.add(gradient, held=held)
            if landed is not None:
                self.landings.give_up()
        del gradient
        self.hold_landing()
        if self.taken is not None:
            self.taken(grad)
