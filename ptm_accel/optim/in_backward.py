"""Updates that begin during backward, where nothing can come between a gradient and its update.

Without clipping, accumulation and loss scaling, and in a loop that is known (`Training.updates_in_backward`), what the
optimizer will do with a gradient is settled as soon as the gradient is whole. That it is whole is known twice over: the
trace of such a pass has one arrival of it, and no use of its parameter after that; and should a pass turn out otherwise
that is an error, and never a wrong number. State then streams beside backward as well, and a gradient's memory is free
again before the next but one arrives.

What is different for the user: an exception in the middle of such a backward leaves the weights between two steps, as
one in the middle of `optimizer.step()` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.run_ahead import RunAhead
from ptm_accel.optim.chase import Chase
from ptm_accel.optim.sweep import Sweep
from ptm_accel.optim.units import Entry, Work
from ptm_accel.schedule.updates import LAG

logger = logging.getLogger(__name__)


class InBackward:
    """The part of a step that is carried out before `optimizer.step()` is called.

    Args:
        sweep: carries updates out.
        run_ahead: knows which gradients are whole when they arrive.
        entry_of: what to update for a gradient; None if its parameter has no state yet, or does not move.
        begin: makes the chase, when the first such gradient has arrived.

    Attributes:
        chase: what has begun; None if nothing has.
    """

    def __init__(
        self,
        sweep: Sweep,
        run_ahead: RunAhead,
        entry_of: Callable[[GradSlot], Entry | None],
        begin: Callable[[], Chase],
    ) -> None:
        self.chase: Chase | None = None
        self._sweep = sweep
        self._run_ahead = run_ahead
        self._entry_of = entry_of
        self._begin = begin
        self._permitted = False
        self._spent: list[GradSlot] = []
        self._arrived: dict[PagedTensor, list[GradSlot]] = {}

    @contextmanager
    def permitted(self) -> Iterator[None]:
        """Around a backward after which `optimizer.step()` comes, and nothing that changes gradients before it.

        Raises:
            UnsupportedError: the step of the backward before it has not come.
        """
        self.refuse("another backward was begun")
        self._permitted = True
        try:
            yield
        except BaseException:
            self.abandon()
            raise
        finally:
            self._permitted = False
            self._arrived.clear()

    def take(self, grad: GradSlot) -> None:
        """A gradient has arrived: its update begins, if it may."""
        block = grad.slot.value.block
        if not self._permitted or block.name not in self._run_ahead.final_gradients:
            return
        grads = self._arrived.setdefault(block, [])
        grads.append(grad)
        # A gradient may be used once all of its group have arrived, each for the first time.
        if len(grads) != block.parts or len(set(grads)) != block.parts:
            return
        entries = [entry for each in grads if (entry := self._entry_of(each)) is not None]
        if len(entries) < len(grads) or _is_viewed(block):
            return
        if self.chase is None:
            self.chase = self._begin()
        with self._sweep.pool.unadvised():
            for group, state, each in entries:
                spent = each.spend()
                self._spent.append(each)
                self.chase.add((group, state, spent))
        self.chase.pump()
        self.chase.catch_up(max(2 * block.slot_bytes, self._sweep.pool.budget.capacity_bytes // LAG))

    def refuse(self, what: str) -> None:
        """Says that `what` was done too late, if it was.

        Raises:
            UnsupportedError: updates of a step that has not come yet have begun.
        """
        if self.chase is not None:
            self.chase.refuse_open(what)

    def refuse_scale(self, coefficient: torch.Tensor) -> None:
        """Gradients, some of which have been used up, are to be multiplied by `coefficient`, as clipping does.

        Raises:
            UnsupportedError: it is not 1.
        """
        if bool(coefficient.isnan()):
            raise UnsupportedError(
                "the gradients have no finite norm, and updates have begun with some of them: in a plain run all "
                "weights would be NaN after this step. Resume from the last checkpoint with update='blocking', and "
                "look for what overflows."
            )
        if not bool(coefficient == 1.0):
            raise UnsupportedError(
                f"the gradients are to be multiplied by {float(coefficient):.3g} (clipping) after updates have begun: "
                "something clips that is not the Trainer. Set update='blocking', or max_grad_norm."
            )

    def close(self, work: Work, order: dict[str, int]) -> None:
        """The step has come: what is left of it runs beside the next forward.

        Args:
            work: what is to be updated beside what has begun.
            order: the place of each parameter in the next forward, by name.

        Raises:
            UnsupportedError: the groups or their hyperparameters have been changed since backward.
        """
        chase = self.chase
        assert chase is not None
        if not chase.unchanged():
            raise UnsupportedError(
                "the optimizer's groups or hyperparameters were changed between backward and optimizer.step(), and "
                "updates had begun with the old ones. Change them elsewhere, or set update='blocking'; and resume from "
                "the last checkpoint."
            )
        chase.close(work, order)

    def end(self) -> None:
        """The step is over, well or not."""
        chase, self.chase = self.chase, None
        for grad in self._spent:
            grad.drop()
        self._spent.clear()
        if chase is not None and not chase.whole:
            chase.give_up()

    def abandon(self) -> None:
        """The step will not be ended: what has been done of it stays done."""
        if self.chase is not None:
            logger.error(
                "backward was broken off after updates had begun: the weights are between two steps. Resume from the "
                "last checkpoint. (With update='blocking' no update begins before optimizer.step().)"
            )
        self.end()


def _is_viewed(value: PagedTensor) -> bool:
    """Whether somebody else holds a view of a parameter's values, which an update in place would change.

    Autograd does where a parameter was used outside of all forwards, without a gradient of it: of that nothing is known
    here. (Values that have left stay what they are for those who hold views of them.)
    """
    return value.place.resident and value.viewed
