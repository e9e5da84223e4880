"""Lock-free updating: a step adds its gradients to those that wait, and training goes on while they are applied.

The paper's mechanism (Angel-PTM) for optimizer state on a disk that is slower than compute. `step()` hands gradients to
`ptm_accel.optim.sweeps` and copies what has been published since into the pages, between two steps: a forward and its
backward use one version of each parameter. No parameter lacks more than `max_staleness` steps; at that bound the step
waits. Steps that waited together are averaged, and count as one for the optimizer.

Whoever looks from outside of a training pass (a save, an evaluation, a read of a parameter or its state) first has all
steps applied: `finish`, which is where updates that run beside a forward are finished, too. After that the pool has the
state as ever, until the next step. A step is exact, and waits for those before it, where state is still to be made or
somebody has written to a parameter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.calls import Call
from ptm_accel.model.addresses import Members
from ptm_accel.optim.host_updates import twin_of
from ptm_accel.optim.hyperparameters import kept_hyperparameters
from ptm_accel.optim.lock_free_needs import desk_bytes, waiting_bytes
from ptm_accel.optim.staleness import Staleness
from ptm_accel.optim.sweeps import Desk, Sweeps, WaitingGroup, state_of
from ptm_accel.optim.units import Entry, ParamState, Work
from ptm_accel.optim.update_queue import plainly
from ptm_accel.optim.updates import Updates

logger = logging.getLogger(__name__)

_LOST = "pending gradients are lost. Resume from the last checkpoint."


class LockFreeUpdates(Updates):
    """`Updates` whose steps wait while training goes on; pending updates (`PendingUpdates`) from a step to `finish`.

    Args:
        *args: as for `Updates`.
        max_staleness: the most steps that a parameter lacks in a forward.
    """

    may_be_plain = False

    def __init__(self, *args: Any, max_staleness: int) -> None:
        super().__init__(*args)
        self._pool = self._compute.pool
        self._executor = self._states.executor
        self._max_staleness = max_staleness
        backing = self._pool.backing
        assert backing is not None
        self._sweeps = Sweeps(backing)
        # What nobody else uses before `finish`: values with a version of their own, and state.
        self._values: dict[Block, WaitingGroup] = {}
        self._state: dict[Block, WaitingGroup] = {}
        self._withheld: dict[Block, Members] = {}
        self._working = False
        self.staleness: Staleness = Staleness()
        for state in self._states:
            if state.slot.group.movable and state.slot.param.requires_grad:
                self._group_of(state)

    # ---- memory --------------------------------------------------------------------------------------------------

    def _group_of(self, state: ParamState) -> WaitingGroup:
        """Returns the buffers of a parameter's block, made if there are none."""
        block, sweeps = state.slot.own.block, self._sweeps
        group = sweeps.groups.get(block)
        if group is not None:
            return group
        self._forget_gone()
        wide, memory = state.wide.dtype, self._compute.optimizer_memory
        self._widen_desk(desk_bytes(block, wide.itemsize, memory, masters=self._states.masters))
        nbytes = waiting_bytes(block, wide.itemsize)
        held = self._pool.hold(nbytes, Tag.UPDATES, f"waiting gradients of {block.name}")
        with sweeps.changed:
            group = sweeps.groups[block] = WaitingGroup(block, wide, held)
        return group

    def _forget_gone(self) -> None:
        """Gives the buffers of blocks back that no parameter has any more."""
        here = {state.slot.own.block for state in self._states}
        with self._sweeps.changed:
            for block in [b for b in self._sweeps.groups if b not in here and b not in self._values]:
                self._sweeps.groups.pop(block).held.release()

    def _widen_desk(self, nbytes: int) -> None:
        desk = self._sweeps.desk
        if desk is not None and desk.nbytes >= nbytes:
            return
        with self._sweeps.changed:
            while self._sweeps.running:
                self._sweeps.changed.wait()
        if desk is not None:
            self._sweeps.desk = None
            desk.held.release()
        held = self._pool.hold(nbytes, Tag.UPDATES, "the updates that run beside training")
        self._sweeps.desk = Desk(nbytes, held)

    # ---- a step --------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Raises the error of an update since the last step, if there was one."""
        if self._sweeps.error is not None:
            self._fail(self._sweeps.error)

    def step(self, work: Work, scale: torch.Tensor | None, hyper: list[dict[str, Any]], *, overlaps: bool) -> None:
        """Adds gradients to those that wait, adopts published values, and waits at the bound; see `Updates.step`.

        Raises:
            UnsupportedError: a parameter was changed in place in a forward or backward, while gradients of it waited.
            DiskError, BudgetError: as by `Updates.step`, also of an update that ran beside training.
        """
        later = [entry for entry in work if entry[1].slot.group.movable]
        self._refuse_written()
        if not all(self._is_ready(state) for _, state, _ in later):
            self.settle()
            super().step(work, scale, hyper, overlaps=False)
            return
        begin, stats = time.perf_counter(), self._pool.stats
        begin -= stats.elsewhere_s
        with self._at_work():
            groups = [self._own(state) for _, state, _ in later]
        if now := [entry for entry in work if not entry[1].slot.group.movable]:
            self._run_now(now, later, scale, hyper)
        handed = [(index, state, grad.hand_over()) for index, state, grad in later]
        try:
            with self._at_work():
                number = self.steps + 1
                # Before the step joins those that wait: with at most one, each is applied by itself.
                self._wait(number - max(self._max_staleness, 1))
                self._hand_over(handed, groups, scale)
                self._wait(number - self._max_staleness)
                self._adopt()
                self._count_lacking(number)
        except BaseException:
            if self.lost is None:
                self._lose(self.steps + 1, len(handed))
            for _, _, grad in handed:
                grad.drop()
            raise
        self._run_ahead.exclude(time.perf_counter() - stats.elsewhere_s - begin)

    def _refuse_written(self) -> None:
        """Refuses what somebody has written beside waiting updates: what is adopted would undo it."""
        for state in self._states:
            if state.slot.own.block in self._values and state.differs:
                raise UnsupportedError(
                    f"parameter {state.slot.name} was changed in place, or its memory was given to other code (p.data, "
                    "p.detach()), in a forward or backward, while its gradients are pending (update: lock_free): the "
                    "written values would be lost. Do it between two steps, or set update to exact."
                )

    def _is_ready(self, state: ParamState) -> bool:
        """Whether all that an update of the parameter reads has been made, and nobody has changed the parameter."""
        made = not (self._compute.optimizer_memory.state_tensors and state.fresh)
        made = made and (state.master is None or state.mastered >= state.slot.own.numel)
        blocks = [part.block for part in state_of(state).values()]
        return made and not state.differs and not state.slot.shown and all(b.place is not Place.BLANK for b in blocks)

    def _own(self, state: ParamState) -> WaitingGroup:
        """Takes the state of a parameter, and its block's values as those that are published; for the updater alone."""
        group, block = self._group_of(state), state.slot.own.block
        self._executor.pending_updates = self
        if block not in self._values:
            with self._executor.pin(block) as values:
                group.begin(values)
            self._values[block] = group
        news = [part.block for part in state_of(state).values() if part.block not in self._state]
        for each in dict.fromkeys(news):
            self._send_away(each)
            self._state[each] = group
        if news:
            # Loaded state may be wider than what the optimizer makes.
            its = sum(each.slot_bytes for each, owner in self._state.items() if owner is group)
            self._widen_desk(its + waiting_bytes(block, group.sums.itemsize))
        return group

    def _send_away(self, block: Block) -> None:
        pool = self._pool
        if block.place is Place.AWAY and block.stored_bytes < block.nbytes:
            pool.fault(block, write=True)
        if block.place is not Place.AWAY:
            pool.admission.evict(block)
        pool.traffic.settle(block)
        if block.handle.snapshots:
            # What somebody has been given by `state_dict()` is what it was.
            pool.traffic.set_apart(block)

    def _hand_over(self, handed: list[Entry], groups: list[WaitingGroup], scale: torch.Tensor | None) -> None:
        sweeps, number = self._sweeps, self.steps + 1
        kept = kept_hyperparameters(self._compute.inner.param_groups)
        for at, (index, state, grad) in enumerate(handed):
            group = groups[at]
            assert grad.value is not None
            with self._executor.pin(grad.value) as gradient, sweeps.changed:
                group.add(state, index, gradient, scale)
                group.oldest = number if group.oldest is None else group.oldest
                group.hyper = kept
                group.grows = at + 1 < len(groups) and groups[at + 1] is group
            grad.drop()
            if not group.grows and group.block not in self._withheld and isinstance(group.block.occupant, Members):
                # Code that goes around torch functions reads no values of a step before.
                self._withheld[group.block] = group.block.occupant
                group.block.occupant.withhold(group.block, self._pool.compute.device)
        if sweeps.begin(self._run_ahead.reading_order() or {}):
            sweeps.twin = twin_of(self._compute.inner)
            try:
                self._on_host.worker.submit(sweeps)
            except BaseException:
                # Nobody will end it, so nobody may wait for it.
                sweeps.running = False
                raise

    def _adopt(self) -> None:
        """Writes what has been published into the pages."""
        for block, group in self._values.items():
            with self._sweeps.changed:
                group.lacks = group.first
                if group.adopted == group.version:
                    continue
            occupied = block.place is Place.AWAY
            if occupied:
                self._pool.occupy(block)
            try:
                with self._executor.pin(block, write=True) as values, self._sweeps.changed:
                    values.view(-1).copy_(group.published)
                    group.adopted, group.lacks = group.version, group.first
            except BaseException:
                if occupied:
                    self._pool.vacate(block)
                raise
            if isinstance(block.occupant, Members):
                for slot in block.occupant.slots:
                    slot.generation += 1

    def _count_lacking(self, number: int) -> None:
        """Notes how many of the steps up to `number` each block lacks in the next forward."""
        for group in self._values.values():
            self.staleness.note(0 if group.lacks is None else number + 1 - group.lacks)

    def _wait(self, step: int | None) -> None:
        """Waits until all steps up to `step` are published, or all that there are."""
        sweeps, begin = self._sweeps, time.perf_counter()
        with self._pool.traffic.stalled(), sweeps.changed:
            while sweeps.error is None and not sweeps.reached(step):
                sweeps.changed.wait()
        self.staleness.waited_s += time.perf_counter() - begin
        if sweeps.error is not None:
            self._fail(sweeps.error)

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        self._working = True
        try:
            # Whatever surrounds whoever looks (autocast, torch function modes) is not for this.
            modes = plainly(self._pool.compute.device.type)
            with self._executor.aside(), modes, torch.no_grad(), torch._C.DisableTorchFunction():
                yield
        finally:
            self._working = False

    # ---- the end of what waits -----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Has all steps applied.

        Raises:
            DiskError: a transfer failed; the last complete checkpoint is intact, this step is not.
        """
        super().settle()
        self.finish()

    def finish(self) -> None:
        """As `settle`; the pool has the state again."""
        if self._working or self._executor.pending_updates is not self:
            return
        with self._at_work():
            self._wait(None)
            self._refuse_written()
            self._adopt()
            self._end()

    def _end(self) -> None:
        self._values.clear()
        self._state.clear()
        while self._withheld:
            self._withheld.popitem()[1].give_back()
        if self._executor.pending_updates is self:
            self._executor.pending_updates = None

    def _fail(self, error: BaseException) -> None:
        """Gives up what waits, and raises why an update was not carried out."""
        number = min((f for g in self._sweeps.groups.values() if (f := g.first) is not None), default=self.steps + 1)
        self._lose(number, self._sweeps.clear())
        self._sweeps.error = None
        self._end()
        logger.error("a lock-free update failed (%s: %s); %s", type(error).__name__, error, _LOST)
        try:
            raise error
        finally:
            # The error refers to this frame.
            del error

    def give_up(self) -> None:
        """Drops what waits, and gives all memory back; says what there was."""
        super().give_up()
        sweeps = self._sweeps
        sweeps.clear()
        self._end()
        if sweeps.error is not None:
            # Nobody has come to be told by an exception.
            logger.error("a lock-free update failed (%s); %s", sweeps.error, _LOST)
            sweeps.error = None
        held = [group.held for group in sweeps.groups.values()] + ([sweeps.desk.held] if sweeps.desk else [])
        sweeps.groups.clear()
        sweeps.desk = None
        for each in held:
            if each.live:
                each.release()

    # ---- as pending updates --------------------------------------------------------------------------------------

    def before_use(self, block: Block) -> None:
        """A training pass reads values as they were adopted; any other use of values or state is after all steps."""
        if self._working or (block not in self._values and block not in self._state):
            return
        within = torch._C._current_graph_task_id() != -1 or self._pool.calls.kind is Call.FORWARD
        if block in self._state or not within:
            self.finish()
        elif (members := self._withheld.pop(block, None)) is not None:
            members.give_back()

    def before_evaluation(self) -> None:
        """See `PendingUpdates`."""
        self.finish()

    def elsewhere(self, block: Block) -> bool:
        """See `PendingUpdates`."""
        return block in self._state

    def give_way(self) -> bool:
        """Returns False: what it holds is its own."""
        return False
