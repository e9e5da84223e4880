"""The ranks that blocks are sharded over: torch's collectives on them, and what ranks have to agree on.

A whole block is gathered in place: what a rank owns of each parameter is copied to its place in the block, and one
`all_gather_into_tensor` for each parameter brings the rest. So the ranks are a source of blocks, and nothing is stored.
"""

from __future__ import annotations

import hashlib
import time
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager
from torch.multiprocessing.reductions import StorageWeakRef

from ptm_accel.distributed.divergence import ADVICE, diverged, line, named
from ptm_accel.errors import UnsupportedError
from ptm_accel.memory.copies import order_behind
from ptm_accel.memory.cut import Cut
from ptm_accel.memory.traffic import PoolStats
from ptm_accel.memory.transfer import Transfer
from ptm_accel.model.groups import Share

_LETS_GO_S = 1.0
"""Longest time that gloo's threads are waited for after a collective: 4 ms were seen on a loaded machine."""

CONTROL_TIMEOUT_S = 300.0
"""Longest time that a rank waits for the others to come to where they have to agree."""

# torch 2.13 has other names for them; 2.11 has only these.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(slots=True)
class ShardStats:
    """Counts since the model was put on pages.

    Attributes:
        gathers: whole blocks gathered.
        gathered_bytes: their bytes, padding included.
        reductions: blocks of gradients that were reduced.
        reduced_bytes: their bytes, padding included.
        received_bytes: of both, what has come from other ranks.
        waited_s: how long the accessing thread has waited for either; a device waits without it.
        agreed: how often ranks had to agree on what comes next.
        pool: where it is told what is no work of ours.
        gathered, reduced: hashes of the names of what was, in order. Each has its own order: gradients of routed models
            come at other times on each rank.
    """

    gathers: int = 0
    gathered_bytes: int = 0
    reductions: int = 0
    reduced_bytes: int = 0
    received_bytes: int = 0
    waited_s: float = 0.0
    agreed: int = 0
    pool: PoolStats = field(default_factory=PoolStats)
    gathered: int = 0
    reduced: int = 0

    @property
    def sequence(self) -> tuple[int, int]:
        """Both hashes, which are the same on all ranks."""
        return self.gathered, self.reduced

    def note_gather(self, name: str) -> None:
        """Adds a gather to the sequence."""
        self.gathered = zlib.crc32(name.encode(), self.gathered)

    def note_reduction(self, name: str) -> None:
        """Adds a reduction to the sequence."""
        self.reduced = zlib.crc32(name.encode(), self.reduced)


def _users(storage: StorageWeakRef) -> int:
    """Counts who holds a storage that lives."""
    return torch._C._storage_Use_Count(storage.cdata)


class Collectives:
    """Several collectives that have been started, as one transfer.

    Gloo's threads hold the memory for up to some milliseconds after they have told of the end, which would count as a
    view where room is made. So it ends when they have let go.

    Args:
        works: they.
        rank, what: which rank has started them, and what it does, for messages.
        stats: where waiting for them counts.
        held: their memory, and who held it before; None where the device orders what uses it.
    """

    __slots__ = ("_error", "_held", "_rank", "_stats", "_what", "_works")

    def __init__(
        self,
        works: Sequence[Any],
        rank: int,
        what: str,
        stats: ShardStats,
        held: tuple[StorageWeakRef, int] | None = None,
    ) -> None:
        self._works = list(works)
        self._rank, self._what, self._stats, self._held = rank, what, stats, held
        self._error: UnsupportedError | None = None

    def done(self) -> bool:
        """See `Transfer`."""
        if not all(work.is_completed() for work in self._works):
            return False
        if self._held is not None:
            self._end()
        return not self._is_held()

    def _end(self) -> None:
        """Waits for them, and drops them, since each holds its memory as long as it is there."""
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            self._held = None
            self._error = diverged(self._rank, self._what, error)
            self._error.__cause__ = error

    def _is_held(self) -> bool:
        if self._held is None:
            return False
        storage, users = self._held
        if storage.expired() or _users(storage) <= users:
            self._held = None
        return self._held is not None

    def wait(self) -> None:
        """See `Transfer`."""
        self.order()

    def order(self) -> None:
        """See `Transfer`. A rank that has ended is an error here."""
        begin = time.perf_counter()
        self._end()
        until = begin + _LETS_GO_S
        while self._is_held() and time.perf_counter() < until:
            time.sleep(1e-5)
        # Gloo's threads have let go of it: what is left are views of others.
        self._held = None
        waited_s = time.perf_counter() - begin
        self._stats.waited_s += waited_s
        self._stats.pool.elsewhere_s += waited_s
        if self._error is not None:
            raise self._error


