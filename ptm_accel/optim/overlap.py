"""The part of an optimizer's steps that is carried out beside passes: beside the next forward, or the backward before.

What has begun there is a `Chase`. Here is what it is begun with, and what is known of it when it has ended: a step that
was lost is no state to save.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from ptm_accel.errors import LostStepError
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.run_ahead import RunAhead
from ptm_accel.optim.chase import Chase
from ptm_accel.optim.host_updates import HostUpdates
from ptm_accel.optim.in_backward import InBackward
from ptm_accel.optim.on_host import OnHost
from ptm_accel.optim.states import States
from ptm_accel.optim.sweep import Sweep
from ptm_accel.optim.units import Entry, ParamState, Work, ordered


class Overlap:
    """Begins updates beside passes, and answers for what becomes of them.

    Args:
        sweep: carries updates out.
        on_host: carries those out that are for the CPU beside a device.
        states: what the optimizer keeps for each parameter.
        run_ahead: knows what passes read, and in which order.

    Attributes:
        chase: what has begun and not ended; None if there is nothing.
        in_backward: what begins before the step is asked for.
        steps: how many have been made.
        lost: what of an update that has failed since the state was loaded last; None if there is nothing.
    """

    def __init__(self, sweep: Sweep, on_host: OnHost, states: States, run_ahead: RunAhead) -> None:
        self.chase: Chase | None = None
        self.in_backward = InBackward(sweep, run_ahead, self._entry_of, self.begin_in_backward)
        self.steps = 0
        self.lost: str | None = None
        self._sweep = sweep
        self._on_host = on_host
        self._states = states
        self._run_ahead = run_ahead
        self._groups: dict[int, int] = {}

    def run(self, work: Work, scale: torch.Tensor | None, later: Work | None = None) -> None:
        """What does not run beside a pass is done at once.

        Args:
            work: what is to be updated.
            scale: what gradients are multiplied by first, if anything.
            later: what is to be updated in the same step, after that.

        Raises:
            DiskError, BudgetError: a transfer failed, or there is no room. If anything was changed by then, the step is
                lost, and so is what is left of its gradients; else all is as it was.
        """
        touched: list[bool] = []
        try:
            self._sweep.run(work, scale, partial(touched.append, True))
        except BaseException:
            if touched:
                left = [grad for _, _, grad in work + (later or []) if grad.value is not None]
                self._lost(len(left))
                for grad in left:
                    grad.drop()
            raise

    def begin(self, later: Work, order: dict[str, int], scale: torch.Tensor | None) -> None:
        """The step has come, and nothing has begun before it: it runs beside the next forward.

        Args:
            later: what is to be updated.
            order: the place of each parameter in the next forward, by name.
            scale: what gradients are multiplied by first, if anything.

        Raises:
            DiskError: a transfer had failed; the step is not whole then.
        """
        work = _handed_over(later)
        self._follow(
            [state for _, state, _ in work],
            {state.block_name: grad.value.block.slot_bytes for _, state, grad in work if grad.value is not None},
        )
        chase = self._make_chase(scale)
        chase.begin(ordered(work, order))
        chase.pump()

    def close(self, later: Work, order: dict[str, int]) -> None:
        """The step has come whose updates have begun during backward: what is left of it runs beside the next forward.

        Args:
            later: what is to be updated beside what has begun.
            order: the place of each parameter in the next forward, by name.

        Raises:
            UnsupportedError: the groups or their hyperparameters have been changed since backward.
            DiskError: a transfer failed; the step is not whole then.
        """
        chase = self.chase
        assert chase is not None
        self.in_backward.close(_handed_over(later), order)
        chase.pump()

    def _entry_of(self, grad: GradSlot) -> Entry | None:
        state, group = self._states.met(grad.slot), self._groups.get(id(grad.slot.param))
        return (group, state, grad) if group is not None and state is not None and self.can_wait(state) else None

    def can_wait(self, state: ParamState) -> bool:
        """Whether an update may be done after the step: its parameter moves, and its state has been made."""
        return state.slot.group.movable and not state.fresh

    def look_at_groups(self, groups: list[dict[str, Any]]) -> None:
        """Before a backward in which updates may begin: takes note of who is in which group."""
        self._groups = {id(p): index for index, group in enumerate(groups) for p in group["params"]}

    def expect(self, groups: list[dict[str, Any]]) -> bool:
        """Makes known what updates during the next backward use; returns whether there are any that can begin there."""
        states = [state for state in self._states if self.can_wait(state)]
        if states:
            self.look_at_groups(groups)
            self._follow(states, {state.block_name: state.slot.value.block.slot_bytes for state in states})
        return bool(states)

    def begin_in_backward(self) -> Chase:
        """Begins a step that has not been asked for yet; its work is added as gradients arrive."""
        self.settle()
        return self._make_chase(whole=False)

    def settle(self) -> None:
        """Carries out what is left of the last step.

        Raises:
            DiskError: a transfer failed; the last complete checkpoint is intact, this step is not.
        """
        if self.chase is not None:
            self.chase.finish()

    def refuse_lost(self) -> None:
        """Carries out what is owed, and says that an update has failed since the state was loaded last.

        Raises:
            LostStepError: so it is.
            DiskError: as by `settle`.
        """
        self.settle()
        if self.lost is not None:
            raise LostStepError(
                f"cannot save what is between two steps: the update {self.lost} (counted since this optimizer was "
                "prepared). Load the last checkpoint, weights and optimizer, and go on from there; "
                "model.save_pretrained() and model.state_dict() give the weights as they are."
            )

    def restored(self) -> None:
        """All of the state was loaded: what was lost before is no more."""
        self.lost = None

    def _lost(self, count: int, number: int | None = None) -> None:
        number = self.steps + 1 if number is None else number
        self.lost = f"of step {number} failed, and {count} parameters were not updated"

    def give_up(self) -> None:
        """What is left of a step is not done."""
        self.in_backward.end()
        if self.chase is not None:
            self.chase.give_up()

    def _follow(self, states: Sequence[ParamState], gradient_bytes: Mapping[str, int]) -> None:
        used: dict[str, dict[PagedTensor, None]] = {}
        written = Counter(state.block_name for state in states if state.overwritten)
        parts = {state.block_name: state.slot.value.block.parts for state in states}
        for state in states:
            used.setdefault(state.block_name, {}).update(dict.fromkeys(state.blocks()[1:]))
        self._run_ahead.follow_updates(
            {name: list(blocks) for name, blocks in used.items()},
            gradient_bytes,
            {name for name, count in written.items() if count == parts[name]},
        )

    def _make_chase(self, scale: torch.Tensor | None = None, *, whole: bool = True) -> Chase:
        number = self.steps + 1

        def ended() -> None:
            self.chase = None
            missed = chase.lost
            if not chase.whole:
                # A step that is not asked for any more: if anything was done of it, all else is missed.
                trained = sum(len(group["params"]) for group in self._sweep.inner.param_groups)
                missed = trained - chase.count_done() if chase.touched else 0
            if missed:
                self._lost(missed, number)
            self._run_ahead.updates_ended(chase.updated)

        chase = Chase(
            self._sweep,
            scale,
            whole=whole,
            # A gradient that has arrived is waited for by nobody but its update: what that lacks it sends for itself.
            sent_for=self._run_ahead.sends_for if whole else _nothing,
            on_host=partial(HostUpdates, self._on_host) if self._run_ahead.on_host_possible() else None,
            spent=self._run_ahead.exclude,
            ended=ended,
        )
        self.chase = self._run_ahead.beside = chase
        return chase


def _nothing(parameter: str) -> bool:
    return False


def _handed_over(work: Work) -> Work:
    return [(group, state, grad.hand_over()) for group, state, grad in work]
