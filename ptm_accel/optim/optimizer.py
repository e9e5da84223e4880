"""The user's optimizer over paged parameters: the same class, groups, hyperparameters and state, a step by sweeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.memory.pool import Pool
from ptm_accel.model.floor import Appetite
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.gradients import Gradients
from ptm_accel.model.run_ahead import RunAhead
from ptm_accel.model.slots import SlotTable
from ptm_accel.optim.arithmetic import bare_step
from ptm_accel.optim.core_threads import CoreThreads
from ptm_accel.optim.hyperparameters import hyperparameters
from ptm_accel.optim.on_host import OnHost
from ptm_accel.optim.overlap import Overlap
from ptm_accel.optim.state_dicts import load_into, state_dict_of
from ptm_accel.optim.states import States
from ptm_accel.optim.support import Grain, appetite_of, grain_of, switches_of
from ptm_accel.optim.sweep import Sweep
from ptm_accel.optim.units import Work, by_block


class PagedOptimizer(torch.optim.Optimizer):
    """Wraps a `torch.optim.Optimizer` whose parameters are on pages.

    It shares the wrapped optimizer's parameter groups and hyperparameters, so schedulers and callbacks see them as
    usual. What it keeps for parameters is on pages: `state_dict()` reads it, `load_state_dict()` writes it, and `state`
    is refused. Parameters that are not the model's are ordinary tensors, and updated too (`ptm_accel.optim.others`).

    Args:
        inner: the user's optimizer, made over the model's own parameters.
        slots: the model's parameters.
        gradients: their gradients.
        pool: where everything lives.
        master_weights: keep an fp32 master of every narrower parameter, and update that.
        window_bytes: see `Sweep`.
        batch_bytes: see `Sweep`.
        run_ahead: is told when a pass has ended and its update begins.
        grown: is told what updates need when that is something else than before; refuses what does not fit.
        state_tensors: full-size tensors of its state, where it was tried; None where they are known.
        synchronise: makes gradients the mean over several processes, where there are some.
        stepped: is told when a step has ended.
        overlap: tells whether there is room for an update to run beside the next forward (`ptm_accel.optim.chase`).

    Attributes:
        ended: called at the end of each step.

    Raises:
        UnsupportedError: the optimizer cannot run on pages.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        slots: SlotTable,
        gradients: Gradients,
        pool: Pool,
        *,
        master_weights: bool,
        window_bytes: int,
        batch_bytes: Callable[[], int],
        run_ahead: RunAhead,
        overlap: Callable[[], bool],
        grown: Callable[[Appetite], None],
        synchronise: Callable[[], None],
        stepped: Callable[[], None],
        state_tensors: int | None = None,
    ) -> None:
        # Not Optimizer.__init__: groups, defaults, state and hooks are the wrapped optimizer's own objects.
        self.__dict__.update(inner.__dict__)
        # A scheduler made over the wrapped optimizer has put a counting step on it, which must not hide ours; and what
        # a fused optimizer says about loss scaling (in its kernel) is not true of us.
        self.__dict__.pop("step", None)
        self.__dict__.pop("_step_supports_amp_scaling", None)
        # A property stands in its place.
        self.__dict__.pop("state", None)
        self._param_groups: list[dict[str, Any]] = self.__dict__.pop("param_groups")
        self._patch_step_function()
        self.inner = inner
        self._appetite_of = partial(appetite_of, inner, state_tensors=state_tensors)
        self.appetite = self._appetite_of()
        self._slots = slots
        self._gradients = gradients
        self._pool = pool
        self._run_ahead = run_ahead
        self._may_overlap = overlap
        self._grown = grown
        self._synchronise = synchronise
        self._stepped = stepped
        self._elementwise = grain_of(inner) is Grain.ELEMENTS
        self._scale: torch.Tensor | None = None
        self._states = States(inner, slots, pool, masters=master_weights)
        self.others = self._states.others
        self._threads = CoreThreads("ptm_accel arithmetic")
        self._sweep = Sweep(inner, pool, self.appetite, window_bytes, batch_bytes, self._threads)
        on_host = run_ahead.updates_on_host
        spent = run_ahead.spent_on_host
        self.on_host = OnHost(inner, pool, self.appetite, window_bytes, on_host, spent, self._threads)
        self._overlap = Overlap(self._sweep, self.on_host, self._states, run_ahead)
        self.in_backward = self._overlap.in_backward
        self._closed = False
        self._leave_plain: Callable[[], object] | None = None
        self._plain: list[nn.Parameter] = []
        self._switches: list[tuple[bool, ...]] = []
        self.ended: Callable[[], object] = lambda: None
        self._take_from(gradients)

    # ---- the step --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient; the gradients are used up.

        Raises:
            UnsupportedError: a closure was given, the state of this optimizer has been given up (`close`), or it was
                called within `ptm_accel.gathered(model, grads=True)`.
            BudgetError: its groups have been given hyperparameters with which updates need more than there is.
            DiskError: a transfer failed; the last complete checkpoint is intact, this step is not.
        """
        if closure is not None:
            raise UnsupportedError("optimizer.step(closure) is not possible on pages; call backward first, then step()")
        if self._closed:
            raise UnsupportedError(
                f"the state of this optimizer ({type(self.inner).__name__}) was given up: another one was prepared for "
                "the same model, or the model was taken off its pages. A model on pages has one optimizer at a time; "
                "where you need several, give one optimizer a parameter group for each."
            )
        if self._leave_plain is not None and switches_of(self.inner) != self._switches:
            self._leave_plain()
        if self._leave_plain is not None:
            self.inner._opt_called = True  # type: ignore[attr-defined]
            bare_step(self.inner)
        else:
            self._run_ahead.end_step()
            self._paged_step()
        self._overlap.steps += 1
        self._stepped()
        try:
            # Nothing of the step is left to be done here, and nothing is lost by what fails.
            if self._pool.room.tide is not None:
                self._pool.room.tide.end_step()
                if self._leave_plain is not None:
                    self.ended()
                self._pool.room.shrink()
        finally:
            if self._leave_plain is None:
                self.in_backward.end()
        self.ended()

    def _paged_step(self) -> None:
        if self.in_backward.chase is None:
            self.settle()
            self.expect(self.param_groups)
        # What is updated here and what is left to be chased are one step: half of it would be no state of the model.
        try:
            self._step()
        except BaseException:
            self.in_backward.abandon()
            raise

    def _work(self) -> Work:
        work: Work = []
        for index, group in enumerate(self.param_groups):
            for slot in map(self._slots.of, group["params"]):
                grad = None if slot is None else self._gradients.known(slot)
                if slot is not None and grad is not None and grad.value is not None:
                    work.append((index, self._states.of(slot), grad))
        # Only of element-wise ones is it known that their order does not matter.
        return by_block(work) if self._elementwise else work

    def _step(self) -> None:
        if self.in_backward.chase is not None:
            self.in_backward.chase.refuse_lost()
        self._synchronise()
        work, begun = self._work(), self.in_backward.chase is not None
        if not work and not begun:
            for grad in [grad for grad in self._gradients.slots() if grad.used][:1]:
                self._gradients.tell_of_used(grad)
        for _, _, grad in work:
            grad.used = True
        scale, self._scale = self._scale, None
        others = hyperparameters(self.param_groups) if self.others.gradients() else None
        # A scheduler made over the wrapped optimizer looks for this, to warn of steps in the wrong order.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        # Only of those that are known to be element-wise is it known that their order does not matter.
        order = self._run_ahead.reading_order() if begun or (self._elementwise and self._may_overlap()) else None
        later: Work = []
        if order is not None:
            # What stays in the compute tier is read without anybody being asked, and has nothing to wait for. Each is
            # asked once: who views a part of it may let go at any time.
            waits = [self._overlap.can_wait(state) for _, state, _ in work]
            later = list(compress(work, waits))
            work = [entry for entry, wait in zip(work, waits, strict=True) if not wait]
        begin = time.perf_counter() - self._pool.stats.stall_s
        try:
            self._overlap.run(work, scale, later)
        except BaseException:
            # What is left of the gradients, if anything, is for another try.
            self._scale = scale
            raise
        self._run_ahead.exclude(time.perf_counter() - self._pool.stats.stall_s - begin)
        if begun:
            assert order is not None
            self._overlap.close(later, order)
        elif order is not None and later:
            self._overlap.begin(later, order, scale)
        if others is not None:
            self.others.step(others)

    # ---- the step, before it is asked for ----------------------------------------------------------------------

    def expects_backward(self) -> bool:
        """Whether updates can begin during the next backward, if its loop lets them; what they use is made known."""
        # What somebody does right before a step would come too late.
        if not self._elementwise or self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
            return False
        # What has to be made room for is met, or refused, by the step.
        if self._appetite_of() != self.appetite:
            return False
        return self._overlap.expect(self.param_groups)

    def look_at_groups(self) -> None:
        """Before a backward in which updates may begin: takes note of who is in which group."""
        self._overlap.look_at_groups(self.param_groups)

    # ---- while the hooks are off (`ptm_accel.plain_mode`) ----------------------------------------------------------

    def can_be_plain(self) -> bool:
        """Whether its step can be the wrapped optimizer's own: nothing is pending, and state is changed in place."""
        idle = self._scale is None and self._overlap.chase is None and not self._closed
        return idle and self._elementwise and not self._states.masters

    def kept(self) -> list[PagedTensor]:
        """What it keeps full-size for parameters."""
        return list(dict.fromkeys(part.block for state in self._states for part in state.paged.values()))

    def unmade_bytes(self) -> int:
        """What it will keep for parameters that have had no gradient yet."""
        fresh = [state.wide.slot_bytes for state in self._states if state.fresh and state.slot.param.requires_grad]
        return sum(fresh) * self.appetite.state_tensors

    def begin_plain(self, leave: Callable[[], object]) -> None:
        """Gives the wrapped optimizer its state, whose pages are pinned: a step is its own from now on.

        Args:
            leave: ends it, by `end_plain`.
        """
        for state in self._states:
            kept = {key: self._pool.fault(tensor, write=True) for key, tensor in state.paged.items()}
            if state.small or kept:
                self.inner.state[state.slot.param] = {**state.small, **kept}
        self._plain = [slot.param for slot in self._states.held()]
        self._switches = switches_of(self.inner)
        self._leave_plain = leave

    def end_plain(self) -> None:
        """Takes the state back."""
        self._leave_plain, self._plain = None, []
        for state in self._states:
            for key, value in self.inner.state.pop(state.slot.param, {}).items():
                page = state.paged.get(key)
                if page is None or value.data_ptr() != self._pool.fault(page, write=True).data_ptr():
                    self._states.put(state, key, value)

    def settle(self) -> None:
        """Carries out what is left of the last step.

        Raises:
            DiskError: a transfer failed; the last complete checkpoint is intact, this step is not.
        """
        if self._leave_plain is not None:
            self._leave_plain()
        self._overlap.settle()

    def refuse_lost_step(self) -> None:
        """Before a save: carries out what is owed, and says that an update has failed since the state was loaded last.

        Raises:
            LostStepError: so it is.
            DiskError: as by `settle`.
        """
        self._overlap.refuse_lost()

    @property
    def lost(self) -> str | None:
        """What of an update that has failed since the state was loaded last, or None."""
        return self._overlap.lost

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's own list. A step that is owed goes by what the groups were when it was asked for."""
        return self._param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = self._param_groups = groups

    @property
    def state(self) -> Any:
        """Not to be had: what it keeps for parameters is on pages.

        Raises:
            UnsupportedError: always; names what reads and writes it.
        """
        raise UnsupportedError(
            f"optimizer.state of {type(self.inner).__name__} is on pages and cannot be read or written in place. Read "
            "optimizer.state_dict()['state'], whose keys number the parameters of all groups, and write with "
            "optimizer.load_state_dict()."
        )

    @state.setter
    def state(self, value: Any) -> None:
        self.state  # noqa: B018

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of its parameters; parameters that it does not hold keep theirs, as in torch.

        Args:
            set_to_none: otherwise zeros are left in their place, also of those that the last step has used up.

        Raises:
            UnsupportedError: updates have begun during backward, and their step has not come yet; or somebody looks at
                the gradients.
        """
        if self._leave_plain is not None:
            if self._gradients.used_up:
                self._gradients.forget_used(zeros=not set_to_none)
            self.inner.zero_grad(set_to_none)
            return
        self.drop_gradients(set_to_none)
        self.others.zero_grad(set_to_none)

    def drop_gradients(self, set_to_none: bool = True) -> None:
        """As `zero_grad`, of the model's parameters alone."""
        if self._leave_plain is not None:
            if self._gradients.used_up:
                self._gradients.forget_used(zeros=not set_to_none)
            for param in self._plain:
                param.grad = None if set_to_none or param.grad is None else param.grad.detach().zero_()
            return
        self.in_backward.refuse("gradients were dropped")
        gradients = [grad for slot in self._states.held() if (grad := self._gradients.known(slot)) is not None]
        self._scale = None
        for grad in gradients:
            grad.forget() if set_to_none else grad.zero()

    def scale_gradients(self, coefficient: torch.Tensor) -> None:
        """Multiplies every gradient by `coefficient`; those of its own parameters at the latest when they are used."""
        if self._leave_plain is not None:
            self._leave_plain()
        if self.in_backward.chase is not None:
            self.in_backward.refuse_scale(coefficient)
            return
        if self._scale is not None:
            self.apply_scale()
        # Multiplying by one changes no bit (NaN stays NaN); the host may only look where that costs no device wait.
        if coefficient.device.type == "cpu" and bool(coefficient == 1.0):
            return
        self._gradients.multiply(coefficient, self._present(own=False))
        self._scale = coefficient

    def apply_scale(self) -> None:
        """Carries out a pending `scale_gradients` now, because somebody wants to look at the gradients."""
        scale, self._scale = self._scale, None
        if scale is not None:
            self._gradients.multiply(scale, self._present(own=True))

    def _present(self, *, own: bool) -> list[GradSlot]:
        """The gradients that there are of the parameters that it holds, or of all others."""
        held = {id(slot) for slot in self._states.held()}
        return [grad for grad in self._gradients.present() if (id(grad.slot) in held) is own]

    @torch.no_grad()
    def change_gradients(self, change: Callable[[torch.Tensor], object]) -> None:
        """Changes every gradient of this optimizer's parameters in place, one at a time.

        Args:
            change: is given each gradient, and changes it in place.

        Raises:
            UnsupportedError: updates have begun during backward, and their step has not come yet.
        """
        if self._leave_plain is not None:
            for gradient in [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]:
                change(gradient)
            return
        self.in_backward.refuse("gradients were changed")
        self._synchronise()
        self.apply_scale()
        for gradient in self.others.gradients():
            change(gradient)
        for slot in self._states.held():
            grad = self._gradients.known(slot)
            if grad is not None and grad.value is not None:
                with self._pool.pin(grad.value, write=True) as total:
                    change(total)
                grad.changed()

    def follow(self, gradients: Gradients) -> None:
        """Takes its gradients from `gradients` from now on: other parameters than before are trainable."""
        self.settle()
        self._gradients = gradients
        self._scale = None
        self._take_from(gradients)

    def _take_from(self, gradients: Gradients) -> None:
        gradients.taken = self.in_backward.take
        # What was to be multiplied is what there was; what is added to it now was not meant.
        gradients.arriving = self.apply_scale

    # ---- parameters and their state --------------------------------------------------------------------------

    @property
    def states(self) -> States:
        """What it keeps for each parameter, as the last step leaves it."""
        self.settle()
        return self._states

    def weights_changed(self) -> None:
        """The parameters were written from outside: masters are taken from them anew."""
        for state in self.states:
            state.mastered = 0

    # ---- torch's own state dictionaries ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As `torch.optim.Optimizer.state_dict`: positional, with the real values.

        What is away is mapped from its home, so this costs no memory beyond the budgets. Valid until the next step.

        Raises:
            LostStepError: an update has failed since the state was loaded last.
        """
        self.refuse_lost_step()
        for before in list(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        made = state_dict_of(self.states, self.param_groups)
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            changed = after(self, made)
            made = made if changed is None else changed
        return made

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.load_state_dict`, one tensor at a time onto pages.

        Raises:
            CheckpointError: other parameter groups than this optimizer's.
            BudgetError: with what they say updates need more than there is; nothing has been changed.
        """
        given = dict(state_dict)
        for before in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = before(self, given)
            given = given if changed is None else changed
        self.restore(given)
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    @torch.no_grad()
    def restore(self, state_dict: dict[str, Any], same: Container[str] = ()) -> None:
        """As `load_state_dict`, without hooks.

        Args:
            state_dict: what is loaded.
            same: names of parameters whose state keeps the dtypes that it has there.
        """
        load_into(self.states, self.inner, state_dict, self.expect, same)
        # What was lost before is no more.
        self._overlap.restored()

    def expect(self, groups: list[dict[str, Any]]) -> None:
        """Makes ready for updates by the hyperparameters of `groups`, which may ask for other state, or more memory.

        Args:
            groups: each lacks nothing but what stays as it is.

        Raises:
            BudgetError: with them updates need more than there is; nothing has been changed.
        """
        now = [{**here, **there} for here, there in zip(self.param_groups, groups, strict=True)]
        appetite = self._appetite_of(now)
        if appetite != self.appetite:
            self._grown(appetite)
            self.appetite = self._sweep.appetite = self.on_host.appetite = appetite

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As `torch.optim.Optimizer.add_param_group`."""
        # An update that is under way has the hyperparameters of the groups that there were.
        self.settle()
        # What has been multiplied already is not to be once more.
        self.apply_scale()
        self.inner.add_param_group(param_group)

    def close(self) -> None:
        """Ends the life of all state on pages; what is left of a step is not done, nor any other step."""
        self._closed = True
        self._overlap.give_up()
        self.on_host.close()
        self._threads.close()
        self._states.close()

    def __repr__(self) -> str:
        return f"PagedOptimizer({self.inner!r})"
