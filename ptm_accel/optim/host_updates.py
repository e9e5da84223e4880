"""Updates on the CPU beside a device: in place, on the pages in host memory, while the device computes.

What an update on the device moves over the link is all of the state, in and out. An update where the state lies moves
the gradient out and the parameter in, and takes time of the CPU instead (ZeRO-Offload; Deep Optimizer States splits
the work between both, which is what the plan does: `ptm_accel.schedule.placement`). Windows are pages, so nothing is
copied and nothing is allocated for them.

The thread that trains opens windows and closes them, in the order of the next forward; one other thread does nothing
but arithmetic on them, after the transfers that they wait for. It has an optimizer of its own with the same
hyperparameters (`twin_of`), since the user's may be looked at, or scheduled, meanwhile.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Any

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.block import Block, Part, Place
from ptm_accel.memory.budget import Reservation, Tag
from ptm_accel.memory.copies import Keeping
from ptm_accel.memory.host_store import HostStore
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.transfer import ALIGN_BYTES, Transfer
from ptm_accel.memory.windows import HostWindow, Window, window_elements
from ptm_accel.model.floor import update_extra_bytes
from ptm_accel.optim.arithmetic import Arithmetic
from ptm_accel.optim.on_host import OnHost
from ptm_accel.optim.units import (
    Entry,
    ParamState,
    Unit,
    Work,
    blocks_of,
    count_pending,
    group_at,
    is_widened,
    parts_of,
    uncount_pending,
)
from ptm_accel.optim.worker import UpdateJob


def twin_of(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class with groups and state of its own, both empty of parameters."""
    twin: torch.optim.Optimizer = object.__new__(type(inner))
    twin.__dict__.update(inner.__dict__)
    twin.param_groups = [{**group, "params": []} for group in inner.param_groups]
    twin.state = defaultdict(dict)
    return twin


