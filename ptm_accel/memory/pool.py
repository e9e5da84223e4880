"""The pool: brings paged tensors into the compute tier on demand, and moves others away to make room.

It owns the budget of the compute tier and the order of eviction (least recently used; only tensors that nobody pins).
It knows tensors, not models or steps. Room is made, or refused with the numbers, in one place: `Pool.reserve`.

A view of an extent may outlive our use of it (autograd, or the user, may hold one). Its memory then stays valid and
*charged* until the last view has died; such extents are kept in a list of leavers that is looked through whenever
room is needed.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.errors import BudgetError
from ptm_accel.memory.budget import Budget, Reservation, Tag
from ptm_accel.memory.paged import Extent, PagedTensor, Place
from ptm_accel.memory.transfer import ALIGN_BYTES, Block, ComputeTier, Home, Transfer, round_up
from ptm_accel.units import format_bytes


@dataclass(slots=True)
class PoolStats:
    """What the pool has done since it was made. Bytes are those between the compute tier and the home."""

    faults: int = 0
    evictions: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    stall_s: float = 0.0


@dataclass(slots=True)
class _Leaver:
    """Memory that we let go of and that somebody may still use: a view, or a transfer."""

    storage: StorageWeakRef
    block: Block | None
    reservation: Reservation
    transfer: Transfer | None


class Pin:
    """Bytes that stay in the compute tier while this value is held; the only way to them."""

    __slots__ = ("_pool", "_tensor")

    def __init__(self, pool: Pool, tensor: PagedTensor) -> None:
        self._pool: Pool | None = pool
        self._tensor = tensor

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor in its shape; not to be kept beyond the pin."""
        assert self._pool is not None and self._tensor.extent is not None, "pin used after its end"
        return self._tensor.extent.tensor

    def release(self) -> None:
        """Ends the pin. A second release does nothing."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._unpin(self._tensor)

    def __enter__(self) -> torch.Tensor:
        return self.tensor

    def __exit__(self, *exc: object) -> None:
        self.release()


class Window:
    """Some elements of a paged tensor in the compute tier: a view of its extent, or a staged copy.

    Attributes:
        source: the paged tensor.
        start: first element.
        tensor: the elements, 1-D; valid after `ready`, until `close`.
    """

    __slots__ = ("_block", "_load", "_pin", "_reservation", "source", "start", "tensor")

    def __init__(self, source: PagedTensor, start: int, tensor: torch.Tensor) -> None:
        self.source = source
        self.start = start
        self.tensor: torch.Tensor | None = tensor
        self._pin: Pin | None = None
        self._block: Block | None = None
        self._reservation: Reservation | None = None
        self._load: Transfer | None = None


class Pool:
    """Paged tensors over one compute tier and one home.

    Args:
        compute: where kernels run.
        budget: the compute tier's budget.
        home: where bytes go when there is no room; None if there is no such place.
    """

    def __init__(self, compute: ComputeTier, budget: Budget, home: Home | None) -> None:
        self.compute = compute
        self.budget = budget
        self.home = home
        self.stats = PoolStats()
        self._idle: OrderedDict[PagedTensor, None] = OrderedDict()
        self._leavers: list[_Leaver] = []
        self._tensors: dict[int, PagedTensor] = {}
        self._lock = threading.RLock()

    # ---- life of a tensor ------------------------------------------------------------------------------------

    def create(
        self, name: str, tag: Tag, shape: torch.Size, dtype: torch.dtype, *, fill: float = 0.0, movable: bool = True
    ) -> PagedTensor:
        """A new paged tensor, every element `fill`; takes no memory yet."""
        tensor = PagedTensor(name, tag, shape, dtype, fill)
        tensor.movable = movable
        with self._lock:
            self._tensors[id(tensor)] = tensor
        return tensor

    def adopt(self, tensor: PagedTensor, data: torch.Tensor) -> None:
        """Makes `data`, a tensor of somebody else's, the (newest) bytes of a blank or away paged tensor.

        Without a copy where `data` is contiguous and alone in its storage; otherwise it is copied.

        Raises:
            BudgetError: no room for its bytes.
        """
        assert not tensor.place.resident and data.shape == tensor.shape and data.dtype == tensor.dtype, tensor
        with self._lock:
            alone = data.is_contiguous() and data.untyped_storage().nbytes() == tensor.nbytes
            if not alone or data.device.type != self.compute.device.type:
                self._make_extent(tensor).tensor.copy_(data)
                self._settle_in(tensor, Place.DIRTY)
                return
            reservation = self.reserve(tensor.nbytes, tensor.tag, tensor.name)
            tensor.extent = Extent(data, data.view(-1).view(torch.uint8), None, reservation)
            self._settle_in(tensor, Place.DIRTY)

    def drop(self, tensor: PagedTensor) -> None:
        """Lets go of all bytes of `tensor`: it is blank again."""
        with self._lock:
            assert tensor.pins == 0, f"{tensor!r} is pinned"
            if tensor.place.resident:
                self._let_go(tensor)
            if tensor.handle is not None:
                self._settle_stores(tensor)
                assert self.home is not None
                self.home.free(tensor.handle)
                tensor.handle = None
            tensor.stored_bytes = 0
            tensor.place = Place.BLANK

    def forget(self, tensor: PagedTensor) -> None:
        """Drops `tensor` and ends its life."""
        self.drop(tensor)
        with self._lock:
            self._tensors.pop(id(tensor), None)

    # ---- access ----------------------------------------------------------------------------------------------

    def fault(self, tensor: PagedTensor, *, write: bool = False) -> torch.Tensor:
        """The tensor in the compute tier, brought in if it is not there.

        Args:
            tensor: which one.
            write: whether the caller will change it.

        Raises:
            BudgetError: no room can be made.
            DiskError: the transfer failed.
        """
        with self._lock:
            if tensor.place is Place.CLEAN or tensor.place is Place.DIRTY:
                if not tensor.pins:
                    self._touch(tensor)
            else:
                self._bring(tensor)
            if write:
                tensor.place = Place.DIRTY
            assert tensor.extent is not None
            return tensor.extent.tensor

    def pin(self, tensor: PagedTensor, *, write: bool = False) -> Pin:
        """Like `fault`, and keeps it there until the pin is released."""
        with self._lock:
            self.fault(tensor, write=write)
            tensor.pins += 1
            self._idle.pop(tensor, None)
            return Pin(self, tensor)

    def _unpin(self, tensor: PagedTensor) -> None:
        with self._lock:
            tensor.pins -= 1
            assert tensor.pins >= 0, f"{tensor!r}: unpinned more often than pinned"
            if not tensor.pins:
                self._touch(tensor)

    def _touch(self, tensor: PagedTensor) -> None:
        """Makes `tensor` the most recently used of those that may be evicted."""
        if tensor.movable and (self.home is not None or tensor.place is Place.CLEAN):
            self._idle[tensor] = None
            self._idle.move_to_end(tensor)

    def _settle_in(self, tensor: PagedTensor, place: Place) -> None:
        tensor.place = place
        if not tensor.pins:
            self._touch(tensor)
        if tensor.occupant is not None:
            assert tensor.extent is not None
            tensor.occupant.arrived(tensor.extent.tensor)

    def _make_extent(self, tensor: PagedTensor) -> Extent:
        reservation = self.reserve(tensor.slot_bytes, tensor.tag, tensor.name)
        try:
            block = self.compute.allocate(tensor.slot_bytes)
        except BaseException:
            reservation.release()
            raise
        assert block.buffer is not None
        typed = block.buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        tensor.extent = Extent(typed, block.buffer, block, reservation)
        return tensor.extent

    def _bring(self, tensor: PagedTensor) -> None:
        self.stats.faults += 1
        away = tensor.place is Place.AWAY
        extent = self._make_extent(tensor)
        try:
            if away:
                self._load(tensor, 0, extent.octets, 0, tensor.numel, extent.tensor.view(-1))
            else:
                extent.tensor.fill_(tensor.fill)
        except BaseException:
            tensor.extent = None
            self._leave(extent.octets, extent.block, extent.reservation, None)
            raise
        whole = tensor.stored_bytes >= tensor.slot_bytes
        self._settle_in(tensor, Place.CLEAN if away and whole else Place.DIRTY)

    def _load(
        self, tensor: PagedTensor, offset: int, into: torch.Tensor, start: int, stop: int, typed: torch.Tensor
    ) -> None:
        """Loads elements [start, stop), whose bytes begin at `offset`; what was never stored is filled."""
        transfer = self._start_load(tensor, offset, into, start, typed)
        if transfer is not None:
            self._order(transfer)

    def _start_load(
        self, tensor: PagedTensor, offset: int, into: torch.Tensor, start: int, typed: torch.Tensor
    ) -> Transfer | None:
        assert self.home is not None
        self._settle_stores(tensor)
        there = max(0, min(into.numel(), tensor.stored_bytes - offset))
        filled = there // tensor.dtype.itemsize
        if filled < typed.numel():
            typed[filled:].fill_(tensor.fill)
        if not there:
            return None
        self.stats.loaded_bytes += there
        return self.home.load(tensor.handle, offset, into[:there])

    def _order(self, transfer: Transfer) -> None:
        begin = time.perf_counter()
        try:
            transfer.order()
        finally:
            self.stats.stall_s += time.perf_counter() - begin

    def _settle_stores(self, tensor: PagedTensor) -> None:
        """Waits for stores of `tensor` that may still run."""
        if tensor.stores:
            stores, tensor.stores = tensor.stores, []
            begin = time.perf_counter()
            for store in stores:
                store.wait()
            self.stats.stall_s += time.perf_counter() - begin

    # ---- windows ---------------------------------------------------------------------------------------------

    def open_window(self, tensor: PagedTensor, start: int, stop: int) -> Window:
        """Elements [start, stop) for reading and writing, without bringing the whole tensor in.

        A resident tensor gives a view of its extent. One that is away is staged: the load is started here and the
        elements are there after `ready_window`. Windows of one tensor are written in ascending order.

        Args:
            tensor: which one.
            start: first element; its byte offset is a multiple of `ALIGN_BYTES`.
            stop: one past the last.

        Raises:
            BudgetError: no room for the staged bytes.
        """
        with self._lock:
            if tensor.place.resident:
                pin = self.pin(tensor)
                window = Window(tensor, start, pin.tensor.view(-1)[start:stop])
                window._pin = pin
                return window
            assert (start * tensor.dtype.itemsize) % ALIGN_BYTES == 0, (tensor, start)
            nbytes = (stop - start) * tensor.dtype.itemsize
            reservation, block = self.take_block(nbytes, Tag.STAGING, tensor.name)
            assert block.buffer is not None
            typed = block.buffer[:nbytes].view(tensor.dtype)
            window = Window(tensor, start, typed)
            window._block, window._reservation = block, reservation
            if tensor.place is Place.AWAY:
                window._load = self._start_load(tensor, start * tensor.dtype.itemsize, block.buffer, start, typed)
            else:
                typed.fill_(tensor.fill)
            return window

    def ready_window(self, window: Window) -> torch.Tensor:
        """The window's elements, 1-D, once they have arrived."""
        load, window._load = window._load, None
        if load is not None:
            self._order(load)
        assert window.tensor is not None
        return window.tensor

    def close_window(self, window: Window, *, wrote: bool) -> None:
        """Ends a window; what was written is on its way home (or in the extent) afterwards.

        Raises:
            BudgetError: the home has no room.
        """
        with self._lock:
            tensor, window.tensor = window.source, None
            if window._pin is not None:
                if wrote:
                    tensor.place = Place.DIRTY
                window._pin.release()
                return
            block, reservation = window._block, window._reservation
            assert block is not None and reservation is not None and block.buffer is not None
            octets = block.buffer
            transfer: Transfer | None = None
            if window._load is not None:
                window._load.wait()
            if wrote and tensor.extent is not None:
                # Somebody has brought the tensor in meanwhile; its extent lacks what was written here.
                typed = octets[: self._window_bytes(window, octets)].view(tensor.dtype)
                tensor.extent.tensor.view(-1)[window.start : window.start + typed.numel()].copy_(typed)
                tensor.place = Place.DIRTY
            elif wrote:
                assert self.home is not None, "a staged window needs a home"
                if tensor.handle is None:
                    tensor.handle = self.home.new(tensor.slot_bytes, tensor.tag, tensor.name)
                offset = window.start * tensor.dtype.itemsize
                assert offset <= tensor.stored_bytes, f"{tensor!r}: windows written out of order"
                transfer = self.home.store(tensor.handle, offset, octets)
                tensor.stores.append(transfer)
                tensor.stored_bytes = max(tensor.stored_bytes, offset + octets.numel())
                tensor.place = Place.AWAY
                self.stats.stored_bytes += octets.numel()
            self._leave(octets, block, reservation, transfer)

    def _window_bytes(self, window: Window, octets: torch.Tensor) -> int:
        tensor = window.source
        return min(octets.numel(), tensor.nbytes - window.start * tensor.dtype.itemsize)

    # ---- room ------------------------------------------------------------------------------------------------

    def reserve(self, nbytes: int, tag: Tag, name: str) -> Reservation:
        """Charges `nbytes` of the compute tier, moving idle tensors away if need be.

        Raises:
            BudgetError: nothing more can be moved; says who holds what.
        """
        with self._lock:
            if nbytes > self.budget.free_bytes:
                self._make_room(nbytes, name)
            return self.budget.reserve(nbytes, tag, name)

    def take_block(self, nbytes: int, tag: Tag, name: str) -> tuple[Reservation, Block]:
        """A charged block for at least `nbytes`; ends with `give_block`."""
        size = round_up(max(nbytes, 1))
        reservation = self.reserve(size, tag, name)
        try:
            return reservation, self.compute.allocate(size)
        except BaseException:
            reservation.release()
            raise

    def give_block(self, reservation: Reservation, block: Block) -> None:
        """Gives a taken block back once its last view has died."""
        with self._lock:
            assert block.buffer is not None
            self._leave(block.buffer, block, reservation, None)

    @contextmanager
    def charged(self, nbytes: int, tag: Tag, name: str) -> Iterator[Callable[[torch.Tensor], None]]:
        """Charges memory that torch allocates within the block, for as long as its storage lives.

        Yields:
            a function that takes the tensor that was made.
        """
        reservation = self.reserve(nbytes, tag, name)
        kept: list[StorageWeakRef] = []
        try:
            yield lambda tensor: kept.append(StorageWeakRef(tensor.untyped_storage()))
        finally:
            with self._lock:
                if kept:
                    self._leavers.append(_Leaver(kept[0], None, reservation, None))
                else:
                    reservation.release()

    def evict(self, tensor: PagedTensor) -> None:
        """Moves an idle resident tensor away, storing it first if it is dirty.

        Raises:
            BudgetError: the home has no room.
            DiskError: the store failed; the tensor is then still resident and unharmed.
        """
        with self._lock:
            assert tensor.place.resident and not tensor.pins and self.home is not None, tensor
            self.stats.evictions += 1
            if tensor.place is Place.DIRTY:
                self._store_whole(tensor)
            self._let_go(tensor)
            tensor.place = Place.AWAY

    def _store_whole(self, tensor: PagedTensor) -> None:
        assert self.home is not None and tensor.extent is not None
        if tensor.handle is None:
            tensor.handle = self.home.new(tensor.slot_bytes, tensor.tag, tensor.name)
        self._settle_stores(tensor)
        octets = tensor.extent.octets
        aligned = octets.numel() // ALIGN_BYTES * ALIGN_BYTES
        transfers = []
        if aligned:
            transfers.append(self.home.store(tensor.handle, 0, octets[:aligned]))
        if aligned < octets.numel():
            # Adopted memory ends where its tensor ends; the last, short unit goes through a padded copy.
            tail = torch.zeros(ALIGN_BYTES, dtype=torch.uint8, device=octets.device)
            tail[: octets.numel() - aligned] = octets[aligned:]
            transfers.append(self.home.store(tensor.handle, aligned, tail))
        begin = time.perf_counter()
        for transfer in transfers:
            transfer.wait()
        self.stats.stall_s += time.perf_counter() - begin
        self.stats.stored_bytes += tensor.slot_bytes
        tensor.stored_bytes = tensor.slot_bytes

    def flush(self, tensor: PagedTensor) -> None:
        """Makes the home hold the newest bytes of a resident tensor; it stays resident."""
        with self._lock:
            if tensor.place is Place.DIRTY and self.home is not None:
                self._store_whole(tensor)
                tensor.place = Place.CLEAN

    def _let_go(self, tensor: PagedTensor) -> None:
        """Takes the extent from `tensor`; its memory is free once nobody views it."""
        extent = tensor.extent
        assert extent is not None
        if tensor.occupant is not None:
            tensor.occupant.leaving(extent.tensor)
        tensor.extent = None
        self._idle.pop(tensor, None)
        octets, block, reservation = extent.octets, extent.block, extent.reservation
        del extent
        self._leave(octets, block, reservation, None)

    def _leave(
        self, octets: torch.Tensor, block: Block | None, reservation: Reservation, transfer: Transfer | None
    ) -> None:
        storage = StorageWeakRef(octets.untyped_storage())
        if block is not None:
            block.buffer = None
        self._leavers.append(_Leaver(storage, block, reservation, transfer))

    def _collect(self) -> None:
        """Takes back the memory of leavers that nobody uses any more."""
        still: list[_Leaver] = []
        for leaver in self._leavers:
            running = leaver.transfer is not None and not leaver.transfer.done()
            if running or not leaver.storage.expired():
                still.append(leaver)
                continue
            leaver.reservation.release()
            if leaver.block is not None:
                self.compute.recycle(leaver.block)
        self._leavers = still

    def _make_room(self, nbytes: int, name: str) -> None:
        self._collect()
        while nbytes > self.budget.free_bytes:
            running = next((x for x in self._leavers if x.transfer is not None and not x.transfer.done()), None)
            if running is not None:
                assert running.transfer is not None
                begin = time.perf_counter()
                running.transfer.wait()
                self.stats.stall_s += time.perf_counter() - begin
            elif self._idle:
                self.evict(next(iter(self._idle)))
            else:
                raise self._no_room(nbytes, name)
            self._collect()

    def _no_room(self, nbytes: int, name: str) -> BudgetError:
        try:
            reservation = self.budget.reserve(nbytes, Tag.STAGING, name)
        except BudgetError as refusal:
            held = sorted((t for t in self._tensors.values() if t.pins), key=lambda t: -t.nbytes)[:3]
            holders = [f"{t.name} ({format_bytes(t.nbytes)}, pinned)" for t in held]
            holders += [f"{x.reservation.name} ({format_bytes(x.reservation.nbytes)}, a view is alive)"
                        for x in self._leavers[:3]]
            home = "" if self.home is not None else " There is no tier below it: set disk to a directory on an SSD."
            text = f"{refusal} Largest holders: {', '.join(holders) or 'none'}.{home}"
            return type(refusal)(text)
        reservation.release()
        raise AssertionError(f"room for {nbytes} bytes appeared while refusing it")

    # ---- looking from outside ----------------------------------------------------------------------------------

    def snapshot(self, tensor: PagedTensor) -> torch.Tensor:
        """The tensor's values as a CPU tensor that costs no charged memory.

        An extent in host memory is given as it is (a live alias, as `state_dict` gives in plain torch); what is in
        the home, as a private mapping. Valid until the next step.
        """
        with self._lock:
            if tensor.place is Place.BLANK:
                return torch.full((1,), tensor.fill, dtype=tensor.dtype).expand(tensor.shape)
            if tensor.extent is not None and tensor.extent.tensor.device.type == "cpu" and not self._is_device():
                return tensor.extent.tensor.detach()
            if tensor.extent is not None:
                self.flush(tensor)
            self._settle_stores(tensor)
            if tensor.stored_bytes < tensor.nbytes:
                self._complete(tensor)
            assert self.home is not None
            octets = self.home.snapshot(tensor.handle)
            return octets[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def _is_device(self) -> bool:
        return self.budget.tier.value == "device"

    def _complete(self, tensor: PagedTensor) -> None:
        """Stores the fill value where an interrupted sweep has left the home unwritten."""
        self.fault(tensor, write=True)
        self.flush(tensor)

    def close(self) -> None:
        """Drops every tensor and gives all memory back. Idempotent; pins must have ended."""
        with self._lock:
            for tensor in list(self._tensors.values()):
                self.drop(tensor)
            self._tensors.clear()
            for leaver in self._leavers:
                if leaver.transfer is not None:
                    leaver.transfer.wait()
            self._collect()

    def tensors(self) -> Iterator[PagedTensor]:
        """All living paged tensors."""
        return iter(list(self._tensors.values()))

    def pinned(self) -> list[PagedTensor]:
        """Those that somebody pins."""
        return [t for t in self._tensors.values() if t.pins]

    def check_integrity(self) -> None:
        """Checks every tensor's place, and that the charges of extents and leavers are within the budget's use.

        Raises:
            AssertionError: with the numbers.
        """
        with self._lock:
            self._collect()
            charged = sum(x.reservation.nbytes for x in self._leavers)
            for tensor in self._tensors.values():
                tensor.check()
                if tensor.extent is not None:
                    charged += tensor.extent.reservation.nbytes
            for tensor in self._idle:
                assert tensor.place.resident and not tensor.pins and tensor.movable, tensor
            if charged > self.budget.used_bytes:
                raise AssertionError(f"extents and leavers hold {charged} of {self.budget.used_bytes} used bytes")
            self.budget.check_integrity()
            self.compute.check_integrity()
            if self.home is not None:
                self.home.check_integrity()
