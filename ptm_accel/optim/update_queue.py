"""The update queue: an optimizer step that is carried out beside passes, exactly.

Clipping by the global norm lets no update begin before the last gradient is in, so others wait for the whole update at
`optimizer.step()` or speculate. Here `step()` fixes what is to be done (gradients, clip coefficient, learning rates)
and returns; the updates follow in the order in which the next forward reads the parameters. Their transfers run beside
its compute, and an access waits for the update of that tensor alone. Nothing is stale: whoever looks at a parameter, at
its state or at a checkpoint sees what a blocking step would have left (`Executor.pending_updates`).

Where nothing can come between a gradient and its update (`Updates.in_backward`) the queue begins empty, during
backward, and grows as gradients arrive; `step()` closes it.

There is no thread behind it. The arithmetic of an update runs between two operations of the forward, in the thread
that computes: on a CPU it needs the same cores, and on a device it is queued like all other work. Only what is updated
on the CPU beside a device (`ptm_accel.optim.host_updates`) is left to another thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from ptm_accel.errors import BudgetError, StaleGraphError, UnsupportedError
from ptm_accel.memory.block import Block
from ptm_accel.memory.budget import Tag
from ptm_accel.model.addresses import Members
from ptm_accel.optim.batches import Batches
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.optim.host_updates import HostUpdates
from ptm_accel.optim.on_host import OnHost
from ptm_accel.optim.units import Entry, Work, blocks_of, ordered
from ptm_accel.runtime.executor import Executor

logger = logging.getLogger(__name__)

_STILL_PENDING = (
    "{} What is left of the last optimizer step is still pending, and nothing of it is lost: the model can be saved "
    "once this forward has ended. Where a forward holds so much (parameters that a parent reads by name stay until it "
    "returns), set update='blocking'."
)
"""Message where there is no room for an update beside a forward."""


class UpdateQueue:
    """The pending updates of one optimizer step.

    Args:
        compute: carries out those of the compute tier.
        scale: what gradients are multiplied by first, if anything.
        hyper: the hyperparameters of each group.
        number: of the step.
        sent_for: see `Batches`.
        on_host: takes some of the updates over; None if all are for the compute tier.
        spent: is told the seconds of the calling thread that updates have taken, waiting for memory left out.
        ended: called with the queue when the last update is done, or the rest was given up.

    Attributes:
        hyper, number: see above.
        whole: whether the step has been asked for, and all of its updates are known (`close`).
        touched: whether updates have been begun, which may have changed something.
        lost: how many parameters will not be updated, because the rest was given up.
    """

    def __init__(
        self,
        compute: ComputeUpdates,
        executor: Executor,
        scale: torch.Tensor | None,
        hyper: list[dict[str, Any]],
        *,
        number: int,
        sent_for: Callable[[str], bool] | None,
        on_host: OnHost | None,
        spent: Callable[[float], None],
        ended: Callable[[UpdateQueue], None],
    ) -> None:
        self.hyper = hyper
        self.number = number
        self.whole = self.touched = False
        self.lost = 0
        self._pool = compute.pool
        self._executor = executor
        self._spent = spent
        self._ended = ended
        self._working = False
        self._parameters: set[Block] = set()
        # Nobody may read what they have: not yet what the step leaves, or already that, before it has been asked for.
        self._withheld: dict[Block, Members] = {}
        self._batches = Batches(compute, [], scale, hyper, stays=True, sent_for=sent_for)
        self._batches.sparing = True
        self._host = None if on_host is None else HostUpdates(on_host, scale, hyper, self._batches.add)
        # What the CPU cannot take after all comes back to the other.
        self._lanes: list[Batches | HostUpdates] = (
            [self._batches] if self._host is None else [self._host, self._batches]
        )
        self._executor.pending_updates = self

    # ---- what it takes on --------------------------------------------------------------------------------------

    def add(self, work: Work) -> None:
        """More parameters to update, whose gradients are whole and its own from now on.

        Raises:
            DiskError: a transfer had failed; what was not taken on is lost.
        """
        left = deque(work)
        try:
            while left:
                if self._host is not None and self._takes(self._host, left[0]):
                    self.touched = True
                else:
                    self._batches.add(left[0])
                _, state, _ = left.popleft()
                block = state.slot.own.block
                if block not in self._parameters:
                    self._parameters.add(block)
                    if isinstance(block.occupant, Members):
                        self._withheld[block] = block.occupant
                        block.occupant.withhold(block, self._pool.compute.device)
        except BaseException:
            self.lost += len(left)
            with self._at_work():
                for _, _, grad in left:
                    grad.drop()
            raise

    def _takes(self, host: HostUpdates, entry: Entry) -> bool:
        """Returns whether the CPU takes an update over; members of one block are all updated where the first one is."""
        blocks = blocks_of(entry)
        if any(block in self._batches.pending_updates for block in blocks):
            return False
        if host.take(entry):
            return True
        while any(block in host.pending_updates for block in blocks):
            self._go_on(host)
        return False

    def close(self, work: Work, order: dict[str, int]) -> None:
        """The step has come: what has not begun is done in the order in which it will be needed.

        Args:
            work: what is to be updated beside what was added.
            order: the place of each parameter in the next forward, by name.

        Raises:
            DiskError: a transfer had failed; the step is not whole then.
        """
        batches, early = self._batches, bool(self._batches.work)
        try:
            self.add(ordered(work, order))
        except BaseException as error:
            self.whole = True
            self.give_up(error)
            raise
        # Not before: it ends when nothing is left of what it has.
        self.whole, batches.sparing = True, False
        if early:
            batches.reorder(order)
        # Those that the CPU has updated by now as well.
        self._give_back([block for block in self._withheld if not self.awaits(block)], batches)
        self._end_if_done()
        self.pump()

    # ---- what it says ------------------------------------------------------------------------------------------

    @property
    def work(self) -> Work:
        """All updates of the queue."""
        return [entry for lane in self._lanes for entry in lane.work]

    @property
    def count_done(self) -> int:
        """Number of parameters that have been updated."""
        return sum(lane.done for lane in self._lanes)

    @property
    def updated(self) -> set[str]:
        """The blocks of what has been updated, but for those on the CPU beside a device, by name."""
        return {state.block_name for _, state, _ in self._batches.work[: self._batches.done]}

    @property
    def open_bytes(self) -> int:
        """See `ptm_accel.runtime.following.Beside`: of parameters that are updated in parts nothing is planned."""
        return self._batches.pinned_bytes

    def awaits(self, tensor: Block) -> bool:
        """Returns whether an update that is still to be done uses the tensor."""
        return tensor in self._batches.pending_updates or self.elsewhere(tensor)

    def elsewhere(self, tensor: Block) -> bool:
        """See `PendingUpdates`."""
        return self._host is not None and tensor in self._host.pending_updates

    def refuse_open(self, what: str) -> None:
        """Says that `what` was done between a backward in which updates have begun and the step that they belong to.

        Raises:
            UnsupportedError: so it is.
        """
        if not self.whole:
            raise UnsupportedError(
                f"{what} between backward and optimizer.step(), after updates had begun: it would see half a step. "
                "Do it elsewhere, or set update='blocking'; and resume from the last checkpoint."
            )

    @property
    def ended(self) -> bool:
        """Whether nothing is left to be done, or what was left has been given up."""
        return self._executor.pending_updates is not self

    # ---- carrying on -------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Opens what there is room for; never waits."""
        if self._batches.pending_updates and not self._working and self._batches.could_open:
            with self._at_work():
                self._batches.open(insist=False)
        self.look()

    def look(self) -> None:
        """Takes note of updates on the CPU that have ended: what they changed can be loaded now."""
        lane = self._host
        if lane is None or not lane.pending_updates or self._working or not (lane.arrived() or lane.could_open):
            return
        with self._at_work():
            while lane.arrived():
                self._update(lane)
                lane.open(insist=False)
            if lane.could_open:
                lane.open(insist=False)

    def catch_up(self, most_bytes: int) -> None:
        """Waits until gradients of no more than `most_bytes` are left to be used up.

        Raises:
            DiskError, BudgetError: a transfer failed, or there is no room; the step is not whole then.
        """
        pending_updates = self._batches.pending_updates
        while not self._working and most_bytes < sum(
            block.slot_bytes for block in pending_updates if block.tag is Tag.GRAD
        ):
            self._go_on(self._batches)

    def finish(self) -> None:
        """Carries out all that is left.

        Raises:
            DiskError, BudgetError: a transfer failed, or there is no room; the step is not whole then.
            UnsupportedError: the step has not been asked for yet.
        """
        self.refuse_open("the model or its optimizer was looked at as a whole")
        while not self._working and not self.ended:
            self._go_on(next(lane for lane in reversed(self._lanes) if lane.pending_updates))

    def before_evaluation(self) -> None:
        """Does nothing: each use of a parameter waits for its update."""

    def before_use(self, tensor: Block) -> None:
        """See `PendingUpdates`.

        Raises:
            StaleGraphError: a parameter is read whose gradient was complete, before the step has come.
        """
        if self._working:
            return
        if not self.whole and tensor in self._parameters:
            where = "in backward" if torch._C._current_graph_task_id() != -1 else "between backward and its step"
            raise StaleGraphError(
                f"parameter {tensor.name} was read {where} after its gradient was complete and its update had "
                "begun: this pass was not like those before it. Set update='blocking', and resume from the last "
                "checkpoint."
            )
        for lane in self._lanes:
            while tensor in lane.pending_updates:
                self._go_on(lane)

    def give_way(self) -> bool:
        """See `PendingUpdates`.

        Raises:
            DiskError: a transfer failed.
        """
        if self._working or not self._batches:
            return False
        self._batches.wait()
        if self._batches:
            with self._at_work():
                self._update(self._batches)
        return True

    def _go_on(self, lane: Batches | HostUpdates) -> None:
        """Carries out what comes next, waiting for what it needs."""
        if not lane:
            with self._at_work(loses=not self.whole):
                lane.open(insist=True)
        if lane:
            lane.wait()
            with self._at_work():
                self._update(lane)
                lane.open(insist=False)

    def _update(self, lane: Batches | HostUpdates) -> None:
        self.touched = True
        self._give_back(lane.update(), lane)
        self._end_if_done()

    def _give_back(self, blocks: Iterable[Block], lane: Batches | HostUpdates) -> None:
        """Gives parameters their values back, if they are what the step has asked for."""
        if not self.whole:
            return
        for block in blocks:
            if block in self._withheld and block not in lane.pending_updates:
                self._withheld.pop(block).give_back()

    @contextmanager
    def _at_work(self, *, loses: bool = True) -> Iterator[None]:
        """Around work on updates.

        Args:
            loses: the step is lost if there is no room for it; otherwise nothing is done yet, and all is still pending.
        """
        pool = self._pool
        begin = time.perf_counter() - pool.stats.elsewhere_s
        try:
            # Whatever surrounds the forward (autocast, gradients, torch function modes) is not for the update.
            with self._executor.aside(), plainly(pool.compute.device.type), torch.no_grad():
                self._working = True
                try:
                    with torch._C.DisableTorchFunction():
                        yield
                except BaseException as error:
                    if loses or not isinstance(error, BudgetError):
                        self.give_up(error)
                        raise
                    # Of a device's it is another, which callers who try smaller batches know.
                    raise type(error)(_STILL_PENDING.format(error)) from error
                finally:
                    self._working = False
        finally:
            self._spent(time.perf_counter() - pool.stats.elsewhere_s - begin)

    # ---- the end -----------------------------------------------------------------------------------------------

    def give_up(self, error: BaseException | None = None) -> None:
        """Ends what is open without updating it; what was asked for is lost.

        Args:
            error: why, which whoever looked at a parameter is given, and may not log.
        """
        if error is not None:
            logger.error(
                "an optimizer step was interrupted (%s: %s) when %d of its %d parameters had been updated; the rest is "
                "lost. Resume from the last checkpoint.",
                type(error).__name__,
                error,
                self.count_done,
                len(self.work) + self.lost,
            )
        left = [entry for lane in self._lanes for entry in lane.work[lane.done :]]
        self.lost += len(left)
        # From the last to the first, and whatever one of them raises, the others are done.
        with ExitStack() as ending:
            ending.callback(self._end)
            for _, _, grad in left:
                ending.callback(grad.drop)
            for lane in self._lanes:
                ending.callback(lane.abandon)

    def _end_if_done(self) -> None:
        if self.whole and not any(lane.pending_updates for lane in self._lanes):
            self._end()

    def _end(self) -> None:
        if not self.ended:
            while self._withheld:
                self._withheld.popitem()[1].give_back()
            if self._host is not None:
                self._host.close()
            self._executor.pending_updates = None
            self._ended(self)


def plainly(device_type: str) -> ExitStack:
    """No inference mode, autocast or `torch.func`; where there is none, a look is quicker than setting it."""
    modes = ExitStack()
    if torch._C._functorch.peek_interpreter_stack() is not None:
        modes.enter_context(temporarily_clear_interpreter_stack())
    if torch.is_inference_mode_enabled():
        modes.enter_context(torch.inference_mode(False))
    if torch.is_autocast_enabled(device_type):
        modes.enter_context(torch.autocast(device_type, enabled=False))
    return modes
