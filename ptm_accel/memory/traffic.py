"""Moves whole tensors and parts of them between the compute tier and the backing store, and counts what that took."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from ptm_accel.errors import BudgetError
from ptm_accel.memory.block import Block
from ptm_accel.memory.copies import Keeping, finish, order_behind
from ptm_accel.memory.profiling import ranged
from ptm_accel.memory.timeline import Span, Timeline, during
from ptm_accel.memory.transfer import ALIGN_BYTES, BackingStore, Transfer
from ptm_accel.units import format_bytes

_FILL_BYTES = 64 << 10
"""Bytes of the fill value that are stored at a time."""


@dataclass(slots=True)
class PoolStats:
    """Counts of what the pool has done since it was made.

    Attributes:
        faults: accesses to tensors that were not resident, nor prefetched.
        hits: accesses to prefetched tensors.
        evictions: tensors evicted.
        loaded_bytes: from the backing store.
        stored_bytes: to the backing store.
        stall_s: how long the accessing thread has waited; a device waits for copies without it.
        own_s: how long it was in hooks and calls of ours, but for what counts as something else.
        elsewhere_s: how long it did what is no work of the call of ours that it is in: it waited, it computed (updates,
            sums and norms of gradients), or it was in another such call, whose work has been counted.
    """

    faults: int = 0
    hits: int = 0
    evictions: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    stall_s: float = 0.0
    own_s: float = 0.0
    elsewhere_s: float = 0.0


def _name(tensor: Block) -> str:
    return tensor.name


class Traffic:
    """Loads and stores over one backing store.

    Args:
        backing: where bytes go when there is no room; None if there is no such place.
        stats: what is counted.
        timeline: of the device that computes; None where compute is carried out as it is called.
    """

    def __init__(self, backing: BackingStore | None, stats: PoolStats, timeline: Timeline | None = None) -> None:
        self.backing = backing
        self.stats = stats
        self.timeline = timeline
        # Handles that are no tensor's any more, with snapshots that may still be alive.
        self._kept: list[Any] = []

    @contextmanager
    def stalled(self) -> Iterator[None]:
        """Counts the time inside as stalled, and what is queued inside as waiting."""
        begin = time.perf_counter()
        try:
            with during(self.timeline, Span.WAIT):
                yield
        finally:
            waited_s = time.perf_counter() - begin
            self.stats.stall_s += waited_s
            self.stats.elsewhere_s += waited_s

    def handle_of(self, tensor: Block) -> Any:
        """Returns the backing store's handle of a tensor, made on first use.

        Raises:
            BudgetError: the backing store has no room.
        """
        assert self.backing is not None, f"{tensor!r}: there is no backing store"
        if tensor.handle is None:
            self._free_kept()
            tensor.handle = self.backing.new(tensor.slot_bytes, tensor.tag, tensor.name)
        return tensor.handle

    def release(self, handle: Any) -> None:
        """Frees a handle, once no snapshot of it is alive."""
        assert self.backing is not None
        if handle.snapshots and handle.held():
            self._kept.append(handle)
        else:
            self.backing.free(handle)

    def set_apart(self, tensor: Block, *, whole: bool = False) -> Any:
        """Gives a tensor that is to be stored to another handle, if a snapshot of the present one is alive.

        What somebody has been given by `state_dict()` is what it was.

        Args:
            tensor: its handle has `snapshots`.
            whole: all of it is to be stored.

        Returns:
            the handle.

        Raises:
            BudgetError: the backing store has no room.
        """
        handle, backing = tensor.handle, self.backing
        assert backing is not None
        self._free_kept()
        if not handle.held():
            return handle
        try:
            made = backing.new(tensor.slot_bytes, tensor.tag, tensor.name)
        except BudgetError as refusal:
            raise type(refusal)(
                f"{tensor.name}: a value of state_dict() is kept, and takes {format_bytes(tensor.slot_bytes)} in "
                f"addition to the new value. Drop it, or keep a copy of it (`value.clone()`). ({refusal})"
            ) from refusal
        if not whole:
            backing.copy(handle, made)
        tensor.handle = made
        self._kept.append(handle)
        return made

    def _free_kept(self) -> None:
        kept, self._kept = self._kept, []
        for handle in kept:
            self.release(handle)

    @ranged("load", _name)
    def start_load(
        self,
        tensor: Block,
        offset: int,
        into: torch.Tensor,
        typed: torch.Tensor,
        behind: Sequence[Transfer] = (),
    ) -> Transfer | None:
        """Starts loading the bytes from `offset` on; what was never stored is filled.

        Args:
            tensor: which one; it is away.
            offset: first byte.
            into: the target, a multiple of `ALIGN_BYTES`.
            typed: the same memory as elements of the tensor.
            behind: transfers that use the memory.

        Raises:
            DiskError: an earlier store of it failed.
        """
        if tensor.backing is not None:
            return tensor.backing.load(tensor.handle, offset, into, behind)
        assert self.backing is not None
        self._look_at_ended(tensor)
        wanted = into.numel()
        there = min(max(0, tensor.stored_bytes - offset), wanted)
        load = None
        if there:
            load = self.backing.load(tensor.handle, offset, into if there == wanted else into[:there], behind)
        if there < wanted and (filled := there // tensor.dtype.itemsize) < typed.numel():
            order_behind(behind)
            typed.view(-1)[filled:].fill_(tensor.fill)
        self.stats.loaded_bytes += there
        return load

    def order(self, transfer: Transfer) -> None:
        """Makes later compute come after `transfer`."""
        if self.timeline is not None and transfer.done():
            # Without marks in the timeline, which cost time.
            transfer.order()
            return
        with self.stalled():
            transfer.order()

    def settle(self, tensor: Block) -> None:
        """Waits for stores of `tensor` that may still run.

        Raises:
            DiskError: one of them failed.
        """
        if tensor.stores:
            stores, tensor.stores = tensor.stores, []
            with self.stalled():
                finish(stores)

    def _look_at_ended(self, tensor: Block) -> None:
        """Raises the error of a store that has failed; the backing store itself orders loads behind running stores."""
        if not tensor.stores:
            return
        ended = [store for store in tensor.stores if store.done()]
        tensor.stores = [store for store in tensor.stores if store not in ended]
        finish(ended)

    @ranged("store", _name)
    def start_store(self, tensor: Block, offset: int, octets: torch.Tensor) -> Transfer:
        """Starts storing part of a tensor; later loads of it wait for that."""
        assert self.backing is not None
        handle = self.handle_of(tensor)
        if handle.snapshots:
            handle = self.set_apart(tensor)
        if offset > tensor.stored_bytes:
            self._fill(tensor, offset, octets.device)
        transfer = self.backing.store(handle, offset, octets)
        tensor.stores.append(transfer)
        tensor.stored_bytes = max(tensor.stored_bytes, offset + octets.numel())
        self.stats.stored_bytes += octets.numel()
        return transfer

    def _fill(self, tensor: Block, stop: int, device: torch.device) -> None:
        """Stores the fill value up to `stop`: the backing store has bytes from the start on, and parts come in any
        order.
        """
        assert self.backing is not None
        piece = torch.empty(min(stop - tensor.stored_bytes, _FILL_BYTES), dtype=torch.uint8, device=device)
        piece.view(tensor.dtype).fill_(tensor.fill)
        with self.stalled():
            while (at := tensor.stored_bytes) < stop:
                size = min(stop - at, piece.numel())
                # Waited for: what is stored there next must come after it.
                self.backing.store(tensor.handle, at, piece[:size]).wait()
                tensor.stored_bytes += size
                self.stats.stored_bytes += size

    @ranged("store", _name)
    def start_store_whole(self, tensor: Block) -> None:
        """Starts storing a resident tensor; later loads of it wait for that.

        Raises:
            BudgetError: the backing store has no room; nothing was started.
            DiskError: it cannot be started.
        """
        assert self.backing is not None and tensor.extent is not None
        handle = self.handle_of(tensor)
        if handle.snapshots:
            handle = self.set_apart(tensor, whole=True)
        # All is stored anew, so errors of older stores no longer matter.
        if tensor.stores:
            tensor.stores = [store for store in tensor.stores if not store.done()]
        octets = tensor.extent.octets
        nbytes = octets.numel()
        aligned = nbytes // ALIGN_BYTES * ALIGN_BYTES
        if aligned:
            tensor.stores.append(self.backing.store(handle, 0, octets if aligned == nbytes else octets[:aligned]))
        if aligned < nbytes:
            # Adopted memory ends where its tensor ends; the last, short unit goes through a padded copy.
            tail = torch.zeros(ALIGN_BYTES, dtype=torch.uint8, device=octets.device)
            tail[: nbytes - aligned] = octets[aligned:]
            tensor.stores.append(Keeping(self.backing.store(handle, aligned, tail), tail))
        self.stats.stored_bytes += tensor.slot_bytes
        tensor.stored_bytes = tensor.slot_bytes

    def store_whole(self, tensor: Block) -> None:
        """Stores a resident tensor and waits until that is done.

        Raises:
            BudgetError: the backing store has no room.
            DiskError: it failed; the extent is still good.
        """
        before = tensor.stored_bytes, self.stats.stored_bytes
        try:
            self.start_store_whole(tensor)
            self.settle(tensor)
        except BaseException:
            tensor.stored_bytes, self.stats.stored_bytes = before
            raise
