"""The pool: brings paged tensors into the compute tier on demand, and evicts others to make room.

Its parts: `Admission` grants charges and evicts; `Traffic` moves bytes to and from the backing store. Who knows what
comes next may prefetch and evict ahead of the accesses: what they return does not depend on that.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial

import torch

from ptm_accel.errors import DeviceBudgetError
from ptm_accel.memory.admission import Admission
from ptm_accel.memory.block import Block, Extent, Part, Pin, Place, alone
from ptm_accel.memory.budget import Budget, Reservation, Tag, Tier
from ptm_accel.memory.calls import Calls
from ptm_accel.memory.card_memory import CardMemory
from ptm_accel.memory.copies import Keeping, close_all, settle
from ptm_accel.memory.tenants import Holder, Need, Tenants
from ptm_accel.memory.timeline import QueuedCompute, Timeline
from ptm_accel.memory.traffic import PoolStats, Traffic
from ptm_accel.memory.transfer import BackingStore, Buffer, ComputeTier

_ROUNDED_BY = 64
"""Adopted tensors are copied where padding adds at most one part in this many."""


class Pool:
    """Paged tensors of one model over one compute tier and one backing store.

    Several models have a pool each over the same tiers (`beside`); any of them may evict tensors of the others.

    Args:
        compute: where kernels run.
        budget: the compute tier's budget.
        backing: the backing store, if any.
        card: memory that blocks share with torch's; None on a CPU.

    Attributes:
        tenants: all pools over these tiers.
        need: what the model needs of them.
        holder: has pending work with its tensors, for which memory is held.
        next_use: tells when a tensor is wanted next, within a planned pass; what is wanted last leaves first.
        closed: whether nothing can be brought in any more.
        timeline: where time goes on a device; None on a CPU.
        copies_in: whether adopted bytes are copied into the tier's own memory, so that the allocator they came from
            has them back at once.
    """

    def __init__(
        self, compute: ComputeTier, budget: Budget, backing: BackingStore | None, *, card: CardMemory | None = None
    ) -> None:
        self.compute = compute
        self.budget = budget
        self.backing = backing
        self.stats = PoolStats()
        self.lock = threading.RLock()
        self.calls = Calls()
        self.timeline = Timeline(compute.record) if isinstance(compute, QueuedCompute) else None
        self.traffic = Traffic(backing, self.stats, self.timeline)
        self.card = card
        self.tenants = Tenants(budget)
        self.admission = Admission(compute, budget, self.traffic, self.tenants, self.lock, card)
        self.eviction = self.admission.eviction
        self._begin()

    def _begin(self) -> None:
        self.holder: Holder | None = None
        self.next_use: Callable[[Block], int] | None = None
        self.copies_in = self.closed = False
        self.need = Need()
        self._tensors: dict[int, Block] = {}
        self._held: list[Reservation] = []
        self.tenants.pools.append(self)

    def beside(self) -> Pool:
        """Returns a pool over the same tiers for the tensors of another model."""
        other = copy.copy(self)
        with self.lock:
            other._begin()
        return other

    @property
    def least_bytes(self) -> int:
        """Least bytes that all models need together; views that are kept leave that much."""
        return self.tenants.least_bytes

    @property
    def whole_bytes(self) -> int:
        """Bytes of the compute tier with which nothing ever moves; 0 where that is not known."""
        return self.tenants.whole_bytes

    @property
    def share_bytes(self) -> int:
        """Bytes of the compute tier that plans of this model may count on."""
        return self.tenants.share_bytes(self)

    def hold(self, nbytes: int, tag: Tag, name: str) -> Reservation:
        """Charges bytes that are no tensor's, until they are released or the pool is closed.

        Raises:
            BudgetError: no room can be made.
        """
        held = self.admission.reserve(nbytes, tag, name)
        self._held = [*(other for other in self._held if other.live), held]
        return held

    def create(
        self, name: str, tag: Tag, shape: torch.Size, dtype: torch.dtype, *, fill: float = 0.0, movable: bool = True
    ) -> Block:
        """Returns a new paged tensor, every element `fill`; takes no memory yet."""
        tensor = Block(name, tag, shape, dtype, fill)
        tensor.movable = movable
        tensor.owner = self
        with self.lock:
            self._tensors[id(tensor)] = tensor
        return tensor

    def adopt(self, tensor: Block, data: torch.Tensor, *, copied: bool = False) -> None:
        """Makes `data` the bytes of a blank or away paged tensor.

        It is copied unless it is contiguous and alone in its storage.

        Args:
            tensor: which one.
            data: of its shape and type.
            copied: whether it is copied in any case, since the caller goes on using it.

        Raises:
            BudgetError: no room for its bytes.
        """
        assert not tensor.place.resident and data.shape == tensor.shape and data.dtype == tensor.dtype, tensor
        with self.lock:
            if tensor.place is Place.ARRIVING:
                self.admission.turn_back(tensor)
            copied |= self.copies(tensor)
            # Of what torch has yet to conjugate or to negate the bytes are not the values.
            lazy = data.is_conj() or data.is_neg()
            alone = not (copied or lazy) and data.is_contiguous() and data.untyped_storage().nbytes() == tensor.nbytes
            if not alone or data.device != self.compute.device:
                self._make(tensor).tensor.copy_(data)
            else:
                reservation = self.admission.reserve(tensor.nbytes, tensor.tag, tensor.name)
                # A view would keep its base, which would count as viewed.
                own = data.data
                tensor.extent = Extent(own, own.view(-1).view(torch.uint8), None, reservation)
            self._settle_in(tensor, Place.DIRTY)

    def copies(self, tensor: Block) -> bool:
        """Returns whether what is adopted for a tensor is copied (`copies_in`)."""
        # Small ones leave small holes, and a copy of them is rounded up to more than they are.
        return self.copies_in and tensor.slot_bytes - tensor.nbytes <= tensor.nbytes // _ROUNDED_BY

    def make(self, tensor: Block) -> torch.Tensor:
        """Makes room for a blank tensor, all of which the caller writes at once: BLANK -> DIRTY.

        Raises:
            BudgetError: no room can be made.
        """
        with self.lock:
            assert tensor.place is Place.BLANK, tensor
            made = self._make(tensor).tensor
            self._settle_in(tensor, Place.DIRTY)
            return made

    def _make(self, tensor: Block) -> Extent:
        assert not self.closed, f"the model of {tensor.name} is no longer on pages"
        return self.admission.make(tensor)

    def _settle_in(self, tensor: Block, place: Place) -> None:
        """The bytes are in the extent: the tensor may be used, and evicted."""
        tensor.become(place)
        if not tensor.pins:
            self.eviction.touch(tensor)
        if tensor.occupant is not None:
            assert tensor.extent is not None
            tensor.occupant.arrived(tensor.extent.tensor)

    def drop(self, tensor: Block) -> None:
        """Lets go of all bytes of `tensor`: it is blank again."""
        with self.lock:
            assert tensor.pins == 0, f"{tensor!r} is pinned"
            if tensor.place is Place.ARRIVING:
                self.admission.turn_back(tensor)
            elif tensor.place.resident:
                self.admission.let_go(tensor, Place.BLANK)
            if tensor.handle is not None and tensor.backing is None:
                # Errors of these stores no longer matter; the backing store waits for those that use its own memory.
                stores, tensor.stores = tensor.stores, []
                settle([store for store in stores if self.card is None or isinstance(store, Keeping)])
                self.traffic.release(tensor.handle)
                tensor.handle = None
            tensor.stored_bytes = 0
            tensor.become(Place.BLANK)

    def forget(self, tensor: Block | Part) -> None:
        """Drops `tensor` and ends its life; a block ends with the last of its parts."""
        if isinstance(tensor, Part):
            tensor.used.discard(tensor.member)
            if tensor.used:
                return
            tensor = tensor.block
        self.drop(tensor)
        with self.lock:
            self._tensors.pop(id(tensor), None)

    def fault(
        self, tensor: Block | Part, *, write: bool = False, begun: Callable[[Block], object] | None = None
    ) -> torch.Tensor:
        """The tensor (of a part, all of its block) in the compute tier, brought in if it is not there.

        Args:
            tensor: which one.
            write: whether the caller will change it.
            begun: called once a load that is waited for has begun.

        Raises:
            BudgetError: no room can be made.
            DiskError: the transfer failed.
        """
        with self.lock:
            if isinstance(tensor, Part):
                return tensor.of(self.fault(tensor.block, write=write, begun=begun))
            if tensor.place.resident:
                if not tensor.pins:
                    self.eviction.touch(tensor)
            elif tensor.place is Place.ARRIVING:
                self.stats.hits += 1
                self._receive(tensor)
            else:
                self._demand(tensor, begun)
            if write:
                tensor.become(Place.DIRTY)
            assert tensor.extent is not None
            return tensor.extent.tensor

    def _demand(self, tensor: Block, begun: Callable[[Block], object] | None) -> None:
        """Brings in a tensor that is blank or away, while the caller waits."""
        self.stats.faults += 1
        if tensor.place is Place.BLANK:
            self._make(tensor).tensor.fill_(tensor.fill)
            self._settle_in(tensor, Place.DIRTY)
            return
        self._start(tensor)
        try:
            if begun is not None:
                begun(tensor)
        except BaseException:
            if tensor.place is Place.ARRIVING:
                self.admission.turn_back(tensor)
            raise
        if tensor.place is Place.ARRIVING:
            self._receive(tensor)

    def _start(self, tensor: Block, *, moves: bool = True, into: tuple[Reservation, Buffer] | None = None) -> None:
        """Starts loading a tensor: AWAY -> ARRIVING, or DIRTY where the backing store has nothing of it.

        Raises:
            BudgetError: no room.
            DiskError: an earlier store of it failed.
        """
        assert not self.closed, f"the model of {tensor.name} is no longer on pages"
        extent = self.admission.make(tensor, moves=moves, ordered=False, into=into)
        assert extent.buffer is not None
        behind, extent.buffer.behind = extent.buffer.behind, ()
        try:
            load = self.traffic.start_load(tensor, 0, extent.octets, extent.tensor, behind)
        except BaseException:
            self.admission.take_back(tensor)
            raise
        if load is None:
            self._settle_in(tensor, Place.DIRTY)
            return
        tensor.arrival = load
        tensor.become(Place.ARRIVING)

    def _receive(self, tensor: Block) -> None:
        """Waits for the load of a tensor: ARRIVING -> CLEAN, or DIRTY where the backing store lacks the end of it.

        Raises:
            DiskError: the load failed; the tensor is away again.
        """
        assert tensor.arrival is not None
        try:
            if tensor.backing is None:
                self.traffic.order(tensor.arrival)
            else:
                # To plans of what the pool moves, waiting for other ranks is as computing: both go on meanwhile.
                tensor.arrival.order()
        except BaseException:
            self.admission.turn_back(tensor)
            raise
        tensor.arrival = None
        self._settle_in(tensor, Place.CLEAN if tensor.stored_bytes >= tensor.slot_bytes else Place.DIRTY)

    def prefetch(self, tensor: Block) -> bool:
        """Starts loading a tensor that is away, if there is room without waiting and without evicting.

        Memory that only a running store to a disk reads counts as room: the disk loads behind the store.

        Returns:
            whether the tensor is resident or arriving now.
        """
        with self.lock:
            if tensor.place is not Place.AWAY:
                return tensor.place is not Place.BLANK
            if tensor.slot_bytes > self.budget.free_bytes:
                self.admission.released.collect()
            into = None
            if tensor.slot_bytes > self.budget.free_bytes:
                if tensor.stored_bytes >= tensor.slot_bytes:
                    released, size = self.admission.released, tensor.slot_bytes
                    into = released.take_over(self.budget, size, tensor.tag, tensor.name)
                if into is None:
                    return False
            try:
                self._start(tensor, moves=False, into=into)
            except DeviceBudgetError:
                # The card's free memory is in pieces, or taken by others. A fault makes room, or raises.
                return False
            if not tensor.pins:
                self.eviction.touch(tensor)
            return True

    def start(self, tensor: Block) -> None:
        """Starts loading a tensor that is away, making room for it: AWAY -> ARRIVING.

        Raises:
            BudgetError: no room can be made.
        """
        with self.lock:
            assert tensor.place is Place.AWAY, tensor
            self._start(tensor)

    def leave(self, tensor: Block) -> None:
        """Drops the bytes of a tensor that has them elsewhere as well: CLEAN or ARRIVING -> AWAY."""
        with self.lock:
            assert tensor.place in (Place.CLEAN, Place.ARRIVING) and not tensor.pins, tensor
            if tensor.place is Place.ARRIVING:
                self.admission.turn_back(tensor)
            else:
                self.admission.let_go(tensor, Place.AWAY)

    def pin(self, tensor: Block | Part, *, write: bool = False, begun: Callable[[Block], object] | None = None) -> Pin:
        """Like `fault`, and keeps it there until the pin is released."""
        part, block = (tensor, tensor.block) if isinstance(tensor, Part) else (None, tensor)
        with self.lock:
            if write or not block.place.resident:
                self.fault(block, write=write, begun=begun)
            block.pins += 1
            self.eviction.take(block)
            return Pin(self, block, part)

    def pin_arriving(self, tensor: Block) -> Pin:
        """Pins a tensor whose prefetch is under way; its bytes can be read after `fault`."""
        with self.lock:
            assert tensor.place is Place.ARRIVING, tensor
            tensor.pins += 1
            self.eviction.take(tensor)
            return Pin(self, tensor)

    def unpin(self, tensor: Block) -> None:
        """Ends a pin (`Pin.release`)."""
        with self.lock:
            tensor.pins -= 1
            assert tensor.pins >= 0, f"{tensor!r}: unpinned more often than pinned"
            # The load of an arriving one may have failed.
            if not tensor.pins and tensor.extent is not None:
                self.eviction.touch(tensor)

    @property
    def fits_on_card(self) -> bool:
        """Whether everything fits on a card beside the activations that have been seen."""
        return self.card is not None and 0 < self.whole_bytes <= self.budget.capacity_bytes

    def occupy(self, tensor: Block) -> None:
        """Makes room for a tensor that is away: AWAY -> DIRTY, no load. The caller writes all of it, or `vacate`s.

        Raises:
            BudgetError: no room can be made.
        """
        with self.lock:
            assert tensor.place is Place.AWAY, tensor
            self._make(tensor)
            self._settle_in(tensor, Place.DIRTY)

    def vacate(self, tensor: Block) -> None:
        """Undoes `occupy`, before anything was written."""
        with self.lock:
            self.admission.let_go(tensor, Place.AWAY)

    def leave_to_viewers(self, tensor: Block) -> None:
        """Gives a pinned tensor other memory with the same bytes if anybody else views what it has, and so keeps that.

        Raises:
            BudgetError: no room for both.
        """
        assert tensor.pins and tensor.extent is not None, tensor
        if not tensor.viewed:
            return
        tensor.note_changes()
        old = tensor.extent
        new = self._make(tensor)
        new.tensor.copy_(old.tensor)
        if tensor.occupant is not None:
            tensor.occupant.leaving(old.tensor)
            tensor.occupant.arrived(new.tensor)
        self.admission.released.add(old.octets, old.buffer, old.reservation)

    def flush(self, tensor: Block) -> None:
        """Makes the backing store hold the newest bytes of a resident tensor; it stays resident."""
        with self.lock:
            tensor.note_changes()
            if tensor.place is Place.DIRTY and self.backing is not None:
                self.traffic.store_whole(tensor)
                tensor.become(Place.CLEAN)

    def snapshot(self, tensor: Block | Part) -> torch.Tensor:
        """Returns the tensor's values as a CPU tensor that costs no charged memory.

        An extent in host memory that never leaves is given as a live alias, as plain torch's `state_dict` does; all
        else is a private mapping of the backing store, which stays what it is.
        """
        if isinstance(tensor, Part):
            return alone(tensor.of(self.snapshot(tensor.block)))
        with self.lock:
            if tensor.place is Place.BLANK:
                return torch.full((), tensor.fill, dtype=tensor.dtype).expand(tensor.shape)
            if tensor.place is Place.ARRIVING:
                self.stats.hits += 1
                self._receive(tensor)
            if tensor.extent is not None:
                movable = self.backing is not None and tensor.movable and not tensor.pins
                all_fits = 0 < self.whole_bytes <= self.budget.capacity_bytes
                if self.budget.tier is Tier.HOST and (all_fits or not movable):
                    return tensor.extent.tensor.detach()
                self.flush(tensor)
            self.traffic.settle(tensor)
            if tensor.stored_bytes < tensor.nbytes:
                # An interrupted sweep has left the backing store unwritten; the rest is the fill value.
                self.fault(tensor, write=True)
                self.flush(tensor)
            assert self.backing is not None
            octets = self.backing.snapshot(tensor.handle)
            return octets[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    def close(self) -> None:
        """Drops every tensor and gives their memory back. Idempotent; pins must have ended.

        Raises:
            BaseException: the first error; all else has been dropped all the same.
        """
        with self.lock:
            if self.closed:
                return
            self.closed = True
            steps: list[Callable[[], object]] = [] if self.holder is None else [self.holder.give_up]
            steps += [partial(self.drop, tensor) for tensor in self._tensors.values()]
            steps += [partial(_release, held) for held in self._held]
            self.tenants.pools.remove(self)
            close_all([*steps, self._tensors.clear, self.admission.released.settle])

    def tensors(self) -> Iterator[Block]:
        """Iterates over all living paged tensors."""
        return iter(list(self._tensors.values()))

    def check_integrity(self) -> None:
        """Raises `AssertionError` with the numbers unless places are right and charges are within the budget's use."""
        with self.lock:
            self.admission.released.collect()
            charged = self.admission.released.nbytes
            for tensor in [tensor for pool in self.tenants.pools for tensor in pool.tensors()]:
                tensor.check()
                if tensor.extent is not None:
                    charged += tensor.extent.reservation.nbytes
            self.eviction.check_integrity()
            if charged > self.budget.used_bytes:
                raise AssertionError(
                    f"extents and memory on its way out hold {charged} of {self.budget.used_bytes} used bytes"
                )
            self.budget.check_integrity()
            self.compute.check_integrity()
            if self.backing is not None:
                self.backing.check_integrity()


def _release(held: Reservation) -> None:
    if held.live:
        held.release()
