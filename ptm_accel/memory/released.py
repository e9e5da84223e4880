"""Memory of the compute tier that was let go of; it stays charged until neither a view nor a transfer uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.errors import DiskError
from ptm_accel.memory.arena import HostArena
from ptm_accel.memory.budget import Budget, Reservation, Tag
from ptm_accel.memory.copies import moves_of, settle
from ptm_accel.memory.disk import DiskTier
from ptm_accel.memory.slabs import Run
from ptm_accel.memory.traffic import Traffic
from ptm_accel.memory.transfer import Buffer, ComputeTier, Transfer

IsOwn = Callable[[Transfer], bool]
"""Whether a transfer is a copy of the device."""


@dataclass(slots=True, eq=False)
class _Released:
    """One piece of memory.

    Attributes:
        storage: dies with the last view.
        buffer: is recycled then; None for memory of torch's.
        reservation: the charge.
        transfer: reads or writes the memory; None once it is known to have ended.
        kept: memory of torch's that only the transfer still needs.
        alone: nobody but the transfer holds the memory.
    """

    storage: StorageWeakRef
    buffer: Buffer | None
    reservation: Reservation
    transfer: Transfer | None
    kept: torch.Tensor | None = None
    alone: bool = False

    def is_unused(self) -> bool:
        """Whether the memory can be taken back."""
        if self.transfer is not None and self.transfer.done():
            self.transfer = self.kept = None
        return self.transfer is None and self.storage.expired()

    def comes_free(self) -> bool:
        """Whether the memory can be taken back once its transfer has ended, whatever anybody does."""
        return self.storage.expired() or (self.alone and self.transfer is not None)

    def is_reusable(self, is_own: IsOwn) -> bool:
        """Whether the memory can be used again behind the copies of the device (`is_own`) that use it."""
        if self.buffer is None or not isinstance(self.buffer.region, Run) or not self.storage.expired():
            return False
        assert self.transfer is not None
        if not all(map(is_own, parts := moves_of(self.transfer))):
            return False
        self.buffer.behind = parts
        return True

    def is_left_to(self, moves: IsOwn) -> bool:
        """Whether nobody but running transfers of a backing store (`moves`) use the memory."""
        return self.alone and self.transfer is not None and all(map(moves, moves_of(self.transfer)))

    def is_viewed(self, is_own: IsOwn) -> bool:
        """Whether somebody else than a transfer holds the memory."""
        ended = self.transfer is None or all(map(is_own, moves_of(self.transfer)))
        return ended and self.kept is None and not self.storage.expired()


class ReleasedMemory:
    """Takes memory back, and gives up its charge, once nothing uses it.

    Args:
        compute: the tier that blocks are given back to.
        traffic: counts the time of waiting.
        is_own: tells copies of the device; None on a CPU.
        lock: guards it.
    """

    def __init__(self, compute: ComputeTier, traffic: Traffic, is_own: IsOwn | None, lock: threading.RLock) -> None:
        self._compute = compute
        # Tells transfers behind which the backing store can load without anybody waiting.
        self._moves: IsOwn | None = None
        if isinstance(traffic.backing, DiskTier) and isinstance(compute, HostArena):
            self._moves = traffic.backing.is_own
        self._traffic = traffic
        self._is_own = is_own
        self._lock = lock
        self._released: list[_Released] = []

    def __bool__(self) -> bool:
        return bool(self._released)

    def __len__(self) -> int:
        return len(self._released)

    @property
    def nbytes(self) -> int:
        """Charged bytes."""
        return sum(each.reservation.nbytes for each in self._released)

    @property
    def ending_bytes(self) -> int:
        """Charged bytes that come free as running transfers end; what somebody views may stay longer."""
        return sum(each.reservation.nbytes for each in self._released if each.comes_free())

    def add(
        self,
        octets: torch.Tensor,
        buffer: Buffer | None,
        reservation: Reservation,
        transfer: Transfer | None = None,
        *,
        alone: bool = False,
    ) -> None:
        """Lets go of memory: it is taken back when its last view has died and `transfer` has ended.

        Args:
            octets: the memory.
            buffer: what the tier takes back; None for memory of torch's.
            reservation: the charge.
            transfer: reads or writes it.
            alone: nobody else holds it.
        """
        storage = StorageWeakRef(octets.untyped_storage())
        if buffer is not None:
            buffer.octets = None
        with self._lock:
            kept = octets if buffer is None and transfer is not None else None
            self._released.append(_Released(storage, buffer, reservation, transfer, kept, alone))

    def watch(self, storage: StorageWeakRef, reservation: Reservation) -> None:
        """Gives up a charge when a storage of torch's dies."""
        with self._lock:
            self._released.append(_Released(storage, None, reservation, None))

    def collect(self) -> None:
        """Takes back what is no longer used."""
        with self._lock:
            still: list[_Released] = []
            for each in self._released:
                if not each.is_unused() and (self._is_own is None or not each.is_reusable(self._is_own)):
                    still.append(each)
                    continue
                each.reservation.release()
                if each.buffer is not None:
                    self._compute.recycle(each.buffer)
            self._released = still

    def take_over(self, budget: Budget, nbytes: int, tag: Tag, name: str) -> tuple[Reservation, Buffer] | None:
        """Returns a charged buffer in the room of running stores: a load into it comes behind them (`Buffer.behind`).

        Args:
            budget: of the tier.
            nbytes: of the buffer, more than is free.
            tag: what it is for.
            name: whose it is.

        Returns:
            None if what only stores to a disk still read is less than that.
        """
        if self._moves is None:
            return None
        with self._lock:
            left = [each for each in self._released if each.is_left_to(self._moves)]
            same = next((each for each in left if each.buffer is not None and each.reservation.nbytes == nbytes), None)
            givers, short = [], nbytes - budget.free_bytes
            for each in left if same is None else [same]:
                if short > 0:
                    givers.append(each)
                    short -= each.reservation.nbytes
                    each.kept = None
            if short > 0:
                return None
            reservation = budget.shift([each.reservation for each in givers], nbytes, tag, name)
            try:
                buffer = self._buffer_of(givers, same, nbytes)
            except BaseException:
                reservation.release()
                raise
            buffer.behind = tuple(p for each in givers if each.transfer is not None for p in moves_of(each.transfer))
            return reservation, buffer

    def _buffer_of(self, givers: list[_Released], same: _Released | None, nbytes: int) -> Buffer:
        arena = cast("HostArena", self._compute)
        if same is not None:
            assert same.buffer is not None
            buffer = arena.again(same.buffer)
            self._released.remove(same)
            same.reservation.release()
            return buffer
        # Fresh memory takes none before it is written to, and then theirs has been unmapped.
        for each in givers:
            if each.buffer is not None:
                arena.leave_to_transfers(each.buffer)
                each.buffer = None
        return arena.allocate(nbytes)

    def settle(self) -> None:
        """Waits for all transfers; their errors are those of their own tensors."""
        with self._lock:
            settle([each.transfer for each in self._released if each.transfer is not None])
            self.collect()

    def running(self) -> Transfer | None:
        """A running transfer at whose end memory comes free."""
        # A device's own copies hold nothing: what is left beside them is viewed, and does not come free with them.
        ending = (each for each in self._released if self._is_own is None or not each.is_viewed(self._is_own))
        transfers = (each.transfer for each in ending if each.transfer is not None)
        return next((transfer for transfer in transfers if not transfer.done()), None)

    def wait_for_one(self) -> bool:
        """Waits for a transfer, whose error is that of its own tensor; False if none is running.

        Raises:
            DiskError: it can never end.
        """
        transfer = self.running()
        if transfer is None:
            return False
        with self._traffic.stalled():
            try:
                transfer.wait()
            except DiskError:
                if not transfer.done():
                    raise
        return True

    def first(self, count: int) -> list[Reservation]:
        """The charges of the pieces that were let go of first."""
        return [each.reservation for each in self._released[:count]]