def _groups(device_type: str) -> tuple[dist.ProcessGroup, ...]:
    """Returns our process groups: for gathers, for reductions, for plain numbers, and for what has to be agreed on.

    All models of a process share them, as long as `torch.distributed` stays initialised.
    """
    world = dist.group.WORLD
    assert world is not None
    known = _made.get(world)
    if known is None:
        backend = "nccl" if device_type == "cuda" else "gloo"
        waits = world._get_backend(torch.device(device_type)).options._timeout
        known = _made[world] = (
            dist.new_group(backend=backend, timeout=waits),
            dist.new_group(backend=backend, timeout=waits),
            dist.new_group(backend="gloo", timeout=waits),
            dist.new_group(backend="gloo", timeout=timedelta(seconds=CONTROL_TIMEOUT_S)),
        )
    return known


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[dist.ProcessGroup, ...]] = weakref.WeakKeyDictionary()


def _octets(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: what is only moved may be of any dtype."""
    return tensor.detach().view(-1).view(torch.uint8)


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor, in pairs where they are complex: collectives add no others."""
    return torch.view_as_real(tensor).view(-1) if tensor.is_complex() else tensor


def broadcast(values: torch.Tensor, group: dist.ProcessGroup | None, device: torch.device) -> None:
    """Gives all processes the first one's values, of any dtype and layout, in place.

    Args:
        values: they.
        group: the processes; None for all.
        device: where the group computes.
    """
    if not values.numel():
        return
    # One that is expanded has few elements of its own.
    sizes = [size if stride else 1 for size, stride in zip(values.shape, values.stride(), strict=True)]
    own = values.as_strided(sizes, values.stride())
    given = own.detach().to(device).contiguous()
    dist.broadcast(_octets(given), group=group, group_src=0)
    if given.data_ptr() != own.data_ptr():
        own.copy_(given)


class Ranks:
    """The ranks, as the source of whole blocks (`ptm_accel.memory.transfer.Source`).

    Gathers and reductions have process groups of their own, so that those of user code and ours keep an order each.

    Attributes:
        rank, count: which rank this is, of how many.
        stats: what has been done.
    """

    def __init__(self, device: torch.device, stats: PoolStats) -> None:
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.stats = ShardStats(pool=stats)
        self.device = device
        self._gathers, self._reductions, self._plain, self._control = _groups(device.type)

    # ---- the source of whole blocks --------------------------------------------------------------------------------

    def load(self, handle: Share, offset: int, into: torch.Tensor, behind: Sequence[Transfer] = ()) -> Transfer:
        """Starts gathering a whole block; what this rank owns of it is in the compute tier, and pinned."""
        own, held = handle.own, self._holders(into)
        assert offset == 0 and own.extent is not None and own.place.resident, own
        order_behind(behind)
        mine, whole, size = own.extent.tensor.detach().view(-1), into.view(own.dtype), own.dtype.itemsize
        pairs, places, owned = [], [], []
        for piece in handle.pieces:
            cut, start = piece.cut, piece.start
            places.append(whole[start + cut.start : start + cut.stop])
            owned.append(mine[piece.own_start : piece.own_start + cut.length])
            target = into[start * size : (start + cut.padded) * size]
            first = cut.rank * cut.span * size
            pairs.append((target, target[first : first + cut.span * size]))
        # One launch for all of them on a GPU.
        with torch.no_grad():
            torch._foreach_copy_(places, owned)
        self.stats.gathers += 1
        gathered = sum(target.nbytes for target, _ in pairs)
        self.stats.gathered_bytes += gathered
        self.stats.received_bytes += gathered * (self.count - 1) // self.count
        self.stats.note_gather(own.name)
        return self._started(_all_gather, pairs, self._gathers, f"gathers {own.name}", held)

    def _holders(self, memory: torch.Tensor) -> tuple[StorageWeakRef, int] | None:
        """See `Collectives`; before anything views the memory."""
        if self.device.type != "cpu":
            return None
        storage = StorageWeakRef(memory.untyped_storage())
        return storage, _users(storage)

    # ---- collectives -----------------------------------------------------------------------------------------------

    def reduce(self, name: str, whole: torch.Tensor, pieces: Sequence[tuple[int, int]]) -> Collectives:
        """Starts summing gradients over all ranks; each rank's ranges then hold the sums, in place.

        Args:
            name: of the block.
            whole: the gradients of all members, 1-D.
            pieces: the first element and the span of a range, of each member.
        """
        held = self._holders(whole)
        sources = [whole[start : start + self.count * span] for start, span in pieces]
        pairs = [
            (_numbers(source[self.rank * span : (self.rank + 1) * span]), _numbers(source))
            for source, (_, span) in zip(sources, pieces, strict=True)
        ]
        self.stats.reductions += 1
        reduced = sum(source.nbytes for source in sources)
        self.stats.reduced_bytes += reduced
        self.stats.received_bytes += reduced * (self.count - 1) // self.count
        self.stats.note_reduction(name)
        return self._started(_reduce_scatter, pairs, self._reductions, f"adds up the gradients of {name}", held)

    def _started(
        self,
        collective: Any,
        pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
        group: dist.ProcessGroup,
        what: str,
        held: tuple[StorageWeakRef, int] | None,
    ) -> Collectives:
        """Starts a collective from the second tensor of each pair to the first: one launch for all of them on a GPU."""
        with named(self.rank, what):
            if collective is _all_gather and self.device.type == "cpu":
                # Gloo's threads assign the name of the work that has ended to one string, without a lock (torch 2.11 to
                # 2.13, `ProcessGroupGloo::runLoop`). That of coalesced gathers is long enough to be freed twice.
                works = [collective(target, source, group=group, async_op=True) for target, source in pairs]
            else:
                with _coalescing_manager(group=group, async_ops=True) as manager:
                    for target, source in pairs:
                        collective(target, source, group=group)
                works = manager.works
        return Collectives(works, self.rank, what, self.stats, held)

    def gather(self, name: str, whole: torch.Tensor, cut: Cut) -> None:
        """Gathers one tensor in place, and waits for it.

        Args:
            name: of it.
            whole: `cut.padded` elements, of which those that this rank owns are there.
            cut: what it owns.
        """
        own = whole[cut.rank * cut.span : (cut.rank + 1) * cut.span]
        self.stats.note_gather(name)
        with named(self.rank, name):
            _all_gather(_octets(whole), _octets(own), group=self._gathers)

    def sum(self, values: torch.Tensor) -> None:
        """Sums in place over all ranks."""
        with named(self.rank, "adds up gradients"):
            dist.all_reduce(values, group=self._reductions)

    def most(self, values: torch.Tensor) -> None:
        """Takes the greatest over all ranks in place, on the device."""
        with named(self.rank, "compares gradients"):
            dist.all_reduce(values, dist.ReduceOp.MAX, group=self._reductions)

    def share(self, values: torch.Tensor) -> None:
        """Gives all ranks the first one's values, in place."""
        with named(self.rank, "puts a model on pages"):
            broadcast(values, self._reductions, self.device)

    # ---- agreement -------------------------------------------------------------------------------------------------

    def agree(self, what: str) -> None:
        """Waits until all ranks have come here for the same reason.

        Args:
            what: this rank does, for messages.

        Raises:
            UnsupportedError: another rank does something else, or has not come within `CONTROL_TIMEOUT_S`.
        """
        self.stats.agreed += 1
        code = int.from_bytes(hashlib.md5(what.encode(), usedforsecurity=False).digest()[:6], "big")
        both = torch.tensor([code, -code])
        try:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._control)
        except RuntimeError as error:
            raise UnsupportedError(
                f"rank {self.rank} {what}{line()}, and not all of the {self.count} ranks have done so within "
                f"{CONTROL_TIMEOUT_S:g} s. {ADVICE} ({error})"
            ) from error
        if both[0] == -both[1]:
            return
        mine = f"{what}{line()}"
        every: list[str] = [""] * self.count
        with named(self.rank, mine):
            dist.all_gather_object(every, mine, group=self._control)
        others = (f"rank {rank} {other}" for rank, other in enumerate(every) if rank != self.rank and other != mine)
        raise UnsupportedError(f"rank {self.rank} {mine}, and {', '.join(others)}. {ADVICE}")

    def flags(self, values: Sequence[int]) -> list[int]:
        """Returns the greatest of each of some small numbers over all ranks.

        Raises:
            UnsupportedError: ranks have not gathered and reduced the same blocks in the same order.
        """
        gathered, reduced = self.stats.sequence
        most = torch.tensor([*values, gathered, reduced, -gathered, -reduced])
        with named(self.rank, "ends a backward"):
            dist.all_reduce(most, dist.ReduceOp.MAX, group=self._plain)
        *found, gathered, reduced, low_gathered, low_reduced = most.tolist()
        if (gathered, reduced) != (-low_gathered, -low_reduced):
            raise UnsupportedError(
                f"the {self.count} ranks have not used the same parameters in the same order, as rank {self.rank} sees "
                "at the end of a backward; their results may be wrong. Every rank has to run the same code: look for "
                "code that one rank runs alone, and resume from the last checkpoint."
            )
        return [int(value) for value in found]

    def meet(self, what: str) -> None:
        """Waits until all ranks have come here, as long as torch's own timeout (`init_process_group`) lets them.

        Args:
            what: this rank does, for messages.

        Raises:
            UnsupportedError: some have not come; the first rank names them.
        """
        with named(self.rank, what):
            waits = self._plain._get_backend(torch.device("cpu")).options._timeout
            dist.monitored_barrier(self._plain, waits, wait_all_ranks=True)

    def least(self, number: int) -> int:
        """Returns the least of one number over all ranks."""
        given = torch.tensor(-number)
        with named(self.rank, "puts a model on pages"):
            dist.all_reduce(given, dist.ReduceOp.MAX, group=self._plain)
        return -int(given)

    def told(self, value: Any) -> Any:
        """Returns the first rank's value, a plain object."""
        given = [value]
        with named(self.rank, "hears what the first one has"):
            dist.broadcast_object_list(given, group=self._plain, group_src=0)
        return given[0]

    def all_of(self, value: Any) -> list[Any]:
        """Returns the value of every rank, a plain object."""
        given: list[Any] = [None] * self.count
        with named(self.rank, "compares what ranks have"):
            dist.all_gather_object(given, value, group=self._plain)
        return given
