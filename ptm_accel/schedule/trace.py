"""Trace of a pass: what it touches, in order, with sizes, times and the memory that is not ours.

A *pass* is one forward with the backward that follows it, if any; a step is one or more passes (accumulation) and an
update. What is recorded is what the pool saw (PatrickStar's warm-up statistics, at the grain of one tensor), so it
holds whatever the model's code does. It is a prediction of the next pass of the same key, and never more.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise


class Use(enum.Enum):
    """Effect of an access on a tensor."""

    READ = "read"
    WRITE = "write"
    """Changes it (a gradient that is added to)."""
    CREATE = "create"
    """Brings it into being (the first gradient of a parameter, or a parameter that its update writes without having
    read it): it takes room, and nothing is loaded.
    """
    CONSUME = "consume"
    """The last use: it is gone afterwards (a gradient that its update has used up)."""


@dataclass(frozen=True, slots=True)
class Item:
    """A paged tensor as the schedule sees it.

    Attributes:
        name: as the pool names it (`model.layers.0.mlp.up_proj.weight`, `….grad`).
        nbytes: what its extent takes.
        parts: the parameters that have a part of it.
    """

    name: str
    nbytes: int
    parts: int = 1


@dataclass(frozen=True, slots=True)
class Access:
    """One use of a tensor.

    Attributes:
        item: index into `Trace.items`.
        use: what it does to it.
        compute_s: seconds of compute from this access to the next, waiting for memory left out.
        held_bytes: what else must be there meanwhile: other tensors that are pinned, and memory that is not ours.
        backward: whether it belongs to the backward.
        update: whether it belongs to an update that is carried out beside the pass, and not to the pass itself.
        last: whether no micro-batch of its step comes after the one that it belongs to.
    """

    item: int
    use: Use
    compute_s: float = 0.0
    held_bytes: int = 0
    backward: bool = False
    update: bool = False
    last: bool = True


@dataclass(frozen=True, slots=True)
class Trace:
    """The accesses of one pass.

    Attributes:
        key: what it is a trace of.
        items: the tensors that are used.
        accesses: the uses, in order.
        lead_s: seconds of compute before the first access.
    """

    key: Hashable
    items: tuple[Item, ...]
    accesses: tuple[Access, ...]
    lead_s: float = 0.0

    @property
    def compute_s(self) -> float:
        """Seconds of compute in the whole pass."""
        return self.lead_s + sum(access.compute_s for access in self.accesses)

    def slowed(self, factor: float) -> Trace:
        """Returns the pass as it is for a batch that is larger by a factor: it computes for longer."""
        if factor == 1:
            return self
        accesses = tuple(replace(access, compute_s=access.compute_s * factor) for access in self.accesses)
        return replace(self, accesses=accesses, lead_s=self.lead_s * factor)

    @property
    def item_bytes(self) -> int:
        """Bytes of all tensors that are used."""
        return sum(item.nbytes for item in self.items)

    @property
    def most_bytes(self) -> int:
        """With so much for them, and what is held beside them, none of the tensors ever leaves."""
        return self.item_bytes + max((access.held_bytes for access in self.accesses), default=0)

    @property
    def made_anew(self) -> int:
        """From here on count the next uses (`next_uses`) of what the next pass makes anew: this one is done with it."""
        return 2 * (len(self.accesses) + 1)

    def next_uses(self, *, more_follow: bool = False) -> list[int]:
        """Returns for each access when its item is next wanted: an index, or beyond the pass.

        What the pass creates (gradients) is next wanted by the update, which comes right after: `len(accesses)`, unless
        updates are part of the pass. What is next wanted by the pass after that counts from there:
        `len(accesses) + 1 +` its first access. What that pass will make anew is wanted after all else.

        Args:
            more_follow: the next pass comes before the update, and adds to what this one creates where this creates it.
        """
        count = len(self.accesses)
        upcoming: dict[int, int] = {}
        for index, access in enumerate(self.accesses):
            made, beyond = access.use is Use.CREATE, count + 1 + index
            if made and access.update:
                beyond = self.made_anew + index
            elif made and more_follow:
                upcoming[access.item] = beyond
            elif made:
                beyond = count
            upcoming.setdefault(access.item, beyond)
        following = [0] * count
        for index in range(count - 1, -1, -1):
            item = self.accesses[index].item
            following[index] = upcoming[item]
            upcoming[item] = index
        return following


@dataclass(slots=True)
class Recorder:
    """Writes a trace down as it happens; when that was may be known later.

    Attributes:
        key: of the trace.
        writes: whether it is written down, and not only counted.
    """

    key: Hashable
    writes: bool = True
    _count: int = 0
    _index: dict[str, int] = field(default_factory=dict)
    _items: list[Item] = field(default_factory=list)
    _accesses: list[Access] = field(default_factory=list)

    def __len__(self) -> int:
        return self._count

    def count(self) -> None:
        """Counts one use, of which nothing is written down."""
        assert not self.writes, "a trace that is written down has all uses"
        self._count += 1

    def record(
        self,
        name: str,
        nbytes: int,
        use: Use,
        *,
        held_bytes: int,
        backward: bool,
        parts: int = 1,
        last: bool = True,
    ) -> None:
        """Writes down one use.

        Args:
            name: of the tensor.
            nbytes: what its extent takes.
            parts: see `Item`.
            use: what was done.
            held_bytes: see `Access`.
            backward: see `Access`.
            last: see `Access`.
        """
        self._count += 1
        number = self._index.get(name)
        if number is None:
            number = self._index[name] = len(self._items)
            self._items.append(Item(name, nbytes, parts))
        self._accesses.append(Access(number, use, held_bytes=held_bytes, backward=backward, last=last))

    def finish(self, times_s: Sequence[float]) -> Trace:
        """Returns the trace.

        Args:
            times_s: when the pass began, when each use was, and when the pass ended; on a clock that stands still
                while somebody waits for memory.
        """
        assert len(times_s) == len(self._accesses) + 2, f"{len(times_s)} times for {len(self._accesses)} accesses"
        lead_s, *spent = (max(after - before, 0.0) for before, after in pairwise(times_s))
        accesses = (replace(access, compute_s=s) for access, s in zip(self._accesses, spent, strict=True))
        return Trace(self.key, tuple(self._items), tuple(accesses), lead_s)
