"""Exact overlapped updating: an optimizer step that is carried out while the next forward runs.

Clipping by the global norm lets no update begin before the last gradient is in, so others wait for the whole update at
`optimizer.step()` or speculate. Here `step()` fixes what is to be done (gradients, clip coefficient, learning rates)
and returns; the updates follow in the order in which the next forward reads the parameters. Their transfers run beside
its compute, and an access waits for the update of that tensor alone. Nothing is stale: whoever looks at a parameter, at
its state or at a checkpoint sees what a blocking step would have left (`Pool.owed`).

Where nothing can come between a gradient and its update (`ptm_accel.optim.in_backward`) the work begins empty, during
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
from ptm_accel.memory.paged import PagedTensor, Part
from ptm_accel.optim.batches import Batches
from ptm_accel.optim.host_updates import HostUpdates
from ptm_accel.optim.hyperparameters import kept_hyperparameters, still_hold
from ptm_accel.optim.sweep import Sweep
from ptm_accel.optim.units import Cursor, Entry, Work, ordered

logger = logging.getLogger(__name__)

_STILL_OWED = (
    "{} What is left of the last optimizer step is still owed, and nothing of it is lost: the model can be saved once "
    "this forward has ended. Where a forward holds so much (parameters that a parent reads by name stay until it "
    "returns), set update='blocking'."
)
"""What is said where there is no room for an update beside a forward."""

BeginOnHost = Callable[[torch.Tensor | None, list[dict[str, Any]]], HostUpdates]
"""Makes what updates on the CPU, of what gradients are multiplied by and of the hyperparameters of each group."""


class Chase:
    """One optimizer step under way.

    Args:
        sweep: carries out its parts.
        whole: whether all of it is given at once (`begin`); otherwise more comes (`add`), until `close`.
        scale: what gradients are multiplied by first, if anything.
        sent_for: see `Cursor`.
        on_host: makes what takes some of the updates over; None if all are for the compute tier.
        spent: is told the seconds of the calling thread that updates have taken, waiting for memory left out.
        ended: called when the last update is done, or the rest was given up.

    Attributes:
        whole: see above.
        touched: whether updates have been begun, which may have changed something.
        lost: how many parameters will not be updated, because the rest was given up.
    """

    def __init__(
        self,
        sweep: Sweep,
        scale: torch.Tensor | None,
        *,
        whole: bool = True,
        sent_for: Callable[[str], bool] = lambda name: False,
        on_host: BeginOnHost | None = None,
        spent: Callable[[float], None],
        ended: Callable[[], None],
    ) -> None:
        self._sweep = sweep
        self._scale = scale
        self._spent = spent
        self._ended = ended
        self._hyper = kept_hyperparameters(sweep.inner.param_groups)
        self._on_host = None if on_host is None else on_host(scale, self._hyper)
        self._working = False
        # Which tensors may not be looked at before which parameter has been updated.
        self._owed: dict[PagedTensor, int] = {}
        # The gradients that are still to be used, by their block.
        self._gradients: dict[PagedTensor, list[Part]] = {}
        self._parameters: set[PagedTensor] = set()
        self._done = 0
        self.whole = whole
        self.touched = False
        self.lost = 0
        self._cursor = Cursor([], stays=True, sparing=not whole, sent_for=sent_for)
        self._batches = Batches(sweep, self._cursor)
        sweep.pool.owed = self

    def begin(self, work: Work) -> None:
        """Takes on what is to be updated, in the order in which it will be needed; the gradients are its own.

        Raises:
            DiskError: a transfer had failed; the step is not whole then.
        """
        try:
            self._add_all(work)
        except BaseException as error:
            self._lose(error)
            raise

    def _add_all(self, work: Work) -> None:
        left = deque(work)
        try:
            while left:
                self.add(left.popleft())
        except BaseException:
            self.lost = 1 + len(left)
            for _, _, grad in left:
                grad.drop()
            raise

    def add(self, entry: Entry) -> None:
        """One more parameter to update; its gradient is whole.

        Raises:
            DiskError: a transfer had failed.
        """
        _, state, grad = entry
        if self._on_host is not None:
            try:
                taken = self._on_host.take(entry)
            except BaseException:
                with self._at_work():
                    grad.drop()
                raise
            if taken:
                self.touched = True
                self._parameters.add(state.slot.value.block)
                return
        self._add_here(entry)

    def _add_here(self, entry: Entry) -> None:
        _, state, grad = entry
        self._owed |= dict.fromkeys(state.blocks(), len(self._cursor.work))
        if grad.value is not None:
            self._gradients.setdefault(grad.value.block, []).append(grad.value)
        self._parameters.add(state.slot.value.block)
        self._cursor.work.append(entry)

    def close(self, work: Work, order: dict[str, int]) -> None:
        """Adds the rest; what has not begun is done in the order in which it will be needed.

        Args:
            work: what is to be updated beside what was added.
            order: the place of each parameter in the next forward, by name.
        """
        self._add_all(ordered(work, order))
        self.whole, self._cursor.sparing = True, False
        self._cursor.reorder(order)
        everything, begun = self._cursor.work, self._cursor.begun
        for index in range(begun, len(everything)):
            self._owed |= dict.fromkeys(everything[index][1].blocks(), index)
        self._end_if_done()

    @property
    def updated(self) -> set[str]:
        """The blocks of what has been updated, but for those on the CPU beside a device, by name."""
        return {state.block_name for _, state, _ in self._cursor.work[: self._done]}

    def awaits(self, tensor: PagedTensor) -> bool:
        """Whether an update that is still to be done uses the tensor."""
        return tensor in self._owed or tensor in self._gradients or self.elsewhere(tensor)

    def elsewhere(self, tensor: PagedTensor) -> bool:
        """See `Owed`."""
        return self._on_host is not None and self._on_host.owes(tensor)

    def pump(self) -> None:
        """Updates what has arrived and opens what there is room for; never waits."""
        if self._owed and not self._working and (self._batches.arrived() or self._batches.could_open):
            with self._at_work():
                while self._batches.arrived():
                    self._update()
                    self._batches.open(insist=False)
                if self._owed and self._batches.could_open:
                    self._batches.open(insist=False)
        self.look()

    def look(self) -> None:
        """Takes note of updates on the CPU that have ended: what they were of can be sent for now."""
        if self._on_host is not None and self._on_host.can_go_on and not self._working:
            with self._at_work():
                self._look_at_host()

    def catch_up(self, most_bytes: int) -> None:
        """Waits until gradients of no more than `most_bytes` are left to be used up.

        Raises:
            DiskError, BudgetError: a transfer failed, or there is no room; the step is not whole then.
        """
        while self._owed and not self._working and self.waiting_bytes > most_bytes:
            self._advance(self._done)

    @property
    def open_bytes(self) -> int:
        """See `ptm_accel.model.following.Beside`: of parameters that are updated in parts nothing is planned."""
        return self._batches.pinned_bytes

    @property
    def waiting_bytes(self) -> int:
        """What is held of gradients that are not used up yet."""
        return sum(part.slot_bytes for parts in self._gradients.values() for part in parts)

    def finish(self) -> None:
        """Carries out all that is left.

        Raises:
            DiskError, BudgetError: a transfer failed, or there is no room; the step is not whole then.
            UnsupportedError: the step has not been asked for yet.
        """
        self.refuse_open("the model or its optimizer was looked at as a whole")
        # What the CPU cannot take after all comes back, and is owed here then.
        while not self._working and (self._owed or (self._on_host is not None and self._on_host.busy)):
            if self._owed:
                self._advance(len(self._cursor.work) - 1)
            else:
                self._wait_for_host()

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

    def refuse_lost(self) -> None:
        """Says that the step cannot be made any more, because what had begun of it was given up.

        Raises:
            UnsupportedError: so it is.
        """
        if not self.whole and self._sweep.pool.owed is not self:
            raise UnsupportedError(
                f"optimizer.step() was called after an update of that step had failed: of {len(self.work)} that had "
                f"begun during backward {self.count_done()} were carried out, so the weights are between two steps. "
                "Resume from the last checkpoint; with update='blocking' no update begins before optimizer.step()."
            )

    def count_done(self) -> int:
        """How many parameters have been updated."""
        host = self._on_host
        return self._done + (0 if host is None else len(host.entries) - len(host.unfinished))

    @property
    def work(self) -> Work:
        """What it goes over."""
        return self._cursor.work + (self._on_host.entries if self._on_host is not None else [])

    def unchanged(self) -> bool:
        """Whether the groups and their hyperparameters are still those that it goes by."""
        return still_hold(self._hyper, self._sweep.inner.param_groups, self.work)

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

    def _lose(self, error: BaseException) -> None:
        """Gives up what is left because of an error, which whoever looked at a parameter is given, and may not log."""
        logger.error(
            "an optimizer step was broken off (%s: %s) when %d of its %d parameters had been updated; the rest is "
            "lost. Resume from the last checkpoint.",
            type(error).__name__,
            error,
            self.count_done(),
            len(self.work),
        )
        self.give_up()

    def give_up(self) -> None:
        """Ends what is open without updating it; what was asked for is lost."""
        self._owed.clear()
        self._gradients.clear()
        self._batches.clear()
        left = self._cursor.work[self._done :]
        if self._on_host is not None:
            left = left + self._on_host.unfinished + self._on_host.refused
        self.lost += len(left)
        # From the last to the first, and whatever one of them raises, the others are done.
        with ExitStack() as ending:
            ending.callback(self._end)
            for _, _, grad in left:
                ending.callback(grad.drop)
            if self._on_host is not None:
                ending.callback(self._on_host.give_up)
            self._batches.abandon()

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
        # What the CPU cannot take after all comes back, and is owed here then.
        while tensor in self._owed or self.elsewhere(tensor):
            if tensor in self._owed:
                self._advance(self._owed[tensor])
            else:
                self._wait_for_host()

    def _advance(self, index: int) -> None:
        """Carries out updates until that of parameter `index` is done."""
        while self._owed and self._done <= index:
            if not self._batches:
                with self._at_work(loses=not self.whole):
                    self._batches.open(insist=True)
            if self._batches:
                self._batches.wait()
                with self._at_work():
                    self._update()
                    self._batches.open(insist=False)

    def _wait_for_host(self) -> None:
        """Waits for the next window that is updated on the CPU."""
        assert self._on_host is not None
        job = self._on_host.next_job
        if job is not None:
            with self._sweep.pool.traffic.stalled():
                job.wait()
        with self._at_work():
            self._look_at_host()

    def _look_at_host(self) -> None:
        assert self._on_host is not None
        self._on_host.pump()
        refused, self._on_host.refused = self._on_host.refused, []
        for entry in refused:
            self._add_here(entry)
        self._end_if_done()

    def _update(self) -> None:
        batch = self._batches.take()
        for _, _, grad in [entry for unit in batch if unit.last for entry in unit.entries]:
            if grad.value is not None:
                self._forget_gradient(grad.value)
        self.touched = True
        self._batches.carry_out(batch, self._scale, self._hyper)
        for unit in batch:
            if unit.last:
                self._done += len(unit.entries)
                for block in unit.state.blocks():
                    # Not before the last of its members.
                    if self._owed.get(block, self._done) < self._done:
                        del self._owed[block]
        self._end_if_done()

    def _forget_gradient(self, part: Part) -> None:
        left = self._gradients[part.block]
        left.remove(part)
        if not left:
            del self._gradients[part.block]

    def _end_if_done(self) -> None:
        busy = self._on_host is not None and self._on_host.busy
        if self.whole and self._done == len(self._cursor.work) and not busy:
            self._end()

    def _end(self) -> None:
        if self._sweep.pool.owed is not self:
            return
        self._owed.clear()
        if self._on_host is not None:
            self._on_host.close()
        self._sweep.pool.owed = None
        self._ended()

    @contextmanager
    def _at_work(self, *, loses: bool = True) -> Iterator[None]:
        """Around work on updates.

        Args:
            loses: the step is lost if there is no room for it; otherwise nothing is done yet, and all is still owed.
        """
        pool = self._sweep.pool
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
                        self._lose(error)
                        raise
                    # Of a device's it is another, which callers who try smaller batches know.
                    raise type(error)(_STILL_OWED.format(error)) from error
                finally:
                    self._working = False
        finally:
            self._spent(time.perf_counter() - pool.stats.stall_s - begin)


def _plainly(device_type: str) -> ExitStack:
    """Neither inference mode nor autocast; where there is neither, that is looked up more quickly than it is set."""
    modes = ExitStack()
    if torch.is_inference_mode_enabled():
        modes.enter_context(torch.inference_mode(False))
    if torch.is_autocast_enabled(device_type):
        modes.enter_context(torch.autocast(device_type, enabled=False))
    return modes