class HostUpdates:
    """The updates of one step that are carried out on the CPU beside a device, as `Batches` has those of the device.

    All methods are for the thread that trains, which holds no lock of the pool's.

    Args:
        owner: with whose thread.
        scale: what gradients are multiplied by first, on the device, if anything.
        hyper: the hyperparameters of each group.
        refused: is given those of which it turns out later that the host has no room for them.

    Attributes:
        work: the updates that it has taken over, in order.
        done: how many of them are done.
        pending_updates: how many updates that are still to be done, or under way, use a block: what the backing store
            has of it is not to be read.
    """

    def __init__(
        self,
        owner: OnHost,
        scale: torch.Tensor | None,
        hyper: list[dict[str, Any]],
        refused: Callable[[Entry], None],
    ) -> None:
        self.work: Work = []
        self.done = 0
        self.pending_updates: dict[Block, int] = {}
        self._owner = owner
        self._compute = owner.compute
        self._pool = owner.compute.pool
        assert isinstance(self._pool.backing, HostStore)
        self._backing = self._pool.backing
        # A multiple of the alignment of every dtype, which a page holds whole.
        self._window_elements = window_elements(owner.compute.window_bytes, 4)
        self._hyper = hyper
        self._scale = scale
        self._scale_comes: Transfer | None = None
        self._arithmetic: Arithmetic | None = None
        # One window is updated at a time.
        self._scratch: list[Reservation] = []
        # What is to be opened, with the first element that is not yet; and what is open, in the same order.
        self._waiting: deque[tuple[Entry, int]] = deque()
        self._open: deque[UpdateJob] = deque()
        self._open_bytes = 0
        self._refused = refused
        self._spent_s = 0.0
        self._counts_come: list[Transfer] = []

    # ---- what it takes -----------------------------------------------------------------------------------------

    def take(self, entry: Entry) -> bool:
        """Takes an update over, if all that it uses can be had in the backing store: what is not there is sent there.

        Returns:
            whether it did.

        Raises:
            DiskError: a transfer failed.
        """
        if not self._owner.chosen(entry[1].block_name):
            return False
        tensors = list(parts_of(entry).values())
        if len(tensors) * self._backing.page_bytes > self._owner.most_bytes or self._is_looked_at(
            entry[1].slot.own.block
        ):
            return False
        step = self._step(entry)
        if not all(self._can_be_held(tensor, step) for tensor in tensors) or not self._prepare(entry):
            return False
        try:
            for part in tensors:
                self._send_to_backing(part.block)
        except BudgetError:
            # The backing store is full: what has gone there is as good there.
            return False
        # Some are padded in the backing store, what was never stored there is nowhere, and what could not be stored is
        # here.
        blocks = [part.block for part in tensors]
        if any(block.place is not Place.AWAY or block.stored_bytes < block.nbytes for block in blocks):
            return False
        try:
            for block in blocks:
                if block.handle.snapshots:
                    self._pool.traffic.set_apart(block)
        except BudgetError:
            return False
        self._counts_come += _counts_to_host(entry[1], self._backing)
        count_pending(self.pending_updates, entry)
        self._waiting.append((entry, 0))
        self.work.append(entry)
        return True

    def _is_looked_at(self, value: Block) -> bool:
        """Whether somebody has a view of a parameter's values, and would see an update of them on the device."""
        if value.extent is None or not value.place.resident:
            return False
        return self._pool.eviction.is_spared(value) or value.viewed

    def _step(self, entry: Entry) -> int:
        """Elements of the smallest window of an update: it lies on one page of each tensor."""
        widest = max(part.dtype.itemsize for part in parts_of(entry).values())
        return min(self._window_elements, self._backing.page_bytes // widest)

    def _can_be_held(self, part: Part, step: int) -> bool:
        block, nbytes, page_bytes = part.block, step * part.dtype.itemsize, self._backing.page_bytes
        # Where a wider tensor has many windows, a narrower one may have parts of its only page.
        cuts = nbytes % ALIGN_BYTES == 0 and (page_bytes % nbytes == 0 or block.slot_bytes <= page_bytes)
        return block.movable and not block.pins and block.place is not Place.BLANK and (cuts or block.nbytes <= nbytes)

    def _send_to_backing(self, tensor: Block) -> None:
        if tensor.place is Place.ARRIVING:
            self._pool.admission.turn_back(tensor)
        elif tensor.place.resident:
            self._pool.admission.evict(tensor)

    def _prepare(self, entry: Entry) -> bool:
        """Makes ready for an update, if there is room for what the arithmetic of one window allocates."""
        compute, cpu = self._compute, torch.device("cpu")
        arithmetic = self._arithmetic
        if arithmetic is None:
            arithmetic = Arithmetic(twin_of(compute.inner), compute.optimizer_memory, cpu, _there, compute.threads)
        elements = min(entry[1].slot.own.numel, arithmetic.grain or self._window_elements)
        nbytes = update_extra_bytes(compute.optimizer_memory, elements, 4, widened=is_widened(entry))
        missing = nbytes - sum(held.nbytes for held in self._scratch)
        if missing > 0:
            self._backing.make_room(missing)
            try:
                self._scratch.append(self._backing.budget.reserve(missing, Tag.STAGING, "updates on the CPU"))
            except BudgetError:
                return False
        if self._arithmetic is None:
            self._scale, self._scale_comes = _on_the_host(self._backing, self._scale)
            self._arithmetic = arithmetic
        return True

    # ---- what it does ------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Returns whether a window is open."""
        return bool(self._open)

    @property
    def could_open(self) -> bool:
        """Whether windows wait to be opened, and none is open that has to end first."""
        return bool(self._waiting) and not self._open

    def arrived(self) -> bool:
        """Returns whether there is a first window, and its arithmetic has ended."""
        return bool(self._open) and self._open[0].done()

    def wait(self) -> None:
        """Waits for the arithmetic of the first window, well or not."""
        with self._pool.traffic.stalled():
            self._open[0].wait()

    def update(self) -> list[Block]:
        """Closes the first window, whose arithmetic has ended.

        Returns:
            the block of the parameters that it ends, if it is their last.

        Raises:
            PTMError: a transfer failed; whatever was raised in the thread that updates.
        """
        job = self._open.popleft()
        unit = job.unit
        self._close(job)
        after = job.result()
        if unit.last:
            self.done += len(unit.entries)
            for (_, state, _), small in zip(unit.entries, after, strict=True):
                state.small = small
                if state.master is not None:
                    state.mastered = state.slot.own.numel
            uncount_pending(self.pending_updates, unit)
            unit.end()
        return [unit.blocks[""]] * unit.last

    def open(self, *, insist: bool) -> None:
        """Opens windows, as many as may be held; never waits for arithmetic.

        Args:
            insist: without effect: there is room for one, or the update is refused.

        Raises:
            BudgetError: there is no room for the next window of a parameter that has begun.
        """
        while self._waiting:
            entry, start = self._waiting[0]
            unit = (None if start else self._all_of_group()) or self._next(entry, start)
            if self._open and self._open_bytes + _held_bytes(unit) > self._owner.most_bytes:
                return
            try:
                self._hold(unit)
            except BudgetError:
                # Windows that are open hold frames; one more fits when they are closed.
                if self._open:
                    return
                if start:
                    raise
                self._refuse(unit)
                continue
            for _ in unit.entries:
                self._waiting.popleft()
            if not unit.last:
                self._waiting.appendleft((entry, unit.stop))
            job = UpdateJob(unit, self._wait, self._update)
            self._open.append(job)
            try:
                self._owner.worker.submit(job)
            except BaseException:
                # Nobody will end it, so nobody may wait for it.
                self._open.remove(job)
                self._close(job)
                raise

    def _refuse(self, unit: Unit) -> None:
        """Hands an update back, and all that wait for the same blocks: the device loads a block as a whole."""
        # What updates them in its place reads the counts where they were sent to.
        for transfer in self._counts_come:
            transfer.wait()
        blocks = set(unit.blocks.values())
        given = [entry for entry, _ in self._waiting if not blocks.isdisjoint(blocks_of(entry))]
        kept = {id(entry) for entry in self.work} - {id(entry) for entry in given}
        self.work = [entry for entry in self.work if id(entry) in kept]
        self._waiting = deque(each for each in self._waiting if id(each[0]) in kept)
        for entry in given:
            uncount_pending(self.pending_updates, Unit([entry], 0, entry[1].slot.own.numel, last=True, new=False))
        for entry in given:
            self._refused(entry)

    def _all_of_group(self) -> Unit | None:
        """Returns all parameters of the group that comes next, if each of its blocks lies in one piece of host memory.

        One call of the optimizer then updates them; a gradient that has to be widened has room for one of them only.
        """
        parts = self._waiting[0][0][1].slot.own.block.parts
        entries = group_at([entry for entry, _ in islice(self._waiting, parts)], 0)
        if not entries or any(map(is_widened, entries)) or self._is_cut_short():
            return None
        unit = Unit(entries, 0, entries[0][1].slot.own.block.numel, last=True, new=False)
        whole = all(self._backing.reach(block.handle, 0) >= block.nbytes for block in unit.blocks.values())
        return unit if whole and 2 * _held_bytes(unit) <= self._owner.most_bytes else None

    def _is_cut_short(self) -> bool:
        """Returns whether the arithmetic allocates memory for all of a window: it has room for the smallest only."""
        return self._arithmetic is None or self._arithmetic.grain is None

    def _next(self, entry: Entry, start: int) -> Unit:
        """The window from `start` on: as far as each tensor that it involves lies in one piece of host memory."""
        value, step = entry[1].slot.own, self._step(entry)
        first, end = value.start + start, value.start + value.numel
        parts = parts_of(entry).values()
        # Others are to be open beside it.
        reach = self._owner.most_bytes // (2 * sum(part.dtype.itemsize for part in parts))
        reach = min(reach, step) if self._is_cut_short() else reach
        for part in parts:
            size = part.dtype.itemsize
            reach = min(reach, self._backing.reach(part.block.handle, (part.start + start) * size) // size)
        stop = end if first + reach >= end else max((first + reach) // step, first // step + 1) * step
        stop = min(stop, end)
        return Unit([entry], start, stop - value.start, last=stop == end, new=False)

    def _hold(self, unit: Unit) -> None:
        try:
            for key, part in unit.involved().items():
                unit.windows[key] = HostWindow(part, unit.start, unit.stop, self._backing)
        except BaseException:
            self._let_go(unit, wrote=False)
            raise
        self._open_bytes += _held_bytes(unit)

    def _wait(self, unit: Unit) -> None:
        """Waits for all that the arithmetic reads; in the thread that updates."""
        with _on_device_of(self._pool):
            for window in unit.windows.values():
                assert isinstance(window, HostWindow)
                window.run.wait()
            for transfer in self._counts_come:
                transfer.wait()
            if self._scale_comes is not None:
                self._scale_comes.wait()

    def _update(self, unit: Unit) -> list[dict[str, Any]]:
        """Updates, and returns what is left for each parameter beside pages; in the thread that updates."""
        arithmetic = self._arithmetic
        assert arithmetic is not None
        begin = time.perf_counter()
        with torch.no_grad(), _on_device_of(self._pool):
            after = arithmetic.update([unit], self._scale, self._hyper)
        left: list[dict[str, Any]] = []
        for (_, state, _), values in zip(unit.entries, after, strict=True):
            left.append({})
            for key, value in values.items():
                known = unit.windows.get(f"state.{key}")
                if known is None:
                    left[-1][key] = value
                    continue
                here = _there(known)
                if unit.together:
                    here = state.paged[key].of(here)
                if here.data_ptr() != value.data_ptr():
                    # Most optimizers change their state in place.
                    here.copy_(value.reshape(here.shape))
        self._spent_s += time.perf_counter() - begin
        return left

    def _close(self, job: UpdateJob) -> None:
        """Ends a window; what was raised for it comes out of `UpdateJob.result`."""
        self._open_bytes -= _held_bytes(job.unit)
        self._let_go(job.unit, wrote=job.touched)

    def _let_go(self, unit: Unit, *, wrote: bool) -> None:
        for key in list(unit.windows):
            window = unit.windows.pop(key)
            assert isinstance(window, HostWindow)
            self._backing.let_go(window.run, wrote=wrote and key != "grad")

    def abandon(self) -> None:
        """Ends what is open without waiting for more than the window that is worked on; the rest is lost."""
        for job in self._open:
            job.cancelled = True
        self._waiting.clear()
        self.pending_updates.clear()
        while self._open:
            self._open[0].wait()
            self._close(self._open.popleft())
        self.close()

    def close(self) -> None:
        """Gives back what was held for the arithmetic; all updates are done."""
        for held in self._scratch:
            held.release()
        self._scratch = []
        if self._arithmetic is not None:
            self._arithmetic = None
            self._owner.spent(self._spent_s)


def _held_bytes(unit: Unit) -> int:
    """Returns about how many bytes its windows take."""
    return (unit.stop - unit.start) * sum(part.dtype.itemsize for part in parts_of(unit.entries[0]).values())


def _there(window: Window) -> torch.Tensor:
    """See `Windows.shaped`; it has arrived."""
    assert window.tensor is not None
    return window.tensor if window.shape is None else window.tensor.view(window.shape)


def _on_device_of(pool: Pool) -> AbstractContextManager[object]:
    """Has CUDA's calls of this thread mean the device that computes, and not the first one."""
    device = pool.compute.device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _counts_to_host(state: ParamState, backing: HostStore) -> list[Transfer]:
    """Brings step counts to the host that the last update has left on the device; returns what brings them."""
    comes: list[Transfer] = []
    for key, entry in state.small.items():
        if isinstance(entry, torch.Tensor) and entry.device.type != "cpu":
            state.small[key], transfer = _on_the_host(backing, entry)
            if transfer is not None:
                comes.append(transfer)
    return comes


def _on_the_host(backing: HostStore, scale: torch.Tensor | None) -> tuple[torch.Tensor | None, Transfer | None]:
    """Returns a number of the device's in host memory, once the transfer has ended; nobody waits for it here."""
    if scale is None:
        return None, None
    source = scale.detach().reshape(1)
    # A copy into ordinary memory would hold the thread up until the device has come to it.
    into = torch.empty_like(source, device="cpu", pin_memory=source.device.type == "cuda")
    copy = backing.device.copy_out(into.view(torch.uint8), source.view(torch.uint8))
    return into[0], Keeping(copy, source)
