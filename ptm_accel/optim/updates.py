"""Decides when updates run: in `step()`, beside the next forward, or as gradients become final.

Without clipping, accumulation and loss scaling, and in a loop that is known (`Training.updates_in_backward`), what the
optimizer will do with a gradient is settled as soon as the gradient is whole. Where all micro-batches of a step are one
pass (`ptm_accel.micro_batches`) that is so with accumulation too, as the last of them arrives. That it is whole is
known twice over: the trace of such a pass has one arrival of it, and no use of its parameter after that; and should a
pass turn out otherwise that is an error, and never a wrong number. State then streams beside backward as well, and a
gradient's memory is free again before the next but one arrives.

What is different for the user: an exception in the middle of such a backward leaves the weights between two steps, as
one in the middle of `optimizer.step()` does. A step that was lost is no state to save.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ptm_accel.errors import LostStepError, UnsupportedError
from ptm_accel.memory.block import Block
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.norms import NORM_TYPE, is_narrow
from ptm_accel.optim.batches import Batches
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.optim.hyperparameters import kept_hyperparameters, still_hold
from ptm_accel.optim.on_host import OnHost
from ptm_accel.optim.staleness import Staleness
from ptm_accel.optim.states import States
from ptm_accel.optim.units import Entry, ParamState, Work
from ptm_accel.optim.update_queue import UpdateQueue
from ptm_accel.runtime.run_ahead import RunAhead
from ptm_accel.schedule.updates import LAG

logger = logging.getLogger(__name__)


class Updates:
    """Begins the updates of steps, and answers for what becomes of them.

    Args:
        compute: carries updates out in the compute tier.
        on_host: carries those out that are for the CPU beside a device.
        states: what the optimizer keeps for each parameter.
        run_ahead: knows what passes read, in which order, and which gradients are whole when they arrive.

    Attributes:
        queue: what has begun and not ended; None if there is nothing.
        early: what has begun during backward, of a step that is not over; None if nothing has.
        steps: how many have been made.
        lost: what of an update that has failed since the state was loaded last; None if there is nothing.
        may_be_plain: whether a step may be the wrapped optimizer's own while everything fits.
        staleness: how many steps parameters lack in forwards; None where they lack none.
    """

    may_be_plain = True
    staleness: Staleness | None = None

    def __init__(self, compute: ComputeUpdates, on_host: OnHost, states: States, run_ahead: RunAhead) -> None:
        self.queue: UpdateQueue | None = None
        self.early: UpdateQueue | None = None
        self.steps = 0
        self.lost: str | None = None
        self._compute = compute
        self._on_host = on_host
        self._states = states
        self._run_ahead = run_ahead
        # While updates may begin in a backward: the group of each parameter, and the gradients that have arrived.
        self._groups: dict[int, int] | None = None
        self._arrived: dict[Block, list[GradSlot]] = {}
        self._spent: list[GradSlot] = []

    # ---- in step() ---------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Carries out what is left of the step before.

        Raises:
            DiskError: as by `settle`.
        """
        self.settle()

    def step(self, work: Work, scale: torch.Tensor | None, hyper: list[dict[str, Any]], *, overlaps: bool) -> None:
        """The step has come: does at once what does not run beside the next forward, and queues the rest.

        Args:
            work: what is to be updated, beside what has begun in backward.
            scale: what gradients are multiplied by first, if anything.
            hyper: the hyperparameters of each group (`of_step`).
            overlaps: whether updates may run beside the next forward.

        Raises:
            UnsupportedError: updates have begun in backward, and have failed; or the groups or their hyperparameters
                have been changed since.
            DiskError, BudgetError: a transfer failed, or there is no room. If anything was changed by then, the step is
                lost, and so is what is left of its gradients; else all is as it was.
        """
        early = self.early
        if early is not None:
            self._check(early)
        order = self._run_ahead.reading_order() if early is not None or overlaps else None
        now, later = work, list[Entry]()
        if order is not None:
            # What stays in the compute tier is read without anybody being asked, and has nothing to wait for. Each is
            # asked once: who views a part of it may let go at any time.
            now = []
            for entry in work:
                (later if self._can_wait(entry[1]) else now).append(entry)
        stats = self._compute.pool.stats
        begin = time.perf_counter() - stats.elsewhere_s
        self._run_now(now, later, scale, hyper)
        self._run_ahead.exclude(time.perf_counter() - stats.elsewhere_s - begin)
        if order is not None and (later or early is not None):
            handed = [(group, state, grad.hand_over()) for group, state, grad in later]
            if early is None:
                sizes = {s.block_name: g.value.block.slot_bytes for _, s, g in handed if g.value is not None}
                self._follow([state for _, state, _ in handed], sizes)
            (early or self._begin(scale)).close(handed, order)

    def _check(self, early: UpdateQueue) -> None:
        """Refuses the step of what has begun during backward, if it is not what it was begun for."""
        if early.ended and not early.whole:
            raise UnsupportedError(
                f"optimizer.step() was called after an update of that step had failed: of {len(early.work)} that had "
                f"begun during backward {early.count_done} were carried out, so the weights are between two steps. "
                "Resume from the last checkpoint; with update='blocking' no update begins before optimizer.step()."
            )
        if not still_hold(early.hyper, self._compute.inner.param_groups, early.work):
            raise UnsupportedError(
                "the optimizer's groups or hyperparameters were changed between backward and optimizer.step(), and "
                "updates had begun with the old ones. Change them elsewhere, or set update='blocking'; and resume from "
                "the last checkpoint."
            )

    def _run_now(self, work: Work, later: Work, scale: torch.Tensor | None, hyper: list[dict[str, Any]]) -> None:
        """Updates `work`; `later` belongs to the same step."""
        batches = Batches(self._compute, work, scale, hyper)
        fresh = [(state, grad, dict(state.small)) for _, state, grad in work if state.fresh]
        touched = False
        try:
            while batches.done < len(work):
                if not batches:
                    batches.open(insist=True)
                batches.open(insist=False)
                touched = True
                batches.update()
        except BaseException:
            batches.abandon()
            for state, grad, small in fresh:
                # Made in this step: without the rest of it, it is no state that an update could start from.
                if grad.value is not None:
                    while state.paged:
                        self._states.executor.forget(state.paged.popitem()[1])
                    state.small = small
            if touched:
                left = [grad for _, _, grad in work + later if grad.value is not None]
                self._lose(self.steps + 1, len(left))
                for grad in left:
                    grad.drop()
            raise

    def _begin(self, scale: torch.Tensor | None = None, *, early: bool = False) -> UpdateQueue:
        hyper = kept_hyperparameters(self._compute.inner.param_groups)
        self.queue = self._run_ahead.beside = UpdateQueue(
            self._compute,
            self._states.executor,
            scale,
            hyper,
            number=self.steps + 1,
            # A gradient that has arrived is waited for by nobody but its update: what that lacks it sends for itself.
            sent_for=None if early else self._run_ahead.sends_for,
            on_host=self._on_host if self._run_ahead.on_host_possible() else None,
            spent=self._run_ahead.exclude,
            ended=self._queue_ended,
        )
        return self.queue

    def _queue_ended(self, queue: UpdateQueue) -> None:
        self.queue = None
        missed = queue.lost
        if not queue.whole:
            # A step that is not asked for any more: if anything was done of it, all else is missed.
            trained = sum(len(group["params"]) for group in self._compute.inner.param_groups)
            missed = trained - queue.count_done if queue.touched else 0
        if missed:
            self._lose(queue.number, missed)
        self._run_ahead.updates_ended(queue.updated)

    def _can_wait(self, state: ParamState) -> bool:
        """Whether an update may be done after the step: its parameter moves, is away, and its state has been made."""
        return state.slot.group.movable and not state.fresh and not state.slot.shown

    def _follow(self, states: Sequence[ParamState], gradient_bytes: Mapping[str, int]) -> None:
        """Makes known what updates beside passes use."""
        used: dict[str, dict[Block, None]] = {}
        written = Counter(state.block_name for state in states if state.overwritten)
        parts = {state.block_name: state.slot.own.block.parts for state in states}
        for state in states:
            used.setdefault(state.block_name, {}).update(dict.fromkeys(state.blocks()[1:]))
        self._run_ahead.follow_updates(
            {name: list(blocks) for name, blocks in used.items()},
            gradient_bytes,
            {name for name, count in written.items() if count == parts[name]},
        )

    # ---- in backward -------------------------------------------------------------------------------------------

    def expect(self) -> bool:
        """Makes known what updates during the next backward use; returns whether there are any that can begin there."""
        states = [state for state in self._states if self._can_wait(state)]
        if states:
            wide = self._states.masters and self._run_ahead.step.at_once > 1
            self._follow(states, {s.block_name: _sum_bytes(s.slot.own.block, wide=wide) for s in states})
        return bool(states)

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Around a backward after which `optimizer.step()` comes, and nothing that changes gradients before it.

        Raises:
            UnsupportedError: the step of the backward before it has not come.
        """
        self.refuse("another backward was begun")
        groups = self._compute.inner.param_groups
        self._groups = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._groups = None
            self._arrived.clear()

    def take(self, grad: GradSlot) -> None:
        """A gradient has arrived: the updates of its group begin if all of them have, each for the first time.

        Where more micro-batches follow, none does.
        """
        block = grad.slot.own.block
        if self._groups is None or block.name not in self._run_ahead.final_gradients:
            return
        if self._run_ahead.step.more_follow():
            return
        grads = self._arrived.setdefault(block, [])
        grads.append(grad)
        if len(grads) != block.parts or len(set(grads)) != block.parts or _is_viewed(block):
            return
        work: Work = []
        for each in grads:
            state, group = self._states.met(each.slot), self._groups.get(id(each.slot.param))
            if state is None or group is None or not self._can_wait(state):
                return
            work.append((group, state, each))
        if self.early is None:
            self.settle()
            self.early = self._begin(early=True)
        pool = self._compute.pool
        with self._states.executor.aside():
            # Before any of them is spent: it may have to be brought in, and there may be no room.
            for each in grads:
                each.norm(NORM_TYPE)
            self._spent += grads
            self.early.add([(group, state, each.spend()) for group, state, each in work])
        self.early.pump()
        self.early.catch_up(max(2 * block.slot_bytes, pool.budget.capacity_bytes // LAG))

    def refuse(self, what: str) -> None:
        """Says that `what` was done too late, if it was.

        Raises:
            UnsupportedError: updates of a step that has not come yet have begun.
        """
        if self.early is not None:
            self.early.refuse_open(what)

    def refuse_scale(self, coefficient: torch.Tensor) -> None:
        """Gradients, some of which have been used up, are to be multiplied by `coefficient`, as clipping does.

        Raises:
            UnsupportedError: it is not 1.
        """
        if bool(coefficient.isnan()):
            raise UnsupportedError(
                "the gradients have no finite norm, and updates have begun with some of them: in a plain run all "
                "weights would be NaN after this step. Resume from the last checkpoint with update='blocking', and "
                "look for the overflow."
            )
        if not bool(coefficient == 1.0):
            raise UnsupportedError(
                f"the gradients would be multiplied by {float(coefficient):.3g} (clipping) after updates have begun: "
                "code other than the Trainer clips. Set update='blocking', or max_grad_norm."
            )

    def end_early(self) -> None:
        """The step is over, well or not."""
        early, self.early = self.early, None
        for grad in self._spent:
            grad.drop()
        self._spent.clear()
        if early is not None and not early.whole:
            early.give_up()

    def abandon(self) -> None:
        """The step will not be ended: what has been done of it stays done."""
        if self.early is not None:
            logger.error(
                "backward was interrupted after updates had begun: the weights are between two steps. Resume from the "
                "last checkpoint. (With update='blocking' no update begins before optimizer.step().)"
            )
        self.end_early()

    # ---- what becomes of them ----------------------------------------------------------------------------------

    def settle(self) -> None:
        """Carries out what is left of the last step.

        Raises:
            DiskError: a transfer failed; the last complete checkpoint is intact, this step is not.
        """
        if self.queue is not None:
            self.queue.finish()

    def refuse_lost(self) -> None:
        """Carries out what is pending, and says that an update has failed since the state was loaded last.

        Raises:
            LostStepError: so it is.
            DiskError: as by `settle`.
        """
        self.settle()
        if self.lost is not None:
            raise LostStepError(
                f"cannot save between two steps: the update {self.lost} (counted since this optimizer was prepared). "
                "Load the last checkpoint, weights and optimizer, and continue from there; model.save_pretrained() and "
                "model.state_dict() give the present weights."
            )

    def _lose(self, number: int, count: int) -> None:
        self.lost = f"of step {number} failed, and {count} parameters were not updated"

    def give_up(self) -> None:
        """Drops what is left of a step."""
        self.end_early()
        if self.queue is not None:
            self.queue.give_up()


def _sum_bytes(values: Block, *, wide: bool) -> int:
    """Bytes of the sum of gradients for a block of values.

    Args:
        values: the block.
        wide: sums are in fp32, also of narrower gradients.
    """
    return values.slot_bytes * 4 // values.dtype.itemsize if wide and is_narrow(values.dtype) else values.slot_bytes


def _is_viewed(value: Block) -> bool:
    """Returns whether somebody else holds a view of a parameter's values, which an update in place would change.

    Autograd does where a parameter was used outside of all forwards, without a gradient of it: of that nothing is known
    here. (Values that have left stay what they are for those who hold views of them.)
    """
    return value.place.resident and value.viewed
