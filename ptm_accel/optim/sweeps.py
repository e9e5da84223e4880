"""Sweeps over gradients that wait: the thread that updates without anybody waiting for it.

Angel-PTM's lock-free updating, for state on a disk. Each block of trained values has two buffers in host memory: the
sum of the gradients of the steps that wait, and the values as they were last *published*. The training thread adds
gradients and copies published values; the updater takes a sum, reads the state from the disk, updates a copy of the
values, writes the state back and publishes. Both hold one lock for the time of a copy, so nobody sees half an update.

The updater never calls the pool: state lies in blocks that are away, and it reads and writes them in the backing store
into memory of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ptm_accel.memory.block import Block, Part
from ptm_accel.memory.budget import Reservation
from ptm_accel.memory.copies import settle
from ptm_accel.memory.transfer import ALIGN_BYTES, BackingStore, round_up
from ptm_accel.model.slots import ParamSlot
from ptm_accel.optim.arithmetic import PIECE_ELEMENTS, step_over
from ptm_accel.optim.hyperparameters import NAMES
from ptm_accel.optim.units import ParamState


class WaitingGroup:
    """Gradients of one block that wait to be applied, and the values that were published last.

    Args:
        block: the values, as the pool has them.
        wide: dtype of what is updated.
        held: the charge for the buffers.

    Attributes:
        block, held: see above.
        sums: of the gradients that wait, in the layout of the block.
        published: the values after the last update.
        waiting: the parameters with gradients, each with its state, its group of the optimizer and its number of steps.
        hyper: the hyperparameters of the newest step that waits.
        oldest: the first step that waits; None if none does.
        under_way: the first of the steps that are being applied; None if none is.
        taken: how many parameters these steps update.
        grows: the step's gradients are being added, and are taken together.
        version: counts what was published.
        adopted: the version that the block has.
        lacks: the first step that this version lacks; None if it lacks none.
    """

    def __init__(self, block: Block, wide: torch.dtype, held: Reservation) -> None:
        self.block = block
        self.held = held
        self.sums = torch.empty(block.numel, dtype=wide)
        self.published = torch.empty(block.numel, dtype=block.dtype)
        self.waiting: dict[ParamSlot, tuple[ParamState, int, int]] = {}
        self.hyper: list[dict[str, Any]] = []
        self.oldest: int | None = None
        self.under_way: int | None = None
        self.grows = False
        self.taken = self.version = self.adopted = 0
        self.lacks: int | None = None

    @property
    def can_be_taken(self) -> bool:
        """Whether there is something for the updater."""
        return bool(self.waiting) and not self.grows

    @property
    def first(self) -> int | None:
        """The first step that is not published yet."""
        return self.oldest if self.under_way is None else self.under_way

    def begin(self, values: torch.Tensor) -> None:
        """Takes the values that the block has as those that were published last."""
        self.published.copy_(values.view(-1))
        self.adopted = self.version

    def add(self, state: ParamState, index: int, gradient: torch.Tensor, scale: torch.Tensor | None) -> None:
        """Adds the gradient of one step.

        Args:
            state: of the parameter.
            index: its group of the optimizer.
            gradient: it, before clipping.
            scale: what clipping multiplies it by, if anything.
        """
        total = state.slot.own.of(self.sums)
        _, _, count = self.waiting.get(state.slot, (state, index, 0))
        if not count:
            # As in a sum of gradients, the first is copied: adding to zeros loses -0.0.
            total.copy_(gradient)
            if scale is not None:
                total.mul_(scale)
        else:
            factor = 1.0 if scale is None else float(scale)
            # In pieces: torch makes a copy of what is narrower than the sum.
            pieces = zip(total.view(-1).split(PIECE_ELEMENTS), gradient.view(-1).split(PIECE_ELEMENTS), strict=True)
            for piece, more in pieces:
                piece.add_(more, alpha=factor)
        self.waiting[state.slot] = state, index, count + 1

    def take(self, into: torch.Tensor) -> list[tuple[ParamState, int, int]]:
        """Moves what waits to `into`, before it is divided; returns what it is of, as `waiting` has it."""
        into.copy_(self.sums)
        taken = list(self.waiting.values())
        self.waiting.clear()
        self.taken, self.under_way, self.oldest = len(taken), self.oldest, None
        return taken

    def publish(self, values: torch.Tensor) -> None:
        """Makes `values` those that the next step adopts."""
        self.published.copy_(values)
        self.version += 1
        self.under_way = None


class Desk:
    """Memory in which the updater has one block at a time: the sum that it took, the values, and state.

    Args:
        nbytes: of all that.
        held: the charge.
    """

    def __init__(self, nbytes: int, held: Reservation) -> None:
        self.nbytes = nbytes
        self.held = held
        # Direct transfers ask for aligned memory.
        octets = torch.empty(nbytes + ALIGN_BYTES, dtype=torch.uint8)
        start = -octets.data_ptr() % ALIGN_BYTES
        self._octets = octets[start : start + nbytes]

    def lay_out(self, group: WaitingGroup, state: Iterable[Block]) -> tuple[torch.Tensor, ...]:
        """Returns memory for a sum, values and blocks of state, the last as octets."""
        parts, at = [], 0
        for like in (group.sums, group.published):
            parts.append(self._octets[at : at + like.nbytes].view(like.dtype))
            at += round_up(like.nbytes)
        for block in state:
            parts.append(self._octets[at : at + block.slot_bytes])
            at += block.slot_bytes
        assert at <= self.nbytes, (at, self.nbytes)
        return tuple(parts)


def state_of(state: ParamState) -> dict[str, Part]:
    """What the update of a parameter reads and writes in the backing store, by the optimizer's key."""
    return state.paged if state.master is None else {**state.paged, "": state.master}


