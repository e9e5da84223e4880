"""Gradients that a step uses: those of one optimizer's parameters, and the factor to multiply them by first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.gradients import Gradients
from ptm_accel.optim.states import States
from ptm_accel.optim.units import Work
from ptm_accel.optim.updates import Updates
from ptm_accel.runtime.executor import Executor


class StepGradients:
    """Drops, multiplies and changes gradients. A clip coefficient is kept until the update, which is over them anyway.

    Args:
        inner: the user's optimizer.
        states: what it keeps for each parameter.
        gradients: of the model.
        updates: have used some up, where they began during backward.
        executor: serves accesses.
        synchronise: makes gradients the mean over several processes, where there are some.

    Attributes:
        scale: what they are still to be multiplied by, if anything.
        synchronise: see above.
        plain: while the hooks are off (`ptm_accel.plain_mode`), the model's parameters that the optimizer has, whose
            gradients are in `p.grad`.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        states: States,
        gradients: Gradients,
        updates: Updates,
        executor: Executor,
        synchronise: Callable[[], None],
    ) -> None:
        self.scale: torch.Tensor | None = None
        self.synchronise = synchronise
        self.plain: list[nn.Parameter] | None = None
        self._left_out = False
        self._inner = inner
        self._states = states
        self._updates = updates
        self._executor = executor
        self.follow(gradients)

    def follow(self, gradients: Gradients) -> None:
        """Takes gradients from `gradients` from now on: other parameters than before are trainable."""
        self._updates.settle()
        self._gradients = gradients
        self.scale = None
        gradients.taken = self._updates.take
        # What was to be multiplied is what there was; what is added to it now was not meant.
        gradients.arriving = self.apply_scale

    # ---- dropped, multiplied, changed --------------------------------------------------------------------------

    def drop(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of the model's parameters.

        Args:
            set_to_none: otherwise zeros are left in their place, also of those that the last step has used up.

        Raises:
            UnsupportedError: updates have begun during backward, and their step has not come yet.
        """
        if self.plain is not None:
            if self._gradients.used_up:
                self._gradients.forget_used(zeros=not set_to_none)
            for param in self.plain:
                param.grad = None if set_to_none or param.grad is None else param.grad.detach().zero_()
            return
        self._updates.refuse("gradients were dropped")
        self.scale = None
        for grad in self._held():
            grad.forget() if set_to_none else grad.zero()

    def multiply(self, coefficient: torch.Tensor) -> None:
        """Multiplies all gradients of the model by `coefficient`; its own at the latest when they are used."""
        if self._updates.early is not None:
            self._updates.refuse_scale(coefficient)
            return
        self.apply_scale()
        # Multiplying by one changes no bit (NaN stays NaN); the host may only look where that costs no device wait.
        if coefficient.device.type == "cpu" and bool(coefficient == 1.0):
            return
        self._gradients.multiply(coefficient, self._present(own=False))
        self.scale = coefficient

    def apply_scale(self) -> None:
        """Carries out a pending `multiply` now: somebody wants to look at the gradients, or something is added."""
        scale, self.scale = self.scale, None
        if scale is not None:
            self._gradients.multiply(scale, self._present(own=True))

    @torch.no_grad()
    def change(self, change: Callable[[torch.Tensor], object]) -> None:
        """Changes every gradient of the optimizer's parameters in place, one at a time.

        Args:
            change: is given each gradient, and changes it in place.

        Raises:
            UnsupportedError: updates have begun during backward, and their step has not come yet.
        """
        if self.plain is not None:
            params = (param for group in self._inner.param_groups for param in group["params"])
            for gradient in [param.grad for param in params if param.grad is not None]:
                change(gradient)
            return
        self._updates.refuse("gradients were changed")
        self.synchronise()
        self.apply_scale()
        for gradient in self._states.others.gradients():
            change(gradient)
        for grad in self._held():
            if grad.value is not None:
                with self._executor.pin(grad.value, write=True) as total:
                    change(total)
                grad.changed()

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Hides the gradients from steps while it lasts; they stay as they are."""
        self.apply_scale()
        kept = [(param, param.grad) for param in self.plain or ()]
        for param, _ in kept:
            param.grad = None
        self._left_out = True
        try:
            with self._states.others.left_out():
                yield
        finally:
            self._left_out = False
            for param, gradient in kept:
                param.grad = gradient

    def _held(self) -> list[GradSlot]:
        """Returns the gradients of the model's parameters that the optimizer has, in its order."""
        return [grad for slot in self._states.held() if (grad := self._gradients.known(slot)) is not None]

    def _present(self, *, own: bool) -> list[GradSlot]:
        """Lists the present gradients of the optimizer's parameters, or of all others."""
        held = {id(slot) for slot in self._states.held()}
        return [grad for grad in self._gradients.present() if (id(grad.slot) in held) is own]

    # ---- for a step --------------------------------------------------------------------------------------------

    def work(self) -> Work:
        """Lists what a step updates, in the optimizer's order; says once if all gradients are used up."""
        work: Work = []
        if self._left_out:
            return work
        for index, group in enumerate(self._inner.param_groups):
            for slot in map(self._states.slots.of, group["params"]):
                grad = None if slot is None else self._gradients.known(slot)
                if slot is not None and grad is not None and grad.value is not None:
                    grad.used = True
                    work.append((index, self._states.of(slot), grad))
        if not work and self._updates.early is None:
            for grad in [grad for grad in self._gradients.slots() if grad.used][:1]:
                self._gradients.tell_of_used(grad)
        return work
