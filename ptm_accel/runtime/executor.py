"""The executor: brings blocks in for a model's hooks.

Calls go one way: hooks -> executor -> pool -> transfers. At each access the pending update of the block is made first,
then the plan of the pass is followed, then the pool brings the block in. Updates use the pool itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.utils._python_dispatch import _disable_current_modes

from ptm_accel.memory.block import Block, Part, Pin
from ptm_accel.memory.cut import Cut
from ptm_accel.memory.dispatch import keeps_results
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.timeline import Span, during

_functorch = torch._C._functorch
_dispatch_modes = torch._C._len_torch_dispatch_stack


@contextmanager
def _plainly() -> Iterator[None]:
    """No `torch.func` and no dispatch modes: what is made within them is of their kind, and of no use after them."""
    with temporarily_clear_interpreter_stack(), _disable_current_modes():
        yield


class Plan(Protocol):
    """Starts loads and evictions ahead of the accesses of a pass. Called with the pool's lock held."""

    def accessed(self, block: Block, *, write: bool) -> None:
        """The block is about to be used; it may not be resident yet."""
        ...

    def awaited(self, block: Block) -> None:
        """A fault: the load of the block has begun, and its user waits."""
        ...

    def created(self, block: Block) -> None:
        """The block gets its first bytes from a caller."""
        ...


class Gathers(Protocol):
    """Blocks that are put together from the ranges of several ranks before they are used."""

    def begin(self, kind: Hashable) -> None:
        """A pass begins."""
        ...

    def before_use(self, block: Block) -> None:
        """The block is about to be used: it is there, or arriving, afterwards. Called with the pool's lock held."""
        ...

    def give_up(self, block: Block) -> bool:
        """Drops the block, since what this rank owns of it is about to change, unless it is pinned.

        Called with the pool's lock held.

        Returns:
            whether it is gone.
        """
        ...

    def gather(self, what: str, whole: torch.Tensor, cut: Cut) -> None:
        """Puts one tensor together that is not a block, such as a gradient, once all ranks have come here.

        Args:
            what: this rank does, for messages.
            whole: `cut.padded` elements, of which those that this rank owns are there.
            cut: what it owns.
        """
        ...


class PendingUpdates(Protocol):
    """Updates of blocks that are still to be made. Called with the pool's lock held."""

    def before_use(self, block: Block) -> None:
        """The block is about to be used: makes its pending update first."""
        ...

    def before_evaluation(self) -> None:
        """A forward begins that is not of training."""
        ...

    def elsewhere(self, block: Block) -> bool:
        """Whether the block is being changed in its backing store, and must not be loaded yet."""
        ...

    def finish(self) -> None:
        """Makes all pending updates now."""
        ...

    def give_way(self) -> bool:
        """Makes some pending updates to free the memory that they hold; False if there are none."""
        ...

    def give_up(self) -> None:
        """The pool is about to close: drops all pending updates."""
        ...


