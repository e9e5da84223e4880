"""The user's optimizer over paged parameters: the same class, groups, hyperparameters and state."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import _global_optimizer_pre_hooks

from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.calls import Call
from ptm_accel.model.floor import OptimizerMemory
from ptm_accel.model.gradients import Gradients
from ptm_accel.model.slot_table import SlotTable
from ptm_accel.optim.arithmetic import bare_step
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.optim.core_threads import CoreThreads
from ptm_accel.optim.hyperparameters import of_step
from ptm_accel.optim.lock_free import LockFreeUpdates
from ptm_accel.optim.on_host import OnHost
from ptm_accel.optim.state_dicts import load_into, state_dict_of
from ptm_accel.optim.states import States
from ptm_accel.optim.step_gradients import StepGradients
from ptm_accel.optim.support import is_elementwise, optimizer_memory_of, switches_of
from ptm_accel.optim.units import by_block
from ptm_accel.optim.updates import Updates
from ptm_accel.runtime.executor import Executor
from ptm_accel.runtime.run_ahead import RunAhead


class PagedOptimizer(torch.optim.Optimizer):
    """Wraps a `torch.optim.Optimizer` whose parameters are on pages.

    It shares the wrapped optimizer's parameter groups and hyperparameters, so schedulers and callbacks see them as
    usual. What it keeps for parameters is on pages: `state_dict()` reads it, `load_state_dict()` writes it, and `state`
    is refused. Parameters that are not the model's are ordinary tensors, and updated too (`ptm_accel.optim.others`).

    Args:
        inner: the user's optimizer, made over the model's own parameters.
        slots: the model's parameters.
        gradients: their gradients.
        executor: serves accesses.
        master_weights: keep an fp32 master of every narrower parameter, and update that.
        window_bytes: see `ComputeUpdates`.
        batch_bytes: see `ComputeUpdates`.
        run_ahead: is told when a pass has ended and its update begins.
        grown: is told what updates need when that is something else than before; refuses what does not fit.
        state_tensors: full-size tensors of its state, where it was tried; None where they are known.
        max_staleness: the most steps that a parameter lacks where updates are lock-free; None where they are not.
        synchronise: makes gradients the mean over several processes, where there are some.
        stepped: is told when a step has ended.
        overlap: tells whether there is room for an update to run beside the next forward.

    Attributes:
        inner: see above.
        optimizer_memory: what an update needs.
        gradients: of its parameters.
        others: its parameters that the model does not have.
        on_host: what updates on the CPU beside a device have in common.
        updates: when updates run, and what becomes of them.
        ended: called at the end of each step.

    Raises:
        UnsupportedError: the optimizer cannot run on pages.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        slots: SlotTable,
        gradients: Gradients,
        executor: Executor,
        *,
        master_weights: bool,
        window_bytes: int,
        batch_bytes: Callable[[], int],
        run_ahead: RunAhead,
        overlap: Callable[[], bool],
        grown: Callable[[OptimizerMemory], None],
        synchronise: Callable[[], None],
        stepped: Callable[[], None],
        state_tensors: int | None = None,
        max_staleness: int | None = None,
    ) -> None:
        # Not Optimizer.__init__: groups, defaults, state and hooks are the wrapped optimizer's own objects.
        self.__dict__.update(inner.__dict__)
        # A scheduler made over the wrapped optimizer has put a counting step on it, which must not hide ours; and what
        # a fused optimizer says about loss scaling (in its kernel) is not true of us.
        self.__dict__.pop("step", None)
        self.__dict__.pop("_step_supports_amp_scaling", None)
        # A property stands in its place.
        self.__dict__.pop("state", None)
        self.__dict__.pop("param_groups")
        self._patch_step_function()
        self.inner = inner
        self._optimizer_memory_of = partial(optimizer_memory_of, inner, state_tensors=state_tensors)
        self.optimizer_memory = self._optimizer_memory_of()
        self._pool = pool = executor.pool
        self._run_ahead = run_ahead
        self._may_overlap = overlap
        self._grown = grown
        self._stepped = stepped
        self._elementwise = is_elementwise(inner)
        self._states = States(inner, slots, executor, masters=master_weights)
        self.others = self._states.others
        self._threads = CoreThreads("ptm_accel arithmetic")
        self._compute = ComputeUpdates(inner, pool, self.optimizer_memory, window_bytes, batch_bytes, self._threads)
        self.on_host = OnHost(self._compute, run_ahead.updates_on_host, run_ahead.spent_on_host)
        parts, most = (self._compute, self.on_host, self._states, run_ahead), max_staleness
        self.updates = Updates(*parts) if most is None else LockFreeUpdates(*parts, max_staleness=most)
        self.gradients = StepGradients(inner, self._states, gradients, self.updates, executor, synchronise)
        self._closed = False
        self._leave_plain: Callable[[], object] | None = None
        self._switches: list[tuple[bool, ...]] = []
        self.ended: Callable[[], object] = lambda: None

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
            self.updates.steps += 1
            self._stepped()
            if self._pool.admission.activation_reserve is not None:
                self._pool.admission.activation_reserve.end_step()
                self.ended()
                self._pool.admission.shrink()
            self.ended()
        else:
            with self._states.executor.own_work(), self._pool.calls.during(Call.STEP, self._pool):
                self._step_on_pages()

    def _step_on_pages(self) -> None:
        with self._states.executor.own_work():
            # It may plan anew, which is counted before the step has ended.
            self._run_ahead.end_step()
        # What is updated here and what is left to be done are one step: half of it would be no state of the model.
        try:
            self._step()
        except BaseException:
            self.updates.abandon()
            raise
        self.updates.steps += 1
        self._stepped()
        try:
            # Nothing of the step is left to be done here, and nothing is lost by what fails.
            if self._pool.admission.activation_reserve is not None:
                self._pool.admission.activation_reserve.end_step()
                self._pool.admission.shrink()
        finally:
            self.updates.end_early()
        self.ended()

    def _step(self) -> None:
        if self.updates.early is None:
            self.updates.begin_step()
            self.expect(self.param_groups)
        self.gradients.synchronise()
        work = self.gradients.work()
        hyper = of_step(self.inner, work, [other.param for other in self.others])
        # A scheduler made over the wrapped optimizer looks for this, to warn of steps in the wrong order.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        # Only of those that are known to be element-wise is it known that their order does not matter.
        overlaps = self._elementwise and self._may_overlap()
        work = by_block(work) if self._elementwise else work
        scale, self.gradients.scale = self.gradients.scale, None
        try:
            self.updates.step(work, scale, hyper, overlaps=overlaps)
        except BaseException:
            # What is left of the gradients, if anything, is for another try.
            self.gradients.scale = scale
            raise
        begin = time.perf_counter()
        self.others.step(hyper)
        self._pool.stats.elsewhere_s += time.perf_counter() - begin

    # ---- the step, before it is asked for ----------------------------------------------------------------------

    def expects_backward(self) -> bool:
        """Whether updates can begin during the next backward, if its loop lets them; what they use is made known."""
        # What somebody does right before a step would come too late.
        if not self._elementwise or self._optimizer_step_pre_hooks or _global_optimizer_pre_hooks:
            return False
        # What has to be made room for is met, or refused, by the step.
        if self._optimizer_memory_of() != self.optimizer_memory:
            return False
        return self.updates.expect()

    # ---- while the hooks are off (`ptm_accel.plain_mode`) ----------------------------------------------------------

    def can_be_plain(self) -> bool:
        """Whether its step can be the wrapped optimizer's own: nothing is pending, and state is changed in place."""
        idle = self.gradients.scale is None and self.updates.queue is None and not self._closed
        return idle and self._elementwise and self.updates.may_be_plain and not self._states.masters

    def begin_plain(self, leave: Callable[[], object]) -> None:
        """Gives the wrapped optimizer its state, whose pages are pinned: a step is its own from now on.

        Args:
            leave: ends it, by `end_plain`.
        """
        self._states.lend()
        self.gradients.plain = [slot.param for slot in self._states.held()]
        self._switches = switches_of(self.inner)
        self._leave_plain = leave

    def end_plain(self) -> None:
        """Takes the state back."""
        self._leave_plain = self.gradients.plain = None
        self._states.take_back()

    def settle(self) -> None:
        """Carries out what is left of the last step.

        Raises:
            DiskError: a transfer failed; the last complete checkpoint is intact, this step is not.
        """
        if self._leave_plain is not None:
            self._leave_plain()
        self.updates.settle()

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The wrapped optimizer's own list. A step that is pending goes by what the groups were when it was asked
        for.
        """
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """Refuses access: the state of parameters is on pages.

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

    def _optimizer_step_code(self) -> None:
        """Keeps torch's profiler away, which reads `state` where it meets the method of this name that is torch's."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of its parameters; parameters that it does not hold keep theirs, as in torch.

        Args:
            set_to_none: otherwise zeros are left in their place, also of those that the last step has used up.

        Raises:
            UnsupportedError: updates have begun during backward, and their step has not come yet; or somebody looks at
                the gradients.
        """
        with self._states.executor.own_work(), self._pool.calls.during(Call.ACCESS, self._pool):
            self.gradients.drop(set_to_none)
        (self.others if self._leave_plain is None else self.inner).zero_grad(set_to_none)

    # ---- parameters and their state --------------------------------------------------------------------------

    @property
    def states(self) -> States:
        """State of each parameter, as the last step leaves it."""
        self.settle()
        return self._states

    # ---- torch's own state dictionaries ------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns what `torch.optim.Optimizer.state_dict` does: positional, with the real values.

        What is away is mapped from its backing store, so this costs no memory beyond the budgets. Valid until the next
        step.

        Raises:
            LostStepError: an update has failed since the state was loaded last.
            UnsupportedError: the model is sharded over ranks.
        """
        self.updates.refuse_lost()
        self._refuse_ranges()
        for before in list(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        with self._pool.calls.during(Call.SAVE, self._pool):
            made = state_dict_of(self.states, self.param_groups)
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            changed = after(self, made)
            made = made if changed is None else changed
        return made

    def _refuse_ranges(self) -> None:
        """Refuses to give a rank's own ranges as if they were whole tensors."""
        if any(slot.sharded for slot in self._states.held()):
            raise UnsupportedError(
                "optimizer.state_dict(): each rank has a range of the state of each parameter (shard: full), and none "
                "has room for all of it. Save with the Trainer's checkpoints or with accelerator.save_state(); a plain "
                "state can be read with optimizer.load_state_dict()."
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads as `torch.optim.Optimizer.load_state_dict` does, one tensor at a time onto pages.

        Where the model is sharded, each rank is given whole tensors, and takes its ranges of them.

        Raises:
            CheckpointError: other parameter groups than this optimizer's, or a master of another shape.
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
        """Loads as `load_state_dict` does, without hooks.

        Args:
            state_dict: what is loaded.
            same: names of parameters whose state keeps the dtypes that it has there.
        """
        with self._pool.calls.during(Call.SAVE, self._pool):
            load_into(self.states, self.inner, state_dict, self.expect, same)
            # What was lost before is no more.
            self.updates.lost = None

    def expect(self, groups: list[dict[str, Any]]) -> None:
        """Makes ready for updates by the hyperparameters of `groups`, which may ask for other state, or more memory.

        Args:
            groups: each lacks nothing but what stays as it is.

        Raises:
            BudgetError: with them updates need more than there is; nothing has been changed.
        """
        now = [{**here, **there} for here, there in zip(self.param_groups, groups, strict=True)]
        optimizer_memory = self._optimizer_memory_of(now)
        if optimizer_memory != self.optimizer_memory:
            self._grown(optimizer_memory)
            self.optimizer_memory = self._compute.optimizer_memory = optimizer_memory

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group as `torch.optim.Optimizer.add_param_group` does."""
        # An update that is under way has the hyperparameters of the groups that there were.
        self.settle()
        # What has been multiplied already is not to be once more.
        self.gradients.apply_scale()
        self.inner.add_param_group(param_group)

    def close(self) -> None:
        """Ends the life of all state on pages; what is left of a step is not done, nor any other step."""
        self._closed = True
        self.updates.give_up()
        self.on_host.close()
        self._threads.close()
        self._states.close()
