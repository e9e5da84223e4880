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
from typing import Any

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Reservation, Tag
from ptm_accel.memory.copies import Keeping
from ptm_accel.memory.frame_home import FrameHome
from ptm_accel.memory.paged import PagedTensor, Part, Place
from ptm_accel.memory.pool import Pool
from ptm_accel.memory.transfer import Transfer
from ptm_accel.memory.windows import HostWindow, Window, window_elements
from ptm_accel.model.floor import update_extra_bytes
from ptm_accel.optim.arithmetic import Arithmetic
from ptm_accel.optim.on_host import OnHost
from ptm_accel.optim.units import Entry, ParamState, Unit, Work, blocks_of, no_more_owed, owe, parts_of
from ptm_accel.optim.worker import Job


def twin_of(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """An optimizer of the same class with groups and state of its own, both empty of parameters."""
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
        owed: how many updates that are still to be done, or under way, use a block: what the home has of it is not to
            be read.
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
        self.owed: dict[PagedTensor, int] = {}
        self._owner = owner
        self._compute = owner.compute
        self._pool = owner.compute.pool
        assert isinstance(self._pool.home, FrameHome)
        self._home = self._pool.home
        # A multiple of the alignment of every dtype, which a page holds whole.
        self._window_elements = window_elements(owner.compute.window_bytes, 4)
        self._hyper = hyper
        self._scale = scale
        self._scale_comes: Transfer | None = None
        self._arithmetic: Arithmetic | None = None
        self._scratch: Reservation | None = None
        # What is to be opened, with the first element that is not yet; and what is open, in the same order.
        self._waiting: deque[tuple[Entry, int]] = deque()
        self._open: deque[Job] = deque()
        self._open_bytes = 0
        self._refused = refused
        self._spent_s = 0.0
        self._counts_come: list[Transfer] = []

    # ---- what it takes -----------------------------------------------------------------------------------------

    def take(self, entry: Entry) -> bool:
        """Takes an update over, if all that it uses can be had in the home: what is not there is sent there.

        Returns:
            whether it did.

        Raises:
            DiskError: a transfer failed.
        """
        if not self._owner.chosen(entry[1].block_name):
            return False
        tensors = list(parts_of(entry).values())
        if len(tensors) * self._home.page_bytes > self._owner.most_bytes or self._is_looked_at(
            entry[1].slot.value.block
        ):
            return False
        if not all(self._can_be_held(tensor) for tensor in tensors) or not self._prepare():
            return False
        try:
            for part in tensors:
                self._send_home(part.block)
        except BudgetError:
            # The home is full: what has gone there is as good there.
            return False
        # Some are padded in the home, what was never stored there is nowhere, and what could not be stored is here.
        blocks = [part.block for part in tensors]
        if any(block.place is not Place.AWAY or block.stored_bytes < block.nbytes for block in blocks):
            return False
        self._counts_come += _counts_to_host(entry[1], self._home)
        owe(self.owed, entry)
        self._waiting.append((entry, 0))
        self.work.append(entry)
        return True

    def _is_looked_at(self, value: PagedTensor) -> bool:
        """Whether somebody has a view of a parameter's values, and would see an update of them on the device."""
        if value.extent is None or not value.place.resident:
            return False
        return self._pool.shelf.is_spared(value) or value.viewed

    def _can_be_held(self, part: Part) -> bool:
        block, step = part.block, self._window_elements * part.dtype.itemsize
        return (
            block.movable
            and not block.pins
            and block.place is not Place.BLANK
            # A window lies on one page.
            and (self._home.page_bytes % step == 0 or block.slot_bytes <= self._home.page_bytes)
        )

    def _send_home(self, tensor: PagedTensor) -> None:
        if tensor.place is Place.ARRIVING:
            self._pool.ahead.turn_back(tensor)
        elif tensor.place.resident:
            self._pool.ahead.evict(tensor)

    def _prepare(self) -> bool:
        """Makes ready for the first update, if there is room for what the arithmetic of one window allocates."""
        if self._arithmetic is not None:
            return True
        compute, cpu = self._compute, torch.device("cpu")
        arithmetic = Arithmetic(twin_of(compute.inner), compute.appetite, cpu, _there, compute.threads)
        elements = min(self._window_elements, arithmetic.grain or self._window_elements)
        nbytes = update_extra_bytes(compute.appetite, elements, 4, new=False, widened=True)
        self._home.make_room(nbytes)
        try:
            self._scratch = self._home.budget.reserve(nbytes, Tag.STAGING, "updates on the CPU")
        except BudgetError:
            return False
        self._scale, self._scale_comes = _on_the_host(self._home, self._scale)
        self._arithmetic = arithmetic
        return True

    # ---- what it does ------------------------------------------------------------------------------------------

    def __bool__(self) -> bool:
        """Whether a window is open."""
        return bool(self._open)

    @property
    def could_open(self) -> bool:
        """Whether windows wait to be opened, and none is open that has to end first."""
        return bool(self._waiting) and not self._open

    def arrived(self) -> bool:
        """Whether there is a first window, and its arithmetic has ended."""
        return bool(self._open) and self._open[0].done()

    def wait(self) -> None:
        """Waits for the arithmetic of the first window, well or not."""
        with self._pool.traffic.stalled():
            self._open[0].wait()

    def update(self) -> None:
        """Closes the first window, whose arithmetic has ended.

        Raises:
            PTMError: a transfer failed; whatever was raised in the thread that updates.
        """
        job = self._open.popleft()
        unit = job.unit
        self._close(job)
        after = job.result()
        if unit.last:
            self.done += 1
            unit.state.small = after
            if unit.state.master is not None:
                unit.state.mastered = unit.state.slot.value.numel
            no_more_owed(self.owed, unit)
            unit.end()

    def open(self, *, insist: bool) -> None:
        """Opens windows, as many as may be held; never waits for arithmetic.

        Args:
            insist: without effect: there is room for one, or the update is refused.

        Raises:
            BudgetError: there is no room for the next window of a parameter that has begun.
        """
        while self._waiting:
            entry, start = self._waiting[0]
            needed = len(parts_of(entry)) * self._home.page_bytes
            if self._open and self._open_bytes + needed > self._owner.most_bytes:
                return
            unit = _unit(entry, start, self._window_elements)
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
            self._waiting.popleft()
            if not unit.last:
                self._waiting.appendleft((entry, unit.stop))
            job = Job(unit, self._wait, self._update)
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
            no_more_owed(self.owed, _unit(entry, 0, self._window_elements))
        for entry in given:
            self._refused(entry)

    def _hold(self, unit: Unit) -> None:
        try:
            for key, part in parts_of(unit.entries[0]).items():
                unit.windows[key] = HostWindow(part, unit.start, unit.stop, self._home)
        except BaseException:
            self._let_go(unit, wrote=False)
            raise
        self._open_bytes += len(unit.windows) * self._home.page_bytes

    def _wait(self, unit: Unit) -> None:
        """In the thread that updates: for all that the arithmetic reads."""
        with _on_device_of(self._pool):
            for window in unit.windows.values():
                assert isinstance(window, HostWindow)
                for transfer in window.run.awaited:
                    transfer.wait()
            for transfer in self._counts_come:
                transfer.wait()
            if self._scale_comes is not None:
                self._scale_comes.wait()

    def _update(self, unit: Unit) -> dict[str, Any]:
        """In the thread that updates."""
        arithmetic = self._arithmetic
        assert arithmetic is not None
        begin = time.perf_counter()
        with torch.no_grad(), _on_device_of(self._pool):
            (after,) = arithmetic.update([unit], self._scale, self._hyper)
        small: dict[str, Any] = {}
        for key, value in after.items():
            known = unit.windows.get(f"state.{key}")
            if known is None:
                small[key] = value
            elif (here := _there(known)).data_ptr() != value.data_ptr():
                # Most optimizers change their state in place.
                here.copy_(value.reshape(here.shape))
        self._spent_s += time.perf_counter() - begin
        return small

    def _close(self, job: Job) -> None:
        """Ends a window; what was raised for it comes out of `Job.result`."""
        self._open_bytes -= len(job.unit.windows) * self._home.page_bytes
        self._let_go(job.unit, wrote=job.touched)

    def _let_go(self, unit: Unit, *, wrote: bool) -> None:
        for key in list(unit.windows):
            window = unit.windows.pop(key)
            assert isinstance(window, HostWindow)
            self._home.let_go(window.run, wrote=wrote and key != "grad")

    def abandon(self) -> None:
        """Ends what is open without waiting for more than the window that is worked on; the rest is lost."""
        for job in self._open:
            job.cancelled = True
        self._waiting.clear()
        self.owed.clear()
        while self._open:
            self._open[0].wait()
            self._close(self._open.popleft())
        self.close()

    def close(self) -> None:
        """Gives back what was held for the arithmetic; all updates are done."""
        if self._scratch is not None:
            self._scratch.release()
            self._scratch = self._arithmetic = None
            self._owner.spent(self._spent_s)


def _unit(entry: Entry, start: int, elements: int) -> Unit:
    state = entry[1]
    # Up to where the next page may begin.
    first = state.slot.value.start
    stop = min((first + start) // elements * elements + elements - first, state.slot.value.numel)
    return Unit([entry], start, stop, last=stop == state.slot.value.numel, new=False)


def _there(window: Window) -> torch.Tensor:
    """See `Windows.shaped`; it has arrived."""
    assert window.tensor is not None
    return window.tensor if window.shape is None else window.tensor.view(window.shape)


def _on_device_of(pool: Pool) -> AbstractContextManager[object]:
    """Has CUDA's calls of this thread mean the device that computes, and not the first one."""
    device = pool.compute.device
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _counts_to_host(state: ParamState, home: FrameHome) -> list[Transfer]:
    """Brings step counts to the host that the last update has left on the device; returns what brings them."""
    comes: list[Transfer] = []
    for key, entry in state.small.items():
        if isinstance(entry, torch.Tensor) and entry.device.type != "cpu":
            state.small[key], transfer = _on_the_host(home, entry)
            if transfer is not None:
                comes.append(transfer)
    return comes


def _on_the_host(home: FrameHome, scale: torch.Tensor | None) -> tuple[torch.Tensor | None, Transfer | None]:
    """A number of the device's in host memory, once the transfer has ended; nobody waits for it here."""
    if scale is None:
        return None, None
    source = scale.detach().reshape(1)
    # A copy into ordinary memory would hold the thread up until the device has come to it.
    into = torch.empty_like(source, device="cpu", pin_memory=source.device.type == "cuda")
    copy = home.device.copy_out(into.view(torch.uint8), source.view(torch.uint8))
    return into[0], Keeping(copy, source)