class Sweeps:
    """Applies what waits, block by block in the order of reading; a job of one thread, which runs while anything waits.

    Args:
        backing: where state lies.

    Attributes:
        groups: those that have buffers, by block.
        desk: the updater's own memory.
        twin: an optimizer like the user's, whose groups nobody else changes.
        changed: guards all of it; notified when something was published, or the job has ended.
        running: whether the job is with the thread.
        error: why it was broken off.
        count: updates that were published so far.
        most: the most steps that one of them had.
    """

    def __init__(self, backing: BackingStore) -> None:
        self.groups: dict[Block, WaitingGroup] = {}
        self.desk: Desk | None = None
        self.twin: torch.optim.Optimizer | None = None
        self.changed = threading.Condition()
        self.running = False
        self.error: BaseException | None = None
        self.count = self.most = 0
        self._backing = backing
        self._order: list[WaitingGroup] = []

    def begin(self, order: dict[str, int]) -> bool:
        """Returns whether the job must be given to the thread, since it is not there and something waits.

        Args:
            order: the place of each block in the next forward, by name.
        """
        with self.changed:
            last = len(order)
            self._order = sorted(self.groups.values(), key=lambda group: order.get(group.block.name, last))
            if self.running or not any(group.waiting for group in self._order):
                return False
            self.running = True
            return True

    def reached(self, step: int | None) -> bool:
        """Whether all steps up to `step` are published, or all that there are; called with the lock."""
        firsts = [group.first for group in self.groups.values()]
        return not any(first is not None and (step is None or first <= step) for first in firsts)

    def clear(self) -> int:
        """Forgets what waits, and waits for the end of the job; returns how many parameters are not updated."""
        with self.changed:
            lost = sum(len(group.waiting) for group in self.groups.values())
            for group in self.groups.values():
                group.waiting.clear()
                group.oldest, group.grows = None, False
            while self.running:
                self.changed.wait()
            for group in self.groups.values():
                if group.under_way is not None:
                    # Its update has failed.
                    group.under_way = None
                    lost += group.taken
            return lost

    # ---- in the thread that updates ------------------------------------------------------------------------------

    def run(self) -> None:
        """Applies what waits until nothing does; an error is for the thread that trains."""
        error: BaseException | None = None
        try:
            with torch.no_grad():
                while self._sweep():
                    pass
        except BaseException as raised:
            error = raised
        with self.changed:
            if error is not None:
                self.error, self.running = error, False
            self.changed.notify_all()

    def _sweep(self) -> bool:
        """Goes over all blocks once; returns whether there was anything, and gives the job up if not."""
        with self.changed:
            order = list(self._order)
        found = False
        for group in order:
            if group.can_be_taken:
                found = True
                self._apply(group)
        with self.changed:
            self.running = found or any(group.can_be_taken for group in self.groups.values())
            return self.running

    def _apply(self, group: WaitingGroup) -> None:
        assert self.desk is not None
        with self.changed:
            state = dict.fromkeys(
                part.block for each, _, _ in group.waiting.values() for part in state_of(each).values()
            )
            if not group.can_be_taken:
                # Cleared meanwhile, or another step has come.
                return
            sums, values, *rooms = self.desk.lay_out(group, state)
            taken, hyper = group.take(sums), group.hyper
        self._move([self._backing.load(block.handle, 0, room) for block, room in zip(state, rooms, strict=True)])
        values.copy_(group.published)
        there = {
            block: room[: block.nbytes].view(block.dtype).view(block.shape)
            for block, room in zip(state, rooms, strict=True)
        }
        for each, _, count in taken:
            if count > 1:
                each.slot.own.of(sums).div_(count)
        self._update(taken, sums, values, there, hyper)
        self._move([self._backing.store(block.handle, 0, room) for block, room in zip(state, rooms, strict=True)])
        with self.changed:
            group.publish(values)
            self.count += 1
            self.most = max(self.most, *(count for _, _, count in taken))
            self.changed.notify_all()

    def _move(self, transfers: list[Any]) -> None:
        """Waits for all transfers, and raises the first error: the desk is used again."""
        error = settle(transfers)
        if error is not None:
            raise error

    def _update(
        self,
        taken: list[tuple[ParamState, int, int]],
        sums: torch.Tensor,
        values: torch.Tensor,
        there: dict[Block, torch.Tensor],
        hyper: list[dict[str, Any]],
    ) -> None:
        """Calls the optimizer for the parameters of a block, over what lies on the desk."""
        twin = self.twin
        assert twin is not None
        groups: list[dict[str, Any]] = [
            {**{key: value for key, value in each.items() if key != NAMES}, "params": []} for each in hyper
        ]
        params: list[nn.Parameter] = []
        for state, index, _ in taken:
            own = state.slot.own
            state_here = {key: part.of(there[part.block]) for key, part in state_of(state).items()}
            param = nn.Parameter(state_here.pop("", own.of(values)))
            param.grad = own.of(sums)
            twin.state[param] = {**state.small, **state_here}
            groups[index]["params"].append(param)
            params.append(param)
        try:
            step_over(twin, groups, hyper)
            for (state, _, _), param in zip(taken, params, strict=True):
                state.small = _kept(state, twin.state[param], there)
                if state.master is not None:
                    state.slot.own.of(values).copy_(param.detach())
        finally:
            for param in params:
                twin.state.pop(param, None)


def _kept(state: ParamState, after: dict[str, Any], there: dict[Block, torch.Tensor]) -> dict[str, Any]:
    """Returns what the optimizer has left beside full-size tensors, which most optimizers change in place."""
    small: dict[str, Any] = {}
    for key, value in after.items():
        part = state.paged.get(key)
        if part is None:
            small[key] = value
            continue
        here = part.of(there[part.block])
        if here.data_ptr() != value.data_ptr():
            here.copy_(value)
    return small
