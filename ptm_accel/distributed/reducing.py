"""Gradients over ranks: collected whole for one group at a time, and reduced to the range that each rank owns.

Gradients are multiplied by 1 / number of ranks and summed, as DistributedDataParallel does, after every micro-batch.
Groups are reduced in one order on all ranks: at first that of their first uses, backwards; from the second backward on
the order in which their gradients arrived on the first rank. A group is closed when the next one in that order has all
its gradients, so that at most a few whole groups are there at a time. What arrives later is reduced at the end of
backward. Gradients of small parameters, which every rank has whole, are summed together at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ptm_accel.distributed.ranks import Collectives, Ranks
from ptm_accel.memory.block import Block
from ptm_accel.memory.budget import Tag
from ptm_accel.model.grad_slot import GradSlot
from ptm_accel.model.groups import ParamGroup
from ptm_accel.runtime.executor import Executor


class _Arriving:
    """The whole gradients of one group, of one backward.

    Attributes:
        block: holds them, as the whole block of its values does.
        members: those that have arrived.
    """

    def __init__(self, group: ParamGroup, dtype: torch.dtype, executor: Executor) -> None:
        pool = executor.pool
        shape = torch.Size([group.whole_numel])
        self.block: Block = pool.create(f"{group.name}.grad (whole)", Tag.GRAD, shape, dtype, movable=False)
        self.members: set[int] = set()
        pool.make(self.block)

    @property
    def elements(self) -> torch.Tensor:
        """All of it, 1-D."""
        assert self.block.extent is not None
        return self.block.extent.tensor

    def add(self, group: ParamGroup, member: int, gradient: torch.Tensor) -> None:
        """A gradient of one member has come."""
        start = group.pieces[member].start
        here = self.elements[start : start + gradient.numel()]
        if member in self.members:
            here.add_(gradient.reshape(-1))
        else:
            here.copy_(gradient.reshape(-1))
            self.members.add(member)


class _Trained:
    """The trained members of one sharded group.

    Attributes:
        group: see above.
        grads: their gradients, by number.
        arriving: what has come in this backward, and is not reduced.
        late: what has come after that.
        closed: whether it has been reduced in this backward.
    """

    def __init__(self, group: ParamGroup) -> None:
        self.group = group
        self.grads: dict[int, GradSlot] = {}
        self.arriving: _Arriving | None = None
        self.late: _Arriving | None = None
        self.closed = False

    @property
    def block(self) -> Block:
        """The whole block of the values."""
        return next(iter(self.grads.values())).slot.value.block

    @property
    def whole_bytes(self) -> int:
        """Bytes of the gradients of whole members."""
        return self.group.whole_numel * next(iter(self.grads.values())).slot.value.dtype.itemsize

    @property
    def whole(self) -> bool:
        """Whether all its gradients have come."""
        return self.arriving is not None and len(self.arriving.members) == len(self.grads)


class Reductions:
    """Takes gradients as autograd accumulates them (`ptm_accel.model.gradients.Sharing`).

    Args:
        executor: serves accesses.
        ranks: who they are shared with.
        grads: gives those of all trained parameters, in the model's order; the same on all ranks.
        used: gives the whole blocks that have been used in the pass under way, in order.
        patience: groups that have all their gradients wait for one before them, in the first backward, while they take
            no more bytes than so many of the largest.
    """

    def __init__(
        self,
        executor: Executor,
        ranks: Ranks,
        grads: Callable[[], list[GradSlot]],
        used: Callable[[], Sequence[object]],
        patience: int,
    ) -> None:
        self._used = used
        self._patience = patience
        self._executor = executor
        self._pool = executor.pool
        self._ranks = ranks
        self._known = grads
        self._meet(grads())

    def _meet(self, grads: list[GradSlot]) -> None:
        """Takes gradients of `grads` from now on, in an order that is still to be found."""
        self._grads = grads
        self._trained: dict[ParamGroup, _Trained] = {}
        self._small: list[GradSlot] = []
        for grad in self._grads:
            if grad.slot.sharded:
                trained = self._trained.setdefault(grad.slot.group, _Trained(grad.slot.group))
                trained.grads[grad.slot.member] = grad
            else:
                self._small.append(grad)
        self._order = list(reversed(self._trained.values()))
        self._largest_bytes = max((trained.whole_bytes for trained in self._order), default=0)
        self._learned = False
        self._begin_backward()

    def _begin_backward(self) -> None:
        self._next = 0
        self._came: list[_Trained] = []
        self._here: set[GradSlot] = set()
        self._zeros: list[GradSlot] = []
        self._small_here: dict[GradSlot, torch.Tensor] = {}
        self._running: tuple[_Trained, _Arriving, Collectives] | None = None
        for trained in self._trained.values():
            trained.closed = False

    def begin(self) -> None:
        """A backward begins; what one that was broken off has left is dropped."""
        for trained in self._trained.values():
            for arriving in (trained.arriving, trained.late):
                if arriving is not None:
                    self._pool.forget(arriving.block)
            trained.arriving = trained.late = None
        if self._running is not None:
            self._pool.forget(self._running[1].block)
        grads = self._known()
        if grads != self._grads:
            # Layers have been unfrozen.
            self._meet(grads)
        self._begin_backward()
        if not self._grads:
            return
        if not self._learned:
            self._guess_order()
        # Also where none comes to this rank: others may have some.
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(self._end)

    def _guess_order(self) -> None:
        """Orders groups by their first uses in the forward, backwards; those that it has not used come last."""
        first: dict[object, int] = {}
        for number, block in enumerate(self._used()):
            first.setdefault(block, number)
        groups = reversed(self._trained.values())
        self._order = sorted(groups, key=lambda trained: -first.get(trained.block, -1))

    # ---- as gradients arrive ---------------------------------------------------------------------------------------

    @torch.no_grad()
    def take(self, grad: GradSlot, gradient: torch.Tensor) -> None:
        """Takes a gradient of one backward.

        Raises:
            BudgetError: there is no room for those of its group.
        """
        slot = grad.slot
        self._here.add(grad)
        if not slot.sharded:
            known = self._small_here.get(grad)
            self._small_here[grad] = gradient if known is None else known.add_(gradient)
            return
        trained = self._trained[slot.group]
        if trained.closed:
            trained.late = trained.late or _Arriving(slot.group, gradient.dtype, self._executor)
            trained.late.add(slot.group, slot.member, gradient)
            return
        if trained.arriving is None:
            trained.arriving = _Arriving(slot.group, gradient.dtype, self._executor)
        trained.arriving.add(slot.group, slot.member, gradient)
        if trained.whole:
            self._came.append(trained)
            self._go_on(trained)

    def _go_on(self, latest: _Trained) -> None:
        """Reduces the groups that come before `latest`, and that one, if its turn has come."""
        until = self._order.index(latest, self._next) + 1
        waiting = self._order[self._next : until]
        come = [trained.whole for trained in waiting]
        held = sum(each.arriving.block.slot_bytes for each in waiting if each.whole and each.arriving is not None)
        # Before an order is known, the others may still come; some of the model may not be used at all.
        if self._learned or all(come) or held > self._patience * self._largest_bytes:
            for trained in waiting:
                self._reduce(trained)

    def _reduce(self, trained: _Trained) -> None:
        """Starts reducing a group: what has not come here adds nothing to what has come on other ranks."""
        group = trained.group
        if trained.arriving is None:
            dtype = next(iter(trained.grads.values())).slot.value.dtype
            trained.arriving = _Arriving(group, dtype, self._executor)
        self._finish()
        arriving, trained.arriving = trained.arriving, None
        self._start(trained, arriving)
        trained.closed = True
        self._next += 1

    def _start(self, trained: _Trained, arriving: _Arriving) -> None:
        pieces = [(trained.group.pieces[member], grad) for member, grad in trained.grads.items()]
        elements = arriving.elements
        for member in trained.grads.keys() - arriving.members:
            piece = trained.group.pieces[member]
            elements[piece.start : piece.start + piece.cut.padded].zero_()
        elements.mul_(1.0 / self._ranks.count)
        spans = [(piece.start, piece.cut.span) for piece, _ in pieces]
        self._running = trained, arriving, self._ranks.reduce(trained.group.name, elements, spans)

    def _finish(self) -> None:
        """Waits for the group that is being reduced, and adds what this rank owns to its sums."""
        if self._running is None:
            return
        trained, arriving, collectives = self._running
        collectives.order()
        self._running = None
        for member, grad in trained.grads.items():
            cut, start = trained.group.pieces[member].cut, trained.group.pieces[member].start
            mine = arriving.elements[start + cut.start : start + cut.stop]
            if member in arriving.members or bool(mine.any()):
                grad.add(mine)
            else:
                # It may be of nobody, and must not count then; or it is of another rank, whose range this is not.
                self._zeros.append(grad)
        self._pool.forget(arriving.block)

    # ---- at the end of a backward ----------------------------------------------------------------------------------

    @torch.no_grad()
    def _end(self) -> None:
        for trained in self._order[self._next :]:
            self._reduce(trained)
        self._finish()
        groups = list(self._trained.values())
        late = [trained.late is not None for trained in groups]
        flags = self._ranks.flags([*(grad in self._here for grad in self._grads), *late])
        came = {grad for grad, flag in zip(self._grads, flags, strict=False) if flag}
        for grad in self._zeros:
            if grad in came:
                value = grad.slot.own
                grad.add(torch.zeros(value.shape, dtype=value.dtype, device=self._ranks.device))
        for trained, flag in zip(groups, flags[len(self._grads) :], strict=True):
            if flag:
                self._reduce_late(trained)
        self._reduce_small([grad for grad in self._small if grad in came])
        if not self._learned:
            self._learn()
        self._begin_backward()

    def _reduce_late(self, trained: _Trained) -> None:
        dtype = next(iter(trained.grads.values())).slot.value.dtype
        late, trained.late = trained.late or _Arriving(trained.group, dtype, self._executor), None
        self._start(trained, late)
        self._finish()

    def _reduce_small(self, grads: list[GradSlot]) -> None:
        """Sums the gradients of small parameters, those of one dtype together."""
        dtypes = dict.fromkeys(grad.slot.value.dtype for grad in grads)
        for dtype in dtypes:
            alike = [grad for grad in grads if grad.slot.value.dtype == dtype]
            parts = [
                self._small_here[grad].reshape(-1)
                if grad in self._small_here
                else torch.zeros(grad.slot.value.numel, dtype=dtype, device=self._ranks.device)
                for grad in alike
            ]
            flat = torch.cat(parts)
            del parts
            flat.mul_(1.0 / self._ranks.count)
            self._ranks.sum(flat)
            at = 0
            for grad in alike:
                grad.add(flat[at : at + grad.slot.value.numel].view(grad.slot.value.shape))
                at += grad.slot.value.numel

    def _learn(self) -> None:
        """Takes over the order in which the first rank's gradients have come."""
        groups = list(self._trained.values())
        numbers = {trained: number for number, trained in enumerate(groups)}
        came = self._came + [trained for trained in self._order if trained not in self._came]
        self._order = [groups[number] for number in self._ranks.told([numbers[trained] for trained in came])]
        self._learned = True
