"""The update queue: an optimizer step that is carried out beside passes, exactly.

Clipping by the global norm lets no update begin before the last gradient is in, so others wait for the whole update at
`optimizer.step()` or speculate. Here `step()` fixes what is to be done (gradients, clip coefficient, learning rates)
and returns; the updates follow in the order in which the next forward reads the parameters. Their transfers run beside
its compute, and an access waits for the update of that tensor alone. Nothing is stale: whoever looks at a parameter, at
its state or at a checkpoint sees what a blocking step would have left (`Pool.owed`).

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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from ptm_accel.errors import BudgetError, StaleGraphError, UnsupportedError
from ptm_accel.memory.budget import Tag
from ptm_accel.memory.paged import PagedTensor
from ptm_accel.optim.batches import Batches
from ptm_accel.optim.compute_updates import ComputeUpdates
from ptm_accel.optim.host_updates import HostUpdates
from ptm_accel.optim.units import Entry, Work, ordered, parts_of

logger = logging.getLogger(__name__)

_STILL_OWED = (
    "{} What is left of the last optimizer step is still owed, and nothing of it is lost: the model can be saved once "
    "this forward has ended. Where a forward holds so much (parameters that a parent reads by name stay until it "
    "returns), set update='blocking'."
)
"""What is said where there is no room for an update beside a forward."""


class UpdateQueue:
    """The pending updates of one optimizer step.

    Args:
        compute: carries out those of the compute tier.
        scale: what gradients are multiplied by first, if anything.
        hyper: the hyperparameters of each group.
        number: of the step.
        sent_for: see `Batches`.
        host: takes some of the updates over; None if all are for the compute tier.
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
        scale: torch.Tensor | None,
        hyper: list[dict[str, Any]],
        *,
        number: int,
        sent_for: Callable[[str], bool] | None,
        host: HostUpdates | None,
        spent: Callable[[float], None],
        ended: Callable[[UpdateQueue], None],
    ) -> None:
        self.hyper = hyper
        self.number = number
        self.whole = self.touched = False
        self.lost = 0
        self._pool = compute.pool
        self._scale = scale
        self._host = host
        self._spent = spent
        self._ended = ended
        self._working = False
        # Which blocks may not be looked at before which parameter has been updated.
        self._owed: dict[PagedTensor, int] = {}
        self._parameters: set[PagedTensor] = set()
        self._batches = Batches(compute, [], stays=True, sent_for=sent_for)
        self._batches.sparing = True
        self._pool.owed = self

    # ---- what it takes on --------------------------------------------------------------------------------------

    def add(self, work: Work) -> None:
        """More parameters to update, whose gradients are whole and its own from now on.

        Raises:
            DiskError: a transfer had failed; what was not taken on is lost.
        """
        left = deque(work)
        try:
            while left:
                if self._host is not None and self._host.take(left[0]):
                    self.touched = True
                    self._parameters.add(left[0][1].slot.value.block)
                else:
                    self._add_here(left[0])
                left.popleft()
        except BaseException:
            self.lost += len(left)
            with self._at_work():
                for _, _, grad in left:
                    grad.drop()
            raise

    def _add_here(self, entry: Entry) -> None:
        self._owed |= {part.block: len(self._batches.work) for part in parts_of(entry).values()}
        self._parameters.add(entry[1].slot.value.block)
        self._batches.work.append(entry)

    def close(self, work: Work, order: dict[str, int]) -> None:
        """The step has come: what has not begun is done in the order in which it will be needed.

        Args:
            work: what is to be updated beside what was added.
            order: the place of each parameter in the next forward, by name.

        Raises:
            DiskError: a transfer had failed; the step is not whole then.
        """
        batches, early = self._batches, bool(self._batches.work)
        self.whole, batches.sparing = True, False
        try:
            self.add(ordered(work, order))
        except BaseException as error:
            self.give_up(error)
            raise
        if early:
            batches.reorder(order)
            for index in range(batches.begun, len(batches.work)):
                self._owed |= {part.block: index for part in parts_of(batches.work[index]).values()}
        self._end_if_done()
        self.pump()

    # ---- what it says ------------------------------------------------------------------------------------------

    @property
    def work(self) -> Work:
        """What it goes over."""
        return self._batches.work + (self._host.entries if self._host is not None else [])

    @property
    def updated(self) -> set[str]:
        """The blocks of what has been updated, but for those on the CPU beside a device, by name."""
        return {state.block_name for _, state, _ in self._batches.work[: self._batches.done]}

    @property
    def count_done(self) -> int:
        """How many parameters have been updated."""
        host = self._host
        return self._batches.done + (0 if host is None else len(host.entries) - len(host.unfinished))

    @property
    def open_bytes(self) -> int:
        """See `ptm_accel.model.following.Beside`: of parameters that are updated in parts nothing is planned."""
        return self._batches.pinned_bytes

    def awaits(self, tensor: PagedTensor) -> bool:
        """Whether an update that is still to be done uses the tensor."""
        return tensor in self._owed or self.elsewhere(tensor)

    def elsewhere(self, tensor: PagedTensor) -> bool:
        """See `Owed`."""
        return self._host is not None and self._host.owes(tensor)

    def refuse_open(self, what: str) -> None:
        """Says that `what` was done between a backward in which updates have begun and the step that they belong to.

        Raises:
            UnsupportedError: so it is.
        """
        if not self.whole:
            raise UnsupportedError(
                f"{what} between backward and optimizer.step(), after updates had begun: nobody may see half a step. "
                "Do it elsewhere, or set update='blocking'; and resume from the last checkpoint."
            )

    @property
    def ended(self) -> bool:
        """Whether nothing is left to be done, or what was left has been given up."""
        return self._pool.owed is not self

    # ---- carrying on -------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Updates what has arrived and opens what there is room for; never waits."""
        batches = self._batches
        if self._owed and not self._working and (batches.arrived() or batches.could_open):
            with self._at_work():
                while batches.arrived():
                    self._update()
                    batches.open(insist=False)
                if self._owed and batches.could_open:
                    batches.open(insist=False)
        self.look()

    def look(self) -> None:
        """Takes note of updates on the CPU that have ended: what they were of can be sent for now."""
        if self._host is not None and self._host.can_go_on and not self._working:
            with self._at_work():
                self._host.pump()
                refused, self._host.refused = self._host.refused, []
                for entry in refused:
                    self._add_here(entry)
                self._end_if_done()

    def catch_up(self, most_bytes: int) -> None:
        """Waits until gradients of no more than `most_bytes` are left to be used up.

        Raises:
            DiskError, BudgetError: a transfer failed, or there is no room; the step is not whole then.
        """
        while not self._working and most_bytes < sum(b.slot_bytes for b in self._owed if b.tag is Tag.GRAD):
            self._advance(self._batches.done)

    def finish(self) -> None:
        """Carries out all that is left.

        Raises:
            DiskError, BudgetError: a transfer failed, or there is no room; the step is not whole then.
            UnsupportedError: the step has not been asked for yet.
        """
        self.refuse_open("the model or its optimizer was looked at as a whole")
        while not self._working and not self.ended:
            self._advance(len(self._batches.work) - 1 if self._owed else None)

    def before_use(self, tensor: PagedTensor) -> None:
        """See `Owed`.

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
        while self.awaits(tensor):
            self._advance(self._owed.get(tensor))

    def give_way(self) -> bool:
        """See `Owed`.

        Raises:
            DiskError: a transfer failed.
        """
        if self._working or not self._batches:
            return False
        self._batches.wait()
        if self._batches:
            with self._at_work():
                self._update()
        return True

    def _advance(self, index: int | None) -> None:
        """Carries out updates until that of parameter `index` is done; without one waits for the CPU's next window.

        What the CPU cannot take after all comes back, and is owed here then.
        """
        if index is None:
            assert self._host is not None
            job = self._host.next_job
            if job is not None:
                with self._pool.traffic.stalled():
                    job.wait()
            self.look()
            return
        while self._owed and self._batches.done <= index:
            if not self._batches:
                with self._at_work(loses=not self.whole):
                    self._batches.open(insist=True)
            if self._batches:
                self._batches.wait()
                with self._at_work():
                    self._update()
                    self._batches.open(insist=False)

    def _update(self) -> None:
        self.touched = True
        for unit in self._batches.update(self._scale, self.hyper):
            if unit.last:
                for block in unit.blocks.values():
                    # Not before the last of its members.
                    if self._owed.get(block, self._batches.done) < self._batches.done:
                        del self._owed[block]
        self._end_if_done()

    @contextmanager
    def _at_work(self, *, loses: bool = True) -> Iterator[None]:
        """Around work on updates.

        Args:
            loses: the step is lost if there is no room for it; otherwise nothing is done yet, and all is still owed.
        """
        pool = self._pool
        begin = time.perf_counter() - pool.stats.stall_s
        try:
            # Whatever surrounds the forward (autocast, gradients, torch function modes) is not for the update.
            with pool.unadvised(), _plainly(pool.compute.device.type), torch.no_grad():
                self._working = True
                try:
                    with torch._C.DisableTorchFunction():
                        yield
                except BaseException as error:
                    if loses or not isinstance(error, BudgetError):
                        self.give_up(error)
                        raise
                    # Of a device's it is another, which callers who try smaller batches know.
                    raise type(error)(_STILL_OWED.format(error)) from error
                finally:
                    self._working = False
        finally:
            self._spent(time.perf_counter() - pool.stats.stall_s - begin)

    # ---- the end -----------------------------------------------------------------------------------------------

    def give_up(self, error: BaseException | None = None) -> None:
        """Ends what is open without updating it; what was asked for is lost.

        Args:
            error: why, which whoever looked at a parameter is given, and may not log.
        """
        if error is not None:
            logger.error(
                "an optimizer step was broken off (%s: %s) when %d of its %d parameters had been updated; the rest is "
                "lost. Resume from the last checkpoint.",
                type(error).__name__,
                error,
                self.count_done,
                len(self.work) + self.lost,
            )
        self._owed.clear()
        left = self._batches.work[self._batches.done :]
        if self._host is not None:
            left = left + self._host.unfinished + self._host.refused
        self.lost += len(left)
        # From the last to the first, and whatever one of them raises, the others are done.
        with ExitStack() as ending:
            ending.callback(self._end)
            for _, _, grad in left:
                ending.callback(grad.drop)
            if self._host is not None:
                ending.callback(self._host.give_up)
            self._batches.abandon()

    def _end_if_done(self) -> None:
        busy = self._host is not None and self._host.busy
        if self.whole and self._batches.done == len(self._batches.work) and not busy:
            self._end()

    def _end(self) -> None:
        if not self.ended:
            self._owed.clear()
            if self._host is not None:
                self._host.close()
            self._pool.owed = None
            self._ended(self)


def _plainly(device_type: str) -> ExitStack:
    """Neither inference mode nor autocast; where there is neither, that is looked up more quickly than it is set."""
    modes = ExitStack()
    if torch.is_inference_mode_enabled():
        modes.enter_context(torch.inference_mode(False))
    if torch.is_autocast_enabled(device_type):
        modes.enter_context(torch.autocast(device_type, enabled=False))
    return modes