class Executor:
    """Serves the accesses of one model.

    Args:
        pool: where its blocks are.

    Attributes:
        pool: see above.
        pending_updates: made before what they change is used; None if there are none.
        plan: that of the pass under way; None outside of one.
        gathers: brings in blocks of which each rank owns a range (`Block.backing`); None where there are none.
    """

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.pending_updates: PendingUpdates | None = None
        self.plan: Plan | None = None
        self.gathers: Gathers | None = None
        self._aside = False
        pool.holder = self

    # ---- accesses ------------------------------------------------------------------------------------------------

    def fault(self, tensor: Block | Part, *, write: bool = False) -> torch.Tensor:
        """As `Pool.fault`, after the pending update of the block.

        Raises:
            BudgetError: no room can be made.
            DiskError: a transfer failed.
        """
        if _functorch.peek_interpreter_stack() is not None or (_dispatch_modes() and keeps_results()):
            with _plainly():
                return self.fault(tensor, write=write)
        block = tensor.block if isinstance(tensor, Part) else tensor
        with self.pool.lock:
            return self.pool.fault(tensor, write=write, begun=self._before(block, write))

    def pin(self, tensor: Block | Part, *, write: bool = False) -> Pin:
        """Like `fault`, and keeps the block there until the pin is released."""
        if _functorch.peek_interpreter_stack() is not None or (_dispatch_modes() and keeps_results()):
            with _plainly():
                return self.pin(tensor, write=write)
        block = tensor.block if isinstance(tensor, Part) else tensor
        with self.pool.lock:
            return self.pool.pin(tensor, write=write, begun=self._before(block, write))

    def _before(self, block: Block, write: bool) -> Callable[[Block], object] | None:
        """Makes the pending update of a block that is to be used, and tells the plan, or gathers it.

        Returns:
            what is called once a load that is waited for has begun.
        """
        if block.backing is not None:
            assert self.gathers is not None, block
            self.gathers.before_use(block)
            return None
        if self.pending_updates is not None:
            self.pending_updates.before_use(block)
        # Its end may come with this access.
        plan = self.plan
        if plan is None or self._aside:
            return None
        plan.accessed(block, write=write)
        return plan.awaited

    def update_first(self, block: Block) -> None:
        """Makes the pending update of a block, if there is one."""
        if self.pending_updates is not None:
            self.pending_updates.before_use(block)

    def adopt(self, block: Block, data: torch.Tensor, *, copied: bool = False) -> None:
        """As `Pool.adopt`, after the pending update of the block.

        Raises:
            BudgetError: no room for its bytes.
        """
        with self.pool.lock:
            self.update_first(block)
            if self.plan is not None and not self._aside:
                self.plan.created(block)
            self.pool.adopt(block, data, copied=copied)

    def make(self, block: Block) -> torch.Tensor:
        """As `Pool.make`.

        Raises:
            BudgetError: no room can be made.
        """
        with self.pool.lock:
            if self.plan is not None and not self._aside:
                self.plan.created(block)
            return self.pool.make(block)

    def forget(self, tensor: Block | Part) -> None:
        """As `Pool.forget`, after the pending update of a block that ends with this."""
        with self.pool.lock:
            if self.pending_updates is not None and not (isinstance(tensor, Part) and tensor.used - {tensor.member}):
                self.pending_updates.before_use(tensor.block if isinstance(tensor, Part) else tensor)
            self.pool.forget(tensor)

    def finish_updates(self) -> None:
        """Makes all pending updates.

        Raises:
            DiskError, BudgetError: a transfer failed, or there is no room; the step is not whole then.
        """
        with self.pool.lock:
            if self.pending_updates is not None:
                self.pending_updates.finish()

    def snapshot(self, tensor: Block | Part) -> torch.Tensor:
        """As `Pool.snapshot`, after all pending updates: snapshots, taken of many, leave them little room."""
        with self.pool.lock:
            self.finish_updates()
            if isinstance(tensor, Part) and tensor.block.backing is not None:
                return self.copied(tensor, torch.device("cpu"))
            return self.pool.snapshot(tensor)

    def copied(self, part: Part, device: torch.device) -> torch.Tensor:
        """Returns a copy in ordinary memory, beside the budgets. Nothing is loaded, evicted or stored for it.

        Raises:
            DiskError: what is away cannot be read.
        """
        with self.pool.lock:
            self.finish_updates()
            if part.block.backing is not None:
                with self.pin(part) as values:
                    return values.detach().to(device, copy=True)
            # A block that is being loaded has a buffer without values.
            if part.place.resident:
                extent = part.block.extent
                assert extent is not None
                return part.of(extent.tensor).detach().to(device, copy=True)
            return self.pool.snapshot(part).to(device, copy=True).contiguous()

    # ---- plans and updates ---------------------------------------------------------------------------------------

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While it lasts the plan is told of no access: those of an update are no part of a pass."""
        before, self._aside = self._aside, True
        try:
            with during(self.pool.timeline, Span.BESIDE):
                yield
        finally:
            self._aside = before

    @contextmanager
    def own_work(self) -> Iterator[None]:
        """Counts the time inside as our own work (`PoolStats.own_s`). What is called often does so without a call.

        After an exception nothing is counted: the pass is not counted either.
        """
        stats = self.pool.stats
        begin = time.perf_counter() - stats.elsewhere_s
        yield
        spent = time.perf_counter() - stats.elsewhere_s - begin
        stats.own_s += spent
        stats.elsewhere_s += spent

    def give_way(self) -> bool:
        """Makes a pending update that holds memory; False if there is none."""
        return self.pending_updates is not None and self.pending_updates.give_way()

    def give_up(self) -> None:
        """Drops all pending updates: the pool closes."""
        pending_updates, self.pending_updates = self.pending_updates, None
        if pending_updates is not None:
            pending_updates.give_up()
