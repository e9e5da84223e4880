"""Whole blocks: gathered before they are used, in one order on all ranks, and dropped in that order too.

A collective that one rank begins alone is a deadlock. So what is gathered, and when, is a function of the accesses
alone, which are the same on all ranks: nothing here asks what there is room for, or what has arrived. The first pass of
a kind is gathered on demand, and ranks agree at each access. From the second on its order is known: then a block is
gathered one access before its own, and nobody has to agree.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable

import torch

from ptm_accel.distributed.ranks import Ranks
from ptm_accel.memory.block import Block, Place
from ptm_accel.memory.cut import Cut
from ptm_accel.model.groups import Share
from ptm_accel.model.slots import ParamSlot
from ptm_accel.runtime.executor import Executor

_AHEAD = 1
"""Accesses before its own at which a block is gathered."""

_JOIN_WITHIN = 64
"""Accesses ahead that are searched where the next access is not the expected one."""


class Order:
    """The accesses of passes, by kind and by their number within a step.

    A pass of a number that is not known is expected to be as the latest one of its kind.

    Attributes:
        seen: the accesses since a pass last began.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, int], list[Block | str]] = {}
        self._latest: dict[Hashable, list[Block | str]] = {}
        self._key: tuple[Hashable, int] | None = None
        self._number = 0
        self._expected: list[Block | str] = []
        self._at = 0
        self.seen: list[Block | str] = []
        self._departed = False

    def begin(self, kind: Hashable) -> None:
        """A pass begins; what was seen since the last one began is that one's order."""
        if self._key is not None and self._departed:
            self._known[self._key] = self._latest[self._key[0]] = self.seen
        self._key, self.seen, self._at, self._departed = (kind, self._number), [], 0, False
        self._number += 1
        self._expected = self._known.get(self._key) or self._latest.get(kind, [])

    def end_step(self) -> None:
        """The next pass is the first of a step."""
        self._number = 0

    def accessed(self, what: Block | str) -> bool:
        """Notes an access, to a block or to what has a name; returns whether it was expected."""
        self.seen.append(what)
        if self._at < len(self._expected) and self._expected[self._at] == what:
            self._at += 1
            return True
        self._departed = True
        ahead = self._expected[self._at : self._at + _JOIN_WITHIN]
        if what in ahead:
            self._at += ahead.index(what) + 1
        return False

    def ahead(self) -> list[Block]:
        """Returns the blocks that are expected next."""
        return [what for what in self._expected[self._at : self._at + _AHEAD] if isinstance(what, Block)]


class Wholes:
    """Gathers and drops whole blocks (`ptm_accel.runtime.executor.Gathers`).

    Args:
        executor: serves accesses.
        ranks: who owns the ranges.

    Attributes:
        most: how many blocks that no forward has pinned stay at most.
        order: the accesses that are known.
    """

    def __init__(self, executor: Executor, ranks: Ranks) -> None:
        self.most = 2
        self.order = Order()
        self._executor = executor
        self._pool = executor.pool
        self._ranks = ranks
        # Those that are there or arriving, the one that was used last at the end.
        self._here: OrderedDict[Block, None] = OrderedDict()
        self._last: Block | None = None

    def begin(self, kind: Hashable) -> None:
        """See `Gathers`."""
        self.order.begin(kind)
        self._last = None

    def before_use(self, block: Block) -> None:
        """See `Gathers`."""
        if block is self._last and block.place is not Place.AWAY:
            # Another parameter of the same group, with nothing in between.
            return
        self._last = block
        expected = self.order.accessed(block)
        if not expected:
            self._ranks.agree(f"uses {block.name.removesuffix(' (whole)')}")
        if block.place is Place.AWAY:
            self._gather(block)
        else:
            self._here.move_to_end(block)
        for following in self.order.ahead() if expected else ():
            if following.place is Place.AWAY:
                self._gather(following, beside=block)

    def give_up(self, block: Block) -> bool:
        """See `Gathers`."""
        if block.pins:
            return False
        if block.place is not Place.AWAY:
            self._drop(block)
        return True

    def gather(self, what: str, whole: torch.Tensor, cut: Cut) -> None:
        """See `Gathers`."""
        self._last = None
        if not self.order.accessed(what):
            self._ranks.agree(what)
        self._ranks.gather(what, whole, cut)

    def _gather(self, block: Block, beside: Block | None = None) -> None:
        """Starts gathering a block, in the place of those that were used longest ago.

        Args:
            block: which one.
            beside: stays in any case.
        """
        self._forget_gone()
        idle = [other for other in self._here if not other.pins and other is not beside]
        stay = max(self.most - 1 - (beside is not None), 0)
        for other in idle[: max(len(idle) - stay, 0)]:
            self._drop(other)
        share: Share = block.handle
        # A pending update of it runs first.
        with self._executor.pin(share.own):
            self._pool.start(block)
        self._here[block] = None

    def _forget_gone(self) -> None:
        """Forgets the blocks of parameters that have left the model, or their pages."""
        for block in [block for block in self._here if block.extent is None]:
            del self._here[block]

    def _drop(self, block: Block) -> None:
        del self._here[block]
        block.note_changes()
        if block.place is Place.DIRTY:
            self._write_back(block)
            block.become(Place.CLEAN)
        self._pool.leave(block)

    def _write_back(self, block: Block) -> None:
        """Keeps what this rank owns of a block that was changed: all ranks have made the same changes."""
        share: Share = block.handle
        assert block.extent is not None
        whole = block.extent.tensor.detach().view(-1)
        with self._executor.pin(share.own, write=True) as own:
            for piece in share.pieces:
                cut, at = piece.cut, piece.start + piece.cut.start
                own.view(-1)[piece.own_start : piece.own_start + cut.length].copy_(whole[at : at + cut.length])

    def keep_changes(self) -> None:
        """Keeps what this rank owns of blocks that were changed, which stay: it is about to be read.

        They count as changed until they leave: torch does not count what is written through `p.data` that somebody has.
        """
        self._forget_gone()
        for block in self._here:
            block.note_changes()
            if block.place is Place.DIRTY:
                self._write_back(block)

    def drop_all(self) -> None:
        """Ends a step: drops all blocks that nobody has pinned, since what ranks own of them is about to change."""
        self._forget_gone()
        for block in [block for block in self._here if not block.pins]:
            self._drop(block)
        self._last = None
        self.order.end_step()

    @property
    def pinned(self) -> list[Block]:
        """Blocks that are in use."""
        return [block for block in self._here if block.pins]


def most_wholes(slots: Iterable[ParamSlot]) -> int:
    """Returns how many whole blocks stay that nobody has pinned: those of a layer, and the next one."""
    groups = dict.fromkeys(slot.group for slot in slots if slot.sharded)
    layers = Counter(group.name.rpartition("[")[0] for group in groups if len(group.shapes) > 1)
    return 1 + max(layers.values(), default=1)
